"""The waiting room of a pool: requests that may not go yet, by priority and fairly, for a limited time.

Without I/O and without a clock of its own: whatever may let a request go (an arrival, a release, a scrape, an
endpoint that came) calls `pump` with the time, and `deadline` says when to call it for time alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from tidemill.api.picker_config import FlowControl, PriorityBand

DEFAULT_BAND_REQUESTS = 5000
DEFAULT_BAND_BYTES = 1_000_000_000
BOUND_MARGIN = 2.0  # seconds that a change of regime may add to the longer time to live


class Drop(StrEnum):
    """Why a request leaves without an endpoint, as the reason header says it."""

    NO_ENDPOINTS = "rejected-no-endpoints"
    SATURATED = "rejected-saturated"
    TTL_EXPIRED = "rejected-ttl-expired"
    SHUTTING_DOWN = "rejected-shutting-down"
    CONTEXT_CANCELLED = "rejected-context-cancelled"

    @property
    def status(self) -> int:
        """The HTTP status follows the cause."""
        return 429 if self in (Drop.SATURATED, Drop.TTL_EXPIRED) else 503


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the room. Exactly one of `go` and `drop` is called, once, unless it is cancelled."""

    priority: int
    fairness_id: str
    size: int
    go: Callable[[], None]
    drop: Callable[[Drop], None]
    model: str = ""
    target_model: str = ""  # under which it will be served
    arrived: float = 0.0
    regime_since: float = 0.0
    regime_empty: bool = False
    number: int = 0
    gone: bool = False


@dataclass(slots=True)
class _Band:
    """Flows of one priority, in order of turn, each in order of arrival.

    That order serves both ordering policies: all requests have the same time to live, so the one that came
    first is also the one whose deadline is first.
    """

    priority: int
    max_requests: int
    max_bytes: int
    round_robin: bool
    flows: OrderedDict[str, OrderedDict[int, Waiting]] = field(default_factory=OrderedDict)
    requests: int = 0
    bytes: int = 0


