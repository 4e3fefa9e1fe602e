"""Capacity in tokens of KV cache (upstream's V2): what replicas hold and can hold, what waits and will want room.

A replica is bound by memory (k1, a share of its cache) or by compute (k2, what it held when requests began to
queue). Formulas: docs/autoscaler.md, "Capacity in tokens".
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_FLOOR, Decimal
from statistics import median_low
from typing import NamedTuple

from tidemill.capacity.engine_flags import EngineFlags
from tidemill.capacity.report import ZERO, CapacityReport, NoReport, Thresholds
from tidemill.capacity.saturation import show
from tidemill.capacity.types import Role, VariantState

ANALYZER = "saturation"
UNIT = "tokens of KV cache"
REMEMBERED = 10


class BoundKey(NamedTuple):
    """What a compute bound is a property of: `bucket` is by mean output length."""

    model: str
    accelerator: str
    gpus: int
    bucket: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """One engine (each rank of a pod is one) of a ready replica. `kv_tokens` is how many its cache holds."""

    variant: str
    replica: str
    kv_usage: Decimal
    queue_length: Decimal
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """Mean tokens of recent requests; None is unknown. `hit_rate` is the share of prompts found in caches."""

    input_tokens: Decimal | None = None
    output_tokens: Decimal | None = None
    hit_rate: Decimal | None = None

    def or_last(self, last: RequestShape) -> RequestShape:
        """Each mean, or the last one known: a mean over no requests is undefined, not zero."""
        return RequestShape(
            input_tokens=last.input_tokens if self.input_tokens is None else self.input_tokens,
            output_tokens=last.output_tokens if self.output_tokens is None else self.output_tokens,
            hit_rate=last.hit_rate if self.hit_rate is None else self.hit_rate,
        )


@dataclass(frozen=True, slots=True)
class UpstreamQueue:
    """Requests for the model that wait before any replica (at the endpoint picker), and their bytes."""

    requests: Decimal = ZERO
    bytes: Decimal = ZERO


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    kv_cache_threshold: Decimal = Decimal("0.80")
    queue_length_threshold: Decimal = Decimal(5)
    thresholds: Thresholds = Thresholds()


class CapacityMemory:
    """What was learned and outlives its moment: compute bounds, and the capacity of variants that now have no
    replica to ask. Written once a cycle, with what `analyze` has found."""

    def __init__(self) -> None:
        self._bounds: dict[BoundKey, deque[Decimal]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._capacities: dict[tuple[str, str], Decimal] = {}  # model, variant

    def learn(self, model: str, found: TokenAnalysis) -> None:
        for key, bound in found.bounds_seen:
            self._bounds[key].append(bound)
        for variant, capacity in found.measured.items():
            self._capacities[model, variant] = capacity

    def bound(self, key: BoundKey) -> Decimal | None:
        """Mean of the last remembered compute bounds."""
        seen = self._bounds.get(key)
        return sum(seen, ZERO) / len(seen) if seen else None

    def capacity(self, model: str, variant: str) -> Decimal | None:
        return self._capacities.get((model, variant))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAnalysis:
    """`report`, or why there is none; and what is worth remembering."""

    report: CapacityReport | NoReport
    bounds_seen: tuple[tuple[BoundKey, Decimal], ...] = ()
    measured: Mapping[str, Decimal] = field(default_factory=dict)


def analyze(
    *,
    model: str,
    role: Role,
    variants: Sequence[VariantState],
    flags: Mapping[str, EngineFlags],
    loads: Sequence[EngineLoad],
    shape: RequestShape,
    upstream: UpstreamQueue,
    settings: TokenSettings,
    memory: CapacityMemory,
) -> TokenAnalysis:
    """Capacity and demand of one role of a model.

    `model` names it with its namespace; `flags` are those of each variant's engines; `shape` the means over the
    role, the last known where there are none now.
    """
    if not loads:
        return TokenAnalysis(report=NoReport(ANALYZER, "no replica reports numbers", holds=True))
    waiting = sum((load.queue_length for load in loads), ZERO)
    if shape.input_tokens is None and (waiting or upstream.requests):
        reason = "requests wait, and how long their prompts are is not known: none has finished yet"
        return TokenAnalysis(report=NoReport(ANALYZER, reason, holds=True))
    mean_input = shape.input_tokens or ZERO
    by_name = {variant.name: variant for variant in variants}
    bounds_seen: list[tuple[BoundKey, Decimal]] = []
    demand = ZERO
    by_replica: dict[tuple[str, str], Decimal] = {}
    bound_by: dict[str, str] = {}
    for load in loads:
        variant = by_name[load.variant]
        in_use = load.kv_usage * load.kv_tokens
        demand += in_use + load.queue_length * mean_input
        memory_bound = load.kv_tokens * settings.kv_cache_threshold
        key = _bound_key(model, variant, shape)
        if load.queue_length >= settings.queue_length_threshold and in_use > 0:
            compute_bound: Decimal | None = in_use
            bounds_seen.append((key, in_use))
        else:
            compute_bound = memory.bound(key) or _derived(flags.get(load.variant), shape)
        capacity = memory_bound if compute_bound is None else min(memory_bound, compute_bound)
        bound_by[load.variant] = "memory" if capacity == memory_bound else "compute"
        place = (load.variant, load.replica)
        by_replica[place] = by_replica.get(place, ZERO) + capacity
    measured = _medians(by_replica)
    per_replica = {
        variant.name: capacity
        for variant in variants
        if (capacity := _capacity(model, variant, by_name, flags, measured, memory)) is not None
    }
    queued = _upstream_demand(role, upstream, shape)
    demand += queued
    supply = sum((v.ready * per_replica[v.name] for v in variants if v.name in per_replica), ZERO)
    pending = sum(
        (v.pending * per_replica[v.name] for v in variants if v.name in per_replica and not v.stalled), ZERO
    )
    report = CapacityReport(
        analyzer=ANALYZER,
        unit=UNIT,
        per_replica=per_replica,
        supply=supply,
        anticipated=supply + pending,
        demand=demand,
        thresholds=settings.thresholds,
        numbers={
            "queueUpstream": show(upstream.requests),
            "queueUpstreamTokens": show(queued),
            "queueAtReplicas": show(waiting),
            "meanInputTokens": "unknown" if shape.input_tokens is None else show(shape.input_tokens),
            "meanOutputTokens": "unknown" if shape.output_tokens is None else show(shape.output_tokens),
            **{
                f"capacityPerReplica/{name}": f"{show(capacity)} ({bound_by.get(name, 'remembered')})"
                for name, capacity in sorted(per_replica.items())
            },
        },
    )
    return TokenAnalysis(report=report, bounds_seen=tuple(bounds_seen), measured=measured)


def bucket(output_tokens: Decimal | None) -> str:
    """By mean output length: the longer answers are, the more sequences fit into one step."""
    if output_tokens is None:
        return "unknown"
    return "short" if output_tokens < 100 else "medium" if output_tokens < 500 else "long"


def _bound_key(model: str, variant: VariantState, shape: RequestShape) -> BoundKey:
    return BoundKey(model, variant.accelerator, variant.gpus or 0, bucket(shape.output_tokens))


def _derived(flags: EngineFlags | None, shape: RequestShape) -> Decimal | None:
    """n sequences at a time, each with its prompt and half of its answer: n = min(B O / (I + O), S)."""
    size_in, size_out = shape.input_tokens, shape.output_tokens
    if flags is None or size_in is None or size_out is None or size_in + size_out <= 0:
        return None
    sequences = min(flags.batched_tokens * size_out / (size_in + size_out), Decimal(flags.max_num_seqs))
    return sequences * (size_in + size_out / 2) or None


def _medians(by_replica: Mapping[tuple[str, str], Decimal]) -> dict[str, Decimal]:
    found: dict[str, list[Decimal]] = {}
    for (variant, _), capacity in by_replica.items():
        found.setdefault(variant, []).append(capacity)
    return {variant: _median(values) for variant, values in found.items()}


def _median(values: Iterable[Decimal]) -> Decimal:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return ((ordered[middle - 1] + ordered[middle]) / 2).to_integral_value(ROUND_FLOOR)


def _capacity(
    model: str,
    variant: VariantState,
    variants: Mapping[str, VariantState],
    flags: Mapping[str, EngineFlags],
    measured: Mapping[str, Decimal],
    memory: CapacityMemory,
) -> Decimal | None:
    """Of one replica: as measured now, else as remembered, else that of a variant that is made alike."""
    if (found := measured.get(variant.name)) is not None:
        return found
    if (found := memory.capacity(model, variant.name)) is not None:
        return found
    alike = [
        capacity
        for name, capacity in sorted(measured.items())
        if (variants[name].accelerator, variants[name].gpus) == (variant.accelerator, variant.gpus)
        and flags.get(name) == flags.get(variant.name)
    ]
    return median_low(alike) if alike else None


def _upstream_demand(role: Role, upstream: UpstreamQueue, shape: RequestShape) -> Decimal:
    """Tokens that waiting requests will want: max(bytes/4, n I) (1 - hit rate) for their prompts, and n O for
    their answers; a prefill server computes prompts only."""
    prompts = max(upstream.bytes / 4, upstream.requests * (shape.input_tokens or ZERO))
    prompts *= 1 - (shape.hit_rate or ZERO)
    answers = upstream.requests * (shape.output_tokens or ZERO)
    return prompts if role is Role.PREFILL else prompts + answers
