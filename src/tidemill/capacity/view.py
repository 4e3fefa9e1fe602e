"""What analyzers look at: one role of one model, as it is in one cycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TypeAlias

from tidemill.capacity.engine_flags import EngineFlags
from tidemill.capacity.queueing import LatencyTarget, ServiceTimes
from tidemill.capacity.report import Thresholds
from tidemill.capacity.types import Role, VariantState

ZERO = Decimal()
ReplicaId: TypeAlias = tuple[str, str]
"""Variant and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """One engine (each rank of a pod is one) of a ready replica that reports.

    `kv_tokens` is how many its cache holds. Rates are per second, means over `rate_seconds` (None: those of the
    view), latencies in seconds; None is unknown.
    """

    variant: str
    replica: str
    kv_usage: Decimal
    queue_length: Decimal
    kv_tokens: int | None = None
    running: float | None = None
    rate_seconds: float | None = None
    request_rate: float | None = None
    output_rate: float | None = None  # tokens
    ttft: float | None = None
    itl: float | None = None

    @property
    def replica_id(self) -> ReplicaId:
        return self.variant, self.replica


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
class Rates:
    """Requests that finish and tokens that are generated, per second."""

    requests: float = 0.0
    output_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class UpstreamQueue:
    """Requests for the model that wait before any replica (at the endpoint picker), and their bytes."""

    requests: Decimal = ZERO
    bytes: Decimal = ZERO


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """`model` is named with its namespace; `flags` are those of each variant's engines, `presets`
    their step times as published, where a preset was asked for; `shape` has the means over
    the role, the last known where there are none now. Rates are means over `rate_seconds`; `departed` are what
    replicas that have just left still stand for, `growth` by how many a second the requests inside the engines
    become more, `unsettled` the replicas whose means are of no one state, `queued` those whose first tokens had a
    queue before them."""

    model: str
    role: Role
    variants: tuple[VariantState, ...]
    engines: tuple[EngineLoad, ...]
    shape: RequestShape = RequestShape()
    upstream: UpstreamQueue = UpstreamQueue()
    rate_seconds: float = 60.0
    departed: Rates = Rates()
    growth: float = 0.0
    unsettled: frozenset[ReplicaId] = frozenset()
    queued: frozenset[ReplicaId] = frozenset()
    flags: Mapping[str, EngineFlags] = field(default_factory=dict)
    presets: Mapping[str, ServiceTimes] = field(default_factory=dict)
    thresholds: Thresholds = Thresholds()
    kv_cache_threshold: Decimal = Decimal("0.80")
    queue_length_threshold: Decimal = Decimal(5)
    target: LatencyTarget | None = None

    @property
    def request_rate(self) -> float | None:
        """Requests per second that the engines finish together; None unless each one says so."""
        return self._total([engine.request_rate for engine in self.engines], self.departed.requests)

    @property
    def arrival_rate(self) -> float | None:
        """Requests per second that come to the engines, whether these keep up with them or not."""
        rate = self.request_rate
        return None if rate is None else max(0.0, rate + self.growth)

    @property
    def output_rate(self) -> float | None:
        """Tokens per second that the engines generate together; None unless each one says so."""
        return self._total([engine.output_rate for engine in self.engines], self.departed.output_tokens)

    @property
    def window(self) -> float:
        """Seconds over which rates of all engines together are means: those of the engine that is seen longest."""
        return max(map(self._seconds, self.engines), default=self.rate_seconds)

    @property
    def waiting(self) -> Decimal:
        """Requests that wait, in the engines' queues and before them."""
        return sum((engine.queue_length for engine in self.engines), ZERO) + self.upstream.requests

    def supply(self, per_replica: Mapping[str, Decimal]) -> tuple[Decimal, Decimal]:
        """Capacity of the ready replicas, and with those that are pending (and may still come)."""
        known = [v for v in self.variants if v.name in per_replica]
        ready = sum((v.ready * per_replica[v.name] for v in known), ZERO)
        pending = sum((v.pending * per_replica[v.name] for v in known if not v.stalled), ZERO)
        return ready, ready + pending

    def _seconds(self, engine: EngineLoad) -> float:
        return self.rate_seconds if engine.rate_seconds is None else engine.rate_seconds

    def _total(self, rates: Sequence[float | None], departed: float) -> float | None:
        """All together over the same time: an engine that is seen for less of it had nothing before, when what it
        gets now went to the others."""
        known = [
            rate * self._seconds(engine)
            for rate, engine in zip(rates, self.engines, strict=True)
            if rate is not None
        ]
        if len(known) < len(rates):
            return None
        return sum(known) / self.window + departed if known and self.window else departed
