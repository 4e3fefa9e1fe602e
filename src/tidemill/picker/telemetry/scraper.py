"""Scraping every endpoint of a pool, often. A slow endpoint never delays another; all together never take more
than their share of the processor, for which the interval grows when there are many.

The HTTP client is own code over httptools: an endpoint is asked twenty times a second over one connection, and a
general client costs several times what the answer does.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools
import structlog

from tidemill.api.inference import ENGINE_TYPE_LABEL
from tidemill.picker.load import LoadTable, Reading, Seat
from tidemill.picker.pools.endpoints import Endpoint, EndpointId
from tidemill.picker.pools.pool import Pool
from tidemill.picker.telemetry.engines import Extractor, engine_named, missing

log = structlog.get_logger(__name__)

_BODY_LIMIT = 16 * 2**20
_SHARE = 0.5  # of one processor core, for all scrapes of a process
_TURN = 0.0002  # seconds of reading answers, before the event loop may see to requests
_RECEIVING = 0.00008  # seconds that asking and receiving cost beside the reading


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeOptions:
    """`interval` and `timeout` in seconds. `port`, `path` and `scheme` say where engines export their metrics,
    when it is not at the endpoint itself; `engine_label` names the label of a pod that names its engine."""

    interval: float = 0.05
    timeout: float = 1.0
    scheme: str = "http"
    path: str = "/metrics"
    port: int | None = None
    engine_label: str = ENGINE_TYPE_LABEL
    default_engine: str = ""
    verify: bool = False
    longest_backoff: float = 1.0

    def engine_of(self, endpoint: Endpoint) -> str:
        """The engine that the endpoint's pod is labelled with; empty when it says nothing."""
        return endpoint.labels.get(self.engine_label, "")


class Budget:
    """The processor time that all scrapes of a process have: the interval grows with their number and cost, and
    answers that came together are read a few at a time, so that a request never waits for all of them."""

    def __init__(self, share: float = _SHARE) -> None:
        self._share = share
        self._cost = 0.0
        self._unread: deque[Callable[[], None]] = deque()
        self.targets = 0

    def interval(self, wanted: float) -> float:
        return max(wanted, self.targets * self._cost / self._share)

    def when_free(self, read: Callable[[], None]) -> None:
        """Have an answer read soon, after whatever else the event loop has to do first."""
        if not self._unread:
            asyncio.get_running_loop().call_soon(self._turn)
        self._unread.append(read)

    def spent(self, seconds: float) -> None:
        """One scrape took so much of the processor."""
        # Slow to rise, so that one scheduling hiccup does not slow all scrapes down.
        self._cost += (min(seconds, 0.01) - self._cost) * 0.01

    def _turn(self) -> None:
        """Read what there is time for now."""
        begun = now = time.perf_counter()
        try:
            while self._unread and now - begun < _TURN:
                before = now
                self._unread.popleft()()
                now = time.perf_counter()
                self.spent(now - before + _RECEIVING)
        finally:
            if self._unread:
                asyncio.get_running_loop().call_soon(self._turn)


class Scraper:
    """Scrapes the endpoints of one pool for as long as they are there."""

    def __init__(
        self,
        pool: Pool,
        options: ScrapeOptions,
        *,
        budget: Budget,
        failed: Callable[[], None] = lambda: None,
        recorded: Callable[[Pool], None] = lambda _: None,
        rng: random.Random,
    ) -> None:
        self._pool = pool
        self.options = options
        self.budget = budget
        self.failed = failed
        self._recorded = recorded
        self.rng = rng
        self._targets: dict[EndpointId, _Target] = {}
        self.tls: ssl.SSLContext | None = None
        if options.scheme == "https":
            self.tls = ssl.create_default_context()
            if not options.verify:
                self.tls.check_hostname = False
                self.tls.verify_mode = ssl.CERT_NONE
        pool.on_change(self.sync)
        self.sync()

    @property
    def load(self) -> LoadTable:
        return self._pool.load

    @property
    def pool(self) -> str:
        return str(self._pool.key)

    def sync(self) -> None:
        """Scrape those that are there now, and no other."""
        wanted = {endpoint.id: endpoint for endpoint in self._pool.snapshot.endpoints}
        for id in [
            id for id, target in self._targets.items() if wanted.get(id) is None or target.moved(wanted[id])
        ]:
            self._targets.pop(id).stop()
            self.budget.targets -= 1
        for id, endpoint in wanted.items():
            seat = self._pool.load.seat(id)
            if id not in self._targets and seat is not None:
                self._targets[id] = _Target(self, seat, endpoint)
                self.budget.targets += 1
                self._targets[id].begin()

    def stop(self) -> None:
        for target in self._targets.values():
            target.stop()
        self._targets.clear()

    def took(self, seat: Seat, reading: Reading, mark: int) -> None:
        self._pool.load.record(seat, reading, mark=mark, now=time.monotonic())
        self._recorded(self._pool)


@dataclass(slots=True)
class _Answer:
    """A response under way."""

    status: int = 0
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0
    sized: bool = False  # its headers say how long it is
    begun: bool = False  # its headers are complete
    complete: bool = False
    last: bool = True  # the connection ends with it


