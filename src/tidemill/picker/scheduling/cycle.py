"""One scheduling cycle: a request, the endpoints it may go to, and what is known of them at one moment."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tidemill.picker.load import FloatArray, IntArray, LoadTable
from tidemill.picker.pools.endpoints import Endpoint
from tidemill.picker.scheduling.prefix import NO_BLOCKS, Blocks, PrefixIndex, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingRequest:
    """What plugins may know of a request. `model` is the one that will be served (after a rewrite; an adapter's
    name counts as one). `headers` are lower case."""

    model: str
    prompt: Prompt = Prompt()
    salt: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    multimodal: bool = False


class Cycle:
    """Candidates and, lazily, one column of numbers for each quantity, in the order of the candidates.

    A number that is not known is NaN. When none of the candidates has numbers, what this picker itself has in
    flight stands for their queues.
    """

    def __init__(
        self,
        request: SchedulingRequest,
        *,
        endpoints: Sequence[Endpoint],
        rows: IntArray,
        load: LoadTable,
        prefix: PrefixIndex | None,
        now: float,
        rng: random.Random,
        blocks: Blocks | None = None,
    ) -> None:
        self.request = request
        self.endpoints = endpoints
        self.rows = rows
        self.load = load
        self.prefix = prefix
        self.now = now
        self.rng = rng
        if blocks is not None:
            self.blocks = blocks

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
            blocks=self.__dict__.get("blocks"),
        )

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        return self.load.known(self.rows, self.now)

    @cached_property
    def blind(self) -> bool:
        """Whether no candidate has numbers."""
        return not self.known.any()

    @cached_property
    def waiting(self) -> FloatArray:
        """Requests that wait, those just picked included."""
        if self.blind:
            return self.in_flight
        return self._fresh(self.load.waiting) + self.load.recent[self.rows]

    @cached_property
    def running(self) -> FloatArray:
        if self.blind:
            return self.in_flight
        return self._fresh(self.load.running) + self.load.recent[self.rows]

    @cached_property
    def kv_usage(self) -> FloatArray:
        return self._fresh(self.load.kv_usage)

    @cached_property
    def in_flight(self) -> FloatArray:
        return self.load.in_flight[self.rows]

    @cached_property
    def in_flight_tokens(self) -> FloatArray:
        return self.load.in_flight_tokens[self.rows]

    @cached_property
    def blocks(self) -> Blocks:
        if self.prefix is None:
            return NO_BLOCKS
        return self.prefix.blocks(self.request.prompt, model=self.request.model, salt=self.request.salt)

    @cached_property
    def matched(self) -> IntArray:
        """Blocks of the prompt that each candidate has probably cached."""
        if self.prefix is None or not self.blocks.chains:
            return np.zeros(len(self.rows), dtype=np.int64)
        return self.prefix.matched(self.blocks, len(self.load.waiting))[self.rows]

    @cached_property
    def uncached_tokens(self) -> IntArray:
        """Tokens of the prompt that each candidate would have to compute."""
        tokens = self.request.prompt.tokens
        if self.prefix is None:
            return np.full(len(self.rows), tokens, dtype=np.int64)
        return np.maximum(tokens - self.matched * self.prefix.block_tokens, 0)

    def _fresh(self, column: FloatArray) -> FloatArray:
        values = column[self.rows]
        return values if self.known.all() else np.where(self.known, values, np.nan)


def worst_if_unknown(scores: FloatArray) -> FloatArray:
    """Scores where what is not known gets the lowest one, 0."""
    return np.fmax(scores, 0.0)
