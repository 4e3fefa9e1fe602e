"""From needs to replicas, exactly: one integer program over all models, variants and accelerators.

Minimised are the cost of all replicas, a charge for each change, and, where accelerators are short, what stays
missing, weighted so that it is never left for money. Variables are replicas to add (of needs that miss
capacity) and to remove (of needs that can miss some). When the solver has no proven answer in its time, the
greedy allocation stands in; the answer says which it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import highspy
import numpy as np

from tidemill.api.names import UNKNOWN_ACCELERATOR
from tidemill.capacity import allocation
from tidemill.capacity.allocation import Allocation, VariantKey
from tidemill.capacity.inventory import Inventory, places
from tidemill.capacity.needs import Need, ordered
from tidemill.capacity.report import replicas_for
from tidemill.capacity.types import VariantState

CHANGE_CHARGE = Decimal("0.01")  # of the cost of one replica: breaks ties in favour of fewer changes
# For a replica's worth that stays missing, times the dearest replica: one replica of whatever variant covers it,
# so above 1 nothing is left missing for money.
_SHORT_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class _Column:
    """Replicas of one variant to add (`sign` +1) or to remove (-1), at most `most`."""

    key: VariantKey
    variant: VariantState
    sign: int
    most: float


class _Program:
    """Columns and rows as the solver takes them."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[tuple[float, float, list[int], list[float]]] = []

    def column(self, cost: float, upper: float, *, integer: bool) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, low: float, high: float, indices: list[int], values: list[float]) -> None:
        self.rows.append((low, high, indices, values))

    def solve(self, time_limit: float) -> list[float] | None:
        """Values of the columns; None when no proven optimum was found in `time_limit` seconds."""
        solver = highspy.Highs()
        solver.setOptionValue("log_to_console", False)
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("mip_rel_gap", 1e-9)
        solver.setOptionValue("mip_abs_gap", 1e-7)
        solver.setOptionValue("time_limit", time_limit)
        count = len(self.cost)
        everything = np.arange(count, dtype=np.int32)
        solver.addVars(count, np.zeros(count), np.array(self.upper))
        solver.changeColsCost(count, everything, np.array(self.cost))
        kinds = [
            highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous for whole in self.integer
        ]
        solver.changeColsIntegrality(count, everything, np.array(kinds))
        starts, indices, values = [0], list[int](), list[float]()
        for _, _, row_indices, row_values in self.rows:
            indices += row_indices
            values += row_values
            starts.append(len(indices))
        solver.addRows(
            len(self.rows), np.array([r[0] for r in self.rows]), np.array([r[1] for r in self.rows]), len(indices),
            np.array(starts[:-1], dtype=np.int32), np.array(indices, dtype=np.int32), np.array(values),
        )  # fmt: skip
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return list(solver.getSolution().col_value)


def allocate(needs: Sequence[Need], inventory: Inventory, *, time_limit: float) -> Allocation:
    """As `allocation.allocate`, at the lowest cost. `time_limit` in seconds."""
    needs = ordered(needs)
    program = _Program()
    columns: list[tuple[int, _Column]] = []
    dearest = max((float(v.cost) for need in needs for v in need.variants), default=1.0) or 1.0
    for need in needs:
        if need.growing:
            columns += _growing(program, need, 0.0 if inventory.unknown else dearest)
        elif need.may_shrink:
            columns += _shrinking(program, need)
    replicas = {(need.model, v.name): v.current for need in needs for v in need.variants}
    if not columns:
        return Allocation(replicas=replicas, how="exact")
    if not inventory.unknown:
        _limit(program, columns, inventory)
    solution = program.solve(time_limit)
    if solution is None:
        fallback = allocation.allocate(needs, inventory)
        how = f"greedy, since the exact optimizer found no proven answer within {time_limit:g}s"
        return Allocation(replicas=fallback.replicas, short=fallback.short, how=how)
    for index, column in columns:
        replicas[column.key] += column.sign * round(solution[index])
    short = _short(needs, replicas, inventory) if not inventory.unknown else {}
    return Allocation(replicas=replicas, short=short, how="exact")


