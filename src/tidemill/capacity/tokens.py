"""Capacity in tokens of KV cache (upstream's V2): what replicas hold and can hold, what waits and will want room.

A replica is bound by memory (k1, a share of its cache) or by compute (k2, what it held when requests began to
queue). Formulas: docs/autoscaler.md, "Capacity in tokens".
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_FLOOR, Decimal
from statistics import median_low
from typing import NamedTuple

from tidemill.api.saturation_config import TOKENS
from tidemill.capacity.engine_flags import EngineFlags
from tidemill.capacity.report import ZERO, CapacityReport, Json, NoReport
from tidemill.capacity.saturation import show
from tidemill.capacity.types import Role, VariantState
from tidemill.capacity.view import RequestShape, RoleView, UpstreamQueue

UNIT = "tokens of KV cache"
REMEMBERED = 10


class BoundKey(NamedTuple):
    """What a compute bound is a property of: `bucket` is by mean output length."""

    model: str
    accelerator: str
    gpus: int
    bucket: str


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

    def dump(self) -> Json:
        return {
            "bounds": [[*key, [str(bound) for bound in bounds]] for key, bounds in self._bounds.items()],
            "capacities": [[*key, str(capacity)] for key, capacity in self._capacities.items()],
        }

    def load(self, state: Json) -> None:
        for model, accelerator, gpus, size, bounds in state["bounds"]:
            key = BoundKey(model, accelerator, gpus, size)
            self._bounds[key].extend(Decimal(bound) for bound in bounds)
        for model, variant, capacity in state["capacities"]:
            self._capacities[model, variant] = Decimal(capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAnalysis:
    """`report`, or why there is none; and what is worth remembering."""

    report: CapacityReport | NoReport
    bounds_seen: tuple[tuple[BoundKey, Decimal], ...] = ()
    measured: Mapping[str, Decimal] = field(default_factory=dict)


def analyze(view: RoleView, memory: CapacityMemory) -> TokenAnalysis:
    """Capacity and demand of one role of a model, with what `memory` knows of earlier cycles."""
    engines, shape = view.engines, view.shape
    if not engines:
        return _silent("no replica reports numbers")
    if lacking := sorted({engine.replica for engine in engines if engine.kv_tokens is None}):
        return _silent(f"the size of the KV cache is not known (vllm:cache_config_info) for {_listed(lacking)}")
    waiting = sum((engine.queue_length for engine in engines), ZERO)
    if shape.input_tokens is None and (waiting or view.upstream.requests):
        return _silent("requests wait, and how long their prompts are is not known: none has finished yet")
    mean_input = shape.input_tokens or ZERO
    variants = {variant.name: variant for variant in view.variants}
    bounds_seen: list[tuple[BoundKey, Decimal]] = []
    demand = ZERO
    by_replica: dict[tuple[str, str], Decimal] = {}
    bound_by: dict[str, str] = {}
    for engine in engines:
        tokens = engine.kv_tokens or 0
        in_use = engine.kv_usage * tokens
        demand += in_use + engine.queue_length * mean_input
        memory_bound = tokens * view.kv_cache_threshold
        key = _bound_key(view.model, variants[engine.variant], shape)
        if engine.queue_length >= view.queue_length_threshold and in_use > 0:
            compute_bound: Decimal | None = in_use
            bounds_seen.append((key, in_use))
        else:
            compute_bound = memory.bound(key) or _derived(view.flags.get(engine.variant), shape)
        capacity = memory_bound if compute_bound is None else min(memory_bound, compute_bound)
        bound_by[engine.variant] = "memory" if capacity == memory_bound else "compute"
        place = (engine.variant, engine.replica)
        by_replica[place] = by_replica.get(place, ZERO) + capacity
    measured = _medians(by_replica)
    per_replica = {
        variant.name: capacity
        for variant in view.variants
        if (capacity := _capacity(view, variant, measured, memory)) is not None
    }
    queued = _upstream_demand(view.role, view.upstream, shape)
    supply, anticipated = view.supply(per_replica)
    report = CapacityReport(
        analyzer=TOKENS,
        unit=UNIT,
        per_replica=per_replica,
        supply=supply,
        anticipated=anticipated,
        demand=demand + queued,
        thresholds=view.thresholds,
        numbers={
            "queueUpstream": show(view.upstream.requests),
            "queueUpstreamTokens": show(queued),
            "queueAtReplicas": show(waiting),
            "meanInputTokens": _show(shape.input_tokens),
            "meanOutputTokens": _show(shape.output_tokens),
            **{
                f"capacityPerReplica/{name}": f"{show(capacity)} ({bound_by.get(name, 'remembered')})"
                for name, capacity in sorted(per_replica.items())
            },
        },
    )
    return TokenAnalysis(report=report, bounds_seen=tuple(bounds_seen), measured=measured)


class TokenAnalyzer:
    """The analyzer with its memory. Without numbers it holds: it is the one that always looks."""

    name = TOKENS

    def __init__(self) -> None:
        self.memory = CapacityMemory()

    def report(self, view: RoleView) -> CapacityReport | NoReport:
        found = analyze(view, self.memory)
        self.memory.learn(view.model, found)
        return found.report

    def dump(self) -> Json:
        return self.memory.dump()

    def load(self, state: Json) -> None:
        self.memory.load(state)


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
    view: RoleView, variant: VariantState, measured: Mapping[str, Decimal], memory: CapacityMemory
) -> Decimal | None:
    """Of one replica: as measured now, else as remembered, else that of a variant that is made alike."""
    if (found := measured.get(variant.name)) is not None:
        return found
    if (found := memory.capacity(view.model, variant.name)) is not None:
        return found
    flags = view.flags
    alike = [
        measured[other.name]
        for other in view.variants
        if other.name in measured
        and (other.accelerator, other.gpus) == (variant.accelerator, variant.gpus)
        and flags.get(other.name) == flags.get(variant.name)
    ]
    return median_low(alike) if alike else None


def _silent(reason: str) -> TokenAnalysis:
    return TokenAnalysis(report=NoReport(TOKENS, reason, holds=True))


def _show(value: Decimal | None) -> str:
    return "unknown" if value is None else show(value)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _upstream_demand(role: Role, upstream: UpstreamQueue, shape: RequestShape) -> Decimal:
    """Tokens that waiting requests will want: max(bytes/4, n I) (1 - hit rate) for their prompts, and n O for
    their answers; a prefill server computes prompts only."""
    prompts = max(upstream.bytes / 4, upstream.requests * (shape.input_tokens or ZERO))
    prompts *= 1 - (shape.hit_rate or ZERO)
    answers = upstream.requests * (shape.output_tokens or ZERO)
    return prompts if role is Role.PREFILL else prompts + answers
