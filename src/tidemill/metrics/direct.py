"""The pods themselves as a source: no Prometheus, a reading every second, windows of one's own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import aiohttp
import structlog

from tidemill.metrics.exposition import parse
from tidemill.metrics.pickers import PickerPoll
from tidemill.metrics.samples import (
    CACHE_CONFIG,
    COUNTERS,
    KV_USAGE,
    KV_USAGE_OLDER,
    QUEUE_LENGTH,
    REQUESTS,
    RUNNING,
    Gauge,
    Quantity,
    ScrapeTarget,
    SeriesId,
    SeriesSample,
    Snapshot,
)

log = structlog.get_logger(__name__)
_QUANTITY_OF = {name: quantity for quantity, names in COUNTERS.items() for name in names}
_WANTED = frozenset({KV_USAGE, KV_USAGE_OLDER, QUEUE_LENGTH, RUNNING, REQUESTS, CACHE_CONFIG, *_QUANTITY_OF})
_KEPT_SECONDS = 300.0  # a gauge that nobody has seen for so long is forgotten


@dataclass(slots=True)
class _Window:
    """Readings of one gauge: the largest of the last seconds, and the age of the newest."""

    readings: deque[tuple[float, float]] = field(default_factory=deque)  # time, value

    def add(self, now: float, value: float, length: float) -> None:
        self.readings.append((now, value))
        # The newest reading always stays: after an outage its age is what must be known.
        while self.readings[0][0] < now - length:
            self.readings.popleft()

    def gauge(self, now: float, length: float) -> Gauge | None:
        if not self.readings:
            return None
        newest = self.readings[-1]
        recent = [value for time, value in self.readings if time >= now - length]
        return Gauge.of(max(recent, default=newest[1]), now - newest[0])


@dataclass(slots=True)
class _Counter:
    """Totals of one counter over the last seconds."""

    totals: deque[tuple[float, float]] = field(default_factory=deque)  # time, total

    def add(self, now: float, total: float, length: float) -> None:
        if self.totals and total < self.totals[-1][1]:
            self.totals.clear()  # the process began anew
        self.totals.append((now, total))
        while self.totals[0][0] < now - length:
            self.totals.popleft()

    def rate(self) -> float | None:
        """Per second; None before there are two readings."""
        (since, first), (until, last) = self.totals[0], self.totals[-1]
        return (last - first) / (until - since) if until > since else None

    @property
    def seconds(self) -> float:
        """Over which the rate is a mean: less than the window where the target is younger."""
        return self.totals[-1][0] - self.totals[0][0]


@dataclass(slots=True)
class _Served:
    """The counter of served requests of one model: since when it is watched, when it last moved."""

    since: float
    total: float
    moved: float | None = None


@dataclass(slots=True)
class _Scraped:
    """What is known of one target."""

    target: ScrapeTarget
    kv: dict[tuple[str, str], _Window] = field(default_factory=dict)  # by model and engine
    queue: dict[tuple[str, str], _Window] = field(default_factory=dict)
    running: dict[tuple[str, str], _Window] = field(default_factory=dict)
    served: dict[str, _Served] = field(default_factory=dict)  # by model
    counters: dict[tuple[str, str], dict[Quantity, _Counter]] = field(default_factory=dict)
    caches: dict[str, int] = field(default_factory=dict)  # tokens by engine

    def rates(self, key: tuple[str, str]) -> dict[Quantity, float]:
        found = {quantity: counter.rate() for quantity, counter in self.counters.get(key, {}).items()}
        return {quantity: rate for quantity, rate in found.items() if rate is not None}

    def rate_seconds(self, key: tuple[str, str]) -> float | None:
        return max((counter.seconds for counter in self.counters.get(key, {}).values()), default=None)

    task: asyncio.Task[None] | None = None
    failing: str = ""


class DirectSource:
    """Scrapes every target each `interval` seconds; a slow pod never delays another."""

    name = "direct"

    def __init__(
        self, *, interval: float = 1.0, window: float = 15.0, rate_window: float = 60.0, timeout: float = 1.0,
        pickers: PickerPoll | None = None,
    ) -> None:  # fmt: skip
        self._interval = interval
        self._window = window
        self._rate_window = rate_window
        self._pickers = pickers
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None
        self._scraped: dict[ScrapeTarget, _Scraped] = {}

    def set_targets(self, targets: Iterable[ScrapeTarget]) -> None:
        wanted = set(targets)
        for gone in self._scraped.keys() - wanted:
            task = self._scraped.pop(gone).task
            if task is not None:
                task.cancel()
        for target in sorted(wanted - self._scraped.keys()):
            scraped = self._scraped[target] = _Scraped(target)
            scraped.task = asyncio.create_task(self._run(scraped))

    async def collect(
        self, models: Mapping[str, float | None], *, deadline: float, in_depth: bool = False
    ) -> Snapshot:
        now = asyncio.get_running_loop().time()
        series: list[SeriesSample] = []
        for target in sorted(self._scraped):
            scraped = self._scraped[target]
            for key in sorted(scraped.kv.keys() | scraped.queue.keys()):
                model, engine = key
                kv, queue, running = (w.get(key) for w in (scraped.kv, scraped.queue, scraped.running))
                series.append(
                    SeriesSample(
                        SeriesId(target.namespace, target.pod, target.address, model, engine),
                        kv.gauge(now, self._window) if kv else None,
                        queue.gauge(now, self._window) if queue else None,
                        running.gauge(now, self._window) if running else None,
                        scraped.caches.get(engine),
                        scraped.rates(key),
                        scraped.rate_seconds(key),
                    )
                )
        waiting = await self._pickers.read() if in_depth and self._pickers is not None else ()
        requests = self._requests(models, now)
        return Snapshot(
            series=tuple(series), failures={}, requests=requests, picker_queues=waiting,
            rate_seconds=self._rate_window,
        )  # fmt: skip

    def _requests(self, models: Mapping[str, float | None], now: float) -> dict[tuple[str, str], float]:
        """1 for a model that served anything within its retention period, 0 for one that did not. A counter
        that has not been watched for so long says nothing about the whole of the period."""
        used: dict[tuple[str, str], float] = {}
        unknown: set[tuple[str, str]] = set()
        for target, scraped in self._scraped.items():
            for model, served in scraped.served.items():
                retention = models.get(model)
                if retention is None:
                    continue
                key = (target.namespace, model)
                if served.moved is not None and served.moved > now - retention:
                    used[key] = 1.0
                elif served.since > now - retention:
                    unknown.add(key)
                else:
                    used.setdefault(key, 0.0)
        return {key: value for key, value in used.items() if value or key not in unknown}

    async def close(self) -> None:
        tasks = [s.task for s in self._scraped.values() if s.task is not None]
        self.set_targets(())
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _run(self, scraped: _Scraped) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            await self._scrape(scraped)
            # Missed turns are left out, not made up for.
            due = max(due + self._interval, clock())
            await asyncio.sleep(due - clock())

    async def _scrape(self, scraped: _Scraped) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout)
        try:
            async with self._session.get(f"http://{scraped.target.address}/metrics") as response:
                response.raise_for_status()
                text = (await response.read()).decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
            if not scraped.failing:
                log.info("scrape failed", pod=f"{scraped.target.namespace}/{scraped.target.pod}", error=why)
            scraped.failing = why
            return
        scraped.failing = ""
        self._take(scraped, text, asyncio.get_running_loop().time())

    def _take(self, scraped: _Scraped, text: str, now: float) -> None:
        by_name = {QUEUE_LENGTH: scraped.queue, RUNNING: scraped.running}
        totals: dict[str, float] = {}
        for sample in parse(text, _WANTED):
            key = (sample.labels.get("model_name", ""), sample.labels.get("engine", ""))
            if Gauge.of(sample.value, 0.0) is None:
                continue
            if sample.name == REQUESTS:
                totals[key[0]] = totals.get(key[0], 0.0) + sample.value
                continue
            if (quantity := _QUANTITY_OF.get(sample.name)) is not None:
                counters = scraped.counters.setdefault(key, {})
                counters.setdefault(quantity, _Counter()).add(now, sample.value, self._rate_window)
                continue
            if sample.name == CACHE_CONFIG:
                blocks, size = sample.labels.get("num_gpu_blocks", ""), sample.labels.get("block_size", "")
                if blocks.isdigit() and size.isdigit():
                    scraped.caches[key[1]] = int(blocks) * int(size)
                continue
            windows = by_name.get(sample.name, scraped.kv)
            windows.setdefault(key, _Window()).add(now, sample.value, self._window)
        for model, total in totals.items():
            served = scraped.served.setdefault(model, _Served(now, total))
            if served.total != total:
                served.total, served.moved = total, now
        for windows in (scraped.kv, scraped.queue, scraped.running):
            for key in [k for k, w in windows.items() if w.readings[-1][0] < now - _KEPT_SECONDS]:
                del windows[key]
