"""Benchmarks of the endpoint picker; prints JSON and writes build/bench/picker.json.

One run on one machine compares Envoy alone, with the lean transport and with grpcio. Every part is a process of
its own; CPU is what the kernel counted for it. Quote ratios and medians, and the load average with them.
`--short` measures less, for a first look. `--interpreted PROGRAM` names another installation of tidemill, whose
request path is not compiled, to be measured beside this one.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from prometheus_client import CollectorRegistry

from benchmarks.extproc_client import HEADER_BLOCK, data_frames, frame
from benchmarks.messages import answered, asked, completion
from tidemill.kube.resources import ObjectKey
from tidemill.local.envoy import Envoy, PoolRoute
from tidemill.picker import director
from tidemill.picker.director import DirectorOptions, PickerDirector
from tidemill.picker.extproc.exchange import Exchange, GatewayRequest, Headers, Pick
from tidemill.picker.instruments import Instruments
from tidemill.picker.load import LoadTable, Reading
from tidemill.picker.pools.endpoints import Endpoint, EndpointId, EndpointSet
from tidemill.picker.pools.pool import Pool, Pools
from tidemill.picker.saturation import SaturationDetector
from tidemill.picker.scheduling.prefix import Blocks
from tidemill.picker.scheduling.scheduler import DEFAULT_CONFIG, Scheduler
from tidemill.picker.transport.http2 import PREFACE
from tidemill.picker.transport.lean import LeanProtocol, LeanServer

OUT = Path("build/bench/picker.json")
TICKS = os.sysconf("SC_CLK_TCK")
PROGRAM = str(Path(sys.executable).parent / "tidemill")
INTERPRETED = "lean, interpreted"
SCRAPES = 4  # seconds between scrapes of one endpoint where the request path is what is measured
LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = io.open("BODY", "rb"):read("*a")
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('RESULT {"requests":%d,"seconds":%f,"p50":%f,"p99":%f,"errors":%d}\\n', summary.requests,
    summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return round(int(text.partition("VmRSS:")[2].split()[0]) / 1024, 1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# Without processes


def in_process(endpoints: int, rng: random.Random) -> tuple[PickerDirector, Pool]:
    """A director over one pool with the default profile."""
    load = LoadTable()
    pools = Pools()
    pool = Pool(ObjectKey("ns", "p"), Scheduler(DEFAULT_CONFIG, load, rng), load, missing="")
    pools.add(pool)
    made = [
        Endpoint(
            id=EndpointId(f"u{i}", 8000), address=f"10.0.{i // 250}.{i % 250 + 1}:8000",
            pod=ObjectKey("ns", f"p{i}"), rank=0,
        )
        for i in range(endpoints)
    ]  # fmt: skip
    pool.replace(EndpointSet(tuple(made)))
    chooser = PickerDirector(
        pools, DEFAULT_CONFIG, detector=SaturationDetector(), instruments=Instruments(CollectorRegistry()),
        options=DirectorOptions(), now=time.monotonic, rng=rng, wake=lambda pool, when: None,
    )  # fmt: skip
    return chooser, pool


def read_all(pool: Pool, rng: random.Random) -> None:
    """A scrape of every endpoint."""
    for seat in pool.load.seats():
        reading = Reading(waiting=float(rng.randrange(5)), running=3.0, kv_usage=rng.random())
        pool.load.record(seat, reading, mark=pool.load.mark, now=time.monotonic())


class _Nowhere:
    """A transport whose bytes go nowhere."""

    def write(self, data: bytes) -> None:
        pass

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("127.0.0.1", 9002)


class _Flight:
    response_headers = ()

    def responded(self, status: int, served: str) -> None: ...

    def first_token(self) -> None: ...

    def finished(self, usage: object, malformed: str) -> None: ...

    def aborted(self) -> None: ...


class _Undecided:
    """A director that has always decided already."""

    max_body = 2**26
    pick = Pick("10.0.0.1:8000", _Flight())

    def admit(self, request: GatewayRequest, decided: Callable[[Any], None]) -> None:
        decided(self.pick)

    def refused(self, status: int) -> None: ...


class _Unspoken:
    """In place of an exchange: every message has an answer of the usual size."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send

    def receive(self, data: bytes) -> None:
        self._send(bytes(100))

    def too_large(self) -> bool:
        return False

    def closed(self) -> None: ...


