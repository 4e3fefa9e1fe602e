"""One scheduling cycle: a request, the endpoints it may go to, and what is known of them at one moment."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tidemill.picker.load import FloatArray, IntArray, LoadTable
from tidemill.picker.pools.endpoints import Endpoint
from tidemill.picker.scheduling.prefix import NO_BLOCKS, NO_PROMPT, Blocks, PrefixIndex, Prompt


class HeaderLookup(Protocol):
    """Header fields by lower-case name; empty where there is none."""

    def get(self, name: str, default: str = "", /) -> str: ...


class _NoHeaders:
    def get(self, name: str, default: str = "", /) -> str:
        return default


class SchedulingRequest(NamedTuple):
    """What plugins may know of a request. `model` is the one that will be served (after a rewrite; an adapter's
    name counts as one). `headers` are lower case. (A tuple, not a dataclass: one is made for each request.)"""

    model: str
    prompt: Prompt = NO_PROMPT
    salt: str = ""
    headers: HeaderLookup = _NoHeaders()
    multimodal: bool = False


class Match:
    """How much of a request's prompt each row of the table has cached; worked out once a request, when asked."""

    __slots__ = ("_asked", "_by_row", "_index", "_size", "blocks")

    def __init__(self, index: PrefixIndex, request: SchedulingRequest, size: int) -> None:
        self._index = index
        self._size = size
        prompt = request.prompt
        self.blocks: Blocks = (
            index.blocks(prompt, model=request.model, salt=request.salt) if prompt.chains else NO_BLOCKS
        )
        self._by_row: IntArray | None = None
        self._asked = False

    @property
    def by_row(self) -> IntArray | None:
        """Matched blocks for each row; None when no row has any."""
        if not self._asked:
            self._asked = True
            self._by_row = self._index.matched(self.blocks, self._size)
        return self._by_row

    def of(self, row: int) -> int:
        found = self.by_row
        return 0 if found is None else int(found[row])


class Cycle:
    """Candidates, and one column of numbers for each quantity, in the order of the candidates.

    A number that is not known is NaN. When none of the candidates has numbers, what this picker itself has in
    flight stands for their queues.
    """

    __slots__ = (
        "_known", "_select", "all_known", "endpoints", "load", "match", "now", "prefix", "request", "rng", "rows",
    )  # fmt: skip

    def __init__(
        self,
        request: SchedulingRequest,
        *,
        endpoints: Sequence[Endpoint],
        rows: IntArray,
        load: LoadTable,
        prefix: PrefixIndex,
        now: float,
        rng: random.Random,
        select: slice | None = None,
        match: Match | None = None,
    ) -> None:
        self.request = request
        self.endpoints = endpoints
        self.rows = rows
        self.load = load
        self.prefix = prefix
        self.now = now
        self.rng = rng
        self.match = match or Match(prefix, request, load.size)
        self.all_known = load.all_known(now)
        self._known: NDArray[np.bool_] | None = None
        # A slice is looked up several times faster than a list of rows.
        self._select: slice | IntArray = rows if select is None else select

    def __len__(self) -> int:
        return len(self.endpoints)

    def narrowed(self, keep: NDArray[np.bool_]) -> Cycle:
        """The same cycle over the candidates where `keep` is true."""
        if keep.all():
            return self
        positions = np.flatnonzero(keep)
        return Cycle(
            self.request,
            endpoints=[self.endpoints[i] for i in positions.tolist()],
            rows=self.rows[positions],
            load=self.load,
            prefix=self.prefix,
            now=self.now,
            rng=self.rng,
            match=self.match,
        )

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which candidates have numbers."""
        if self._known is None:
            self._known = self.load.known(self.rows, self.now)
        return self._known

    @property
    def blind(self) -> bool:
        """Whether no candidate has numbers."""
        return not self.all_known and not self.known.any()

    @property
    def waiting(self) -> FloatArray:
        """Requests that wait, those just picked included."""
        return self.load.waiting[self._select] if self.all_known else self._partly(self.load.waiting)

    @property
    def running(self) -> FloatArray:
        return self.load.running[self._select] if self.all_known else self._partly(self.load.running)

    @property
    def kv_usage(self) -> FloatArray:
        values = self.load.kv_usage[self._select]
        return values if self.all_known else np.where(self.known, values, np.nan)

    @property
    def in_flight(self) -> FloatArray:
        return self.load.in_flight[self._select]

    @property
    def in_flight_tokens(self) -> FloatArray:
        return self.load.in_flight_tokens[self._select]

    @property
    def blocks(self) -> Blocks:
        """Hashes of the prompt."""
        return self.match.blocks

    @property
    def matched(self) -> IntArray:
        """Blocks of the prompt that each candidate has probably cached."""
        found = self.match.by_row
        return np.zeros(len(self.rows), dtype=np.int64) if found is None else found[self._select]

    @property
    def uncached_tokens(self) -> IntArray:
        """Tokens of the prompt that each candidate would have to compute."""
        return np.maximum(self.request.prompt.tokens - self.matched * self.prefix.block_tokens, 0)

    def _partly(self, column: FloatArray) -> FloatArray:
        if self.blind:
            return self.in_flight
        return np.where(self.known, column[self._select], np.nan)


def worst_if_unknown(scores: FloatArray) -> FloatArray:
    """Scores where what is not known gets the lowest one, 0."""
    return np.fmax(scores, 0.0)
