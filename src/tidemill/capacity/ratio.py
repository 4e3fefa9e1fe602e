"""Prefill, decode and encode replicas in a fixed ratio, for those who ask for one.

Each role gets what its own demand needs; then the roles that fall behind the ratio are raised to it. None is ever
lowered for its sake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from tidemill.capacity.allocation import Allocation, VariantKey
from tidemill.capacity.inventory import Inventory
from tidemill.capacity.needs import Need
from tidemill.capacity.types import VariantState


def held(found: Allocation, needs: Sequence[Need], ratio: Mapping[str, int], inventory: Inventory) -> Allocation:
    """`found` with the roles of one model (its `needs`) raised to `ratio`, as far as there is room."""
    mine = [need for need in needs if need.role.value in ratio]
    if len(mine) < 2:
        return found
    replicas = dict(found.replicas)
    left = _left(replicas, needs, inventory)
    totals = {need.role: sum(replicas[need.model, v.name] for v in need.variants) for need in mine}
    scale = max(Fraction(totals[need.role], ratio[need.role.value]) for need in mine)
    notes = dict(found.notes)
    for need in mine:
        wanted = -(-scale.numerator * ratio[need.role.value] // scale.denominator)
        raised = 0
        for variant in sorted(need.variants, key=lambda v: (v.cost, v.name)):
            key = (need.model, variant.name)
            while totals[need.role] + raised < wanted and _may_hold_more(variant, replicas[key]):
                after = left.take(variant)
                if after is None:
                    break
                left = after
                replicas[key] += 1
                raised += 1
        if totals[need.role] < wanted:
            words = " : ".join(f"{role} {ratio[role]}" for role in sorted(ratio))
            notes[need.model, need.role.value] = (
                f"{raised} of {wanted - totals[need.role]} more to hold the ratio {words}"
            )
    return replace(found, replicas=replicas, notes=notes)


def _left(replicas: Mapping[VariantKey, int], needs: Sequence[Need], inventory: Inventory) -> Inventory:
    """What is free after the growth that is decided already."""
    for need in needs:
        for variant in need.variants:
            for _ in range(replicas[need.model, variant.name] - variant.current):
                inventory = inventory.take(variant) or inventory
    return inventory


def _may_hold_more(variant: VariantState, replicas: int) -> bool:
    if variant.at_rest or (variant.stalled and variant.pending):
        return False
    return variant.max_replicas is None or replicas < variant.max_replicas
