"""From the reports of several analyzers to one need: what is missing, or what may go, of one role of one model.

Growth takes the largest vote. Shrinking needs every analyzer that votes to have something to spare, and takes the
smallest; an analyzer without a report abstains, or holds while it may still speak up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from tidemill.capacity.report import ZERO, CapacityReport, NoReport, replicas_for, replicas_within
from tidemill.capacity.saturation import show
from tidemill.capacity.types import Role, VariantState


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one role of one model asks for.

    `growing` are the reports that miss capacity, `votes` all that count, `silent` those who said nothing.
    `priority` weighs models against each other where accelerators are short. `filling` is how many replicas still
    take up requests, after a step down, say: until what they hold is all there, nothing more may go.
    """

    model: str
    role: Role
    variants: tuple[VariantState, ...]
    votes: tuple[CapacityReport, ...]
    silent: tuple[NoReport, ...] = ()
    priority: Decimal = Decimal(1)
    filling: int = 0

    @property
    def growing(self) -> tuple[CapacityReport, ...]:
        return tuple(report for report in self.votes if report.required > 0)

    @property
    def may_shrink(self) -> bool:
        return (
            bool(self.votes)
            and not self.filling
            and not any(report.holds for report in self.silent)
            and all(report.spare > 0 for report in self.votes)
        )

    @property
    def binding(self) -> CapacityReport | None:
        """The report that decides: the largest vote for growth, else the smallest for shrinking."""
        if growing := self.growing:
            return max(growing, key=lambda r: (self._replicas(r, r.required), r.analyzer))
        if self.votes:
            return min(self.votes, key=lambda r: (self._replicas(r, r.spare), r.analyzer))
        return None

    @property
    def unreachable(self) -> str:
        """Which latency targets no size can meet, and why; "" when all can be met."""
        return "; ".join(found.unreachable for found in (*self.votes, *self.silent) if found.unreachable)

    def missing(self, variant: str) -> Decimal:
        """Replicas of `variant` that would cover what every analyzer misses, not rounded; 0 when none does."""
        return max((r.required / r.per_replica[variant] for r in self.growing), default=ZERO)

    def may_shrink_by(self, variant: VariantState) -> bool:
        """Whether every vote knows what a replica of `variant` is worth, and there is one."""
        return variant.current > 0 and _known(self.votes, variant)

    def may_grow(self, variant: VariantState) -> bool:
        return (
            _known(self.growing, variant)
            and not variant.at_rest
            and not (variant.stalled and variant.pending)
            and (variant.max_replicas is None or variant.current < variant.max_replicas)
        )

    def why_not_grow(self, variant: VariantState) -> str:
        """What keeps `variant` from growing, in words."""
        if variant.at_rest:
            return f"{variant.name} was set to 0 replicas"
        if variant.stalled and variant.pending:
            return f"{variant.name} has {variant.pending} pending, which did not start in time"
        if not _known(self.growing, variant):
            return f"what a replica of {variant.name} can do is not known: none has served yet"
        return f"{variant.name} is at maxReplicas {variant.max_replicas}"

    def removable(self, variant: VariantState, left: Mapping[str, Decimal]) -> int:
        """Replicas of `variant` that may go when each analyzer still has `left` to spare."""
        within = min(replicas_within(left[r.analyzer], r.per_replica[variant.name]) for r in self.votes)
        return max(0, min(within, variant.current - (variant.min_replicas or 0)))

    @property
    def fewest(self) -> int:
        """Replicas of all variants together that must stay for now: one, and at least half of them unless very
        little is asked for. What replicas hold grows faster than their load, so half as many may hold more than
        twice as much each: that is looked at before the next step."""
        current = sum(variant.current for variant in self.variants)
        half = -(-current // 2)
        enough = 1
        for report in self.votes:
            if known := [capacity for capacity in report.per_replica.values() if capacity > 0]:
                enough = max(enough, replicas_for(report.demand, min(known) * report.thresholds.down / 2))
        return max(1, min(half, enough))

    def _replicas(self, report: CapacityReport, amount: Decimal) -> Decimal:
        """`amount` in replicas of the smallest variant, so that units can be compared."""
        each = [capacity for capacity in report.per_replica.values() if capacity > 0]
        return amount / min(each) if each else ZERO


def _known(reports: Iterable[CapacityReport], variant: VariantState) -> bool:
    return all(report.per_replica.get(variant.name, ZERO) > 0 for report in reports)


def sentence(need: Need) -> str:
    """The need in words: who binds, with which numbers, and what the others say."""
    binding = need.binding
    if binding is None:
        return "; ".join(f"{s.analyzer}: {s.reason}" for s in need.silent) or "no analyzer is enabled"
    parts = [_about(binding)]
    parts += [_about(report) for report in need.votes if report is not binding]
    parts += [f"{s.analyzer} {'holds' if s.holds else 'abstains'}: {s.reason}" for s in need.silent]
    if need.filling and any(report.spare for report in need.votes):
        parts.append(f"nothing may go while the batches of {need.filling} replicas still fill")
    return "; ".join(parts)


def _about(report: CapacityReport) -> str:
    what = f"{report.analyzer}: demand {show(report.demand)}"
    if report.required:
        return f"{what} needs {show(report.required)} more than the {show(report.anticipated)} {report.unit}"
    if report.spare:
        return f"{what} leaves {show(report.spare)} of {show(report.supply)} {report.unit} to spare"
    return f"{what} fits {show(report.supply)} {report.unit}, with none to spare"


def numbers(need: Need) -> dict[str, str]:
    """The numbers of every vote, each under the name of its analyzer."""
    found: dict[str, str] = {}
    for report in need.votes:
        found |= {
            f"{report.analyzer}/{name}": value
            for name, value in (
                ("demand", show(report.demand)),
                ("supply", show(report.supply)),
                ("anticipated", show(report.anticipated)),
                ("required", show(report.required)),
                ("spare", show(report.spare)),
                ("scaleUpThreshold", str(report.thresholds.up)),
                ("scaleDownBoundary", str(report.thresholds.down)),
                *report.numbers.items(),
            )
        }
    for silent in need.silent:
        found[f"{silent.analyzer}/silent"] = silent.reason
    return found


def by_role(variants: Iterable[VariantState]) -> dict[Role, tuple[VariantState, ...]]:
    """Variants of one model by role, in order of name."""
    found: dict[Role, list[VariantState]] = {}
    for variant in sorted(variants, key=lambda v: v.name):
        found.setdefault(variant.role, []).append(variant)
    return {role: tuple(found[role]) for role in sorted(found)}


def spare_share(need: Need) -> Decimal:
    """How little is left: (anticipated - demand / up) / anticipated of the binding report; lower is worse."""
    binding = need.binding
    if binding is None or not binding.anticipated:
        return Decimal(-1)
    return 1 - binding.demand / binding.thresholds.up / binding.anticipated


def ordered(needs: Iterable[Need]) -> Sequence[Need]:
    return sorted(needs, key=lambda n: (n.model, n.role))