class FlowController:
    """Who waits for one pool. `saturation` is 1 or more when nobody may go; `has_endpoints` chooses between the
    two times to live."""

    def __init__(
        self, config: FlowControl, *, saturation: Callable[[float], float], has_endpoints: Callable[[], bool]
    ) -> None:
        self._config = config
        self._saturation = saturation
        self._has_endpoints = has_endpoints
        self._bands: dict[int, _Band] = {}
        self._listed = {band.priority: band for band in config.priority_bands}
        self._number = 0
        self._pumping = False
        self._draining = False
        self._earliest = float("inf")  # no request expires before this
        self._empty: bool | None = None  # regime of the last look
        self.ttl = config.default_request_ttl
        empty = config.no_endpoint_request_ttl
        self.empty_ttl = self.ttl if empty is None else empty

    @property
    def requests(self) -> int:
        return sum(band.requests for band in self._bands.values())

    @property
    def bytes(self) -> int:
        return sum(band.bytes for band in self._bands.values())

    def waiting(self) -> Iterator[Waiting]:
        """Everybody in the room."""
        for band in self._bands.values():
            for flow in band.flows.values():
                yield from flow.values()

    def submit(self, item: Waiting, now: float) -> None:
        """Let it go at once, have it wait, or drop it because there is no room."""
        if self._draining:
            item.gone = True
            item.drop(Drop.SHUTTING_DOWN)
            return
        # Whatever may go, goes first: what is full may be so only because nobody has looked.
        self.pump(now)
        item.arrived = item.regime_since = now
        item.regime_empty = not self._has_endpoints()
        band = self._band(item.priority)
        if self._full(band, item):
            item.gone = True
            item.drop(Drop.NO_ENDPOINTS if item.regime_empty else Drop.SATURATED)
            return
        self._number += 1
        item.number = self._number
        band.flows.setdefault(item.fairness_id, OrderedDict())[item.number] = item
        self._earliest = min(self._earliest, self._expiry(item))
        band.requests += 1
        band.bytes += item.size
        self.pump(now)

    def cancel(self, item: Waiting) -> None:
        """Its client has left."""
        if not item.gone:
            self._leave(item)
            self._prune()

    def pump(self, now: float) -> None:
        """Drop what has waited too long, then let go whoever may."""
        if self._pumping:
            return
        self._pumping = True
        try:
            self._expire(now)
            while (band := self._first()) is not None and self._saturation(now) < 1.0:
                item = self._next(band)
                self._leave(item)
                item.go()
        finally:
            self._pumping = False
        self._prune()

    def deadline(self) -> float | None:
        """When the next request will have waited too long."""
        return None if self._earliest == float("inf") else self._earliest

    def drain(self) -> None:
        """Nobody waits any longer, and nobody may begin to."""
        self._draining = True
        for item in list(self._items()):
            self._leave(item)
            item.drop(Drop.SHUTTING_DOWN)

    def _expire(self, now: float) -> None:
        empty = not self._has_endpoints()
        if now < self._earliest and empty == self._empty:
            return
        self._empty = empty
        self._earliest = float("inf")
        for item in list(self._items()):
            if item.regime_empty != empty:
                # Contention and emptiness have budgets of their own, and each starts afresh.
                item.regime_empty, item.regime_since = empty, now
            expiry = self._expiry(item)
            if now >= expiry:
                self._leave(item)
                item.drop(Drop.NO_ENDPOINTS if empty else Drop.TTL_EXPIRED)
            else:
                self._earliest = min(self._earliest, expiry)

    def _expiry(self, item: Waiting) -> float:
        ttl = self.empty_ttl if item.regime_empty else self.ttl
        own = item.regime_since + ttl if ttl else float("inf")
        if not self.ttl or not self.empty_ttl:
            return own
        return min(own, item.arrived + max(self.ttl, self.empty_ttl) + BOUND_MARGIN)

    def _items(self) -> Iterator[Waiting]:
        for band in self._bands.values():
            for flow in band.flows.values():
                yield from flow.values()

    def _first(self) -> _Band | None:
        """The highest band where somebody waits. Lower ones do not overtake it."""
        waiting = [band for band in self._bands.values() if band.requests]
        return max(waiting, key=lambda band: band.priority) if waiting else None

    def _next(self, band: _Band) -> Waiting:
        if band.round_robin:
            name = next(iter(band.flows))
            band.flows.move_to_end(name)
        else:
            name = min(band.flows, key=lambda n: next(iter(band.flows[n])))
        return next(iter(band.flows[name].values()))

    def _leave(self, item: Waiting) -> None:
        item.gone = True
        band = self._bands[item.priority]
        flow = band.flows[item.fairness_id]
        del flow[item.number]
        if not flow:
            # Flows come from headers of clients: an empty one is not kept.
            del band.flows[item.fairness_id]
        band.requests -= 1
        band.bytes -= item.size

    def _prune(self) -> None:
        for priority in [p for p, band in self._bands.items() if not band.requests]:
            del self._bands[priority]

    def _full(self, band: _Band, item: Waiting) -> bool:
        config = self._config
        return (
            band.requests >= band.max_requests
            or band.bytes + item.size > band.max_bytes
            or bool(config.max_requests and self.requests >= config.max_requests)
            or bool(config.max_bytes and self.bytes + item.size > config.max_bytes)
        )

    def _band(self, priority: int) -> _Band:
        band = self._bands.get(priority)
        if band is None:
            config = self._template(priority)
            band = self._bands[priority] = _Band(
                priority,
                config.max_requests or DEFAULT_BAND_REQUESTS,
                config.max_bytes or DEFAULT_BAND_BYTES,
                round_robin=config.fairness_policy_ref == "round-robin-fairness-policy",
            )
        return band

    def _template(self, priority: int) -> PriorityBand:
        config = self._config
        if priority in self._listed:
            return self._listed[priority]
        if priority < 0 and config.default_negative_priority_band is not None:
            return config.default_negative_priority_band
        return config.default_priority_band
