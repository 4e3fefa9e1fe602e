"""What goes into a decision about one model, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum


class Role(StrEnum):
    """What a variant does for a request. Roles are separate capacities: what one has too much of is of no use to
    another."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of one replica that reports. Decimals, so that thresholds compare exactly."""

    variant: str
    replica: str
    kv_usage: Decimal  # share of the KV cache, 0 to 1
    queue_length: Decimal  # requests that wait, per engine of the replica


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantState:
    """One variant of a model as the cluster shows it."""

    name: str
    cost: Decimal
    current: int  # spec.replicas of the target
    desired: int | None  # the last decision, None before the first
    reporting: int  # replicas with numbers
    ready: int
    min_replicas: int | None = None
    max_replicas: int | None = None
    # Its pending replicas did not start within the deadline: nothing waits for them any more.
    stalled: bool = False
    role: Role = Role.BOTH
    accelerator: str = "unknown"
    gpus: int | None = None  # of one replica; None when its pod template does not say
    # Whether it may be brought back from 0: this autoscaler took it there, or its minimum is 0.
    may_return: bool = False
    placement: str = ""  # the nodes of that accelerator which its pods may go to, when not all of them

    @property
    def pending(self) -> int:
        return max(0, self.current - self.ready)

    @property
    def at_rest(self) -> bool:
        """Whether it has no replica because somebody else wants it so."""
        return self.current == 0 and not self.may_return


class Direction(StrEnum):
    UP = "up"
    DOWN = "down"
    HOLD = "hold"


class Cause(StrEnum):
    """Why a target is what it is, for machines."""

    KV_SPARE = "KVSpareBelowTrigger"
    QUEUE_SPARE = "QueueSpareBelowTrigger"
    ALL_SATURATED = "AllReplicasSaturated"
    SPARE_CAPACITY = "SpareCapacity"
    STEADY = "Steady"
    OTHER_VARIANT = "OtherVariantChosen"
    IN_TRANSITION = "InTransition"
    NO_CANDIDATE = "NoCandidate"
    NO_NUMBERS = "NoNumbers"
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    AT_ZERO = "AtZero"
    IDLE = "Idle"
    IN_USE_AGAIN = "InUseAgain"
    SCALE_FROM_ZERO = "ScaleFromZero"
    BELOW_MINIMUM = "BelowMinimum"
    ABOVE_MAXIMUM = "AboveMaximum"
    DEMAND = "DemandAboveCapacity"
    ROLE_RATIO = "RoleRatio"
    ANALYZERS_DISAGREE = "AnalyzersDisagree"
    ACCELERATORS_SHORT = "AcceleratorsShort"


class Notice(StrEnum):
    """What a decision may have met; the values are reasons of events."""

    ACCELERATORS = "ResourceConstrained"  # there are too few, or which are free is not known
    LATENCY_TARGET = "LatencyTargetUnreachable"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why: which analyzer bound, what it saw, and the same as a sentence."""

    analyzer: str
    cause: Cause
    sentence: str
    numbers: Mapping[str, str] = field(default_factory=dict)
    # What an operator should be told once, by the reason of the event that does.
    warnings: Mapping[Notice, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return {
            "analyzer": self.analyzer,
            "cause": self.cause.value,
            "sentence": self.sentence,
            "numbers": dict(self.numbers),
            **({"warnings": {k.value: text for k, text in self.warnings.items()}} if self.warnings else {}),
        }


@dataclass(frozen=True, slots=True)
class Target:
    """Replicas decided for one variant."""

    variant: str
    replicas: int
    direction: Direction
    explanation: Explanation
