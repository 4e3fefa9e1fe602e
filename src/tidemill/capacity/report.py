"""What an analyzer says of one role of one model: how much there is, how much is asked for, in its own unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
"""What was learned, as it outlives a process."""

ZERO = Decimal()


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Demand is wanted at or below `up` of the capacity; below `down` of it some may go. 0 < down < up <= 1."""

    up: Decimal = Decimal("0.85")
    down: Decimal = Decimal("0.70")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReport:
    """`per_replica` is by variant what one replica can take; a variant that is not in it cannot be judged.

    `demand` is a mean over the last `window` seconds, 0 where it is of this moment.
    `supply` is that of the ready replicas, `anticipated` that of the pending ones too. All four are in `unit`.
    `numbers` are what led there, for people.
    """

    analyzer: str
    unit: str
    per_replica: Mapping[str, Decimal]
    supply: Decimal
    anticipated: Decimal
    demand: Decimal
    thresholds: Thresholds
    window: float = 0.0
    numbers: Mapping[str, str] = field(default_factory=dict)
    unreachable: str = ""  # variants that meet no latency target at any size, and why

    @property
    def required(self) -> Decimal:
        """Capacity that is missing: demand / up - anticipated, or 0."""
        # Compared without division: a demand that just fits needs nothing more.
        if self.demand <= self.anticipated * self.thresholds.up:
            return ZERO
        return self.demand / self.thresholds.up - self.anticipated

    @property
    def spare(self) -> Decimal:
        """Capacity that can be missed: supply - demand / down, or 0."""
        if self.supply * self.thresholds.down <= self.demand:
            return ZERO
        return self.supply - self.demand / self.thresholds.down


@dataclass(frozen=True, slots=True)
class NoReport:
    """An analyzer that has nothing to say this time, and why. While it `holds`, nothing may shrink on the word of
    the others. `demand` is what is asked for, in its unit, where only the capacities are not known yet."""

    analyzer: str
    reason: str
    holds: bool
    unreachable: str = ""
    demand: Decimal | None = None


def replicas_for(amount: Decimal, each: Decimal) -> int:
    """The fewest replicas with `each` of capacity that have at least `amount`."""
    return int((amount / each).to_integral_value(ROUND_CEILING))


def replicas_within(amount: Decimal, each: Decimal) -> int:
    """The most replicas with `each` of capacity that have at most `amount`."""
    return int((amount / each).to_integral_value(ROUND_FLOOR))
