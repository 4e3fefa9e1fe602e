"""`tidemill picker` as a process: what it refuses, who is told that it is ready, certificates, its end."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.conftest import free_port, program
from tests.integration.gateway import Echo, gateway, static_picker, write_endpoints
from tests.integration.inference import Cluster, addresses, picking, stream, until
from tests.integration.wire import WireTalk, channel
from tests.picker_rig import chat, destination_of, post, request_headers, response_body, response_headers
from tests.polling import eventually

from tidemill.kube import tls
from tidemill.local.cluster import LocalCluster
from tidemill.local.envoy import PoolRoute
from tidemill.picker.server import Picker, TransportKind

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"


async def health(port: int, name: str) -> object:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as made:
        try:
            answer = await health_pb2_grpc.HealthStub(made).Check(health_pb2.HealthCheckRequest(service=name))
        except grpc.aio.AioRpcError as error:
            return error.code()
        return answer.status


def ask(picker: Picker) -> tuple[int, str]:
    talk = stream(picker)
    for message in post("/v1/chat/completions", chat()):
        talk.send(message)
    found = talk.status, "" if talk.refusal is None else talk.refusal.body.decode()
    talk.close()
    return found


async def all_health(picker: Picker) -> dict[str, object]:
    port = picker._health.port
    return {name: await health(port, name) for name in ("", "liveness", "readiness", EXT_PROC, "nope")}


def expected(*, ready: bool) -> dict[str, object]:
    status = SERVING if ready else NOT_SERVING
    return {
        "": status, "liveness": SERVING, "readiness": status, EXT_PROC: status, "nope": grpc.StatusCode.NOT_FOUND,
    }  # fmt: skip


class TestP25:
    async def test_from_the_first_moment_to_the_last(self, api_only: LocalCluster) -> None:
        cluster = Cluster(api_only.client)
        await cluster.prepare()
        async with picking(cluster.client, drain_seconds=1.0) as picker:
            await eventually(lambda: "there is no such pool" in ask(picker)[1])
            assert await all_health(picker) == expected(ready=False)
            await cluster.pool()
            await until(picker, set())
            await eventually(lambda: picker.ready)
            await picker._health.look()
            assert await all_health(picker) == expected(ready=True)
            assert ask(picker)[0] == 503
            assert "no ready endpoint" in ask(picker)[1]
            await cluster.pod("a", "10.0.0.11")
            await until(picker, {"10.0.0.11:8000"})
            assert ask(picker)[0] == 200
            assert await all_health(picker) == expected(ready=True)
            await cluster.delete_pool()
            await until(picker, set())
            assert ask(picker)[0] == 503
            assert "deleted" in ask(picker)[1]
            await cluster.pool()
            await until(picker, {"10.0.0.11:8000"})
            draining = asyncio.create_task(picker.drain())
            await asyncio.sleep(0)
            await picker._health.look()
            assert await all_health(picker) == expected(ready=False)
            assert ask(picker)[0] == 200  # new streams are still answered
            await draining

    async def test_without_an_api_server(self, api_only: LocalCluster) -> None:
        client = api_only.client
        await api_only.server.stop()
        async with picking(client) as picker:
            assert await all_health(picker) == expected(ready=False)
            assert "not known yet" in ask(picker)[1]
            assert any("waiting for the first list" in why for why in picker.waiting_for)


@asynccontextmanager
async def running(*args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command; it is killed if it has not ended by itself."""
    process = await asyncio.create_subprocess_exec(
        program("tidemill"), "picker", "--bind-address", "127.0.0.1", *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def refused(*args: str) -> str:
    async with running(*args) as process:
        _, err = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 2
        return err.decode()


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ("plugins: [{type: queue-scorrer}]", ["plugins.0.type", "'queue-scorrer'", "must be one of"]),
            ("plugins: [", ["must be YAML"]),
        ],
    )
    async def test_a_bad_configuration(self, tmp_path: Path, config: str, said: list[str]) -> None:
        path = tmp_path / "config.yaml"
        path.write_text(config)
        endpoints = tmp_path / "endpoints.yaml"
        write_endpoints(endpoints, {"p": ["127.0.0.1:1"]})
        err = await refused("--config-file", str(path), "--endpoints", str(endpoints))
        for part in (str(path), *said):
            assert part in err

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("endpoints: [{name: a, address: host.example, port: 1}]", ["endpoints.0.address", "IP address"]),
            ("endpoints: [{name: a, address: 10.0.0.1, port: 0}]", ["endpoints.0.port", "'0'"]),
            ("endpoints: [{name: a, address: 10.0.0.1, port: 1, x: 2}]", ["endpoints.0.x"]),
            ("5", ["must be a mapping"]),
        ],
    )
    async def test_a_bad_endpoints_file(self, tmp_path: Path, text: str, said: list[str]) -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text(text)
        err = await refused("--endpoints", str(path))
        for part in (str(path), *said):
            assert part in err

    async def test_no_certificate_where_one_is_named(self, tmp_path: Path) -> None:
        endpoints = tmp_path / "endpoints.yaml"
        write_endpoints(endpoints, {"p": ["127.0.0.1:1"]})
        ports = ("--grpc-health-port", "0", "--metrics-port", "0", "--grpc-port", "0")
        err = await refused("--endpoints", str(endpoints), "--cert-path", str(tmp_path / "none"), *ports)
        assert "tls.crt" in err

    @pytest.mark.parametrize("transport", ["lean", "grpc"])
    @pytest.mark.parametrize("taken", ["--grpc-port", "--grpc-health-port", "--metrics-port"])
    async def test_a_port_that_is_taken(self, tmp_path: Path, taken: str, transport: str) -> None:
        endpoints = tmp_path / "endpoints.yaml"
        write_endpoints(endpoints, {"p": ["127.0.0.1:1"]})
        async with Echo() as echo:
            ports = {"--grpc-port": "0", "--grpc-health-port": "0", "--metrics-port": "0", taken: str(echo.port)}
            flags = [text for pair in ports.items() for text in pair]
            err = await refused("--endpoints", str(endpoints), "--transport", transport, *flags)
            assert str(echo.port) in err
            assert "Traceback" not in err

    async def test_both_a_pool_and_a_file(self, tmp_path: Path) -> None:
        assert "either a pool" in await refused("--endpoints", "x", "--pool-name", "p")


