"""From needs to replicas, greedily: the compatible way, and what stands in when the exact one has no time.

Growth goes to the lowest cost per capacity first, shrinking to the highest cost first. Where accelerators are
short they go one replica at a time to the model with the highest priority times missing replicas (ties: the one
with the least to spare), so that each has its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from tidemill.api.names import UNKNOWN_ACCELERATOR
from tidemill.capacity.inventory import Inventory, places, take
from tidemill.capacity.needs import Need, ordered, spare_share
from tidemill.capacity.report import ZERO, replicas_for
from tidemill.capacity.types import VariantState

VariantKey = tuple[str, str]
"""Model (with its namespace) and variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Replicas by variant. `short` says by model and role how a need was cut, `notes` what else was done to
    it, `how` which optimizer it was."""

    replicas: Mapping[VariantKey, int]
    short: Mapping[tuple[str, str], str] = field(default_factory=dict)
    notes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    how: str = "greedy"


def allocate(needs: Sequence[Need], inventory: Inventory) -> Allocation:
    """Replicas of every variant of every need; those of a need that neither grows nor shrinks stay."""
    replicas: dict[VariantKey, int] = {}
    growing: list[Need] = []
    for need in ordered(needs):
        for variant in need.variants:
            replicas[need.model, variant.name] = variant.current
        if need.growing:
            growing.append(need)
        elif need.may_shrink:
            for name, count in shrink(need).items():
                replicas[need.model, name] -= count
    plans = [(need, grow(need)) for need in growing]
    short = fit(plans, inventory)
    for need, plan in plans:
        for name, count in plan.items():
            replicas[need.model, name] += count
    return Allocation(replicas=replicas, short=short)


def grow(need: Need) -> dict[str, int]:
    """Replicas to add: as many of the cheapest for what is missing as its maximum allows, then the next."""
    left = {report.analyzer: report.required for report in need.growing}

    def missing(variant: VariantState) -> Decimal:
        return max((left[r.analyzer] / r.per_replica[variant.name] for r in need.growing), default=ZERO)

    added: dict[str, int] = {}
    candidates = [variant for variant in need.variants if need.may_grow(variant)]
    for variant in sorted(candidates, key=lambda v: (v.cost * need.missing(v.name), v.name)):
        count = replicas_for(max(ZERO, missing(variant)), Decimal(1))
        if variant.max_replicas is not None:
            count = min(count, variant.max_replicas - variant.current)
        if count <= 0:
            continue
        added[variant.name] = count
        for report in need.growing:
            left[report.analyzer] -= count * report.per_replica[variant.name]
    return added


def shrink(need: Need) -> dict[str, int]:
    """Replicas to take away, the dearest first. What must stay is left to the cheapest."""
    left = {report.analyzer: report.spare for report in need.votes}
    candidates = [variant for variant in need.variants if need.may_shrink_by(variant)]
    others = sum(variant.current for variant in need.variants)
    removed: dict[str, int] = {}
    for variant in sorted(candidates, key=lambda v: (v.cost, v.name), reverse=True):
        count = need.removable(variant, left)
        count = min(count, others - need.fewest)
        if count <= 0:
            continue
        removed[variant.name] = count
        others -= count
        for report in need.votes:
            left[report.analyzer] -= count * report.per_replica[variant.name]
    return removed


def fit(plans: Sequence[tuple[Need, dict[str, int]]], inventory: Inventory) -> dict[tuple[str, str], str]:
    """Cut the plans in place to the accelerators that are free; says by need what was cut.

    Replicas are granted one at a time. A need whose first choice has no devices left takes its next one. A variant
    whose accelerator is not known may take any, so that never more is granted than exists in all.
    """
    if inventory.unknown:
        return {}
    free = inventory.free()
    wanted = [dict(plan) for _, plan in plans]
    waiting = [_Claim(need, plan) for need, plan in plans]
    for _, plan in plans:
        plan.clear()
    while waiting:
        claim = max(waiting, key=lambda c: c.strength)
        if not claim.grant(free):
            waiting.remove(claim)
    short: dict[tuple[str, str], str] = {}
    for (need, plan), want in zip(plans, wanted, strict=True):
        if not any(_still(need, plan, report.analyzer) > 0 for report in need.growing):
            continue
        if sum(want.values()) > sum(plan.values()):
            offers = "; ".join(f"{v.name} takes {offer(v, inventory)}" for v in need.variants if need.may_grow(v))
            granted = sum(plan.values())
            short[need.model, need.role.value] = f"{sum(want.values())} more wanted, {granted} granted: {offers}"
    return short


class _Claim:
    """A need that asks for replicas, one at a time."""

    def __init__(self, need: Need, plan: dict[str, int]) -> None:
        self._need = need
        self._plan = plan
        candidates = [variant for variant in need.variants if need.may_grow(variant)]
        self._candidates = sorted(candidates, key=lambda v: (v.cost * need.missing(v.name), v.name))

    @property
    def strength(self) -> tuple[Decimal, Decimal, tuple[int, ...]]:
        """Priority times the replicas that are still missing, then how little there is to spare, then by name."""
        name = tuple(-ord(letter) for letter in self._need.model)  # the first by name is the largest
        return self._need.priority * self._missing(), -spare_share(self._need), name

    def grant(self, free: dict[str, int]) -> bool:
        """Take one replica of the cheapest variant that has devices; False when none is missing or to be had."""
        if self._missing() <= 0:
            return False
        for variant in self._candidates:
            count = self._plan.get(variant.name, 0)
            full = variant.max_replicas is not None and variant.current + count >= variant.max_replicas
            if not full and take(variant, free):
                self._plan[variant.name] = count + 1
                return True
        return False

    def _missing(self) -> Decimal:
        """Replicas of the first choice that would cover what is still missing."""
        if not self._candidates:
            return ZERO
        first = self._candidates[0].name
        return max(
            (
                _still(self._need, self._plan, report.analyzer) / report.per_replica[first]
                for report in self._need.growing
            ),
            default=ZERO,
        )


def _still(need: Need, plan: Mapping[str, int], analyzer: str) -> Decimal:
    """What an analyzer would still miss with the replicas of `plan`."""
    report = next(r for r in need.growing if r.analyzer == analyzer)
    return report.required - sum((n * report.per_replica[name] for name, n in plan.items()), ZERO)


def offer(variant: VariantState, inventory: Inventory) -> str:
    """What a replica takes of what there is, in words."""
    place = places(variant)[-1]
    size = f"{variant.gpus}" if variant.gpus else "1 (its pod template does not say)"
    if variant.accelerator == UNKNOWN_ACCELERATOR:
        return f"{size} each of any accelerator, {sum(inventory.free().values())} free in all"
    return f"{size} {place} each, {inventory.free().get(place, 0)} of {inventory.total.get(place, 0)} free"
