"""Roles in a ratio."""

from __future__ import annotations

from decimal import Decimal

import pytest

from tidemill.capacity.allocation import Allocation
from tidemill.capacity.inventory import UNLIMITED, Inventory
from tidemill.capacity.needs import Need
from tidemill.capacity.ratio import held
from tidemill.capacity.types import Role, VariantState

RATIO = {"prefill": 1, "decode": 3}


def need(role: Role, *counts: int, high: int | None = None) -> Need:
    variants = tuple(
        VariantState(
            name=f"{role.value}-{i}", cost=Decimal(i + 1), current=count, desired=count, reporting=count,
            ready=count, role=role, max_replicas=high, accelerator="A100", gpus=1,
        )
        for i, count in enumerate(counts)
    )  # fmt: skip
    return Need(model="m", role=role, variants=variants, votes=())


def totals(needs: list[Need], found: Allocation) -> list[int]:
    return [sum(found.replicas["m", v.name] for v in n.variants) for n in needs]


def allocation(needs: list[Need], **wanted: int) -> Allocation:
    """As they are, but for `wanted`."""
    replicas = {("m", v.name): v.current for n in needs for v in n.variants}
    return Allocation(replicas=replicas | {("m", name.replace("_", "-")): n for name, n in wanted.items()})


@pytest.mark.parametrize(
    ("prefill", "decode", "right"),
    [(1, 3, [1, 3]), (2, 3, [2, 6]), (1, 5, [2, 5]), (1, 1, [1, 3]), (4, 12, [4, 12])],
)
def test_who_falls_behind_is_raised(prefill: int, decode: int, right: list[int]) -> None:
    needs = [need(Role.PREFILL, prefill), need(Role.DECODE, decode)]
    assert totals(needs, held(allocation(needs), needs, RATIO, UNLIMITED)) == right


def test_what_demand_wants_counts() -> None:
    needs = [need(Role.PREFILL, 1), need(Role.DECODE, 3)]
    found = held(allocation(needs, decode_0=6), needs, RATIO, UNLIMITED)
    assert totals(needs, found) == [2, 6]
    assert found.notes == {("m", "prefill"): "1 of 1 more to hold the ratio decode 3 : prefill 1"}


def test_the_cheapest_that_may_grow_is_raised() -> None:
    needs = [need(Role.PREFILL, 3), need(Role.DECODE, 2, 2, high=4)]
    found = held(allocation(needs), needs, RATIO, UNLIMITED)
    assert [found.replicas["m", f"decode-{i}"] for i in (0, 1)] == [4, 4]
    assert found.notes["m", "decode"].startswith("4 of 5 more")


def test_accelerators_limit_it_too() -> None:
    needs = [need(Role.PREFILL, 2), need(Role.DECODE, 3)]
    free = Inventory(total={"A100": 7}, used={"A100": 5})
    assert totals(needs, held(allocation(needs), needs, RATIO, free)) == [2, 5]
    assert totals(needs, held(allocation(needs, prefill_0=3), needs, RATIO, free)) == [3, 4]


def test_one_role_alone_has_no_ratio() -> None:
    needs = [need(Role.BOTH, 2)]
    found = allocation(needs)
    assert held(found, needs, RATIO, UNLIMITED) == found