async def split(rounds: int = 4000) -> dict[str, float]:
    """Where the time of a request goes inside the picker, sockets left out: 1 KB, 50 endpoints, microseconds. Each
    part is the difference that leaving it out makes."""
    rng = random.Random(1)
    chooser, pool = in_process(50, rng)
    requests, answers = asked("".join(rng.choices("abcdefgh ", k=900)).encode()), answered()

    def reads(stream: int) -> tuple[bytes, bytes, bytes]:
        """What comes out of the socket for one request, read by read."""
        asks = [data_frames(stream, [message], end=False) for message in requests]
        answered = [data_frames(stream, [message], end=False) for message in answers]
        return b"".join((frame(1, 4, stream, HEADER_BLOCK), *asks)), b"".join(answered), frame(0, 1, stream, b"")

    sent = [reads(2 * number + 1) for number in range(rounds)]

    def run(call: Callable[[Any, Any, Any], Any]) -> float:
        protocol = LeanProtocol(LeanServer(call, max_body=2**26))
        protocol.connection_made(_Nowhere())  # type: ignore[arg-type]
        window = frame(8, 0, 0, (2**30).to_bytes(4, "big"))
        protocol.data_received(PREFACE + frame(4, 0, 0, b"") + frame(4, 1, 0, b"") + window)
        read_all(pool, rng)
        begun = time.perf_counter()
        for request in sent:
            for data in request:
                protocol.data_received(data)
        return (time.perf_counter() - begun) / rounds * 1e6

    gc.collect()
    gc.freeze()
    whole = min(run(lambda i, s, f: Exchange(chooser, i, s, f)) for _ in range(3))
    undecided = _Undecided()
    without_decision = min(run(lambda i, s, f: Exchange(undecided, i, s, f)) for _ in range(3))
    transport = min(run(lambda i, s, f: _Unspoken(s)) for _ in range(3))
    return {
        "http2_and_grpc": round(transport, 1),
        "exchange": round(without_decision - transport, 1),
        "decision": round(whole - without_decision, 1),
    }


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What is to be reached, and what was."""

    def row(transport: str) -> dict[str, Any]:
        return next(
            r for r in result["rows"]
            if (r["transport"], r["body_bytes"], r["endpoints"], r["concurrency"]) == (transport, 1024, 50, 64)
        )  # fmt: skip

    def pick(size: int) -> float:
        return next(p["pick_us"] for p in result["picks"] if (p["endpoints"], p["body_bytes"]) == (1000, size))

    lean, grpc = row("lean"), row("grpc")
    many, busy, small = result["telemetry"]
    wanted = [
        ("picker CPU per request, lean, us", lean["picker_cpu_us"], 120),
        ("the same as a share of grpcio's", round(lean["picker_cpu_us"] / grpc["picker_cpu_us"], 3), 0.2),
        ("picker CPU as a share of Envoy's", round(lean["picker_cpu_us"] / lean["envoy_cpu_us"], 2), 1),
        ("pick over 1,000 endpoints, 1 KB, us", pick(1024), 200),
        ("pick over 1,000 endpoints, 32 KB, us", pick(32_768), 600),
        ("cores for 100 endpoints every 50 ms", many["cores"], 1),
        ("p99 of picks beside 500 endpoints every 200 ms, ms", busy["p99_ms"], 5),
        ("p95 of picks, 500/s over 10 endpoints, ms", small["p95_ms"], 5),
        ("cores for that", small["cores"], 1),
    ]
    return [{"what": what, "value": value, "at_most": most, "met": value <= most} for what, value, most in wanted]


# The pick alone


def picks(endpoints: int, body_bytes: int, rounds: int = 1500) -> dict[str, Any]:
    """Microseconds from a complete request to its pick: parsing, hashing, scoring, accounting. Half of the
    requests continue a prompt that endpoints have cached to different depths."""
    rng = random.Random(1)
    chooser, pool = in_process(endpoints, rng)
    text = "".join(rng.choices("abcdefgh ", k=body_bytes))
    found: list[float] = []
    warm: Blocks | None = None
    for number in range(rounds):
        if number % 100 == 0:
            read_all(pool, rng)
        prompt = text if number % 2 else text[: body_bytes // 2] + "".join(rng.choices("xyz", k=body_bytes // 2))
        request = GatewayRequest(Headers({":path": b"/v1/completions", ":method": b"POST"}), completion(prompt))
        out: list[Any] = []
        begun = time.perf_counter()
        chooser.admit(request, out.append)
        found.append(time.perf_counter() - begun)
        pick = out[0]
        assert isinstance(pick, Pick)
        if warm is None:
            warm = pick.flight._blocks  # type: ignore[attr-defined]
            for row in pool.snapshot.rows.tolist():
                depth = rng.randrange(warm.total + 1)
                pool.scheduler.prefix.served(Blocks((warm.chains[0][:depth],)), row)
        pick.flight.responded(200, "")
        pick.flight.aborted()
    found.sort()
    return {
        "endpoints": endpoints,
        "body_bytes": body_bytes,
        "pick_us": round(found[len(found) // 2] * 1e6, 1),
        "pick_p99_us": round(found[int(len(found) * 0.99)] * 1e6, 1),
    }


# Processes


@asynccontextmanager
async def process(*command: str, ready: str = "") -> AsyncIterator[subprocess.Popen[str]]:
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    line = running.stdout.readline()
    while line and ready not in line:
        line = running.stdout.readline()
    if not line:
        raise RuntimeError(f"{command} ended")
    try:
        yield running
    finally:
        running.terminate()
        running.wait(10)


@asynccontextmanager
async def backend() -> AsyncIterator[int]:
    port = free_port()
    async with process(sys.executable, "-m", "benchmarks.backend", str(port)):
        yield port


@asynccontextmanager
async def picker(
    directory: Path, endpoints: int, port: int, *, transport: str, interval: str, program: str = PROGRAM
) -> AsyncIterator[tuple[int, int]]:
    """gRPC port and process id of a picker with `endpoints` endpoints."""
    lines = ["endpoints:"]
    for i in range(endpoints):
        lines.append(f"- {{name: e{i}, address: 127.1.{i // 250}.{i % 250 + 1}, port: {port}}}")
    path = directory / "endpoints.yaml"
    path.write_text("\n".join(lines))
    grpc_port = free_port()
    async with process(
        program, "picker", "--endpoints", str(path),
        "--bind-address", "127.0.0.1", "--grpc-port", str(grpc_port), "--grpc-health-port", "0",
        "--metrics-port", "0", "--secure-serving=false", "--transport", transport,
        "--refresh-metrics-interval", interval,
        "--drain-timeout", "100ms", ready="event=serving",
    ) as running:  # fmt: skip
        yield grpc_port, running.pid


async def wrk(url: str, body: Path, concurrency: int, seconds: float, header: str = "") -> dict[str, Any]:
    script = body.with_suffix(".lua")
    script.write_text(LUA.replace("BODY", str(body)))
    command = ["wrk", "-t1", f"-c{concurrency}", f"-d{seconds:g}s", "-s", str(script)]
    command += ["-H", header] if header else []
    made = await asyncio.create_subprocess_exec(*command, url, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out = (await made.communicate())[0].decode()
    found = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise RuntimeError(out)
    return orjson.loads(found[0].removeprefix("RESULT "))


async def through_envoy(
    directory: Path,
    *,
    endpoints: int,
    bodies: Sequence[int],
    concurrencies: Sequence[int],
    seconds: float,
    interpreted: str | None,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    alone: dict[tuple[int, int], dict[str, Any]] = {}
    async with backend() as port:
        for transport in ("none", "lean", INTERPRETED, "grpc"):
            program = interpreted if transport == INTERPRETED else PROGRAM
            if program is None:
                continue
            served_by = "grpc" if transport == "grpc" else "lean"
            scrapes = f"{SCRAPES}s"
            async with picker(
                directory, endpoints, port, transport=served_by, interval=scrapes, program=program
            ) as (grpc_port, pid):
                envoy = Envoy(
                    directory / f"{transport.replace(', ', '-')}-{endpoints}",
                    [PoolRoute(name="p", pickers=[f"127.0.0.1:{grpc_port}"])],
                    port=free_port(),
                    admin_port=free_port(),
                    bypass=True,
                )
                header = "x-without-picker: 1" if transport == "none" else ""
                async with envoy:
                    envoy.set_endpoints("p", [f"127.1.0.1:{port}"])
                    await asyncio.sleep(SCRAPES + 0.5)  # by then every endpoint has been read once
                    url = f"{envoy.url}/v1/completions"
                    for size in bodies:
                        body = directory / f"body-{size}"
                        body.write_bytes(completion("".join(random.Random(2).choices("abcdefgh ", k=size - 100))))
                        await wrk(url, body, 16, 1.0, header)
                        for concurrency in concurrencies:
                            before = cpu_seconds(pid), cpu_seconds(envoy.pid)
                            found = await wrk(url, body, concurrency, seconds, header)
                            after = cpu_seconds(pid), cpu_seconds(envoy.pid)
                            if found["errors"]:
                                raise RuntimeError(f"{transport}, {size} bytes: {found}: no request may fail here")
                            each = [
                                (b - a) / max(1, found["requests"]) * 1e6
                                for a, b in zip(before, after, strict=True)
                            ]
                            base = alone.setdefault((size, concurrency), found)
                            rows.append(
                                {
                                    "transport": transport,
                                    "body_bytes": size,
                                    "endpoints": endpoints,
                                    "concurrency": concurrency,
                                    "rps": round(found["requests"] / found["seconds"]),
                                    "errors": found["errors"],
                                    "added_p50_ms": round(found["p50"] - base["p50"], 3),
                                    "added_p99_ms": round(found["p99"] - base["p99"], 3),
                                    "picker_cpu_us": None if transport == "none" else round(each[0], 1),
                                    "envoy_cpu_us": round(each[1], 1),
                                }
                            )
                            print(orjson.dumps(rows[-1]).decode(), file=sys.stderr, flush=True)
    return rows


async def scraping(
    directory: Path, *, endpoints: int, interval: str, rate: float, seconds: float
) -> dict[str, Any]:
    """Cores that a picker uses while it scrapes, and the latency of picks meanwhile."""
    async with (
        backend() as port,
        picker(directory, endpoints, port, transport="lean", interval=interval) as (grpc_port, pid),
    ):
        await asyncio.sleep(1.0)
        before, begun = cpu_seconds(pid), time.monotonic()
        picked: dict[str, Any] = {}
        if rate:
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.extproc_client", str(grpc_port), str(rate), str(seconds), "900",
                stdout=subprocess.PIPE,
            )  # fmt: skip
            picked = orjson.loads((await client.communicate())[0])
        else:
            await asyncio.sleep(seconds)
        cores = (cpu_seconds(pid) - before) / (time.monotonic() - begun)
        return {
            "endpoints": endpoints,
            "interval": interval,
            "requests_per_s": rate,
            "cores": round(cores, 3),
            "rss_mib": rss_mib(pid),
            **picked,
        }


async def main() -> None:
    short = "--short" in sys.argv
    interpreted = sys.argv[sys.argv.index("--interpreted") + 1] if "--interpreted" in sys.argv else None
    seconds = 2.0 if short else 5.0
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed (Debian package wrk)")
    result: dict[str, Any] = {
        "load_average": os.getloadavg()[0], "cpus": os.cpu_count(),
        "compiled": Path(director.__file__).suffix == ".so",
    }  # fmt: skip
    result["inside_us"] = await split()
    result["picks"] = [picks(n, size) for n in (50, 1000) for size in (1024, 32_768)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        result["telemetry"] = [
            await scraping(directory, endpoints=100, interval="50ms", rate=0, seconds=seconds),
            await scraping(directory, endpoints=500, interval="200ms", rate=1000, seconds=seconds),
            await scraping(directory, endpoints=10, interval="50ms", rate=500, seconds=seconds),
        ]
        result["rows"] = []
        for endpoints in (50,) if short else (50, 1000):
            result["rows"] += await through_envoy(
                directory,
                endpoints=endpoints,
                bodies=(1024, 32_768),
                concurrencies=(64,) if short else (1, 16, 64),
                seconds=seconds,
                interpreted=interpreted,
            )

    result["targets"] = targets(result)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    print(OUT.read_text())


if __name__ == "__main__":
    asyncio.run(main())