class _Target(asyncio.Protocol):
    """One endpoint: a connection that is kept, one question after the other."""

    def __init__(self, scraper: Scraper, seat: Seat, endpoint: Endpoint) -> None:
        self._scraper = scraper
        self._seat = seat
        self._address = endpoint.address
        options = scraper.options
        self._engine_named = options.engine_of(endpoint)
        host, _, port = endpoint.address.rpartition(":")
        self._host, self._port = host.strip("[]"), options.port or int(port)
        self._url = f"{options.scheme}://{host}:{self._port}{options.path}"
        self._request = (
            f"GET {options.path} HTTP/1.1\r\nHost: {host}:{self._port}\r\nAccept: text/plain\r\n"
            "User-Agent: tidemill-picker\r\n\r\n"
        ).encode()
        named = self._engine_named or options.default_engine
        self._extractor = Extractor(engine_named(named))
        if named and engine_named(named) is None:
            self._say("engine type of the endpoint is not known; it is found by its metrics", engine=named)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer = _Answer()
        self._asked = False
        self._mark = 0
        self._due = 0.0
        self._failures = 0
        self._error = ""
        self._missing: list[str] = []
        self._stopped = False

    def moved(self, endpoint: Endpoint) -> bool:
        named = self._scraper.options.engine_of(endpoint)
        return endpoint.address != self._address or named != self._engine_named

    def begin(self) -> None:
        # Spread over the interval, so that not all come at once, now or later.
        self._due = self._loop.time() + self._scraper.rng.random() * self._scraper.options.interval
        self._timer = self._loop.call_at(self._due, self._scrape)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    # Asking

    def _scrape(self) -> None:
        if self._transport is None:
            self._connecting = self._loop.create_task(self._connect())
            return
        self._ask()

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._scraper.options.timeout):
                await self._loop.create_connection(
                    lambda: self, self._host, self._port, ssl=self._scraper.tls,
                    server_hostname=self._host if self._scraper.tls and self._scraper.options.verify else
                    ("" if self._scraper.tls else None),
                )  # fmt: skip
        except (OSError, TimeoutError, ssl.SSLError) as error:
            self._fail(f"{type(error).__name__}: {error}")
            return
        finally:
            self._connecting = None
        if not self._stopped:
            self._ask()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # pyright: ignore[reportAttributeAccessIssue]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._asked and not self._stopped:
            # Where no length was given, the end of the connection is the end of the answer.
            if self._answer.begun and not self._answer.sized and exc is None:
                self.on_message_complete()
                self._done()
            else:
                self._fail("connection closed before the answer" + (f": {exc}" if exc else ""))

    def _ask(self) -> None:
        assert self._transport is not None
        self._asked = True
        self._mark = self._scraper.load.mark
        self._answer = _Answer()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(self._request)
        self._timer = self._loop.call_later(self._scraper.options.timeout, self._timed_out)

    def _timed_out(self) -> None:
        self._fail(f"no answer within {self._scraper.options.timeout:g}s")

    # The answer

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP answer: {error}")
            return
        if self._answer.complete:
            self._done()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._answer.sized = True

    def on_headers_complete(self) -> None:
        self._answer.begun = True

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        answer.size += len(body)
        if answer.size <= _BODY_LIMIT:
            answer.chunks.append(body)

    def on_message_complete(self) -> None:
        self._answer.complete = True
        if self._parser is not None:
            self._answer.status = self._parser.get_status_code()
            # Only here: afterwards the parser has forgotten it, and says False.
            self._answer.last = not self._parser.should_keep_alive()

    def _done(self) -> None:
        answer = self._answer
        self._asked = False
        self._parser = None
        if self._timer is not None:
            self._timer.cancel()
        if answer.last and self._transport is not None:
            self._transport.abort()
            self._transport = None
        if answer.status != 200:
            self._fail(f"status {answer.status}")
            return
        if answer.size > _BODY_LIMIT:
            self._fail(f"answer of {answer.size} bytes; at most {_BODY_LIMIT} are read")
            return
        self._scraper.budget.when_free(self._read)

    def _read(self) -> None:
        if self._stopped:
            return
        chunks = self._answer.chunks
        reading = self._extractor.read(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        if reading is None or not reading.has_numbers:
            self._fail("no metrics of a known engine in the answer")
            return
        if self._error:
            self._say("scrapes succeed again")
        self._error = ""
        self._failures = 0
        self._scraper.took(self._seat, reading, self._mark)
        engine = self._extractor.engine
        gaps = [] if engine is None else missing(engine, reading)
        if gaps != self._missing:
            self._missing = gaps
            if gaps:
                self._say("metrics missing; they count as unknown", missing=", ".join(gaps))
        self._again(self._scraper.budget.interval(self._scraper.options.interval))

    def _fail(self, why: str) -> None:
        """Keep what is known, try again later."""
        self._asked = False
        self._parser = None
        if self._stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._scraper.failed()
        # Said when it begins; a scrape that fails now and then is no news.
        self._failures += 1
        if self._failures == 3:
            self._error = why
            self._say("scrapes fail", error=why)
        options = self._scraper.options
        pause = min(options.interval * 2 ** min(self._failures, 10), options.longest_backoff)
        self._again(
            max(self._scraper.budget.interval(options.interval), pause * (0.5 + self._scraper.rng.random() / 2))
        )

    def _again(self, interval: float) -> None:
        # Missed turns are left out, not made up for.
        self._due = max(self._due + interval, self._loop.time())
        self._timer = self._loop.call_at(self._due, self._scrape)

    def _say(self, message: str, **fields: object) -> None:
        log.info(message, pool=self._scraper.pool, endpoint=self._address, url=self._url, **fields)