def _growing(program: _Program, need: Need, dearest: float) -> list[tuple[int, _Column]]:
    """`dearest` is the highest cost of any replica where accelerators are limited, else 0: then all is covered."""
    found: list[tuple[int, _Column]] = []
    for variant in _by_name(need):
        if not need.may_grow(variant):
            continue
        # More than what covers everything alone is never of use.
        most = float(replicas_for(need.missing(variant.name), Decimal(1)))
        if variant.max_replicas is not None:
            most = min(most, float(variant.max_replicas - variant.current))
        cost = float(variant.cost * (1 + CHANGE_CHARGE))
        column = _Column((need.model, variant.name), variant, 1, most)
        found.append((program.column(cost, most, integer=True), column))
    if not found:
        return []
    indices = [index for index, _ in found]
    smallest = {r.analyzer: min(float(r.per_replica[c.variant.name]) for _, c in found) for r in need.growing}
    gap: list[int] = []
    if dearest:
        # What stays missing, in whole replicas of the smallest variant: a fraction costs a replica too.
        weight = _SHORT_WEIGHT * dearest * float(need.priority)
        gap = [program.column(weight, highspy.kHighsInf, integer=True)]
    for report in need.growing:
        unit = smallest[report.analyzer]
        values = [float(report.per_replica[c.variant.name]) / unit for _, c in found]
        reachable = sum(c.most * value for (_, c), value in zip(found, values, strict=True))
        wanted = min(float(report.required) / unit, reachable)
        program.row(wanted * (1 - 1e-9), highspy.kHighsInf, [*indices, *gap], [*values, *([1.0] * len(gap))])
    return found


def _shrinking(program: _Program, need: Need) -> list[tuple[int, _Column]]:
    found: list[tuple[int, _Column]] = []
    spare = {report.analyzer: report.spare for report in need.votes}
    for variant in _by_name(need):
        if not need.may_shrink_by(variant):
            continue
        most = float(need.removable(variant, spare))
        gain = -float(variant.cost * (1 - CHANGE_CHARGE))
        column = _Column((need.model, variant.name), variant, -1, most)
        found.append((program.column(gain, most, integer=True), column))
    if not found:
        return []
    indices = [index for index, _ in found]
    for report in need.votes:
        values = [float(report.per_replica[c.variant.name]) for _, c in found]
        program.row(-highspy.kHighsInf, float(report.spare) * (1 + 1e-12), indices, values)
    total = sum(variant.current for variant in need.variants)
    program.row(-highspy.kHighsInf, float(max(0, total - need.fewest)), indices, [1.0] * len(indices))
    return found


def _by_name(need: Need) -> Sequence[VariantState]:
    """In one order whatever the input's: of equally good answers the solver takes the one it meets first."""
    return sorted(need.variants, key=lambda v: v.name)


def _limit(program: _Program, columns: Sequence[tuple[int, _Column]], inventory: Inventory) -> None:
    free = inventory.free()
    growing = [(index, column.variant) for index, column in columns if column.sign > 0]
    known = [(index, v) for index, v in growing if v.accelerator != UNKNOWN_ACCELERATOR]
    for place in sorted({place for _, v in known for place in places(v)}):
        mine = [(index, v) for index, v in known if place in places(v)]
        program.row(
            -highspy.kHighsInf,
            float(free.get(place, 0)),
            [i for i, _ in mine],
            [float(v.gpus or 1) for _, v in mine],
        )
    if len(known) < len(growing):
        # They may take any: never more in all than there is.
        everything = sum(count for place, count in free.items() if " on " not in place)
        program.row(
            -highspy.kHighsInf,
            float(everything),
            [i for i, _ in growing],
            [float(v.gpus or 1) for _, v in growing],
        )


def _short(
    needs: Sequence[Need], replicas: Mapping[VariantKey, int], inventory: Inventory
) -> dict[tuple[str, str], str]:
    """What was cut, where accelerators did not suffice for what the need would have taken."""
    short: dict[tuple[str, str], str] = {}
    for need in needs:
        uncovered = [
            report
            for report in need.growing
            if sum(
                (replicas[need.model, v.name] - v.current) * report.per_replica.get(v.name, Decimal())
                for v in need.variants
            ) < report.required
        ]  # fmt: skip
        room = [v for v in need.variants if need.may_grow(v)]
        at_maximum = all(
            v.max_replicas is not None and replicas[need.model, v.name] >= v.max_replicas for v in room
        )
        if uncovered and room and not at_maximum:
            granted = sum(replicas[need.model, v.name] - v.current for v in need.variants)
            wanted = sum(allocation.grow(need).values())
            offers = "; ".join(f"{v.name} takes {allocation.offer(v, inventory)}" for v in room)
            short[need.model, need.role.value] = f"{wanted} more wanted, {granted} granted: {offers}"
    return short
