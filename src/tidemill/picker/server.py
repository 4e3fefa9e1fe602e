"""The picker put together: pools, telemetry, director, transport, health, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import grpc
import orjson
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from tidemill.api.picker_config import EndpointPickerConfig
from tidemill.kube import tls
from tidemill.kube.client import KubeClient
from tidemill.kube.clock import utc_now
from tidemill.kube.resources import ObjectKey
from tidemill.metrics.samples import PickerQueue
from tidemill.picker.director import DirectorOptions, PickerDirector
from tidemill.picker.extproc.exchange import Exchange, StreamInfo
from tidemill.picker.health import HealthServer
from tidemill.picker.instruments import Instruments
from tidemill.picker.load import LoadTable
from tidemill.picker.pools.cluster import ClusterPools, WatchTiming
from tidemill.picker.pools.pool import Pool, Pools
from tidemill.picker.pools.static import StaticPools
from tidemill.picker.saturation import SaturationDetector
from tidemill.picker.scheduling.scheduler import DEFAULT_CONFIG, Scheduler
from tidemill.picker.scheduling.settings import (
    ConcurrencyDetector,
    CoreMetricsExtractor,
    MetricsDataSource,
    UtilizationDetector,
    one_of,
)
from tidemill.picker.state import PoolCollector, pool_state, waiting
from tidemill.picker.telemetry.scraper import Budget, ScrapeOptions, Scraper
from tidemill.picker.transport.lean import LeanServer
from tidemill.picker.transport.reference import ReferenceServer

log = structlog.get_logger(__name__)


class TransportKind(StrEnum):
    LEAN = "lean"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerOptions:
    """What flags and files say. Ports of 0 take free ones. Without `endpoints_file` pools come from the cluster:
    the one called `pool_name` in `pool_namespace`, or all of that namespace, or (None) all there are. `pool_ports`
    are further gRPC ports, each for one pool."""

    config: EndpointPickerConfig = DEFAULT_CONFIG
    config_source: str = "(default)"
    endpoints_file: Path | None = None
    pool_name: str = ""
    pool_namespace: str | None = None
    pool_ports: tuple[tuple[int, ObjectKey], ...] = ()
    host: str | None = None
    grpc_port: int = 9002
    health_port: int = 9003
    metrics_port: int = 9090
    reuse_port: bool = False
    transport: TransportKind = TransportKind.LEAN
    secure: bool = True
    cert_path: Path | None = None
    cert_reload: bool = False
    drain_seconds: float = 30.0
    scrape_interval: float = 0.05
    director: DirectorOptions = field(default_factory=DirectorOptions)
    timing: WatchTiming = WatchTiming()


class PoolSource(Protocol):
    @property
    def waiting_for(self) -> list[str]: ...

    def run(self) -> Coroutine[Any, Any, None]: ...


class Picker:
    """One picker process. `async with` starts it; `drain` ends it gently.

    Raises InvalidObjectError, ValueError or OSError for options that cannot be used.
    """

    def __init__(
        self, options: PickerOptions, client: KubeClient | None = None, *, rng: random.Random | None = None
    ) -> None:
        self.options = options
        self._rng = rng or random.Random()
        self._client = client
        self.registry = CollectorRegistry()
        self.instruments = Instruments(self.registry)
        self.pools = Pools()
        self._scrapers: list[Scraper] = []
        self._budget = Budget()
        # A configuration that cannot be used is found now, not with the first pool.
        self._plugins = Scheduler(options.config, LoadTable(), self._rng, source=options.config_source).plugins
        self._scrape_options = self._scraping()
        self._timers: dict[Pool, asyncio.TimerHandle] = {}
        self.director = PickerDirector(
            self.pools,
            options.config,
            detector=self._detector(),
            instruments=self.instruments,
            options=options.director,
            now=time.monotonic,
            rng=self._rng,
            wake=self._wake,
        )
        self.source = self._source()
        self.instruments.follow(
            PoolCollector(
                self.pools, self.director, now=time.monotonic, age=self._age,
                fairness_label=self.instruments.fairness_label,
            )
        )  # fmt: skip
        self._draining = False
        self._tasks: list[asyncio.Task[None]] = []
        self._health = HealthServer(lambda: self.ready)
        self._transport: LeanServer | ReferenceServer | None = None
        self._web: web.AppRunner | None = None
        self._context: ssl.SSLContext | None = None
        self._pair: tls.KeyPair | None = None
        self.grpc_port = self.health_port = self.metrics_port = 0

    @property
    def waiting_for(self) -> list[str]:
        """Why the picker is not ready; empty when it is."""
        return ["this picker is shutting down"] if self._draining else self.source.waiting_for

    @property
    def ready(self) -> bool:
        return not self.waiting_for

    @property
    def streams(self) -> int:
        return 0 if self._transport is None else self._transport.streams

    def queues(self) -> tuple[PickerQueue, ...]:
        """Requests that wait here."""
        return waiting(self.pools, self.director)

    async def __aenter__(self) -> Picker:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def drain(self) -> None:
        """Say that this picker is not ready, but go on serving for half of the drain window, so that the gateway
        has time to notice; then listen no more and let streams in flight end. Who waits for an endpoint when the
        window ends is told so."""
        self._draining = True
        await self._health.look()
        loop = asyncio.get_running_loop()
        window = self.options.drain_seconds
        deadline = loop.time() + window
        log.info("draining", seconds=window, streams=self.streams)
        await asyncio.sleep(window / 2)
        if self._transport is not None:
            await self._transport.drain(max(0.0, deadline - loop.time()), self.director.drain)

    async def _start(self) -> None:
        options = self.options
        await self._health.listen(options.host, options.health_port, reuse_port=options.reuse_port)
        if isinstance(self.source, StaticPools):
            self.source.load()
        self._spawn(self.source.run())
        self._spawn(self._health.run())
        if options.metrics_port >= 0:
            self._web = web.AppRunner(self._pages(), access_log=None)
            await self._web.setup()
            await web.TCPSite(self._web, options.host, options.metrics_port).start()
            self.metrics_port = self._web.addresses[0][1]
        await self._listen()
        log.info("serving", grpc=self.grpc_port, transport=options.transport.value, secure=options.secure)

    async def _listen(self) -> None:
        options = self.options
        max_body = options.director.max_body

        def factory(info: StreamInfo, send: Callable[[bytes], None], finish: Callable[[], None]) -> Exchange:
            return Exchange(self.director, info, send, finish)

        if options.secure:
            self._pair = (
                tls.self_signed("tidemill-picker", utc_now())
                if options.cert_path is None
                else tls.read_pair(options.cert_path)
            )
            if options.cert_path is not None and options.cert_reload:
                self._spawn(tls.watch_pair(options.cert_path, self._use_pair))
        ports = [(options.grpc_port, None), *options.pool_ports]
        bound: list[int] = []
        if options.transport is TransportKind.LEAN:
            lean = LeanServer(factory, max_body=max_body)
            self._transport = lean
            self._context = None if self._pair is None else tls.server_context(self._pair)
            for port, _ in ports:
                bound.append(
                    await lean.listen(options.host, port, tls=self._context, reuse_port=options.reuse_port)
                )
        else:
            reference = ReferenceServer(factory)
            self._transport = reference
            credentials = None if self._pair is None else self._credentials()
            for port, _ in ports:
                bound.append(
                    await reference.listen(options.host, port, tls=credentials, reuse_port=options.reuse_port)
                )
        self.grpc_port = bound[0]
        for port, (_, key) in zip(bound[1:], options.pool_ports, strict=True):
            self.pools.assign(port, key)

    def _credentials(self) -> grpc.ServerCredentials:
        def current() -> Any:
            assert self._pair is not None
            return grpc.ssl_server_certificate_configuration([(self._pair.key, self._pair.certificate)])

        return grpc.dynamic_ssl_server_credentials(current(), current, False)

    def _use_pair(self, pair: tls.KeyPair) -> None:
        self._pair = pair
        if self._context is not None:
            tls.load(self._context, pair)

    async def _stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for scraper in self._scrapers:
            scraper.stop()
        if self._transport is not None:
            await self._transport.drain(0.0, self.director.drain)
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("a part of the picker had failed", error=str(result))
        await self._health.stop()
        if self._web is not None:
            await self._web.cleanup()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then drain. Raises what a part of the picker fails with."""
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait({stopping, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            stopping.cancel()
            task.result()
        await self.drain()

    # Parts

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _source(self) -> StaticPools | ClusterPools:
        options = self.options
        if options.endpoints_file is not None:
            return StaticPools(options.endpoints_file, self.pools, self._make_pool)
        if self._client is None:
            raise ValueError("a picker needs a cluster or an endpoints file")
        return ClusterPools(
            self._client, self.pools, self._make_pool, namespace=options.pool_namespace, name=options.pool_name,
            timing=options.timing,
        )  # fmt: skip

    def _make_pool(self, key: ObjectKey, missing: str) -> Pool:
        load = LoadTable()
        scheduler = Scheduler(self.options.config, load, self._rng, source=self.options.config_source)
        pool = Pool(key, scheduler, load, missing=missing)
        pool.on_change(lambda: self.director.tick(pool))
        self._scrapers.append(
            Scraper(
                pool, self._scrape_options, budget=self._budget, recorded=self.director.tick, rng=self._rng,
                failed=self._poll_failed,
            )
        )  # fmt: skip
        return pool

    def _poll_failed(self) -> None:
        self.instruments.poll_errors.value += 1

    def _scraping(self) -> ScrapeOptions:
        source: MetricsDataSource = one_of(self._plugins, MetricsDataSource)
        extractor: CoreMetricsExtractor = one_of(self._plugins, CoreMetricsExtractor)
        return ScrapeOptions(
            interval=self.options.scrape_interval, scheme=source.scheme, path=source.path, port=source.port,
            verify=not source.insecure_skip_verify, engine_label=extractor.engine_label_key,
            default_engine=extractor.default_engine,
        )  # fmt: skip

    def _detector(self) -> SaturationDetector:
        utilization: UtilizationDetector = one_of(self._plugins, UtilizationDetector)
        concurrency: ConcurrencyDetector = one_of(self._plugins, ConcurrencyDetector)
        chosen = self._plugins.get(self.options.config.detector_ref)
        return SaturationDetector(
            queue_limit=utilization.queue_depth_threshold,
            kv_limit=utilization.kv_cache_util_threshold,
            fresh_for=utilization.metrics_staleness_threshold,
            max_requests=concurrency.max_concurrency,
            by_requests=isinstance(chosen, ConcurrencyDetector),
        )

    def _age(self, key: ObjectKey) -> float | None:
        if isinstance(self.source, ClusterPools):
            return self.source.age(key, asyncio.get_running_loop().time())
        return None

    def _wake(self, pool: Pool, when: float) -> None:
        """Have the director look at `pool` at a time of time.monotonic."""
        timer = self._timers.get(pool)
        if timer is not None:
            timer.cancel()
        delay = max(0.0, when - time.monotonic())
        self._timers[pool] = asyncio.get_running_loop().call_later(delay, self.director.tick, pool)

    def _pages(self) -> web.Application:
        async def metrics(request: web.Request) -> web.Response:
            return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        async def readyz(request: web.Request) -> web.Response:
            waiting = self.waiting_for
            return web.Response(status=503 if waiting else 200, text="\n".join(waiting) or "ok")

        async def healthz(request: web.Request) -> web.Response:
            return web.Response(text="ok")

        async def state(request: web.Request) -> web.Response:
            now = time.monotonic()
            body = [pool_state(pool, self.director, now) for pool in self.pools.all()]
            return web.Response(body=orjson.dumps({"pools": body}), content_type="application/json")

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/healthz", healthz)
        app.router.add_get("/readyz", readyz)
        app.router.add_get("/pools", state)
        return app


async def serve(options: PickerOptions, client: KubeClient | None, stop: asyncio.Event) -> None:
    """Run a picker until `stop`, then drain it."""
    async with contextlib.AsyncExitStack() as stack:
        picker = await stack.enter_async_context(Picker(options, client))
        await picker.run(stop)