class TestFile:
    async def test_it_is_read_again_and_a_bad_one_changes_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        async with static_picker(tmp_path, {"p": ["127.0.0.1:1"]}) as picker:
            path = tmp_path / "endpoints.yaml"
            write_endpoints(path, {"p": ["127.0.0.1:1", "127.0.0.1:2"], "q": ["127.0.0.1:3"]})
            await eventually(lambda: addresses(picker) == {"127.0.0.1:1", "127.0.0.1:2"})
            await eventually(lambda: addresses(picker, "q") == {"127.0.0.1:3"})
            path.write_text("endpoints: [{")
            await eventually(lambda: "cannot be used" in capsys.readouterr().out)
            assert addresses(picker) == {"127.0.0.1:1", "127.0.0.1:2"}
            write_endpoints(path, {"q": ["127.0.0.1:3"]})
            await eventually(lambda: addresses(picker) == set())


class TestTls:
    async def test_envoy_over_tls_with_the_default_certificate(self, tmp_path: Path) -> None:
        async with Echo() as echo, static_picker(tmp_path, {"p": [echo.address]}, secure=True) as picker:
            route = PoolRoute(name="p", pickers=[f"127.0.0.1:{picker.grpc_port}"], tls=True)
            async with gateway(tmp_path, picker, [route]) as gate:
                status, told = await gate.post(json=chat())
                assert (status, told["served"]) == (200, echo.address)

    @pytest.mark.parametrize("transport", ["lean", "grpc"])
    async def test_a_new_pair_is_used_and_a_broken_one_is_not(
        self, tmp_path: Path, transport: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        directory = tmp_path / "pki"
        directory.mkdir()

        def write(pair: tls.KeyPair) -> None:
            (directory / tls.CERTIFICATE).write_bytes(pair.certificate)
            (directory / tls.KEY).write_bytes(pair.key)

        now = dt.datetime.now(dt.UTC)
        first, second = tls.self_signed("test", now), tls.self_signed("test", now)
        write(first)
        async with static_picker(
            tmp_path,
            {"p": ["127.0.0.1:1"]},
            secure=True,
            cert_path=directory,
            cert_reload=True,
            transport=TransportKind(transport),
        ) as picker:

            async def trusted(pair: tls.KeyPair) -> bool:
                credentials = grpc.ssl_channel_credentials(pair.certificate)
                async with channel(picker.grpc_port, credentials=credentials) as client:
                    talk = WireTalk(client)
                    try:
                        await talk.send(request_headers("/any", eos=True))
                        return destination_of(await talk.read(within=3)) == "127.0.0.1:1"
                    except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                        return False

            assert await trusted(first)
            (directory / tls.KEY).write_bytes(second.key)  # not the key of this certificate
            await eventually(lambda: "certificate cannot be used" in capsys.readouterr().out)
            assert await trusted(first)
            write(second)
            await eventually(lambda: trusted(second), within=15)
            assert not await trusted(first)


class TestProcess:
    async def flags(self, tmp_path: Path, echo: Echo) -> tuple[list[str], int, int]:
        write_endpoints(tmp_path / "endpoints.yaml", {"p": [echo.address]})
        grpc_port, metrics = free_port(), free_port(following=1)
        flags = [
            "--endpoints", str(tmp_path / "endpoints.yaml"), "--secure-serving=false", "-v=2",
            "--grpc-port", str(grpc_port), "--grpc-health-port", str(free_port()), "--metrics-port", str(metrics),
        ]  # fmt: skip
        return flags, grpc_port, metrics

    async def ready(self, metrics: int) -> bool:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(f"http://127.0.0.1:{metrics}/readyz") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

    async def test_it_serves_and_ends_gently(self, tmp_path: Path) -> None:
        async with Echo() as echo:
            flags, port, metrics = await self.flags(tmp_path, echo)
            async with running(*flags, "--drain-timeout", "2s") as process:
                await eventually(lambda: self.ready(metrics), within=20)
                async with channel(port) as client:
                    talk = WireTalk(client)
                    await talk.send(request_headers("/any", eos=True))
                    assert destination_of(await talk.read()) == echo.address
                    process.send_signal(signal.SIGTERM)
                    await eventually(lambda: not_(self.ready(metrics)))
                    # Both a stream that was there and one that comes now are served to their end.
                    other = WireTalk(client)
                    await other.send(request_headers("/any", eos=True))
                    assert destination_of(await other.read()) == echo.address
                    for one in (talk, other):
                        await one.send(response_headers())
                        await one.send(response_body(b"{}", eos=True))
                        assert len(await one.rest()) == 2
                await asyncio.wait_for(process.wait(), 10)
                assert process.returncode == 0

    async def test_pages(self, tmp_path: Path) -> None:
        async with Echo() as echo:
            flags, _, metrics = await self.flags(tmp_path, echo)
            async with running(*flags), aiohttp.ClientSession() as session:
                await eventually(lambda: self.ready(metrics), within=20)
                async with session.get(f"http://127.0.0.1:{metrics}/pools") as response:
                    (pool,) = (await response.json())["pools"]
                assert pool["pool"] == "ns/p"
                assert [e["address"] for e in pool["endpoints"]] == [echo.address]
                async with session.get(f"http://127.0.0.1:{metrics}/metrics") as response:
                    text = await response.text()
                for name in (
                    "llm_d_epp_ready_endpoints",
                    "inference_pool_ready_pods",
                    "llm_d_epp_datalayer_poll_errors_total",
                ):
                    assert name in text

    async def test_workers_share_the_port_and_are_replaced(self, tmp_path: Path) -> None:
        async with Echo() as echo:
            flags, port, metrics = await self.flags(tmp_path, echo)
            async with running(*flags, "--workers", "2", "--drain-timeout", "200ms") as process:
                for worker in (0, 1):
                    await eventually(lambda: self.ready(metrics + worker), within=30)  # noqa: B023
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                workers = [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
                assert len(workers) == 2
                os.kill(workers[0], signal.SIGKILL)
                await eventually(lambda: not_(self.both(metrics)), within=10)
                await eventually(lambda: self.both(metrics), within=30)
                for _ in range(8):
                    async with channel(port) as client:
                        talk = WireTalk(client)
                        await talk.send(request_headers("/any", eos=True))
                        assert destination_of(await talk.read()) == echo.address
                process.send_signal(signal.SIGTERM)
                await asyncio.wait_for(process.wait(), 15)
                assert process.returncode == 0

    async def both(self, metrics: int) -> bool:
        return await self.ready(metrics) and await self.ready(metrics + 1)


async def not_(check: object) -> bool:
    return not await check  # type: ignore[misc]
