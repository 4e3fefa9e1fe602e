"""How the endpoints are: one table a pool, a column a quantity, so that a thousand are compared at once.

Two hands write it and neither touches the other's part: the scrape loop writes what the engines say, picks and
their releases write what is in flight. Which endpoints have a row is decided by the pool alone (`sync`).
Unknown is NaN, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tidemill.picker.pools.endpoints import Endpoint, EndpointId

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

EXPIRY = 5.0  # seconds after which a number is no longer known


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one scrape of one endpoint said; None is what it did not say.

    `kv_usage` from 0 to 1; `kv_tokens` is how many tokens the cache holds; `started` is when the process began
    (Unix time); `awake` is False for an engine put to sleep.
    """

    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    kv_tokens: int | None = None
    lora: Lora | None = None
    awake: bool = True
    started: float | None = None
    models: frozenset[str] = frozenset()

    @property
    def has_numbers(self) -> bool:
        return self.waiting is not None or self.running is not None or self.kv_usage is not None


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of an engine: which run, which wait, how many fit at once."""

    running: frozenset[str]
    waiting: frozenset[str]
    max: int


@dataclass(slots=True)
class Seat:
    """The row of one endpoint for as long as the endpoint is there, and the last that was read of it."""

    endpoint: Endpoint
    row: int
    alive: bool = True
    reading: Reading | None = None
    started: float | None = None
    unseen: set[int] = field(default_factory=set)  # tickets that no scrape can have seen yet


@dataclass(slots=True)
class Ticket:
    """What one pick added to an endpoint. Released once; releasing it again does nothing."""

    seat: Seat
    number: int
    tokens: int
    open: bool = True


class LoadTable:
    """Columns by row. `waiting` and `running` are what was read last and the picks that this reading cannot have
    seen; `kv_usage` and `awake` are as read, `updated` is when. `in_flight` and `in_flight_tokens` are this
    picker's own requests."""

    def __init__(self) -> None:
        self._size = 0
        self._seats: dict[EndpointId, Seat] = {}
        self._rows: IntArray = np.empty(0, dtype=np.int64)
        self._free: list[int] = []
        self._tickets = 0
        self._known_until = -np.inf  # a time up to which every endpoint is known, not always the latest one
        self._on_reset: list[Callable[[int], None]] = []
        self.sleeping = 0  # endpoints that are not awake
        self.waiting: FloatArray = np.empty(0)
        self.running: FloatArray = np.empty(0)
        self.kv_usage: FloatArray = np.empty(0)
        self.updated: FloatArray = np.empty(0)
        self.in_flight: FloatArray = np.empty(0)
        self.in_flight_tokens: FloatArray = np.empty(0)
        self.awake: NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
        self.lora: list[Lora | None] = []
        self._grow(64)

    @property
    def size(self) -> int:
        """Rows, used or not."""
        return self._size

    def on_reset(self, callback: Callable[[int], None]) -> None:
        """Have `callback` told of each row whose cache is gone: the endpoint left, or its process restarted."""
        self._on_reset.append(callback)

    def sync(self, endpoints: Sequence[Endpoint]) -> IntArray:
        """Give each endpoint its row, free those of the others. Rows of endpoints that stay are untouched."""
        wanted = {endpoint.id for endpoint in endpoints}
        for gone in [known for known in self._seats if known not in wanted]:
            left = self._seats.pop(gone)
            left.alive = False
            self._clear(left.row)
            self._free.append(left.row)
        self._free.sort(reverse=True)  # the lowest first: rows that follow each other are looked up faster
        rows: list[int] = []
        for endpoint in endpoints:
            seat = self._seats.get(endpoint.id)
            if seat is None:
                if not self._free:
                    self._grow(self._size * 2)
                seat = self._seats[endpoint.id] = Seat(endpoint, self._free.pop())
            elif endpoint.restarts > seat.endpoint.restarts:
                self._reset(seat)
            seat.endpoint = endpoint
            rows.append(seat.row)
        self._rows = np.array(rows, dtype=np.int64)
        self._known_until = -np.inf
        return self._rows

    def seat(self, id: EndpointId) -> Seat | None:
        return self._seats.get(id)

    def seats(self) -> list[Seat]:
        return list(self._seats.values())

    # What the scrape loop writes

    @property
    def mark(self) -> int:
        """The latest pick; a scrape that begins now can have seen it, and none after it."""
        return self._tickets

    def record(self, seat: Seat, reading: Reading, *, mark: int, now: float) -> None:
        """Take over what a scrape said that began at `mark`. An endpoint that left meanwhile is not revived."""
        if not seat.alive:
            return
        row = seat.row
        if reading.started is not None:
            if seat.started is not None and reading.started > seat.started + 0.5:
                self._reset(seat)
            seat.started = reading.started
        if not reading.has_numbers:
            return
        if seat.unseen:
            seat.unseen = {number for number in seat.unseen if number > mark}
        recent = len(seat.unseen)
        self.waiting[row] = _NAN if reading.waiting is None else reading.waiting + recent
        self.running[row] = _NAN if reading.running is None else reading.running + recent
        self.kv_usage[row] = _NAN if reading.kv_usage is None else reading.kv_usage
        self.updated[row] = now
        self.lora[row] = reading.lora
        self._wake(row, awake=reading.awake)
        seat.reading = reading

    # What picks write

    def take(self, seat: Seat, tokens: int) -> Ticket:
        """Count a request with `tokens` of prompt to compute on an endpoint, at once."""
        self._tickets += 1
        ticket = Ticket(seat, self._tickets, tokens)
        if seat.alive:
            row = seat.row
            self.in_flight[row] += 1
            self.in_flight_tokens[row] += tokens
            self.waiting[row] += 1
            self.running[row] += 1
            seat.unseen.add(ticket.number)
        return ticket

    def release_tokens(self, ticket: Ticket) -> None:
        """The prompt has been computed: the first output is there."""
        if ticket.tokens and ticket.open and ticket.seat.alive:
            self.in_flight_tokens[ticket.seat.row] -= ticket.tokens
        ticket.tokens = 0

    def release(self, ticket: Ticket) -> None:
        self.release_tokens(ticket)
        if not ticket.open:
            return
        ticket.open = False
        seat = ticket.seat
        if seat.alive:
            self.in_flight[seat.row] -= 1
            if ticket.number in seat.unseen:
                seat.unseen.discard(ticket.number)
                self.waiting[seat.row] -= 1
                self.running[seat.row] -= 1

    # Questions about the whole

    def all_known(self, now: float) -> bool:
        """Whether every endpoint has numbers that still count. Readings only make that last longer, so the answer
        is mostly one comparison."""
        if now <= self._known_until:
            return True
        if not len(self._rows):
            return False
        self._known_until = float(self.updated[self._rows].min()) + EXPIRY
        return now <= self._known_until

    def known(self, rows: IntArray, now: float) -> NDArray[np.bool_]:
        """Which rows have numbers that still count."""
        return self.updated[rows] >= now - EXPIRY

    def _grow(self, size: int) -> None:
        more = size - self._size
        for name in ("waiting", "running", "kv_usage"):
            setattr(self, name, np.concatenate([getattr(self, name), np.full(more, np.nan)]))
        self.updated = np.concatenate([self.updated, np.full(more, -np.inf)])
        for name in ("in_flight", "in_flight_tokens"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more)]))
        self.awake = np.concatenate([self.awake, np.ones(more, dtype=np.bool_)])
        self.lora += [None] * more
        self._free += range(size - 1, self._size - 1, -1)
        self._size = size

    def _wake(self, row: int, *, awake: bool) -> None:
        if bool(self.awake[row]) != awake:
            self.awake[row] = awake
            self.sleeping += -1 if awake else 1

    def _forget(self, row: int) -> None:
        """Nothing is known of the process behind a row."""
        self.waiting[row] = self.running[row] = self.kv_usage[row] = _NAN
        self.updated[row] = -np.inf
        self.lora[row] = None
        self._wake(row, awake=True)
        self._known_until = -np.inf
        for callback in self._on_reset:
            callback(row)

    def _clear(self, row: int) -> None:
        self.in_flight[row] = self.in_flight_tokens[row] = 0
        self._forget(row)

    def _reset(self, seat: Seat) -> None:
        """A new process answers at the address: what was known of the old one's cache and queue is not true of it.
        Requests in flight are still this picker's, and end by their own streams."""
        self._forget(seat.row)
        seat.started = None
        seat.reading = None


_NAN = float("nan")
