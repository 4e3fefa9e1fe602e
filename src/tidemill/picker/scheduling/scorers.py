"""Scorers. Every one gives numbers from 0 to 1, for all candidates at once."""

from __future__ import annotations

import base64
from collections import OrderedDict
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PrivateAttr

from tidemill.picker.load import FloatArray
from tidemill.picker.pools.endpoints import Endpoint, EndpointId
from tidemill.picker.scheduling.cycle import Cycle, worst_if_unknown
from tidemill.picker.scheduling.plugin import Scorer

SESSION_HEADER = "x-session-token"
TOKEN_LOAD_SCALE = 4_194_304


def _fewer_is_better(values: FloatArray) -> FloatArray:
    """(max - v) / (max - min) over what is known; 1 for all when all are equal."""
    # By position, which is several times faster than by value; a NaN counts as both extremes.
    high, low = values.item(values.argmax()), values.item(values.argmin())
    if high > low:
        scores = high - values
        scores /= high - low
        return scores
    if high == low:
        return np.ones(len(values))
    # Not all are known.
    high, low = np.fmax.reduce(values), np.fmin.reduce(values)
    if not high > low:
        return np.where(np.isnan(values), 0.0, 1.0)
    return worst_if_unknown((high - values) / (high - low))


class QueueScorer(Scorer):
    """Fewer waiting requests."""

    def score(self, cycle: Cycle) -> FloatArray:
        return _fewer_is_better(cycle.waiting)


class RunningRequestsSizeScorer(Scorer):
    """Fewer running requests."""

    def score(self, cycle: Cycle) -> FloatArray:
        return _fewer_is_better(cycle.running)


class KvCacheUtilizationScorer(Scorer):
    """More free KV cache: 1 - usage."""

    def score(self, cycle: Cycle) -> FloatArray:
        return worst_if_unknown(1.0 - cycle.kv_usage)


class PrefixCacheScorer(Scorer):
    """The share m/t of the prompt's t blocks that an endpoint has cached. With matchLengthWeight w, also the
    length of the match: w * min(1, m * block / S)^2 + (1 - w) * m/t."""

    match_length_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    match_length_scale_tokens: Annotated[int, Field(ge=1)] = 8192
    # Older configurations set up the index here; today's do at approx-prefix-cache-producer.
    block_size_tokens: Annotated[int | None, Field(ge=1)] = None
    max_prefix_tokens_to_match: Annotated[int | None, Field(ge=1)] = None
    max_prefix_blocks_to_match: Annotated[int | None, Field(ge=1)] = None
    lru_capacity_per_server: Annotated[int | None, Field(ge=1)] = None
    auto_tune: bool | None = None
    prefix_match_info_producer_name: str = ""
    without_effect = frozenset({"auto_tune", "prefix_match_info_producer_name"})  # there is one index

    def score(self, cycle: Cycle) -> FloatArray:
        total = cycle.blocks.total
        if not total or cycle.match.by_row is None:
            return np.zeros(len(cycle))
        ratio = cycle.matched / total
        weight = self.match_length_weight
        if not weight:
            return ratio
        length = np.minimum(1.0, cycle.matched * cycle.prefix.block_tokens / self.match_length_scale_tokens)
        return weight * length**2 + (1 - weight) * ratio


class LoraAffinityScorer(Scorer):
    """1 where the adapter runs, 0.8 where there is room for one more, 0.6 where it waits, else 0."""

    def score(self, cycle: Cycle) -> FloatArray:
        adapter = cycle.request.model
        scores = np.zeros(len(cycle))
        for position, row in enumerate(cycle.rows.tolist()):
            lora = cycle.load.lora[row]
            if lora is None:
                continue
            if adapter in lora.running:
                scores[position] = 1.0
            elif len(lora.running | lora.waiting) < lora.max:
                scores[position] = 0.8
            elif adapter in lora.waiting:
                scores[position] = 0.6
        return scores


