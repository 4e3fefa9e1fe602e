"""Scraping: who is asked, how often, and what an endpoint that does not answer well changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import free_port
from tests.integration.gateway import static_picker
from tests.picker_rig import Rig, config, endpoint
from tests.polling import eventually
from tests.unit.picker.test_scoring import pick

from tidemill.picker.scheduling.settings import MetricsDataSource, one_of
from tidemill.picker.telemetry.scraper import Budget, ScrapeOptions, Scraper

GOOD = b"# HELP x y\nvllm:num_requests_waiting 2\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.5\n"


@dataclass
class Exporter:
    """A server of metrics that answers `answer` (bytes: a body; None: nothing at all) in one of several ways."""

    answer: bytes | None = GOOD
    status: int = 200
    way: str = "length"
    port: int = 0
    asked: int = 0
    paths: set[str] = field(default_factory=set)
    connections: int = 0
    accepted: int = 0
    failing: int = 0  # every so-manieth request is refused; 0 is none

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.accepted += 1
        try:
            while line := await reader.readline():
                while (await reader.readline()).strip():
                    pass
                self.asked += 1
                self.paths.add(line.split()[1].decode())
                if self.answer is None:
                    await asyncio.Event().wait()
                status = 500 if self.failing and self.asked % self.failing == 0 else self.status
                body = self.answer or b""
                head = f"HTTP/1.1 {status} x\r\nContent-Type: text/plain\r\n".encode()
                if self.way == "garbage":
                    writer.write(b"\x00\x01nonsense\r\n\r\n")
                    return
                if self.way == "close":
                    writer.write(head + b"Connection: close\r\n\r\n" + body)
                    return
                if self.way == "chunked":
                    parts = [body[i : i + 7] for i in range(0, len(body), 7)]
                    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
                    writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
                else:
                    writer.write(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            self.connections -= 1
            writer.close()


@asynccontextmanager
async def exporting(*exporters: Exporter) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        addresses = []
        for exporter in exporters:
            server = await asyncio.start_server(exporter.serve, "127.0.0.1", exporter.port)
            exporter.port = server.sockets[0].getsockname()[1]
            stack.callback(server.close)
            addresses.append(f"127.0.0.1:{exporter.port}")
        yield addresses


@asynccontextmanager
async def scraping(rig: Rig, **options: Any) -> AsyncIterator[Scraper]:
    failures: list[int] = []
    given = {"interval": 0.02, "timeout": 0.2, "longest_backoff": 0.1}
    scraper = Scraper(
        rig.pool, ScrapeOptions(**{**given, **options}), budget=Budget(), rng=rig.rng,
        failed=lambda: failures.append(1),
    )  # fmt: skip
    scraper.failures = failures  # type: ignore[attr-defined]
    try:
        yield scraper
    finally:
        scraper.stop()


def waiting(rig: Rig, address: str) -> float | None:
    reading = rig.seat(address).reading
    return None if reading is None else reading.waiting


@pytest.mark.parametrize("way", ["length", "chunked", "close"])
async def test_every_form_of_an_answer(way: str) -> None:
    exporter = Exporter(way=way)
    async with exporting(exporter) as (address,):
        rig = Rig()
        rig.endpoints(address)
        async with scraping(rig):
            await eventually(lambda: exporter.asked > 5)
            assert waiting(rig, address) == 2
            assert exporter.paths == {"/metrics"}
            # One connection is kept for all questions, unless the server ends it. (The next one may be
            # accepted before its question is read.)
            if way == "close":
                assert exporter.accepted - exporter.asked in (0, 1)
            else:
                assert exporter.accepted == 1


@pytest.mark.parametrize(
    "bad", [Exporter(status=404), Exporter(answer=b"[]"), Exporter(answer=None), Exporter(way="garbage")]
)
async def test_what_is_no_answer_is_counted_and_said_once(
    bad: Exporter, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter = Exporter(bad.answer, bad.status, bad.way)
    async with exporting(exporter) as (address,):
        rig = Rig()
        rig.endpoints(address)
        capsys.readouterr()
        async with scraping(rig, timeout=0.05) as scraper:
            await eventually(lambda: len(scraper.failures) > 6)  # type: ignore[attr-defined]
            said = [line for line in capsys.readouterr().out.splitlines() if "scrapes fail" in line]
            assert len(said) == 1
            assert f"http://{address}/metrics" in said[0]
            assert waiting(rig, address) is None
            assert pick(rig) == address  # Kubernetes says that it is ready
            exporter.answer, exporter.status, exporter.way = GOOD, 200, "length"
            await eventually(lambda: waiting(rig, address) == 2)
            assert "succeed again" in capsys.readouterr().out


async def test_p23_ready_but_never_scraped() -> None:
    port = free_port()
    good, late = Exporter(), Exporter(GOOD.replace(b" 2", b" 0").replace(b"0.5", b"0"), port=port)
    async with exporting(good) as (a,):
        b = f"127.0.0.1:{port}"
        rig = Rig()
        rig.endpoints(a, b)
        async with scraping(rig):
            await eventually(lambda: waiting(rig, a) == 2)
            rig.now = asyncio.get_running_loop().time()
            assert {pick(rig) for _ in range(100)} == {a}
            async with exporting(late):
                await eventually(lambda: waiting(rig, b) == 0)
                rig.now = asyncio.get_running_loop().time()
                assert pick(rig) == b


async def test_p23_one_failed_scrape_in_three_moves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    exporter = Exporter(failing=3)
    async with exporting(exporter) as (address,):
        rig = Rig()
        rig.endpoints(address)
        async with scraping(rig):
            await eventually(lambda: waiting(rig, address) == 2)
            capsys.readouterr()
            before = exporter.asked
            await eventually(lambda: exporter.asked > before + 15)
            assert waiting(rig, address) == 2
            assert not capsys.readouterr().out


async def test_a_slow_endpoint_delays_no_other() -> None:
    slow, quick = Exporter(answer=None), Exporter()
    async with exporting(slow, quick) as (a, b):
        rig = Rig()
        rig.endpoints(a, b)
        async with scraping(rig, timeout=5.0):
            await eventually(lambda: slow.asked == 1)
            before = quick.asked
            await eventually(lambda: quick.asked > before + 20)
            assert slow.asked == 1


async def test_an_endpoint_that_leaves_is_asked_no_more() -> None:
    first, second = Exporter(), Exporter()
    async with exporting(first, second) as (a, b):
        rig = Rig()
        rig.endpoints(a, b)
        async with scraping(rig):
            await eventually(lambda: first.asked and second.asked)
            rig.endpoints(b)
            await eventually(lambda: first.connections == 0)
            before = first.asked
            later = second.asked
            await eventually(lambda: second.asked > later + 10)
            assert first.asked == before


async def test_ps6_metrics_at_another_port() -> None:
    exporter = Exporter()
    async with exporting(exporter) as (address,):
        rig = Rig()
        served = f"127.0.0.1:{free_port()}"
        rig.endpoints(served)
        async with scraping(rig, port=exporter.port, path="/stats"):
            await eventually(lambda: waiting(rig, served) == 2)
            assert exporter.paths == {"/stats"}
            assert pick(rig) == served
        assert address != served


async def test_missing_metrics_are_said_once_and_adapters_are_not_missed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exporter = Exporter(GOOD)
    async with exporting(exporter) as (address,):
        rig = Rig()
        rig.endpoints(address)
        capsys.readouterr()
        async with scraping(rig):
            await eventually(lambda: exporter.asked > 5)
            assert not capsys.readouterr().out
            exporter.answer = GOOD.replace(b"vllm:kv_cache_usage_perc", b"vllm:renamed")
            await eventually(lambda: rig.seat(address).reading.kv_usage is None)  # type: ignore[union-attr]
            before = exporter.asked
            await eventually(lambda: exporter.asked > before + 10)
            said = capsys.readouterr().out.splitlines()
            assert len(said) == 1
            assert "vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc" in said[0]


async def test_the_label_that_names_the_engine_can_be_another() -> None:
    both = GOOD + b"sglang:num_queue_reqs 7\nsglang:num_running_reqs 1\nsglang:token_usage 0.5\n"
    async with exporting(Exporter(both)) as (address,):
        rig = Rig()
        rig.endpoints(endpoint(address, labels={"team/engine": "sglang", "llm-d.ai/engine-type": "vllm"}))
        async with scraping(rig, engine_label="team/engine"):
            await eventually(lambda: waiting(rig, address) == 7)
            rig.endpoints(endpoint(address, labels={"llm-d.ai/engine-type": "sglang"}))
            await eventually(lambda: waiting(rig, address) == 2)  # nothing is said: by its metrics
        async with scraping(rig):
            await eventually(lambda: waiting(rig, address) == 7)


def test_the_interval_grows_with_the_number_of_targets() -> None:
    budget = Budget(share=0.5)
    for _ in range(2000):
        budget.spent(0.0002)
    budget.targets = 10
    assert budget.interval(0.05) == 0.05
    budget.targets = 1000
    assert budget.interval(0.05) == pytest.approx(0.4, rel=0.01)


async def test_answers_that_came_together_let_other_work_in_between() -> None:
    budget, loop, order = Budget(), asyncio.get_running_loop(), []

    def read(number: int) -> None:
        until = time.perf_counter() + 0.0003
        while time.perf_counter() < until:
            pass
        order.append(number)
        if number == 0:
            loop.call_soon(order.append, "request")
        if number == 2:
            raise RuntimeError("a fault of ours")

    reported: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    for number in range(5):
        budget.when_free(lambda number=number: read(number))
    await eventually(lambda: 4 in order)
    assert order == [0, "request", 1, 2, 3, 4]  # and a fault ends its own reading only
    assert len(reported) == 1


def test_parameters_reach_the_scraper() -> None:
    text = "plugins: [{type: metrics-data-source, parameters: {port: 7080, path: /stats, scheme: https}}]"
    rig = Rig(config=config(text))
    found = one_of(rig.pool.scheduler.plugins, MetricsDataSource)
    assert (found.port, found.path, found.scheme) == (7080, "/stats", "https")


async def test_parameters_reach_who_uses_them(tmp_path: Path) -> None:
    text = """
plugins:
- {type: core-metrics-extractor, parameters: {engineLabelKey: team/engine, defaultEngine: sglang}}
- {type: utilization-detector, parameters: {metricsStalenessThreshold: 1500ms}}
"""
    async with static_picker(tmp_path, {"p": []}, config=config(text)) as picker:
        options = picker._scrape_options
        assert (options.engine_label, options.default_engine) == ("team/engine", "sglang")
        assert picker._detector().fresh_for == 1.5