class LoadAwareScorer(Scorer):
    """0.5 where nothing waits, falling to 0 at `threshold` waiting requests."""

    threshold: Annotated[int, Field(ge=1)] = 128

    def score(self, cycle: Cycle) -> FloatArray:
        return worst_if_unknown(0.5 * (1.0 - np.minimum(cycle.waiting, self.threshold) / self.threshold))


class TokenLoadScorer(Scorer):
    """1 - min(L, T)/T, where L are the tokens in flight and those this request would add."""

    queue_threshold_tokens: Annotated[int, Field(ge=1)] = TOKEN_LOAD_SCALE

    def score(self, cycle: Cycle) -> FloatArray:
        scale = self.queue_threshold_tokens
        return 1.0 - np.minimum(cycle.in_flight_tokens + cycle.uncached_tokens, scale) / scale


class ActiveRequestScorer(Scorer):
    """1 where no more than `idleThreshold` requests are in flight, else (max - n)/max * maxBusyScore."""

    idle_threshold: Annotated[int, Field(ge=0)] = 0
    max_busy_score: Annotated[float, Field(ge=0, le=1)] = 1.0
    request_timeout: str | None = None
    without_effect = frozenset({"request_timeout"})  # releases here are events, not time-outs

    def score(self, cycle: Cycle) -> FloatArray:
        active = cycle.in_flight
        most = active.max()
        if most <= self.idle_threshold:
            return np.ones(len(cycle))
        busy = (most - active) / most * self.max_busy_score
        return np.where(active <= self.idle_threshold, 1.0, busy)


class SessionAffinityScorer(Scorer):
    """1 for the endpoint that the request's session token names."""

    def score(self, cycle: Cycle) -> FloatArray:
        token = cycle.request.headers.get(SESSION_HEADER)
        scores = np.zeros(len(cycle))
        if token:
            for position, endpoint in enumerate(cycle.endpoints):
                if session_token(endpoint) == token:
                    scores[position] = 1.0
        return scores


def session_token(endpoint: Endpoint) -> str:
    return base64.b64encode(f"{endpoint.pod.namespace}/{endpoint.pod.name}".encode()).decode()


class NoHitLruScorer(Scorer):
    """Requests that nobody has cached go round: to endpoints that never had one, then the one whose last is
    the longest ago. 0.5 for all where somebody has a block."""

    lru_size: Annotated[int, Field(ge=1)] = 1024
    prefix_plugin_name: str = ""
    prefix_match_info_producer_name: str = ""
    without_effect = frozenset({"prefix_plugin_name", "prefix_match_info_producer_name"})  # there is one index
    _used: OrderedDict[EndpointId, None] = PrivateAttr(default_factory=OrderedDict)

    def score(self, cycle: Cycle) -> FloatArray:
        if cycle.matched.any():
            return np.full(len(cycle), 0.5)
        count = len(cycle)
        if count == 1:
            return np.ones(1)
        never = [i for i, endpoint in enumerate(cycle.endpoints) if endpoint.id not in self._used]
        positions = {endpoint.id: i for i, endpoint in enumerate(cycle.endpoints)}
        used = [positions[id] for id in self._used if id in positions]
        scores = np.zeros(count)
        for order, position in enumerate([*never, *used]):
            scores[position] = max(0.0, 1.0 - order / (count - 1))
        return scores

    def picked(self, cycle: Cycle, endpoint: Endpoint) -> None:
        if cycle.matched.any():
            return
        self._used[endpoint.id] = None
        self._used.move_to_end(endpoint.id)
        while len(self._used) > self.lru_size:
            self._used.popitem(last=False)


SCORERS: dict[str, type[Any]] = {
    "queue-scorer": QueueScorer,
    "running-requests-size-scorer": RunningRequestsSizeScorer,
    "kv-cache-utilization-scorer": KvCacheUtilizationScorer,
    "prefix-cache-scorer": PrefixCacheScorer,
    "lora-affinity-scorer": LoraAffinityScorer,
    "load-aware-scorer": LoadAwareScorer,
    "token-load-scorer": TokenLoadScorer,
    "active-request-scorer": ActiveRequestScorer,
    "session-affinity-scorer": SessionAffinityScorer,
    "no-hit-lru-scorer": NoHitLruScorer,
}
