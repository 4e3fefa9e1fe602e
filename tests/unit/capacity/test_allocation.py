"""From needs to replicas: greedy and exact, limits, several analyzers, several models."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.capacity import allocation, exact
from tidemill.capacity.allocation import Allocation
from tidemill.capacity.inventory import UNLIMITED, Inventory
from tidemill.capacity.needs import Need, sentence
from tidemill.capacity.report import CapacityReport, NoReport, Thresholds
from tidemill.capacity.targets import allocated
from tidemill.capacity.types import Cause, Role, VariantState

ONE = Thresholds(up=Decimal(1), down=Decimal(1))


def D(value: float | str) -> Decimal:
    return Decimal(str(value))


def variant(
    name: str, cost: float, current: int = 1, *, low: int | None = None, high: int | None = None,
    accelerator: str = "A100", gpus: int | None = 1, role: Role = Role.BOTH,
) -> VariantState:  # fmt: skip
    return VariantState(
        name=name, cost=D(cost), current=current, desired=current, reporting=current, ready=current,
        min_replicas=low, max_replicas=high, accelerator=accelerator, gpus=gpus, role=role, may_return=True,
    )  # fmt: skip


def report(
    each: Mapping[str, float], *, required: float = 0, spare: float = 0, supply: float = 40,
    analyzer: str = "saturation",
) -> CapacityReport:  # fmt: skip
    """A report that misses `required` or has `spare`."""
    return CapacityReport(
        analyzer=analyzer, unit="tokens", per_replica={k: D(v) for k, v in each.items()}, supply=D(supply),
        anticipated=D(supply), demand=max(D(0), D(supply) + D(required) - D(spare)), thresholds=ONE,
    )  # fmt: skip


def need(
    variants: Sequence[VariantState], *votes: CapacityReport, model: str = "ns/m", priority: float = 1,
    silent: tuple[NoReport, ...] = (), role: Role = Role.BOTH,
) -> Need:  # fmt: skip
    return Need(model=model, role=role, variants=tuple(variants), votes=votes, silent=silent, priority=D(priority))


def solve(needs: Sequence[Need], inventory: Inventory = UNLIMITED) -> Allocation:
    return exact.allocate(needs, inventory, time_limit=10)


def bill(found: Allocation, needs: Sequence[Need]) -> Decimal:
    return sum((v.cost * found.replicas[n.model, v.name] for n in needs for v in n.variants), Decimal())


class TestGreedy:
    """autoscaler-reference.md, 11."""

    @pytest.mark.parametrize(("most", "right"), [(None, (5, 1)), (3, (3, 2))])
    def test_the_lowest_cost_per_capacity_grows_first(self, most: int | None, right: tuple[int, int]) -> None:
        variants = [variant("a", 5, high=most), variant("b", 15)]
        found = allocation.allocate([need(variants, report({"a": 10, "b": 20}, required=35))], UNLIMITED)
        assert (found.replicas["ns/m", "a"], found.replicas["ns/m", "b"]) == right

    @pytest.mark.parametrize("spare", [35, 55])
    def test_the_dearest_goes_first_and_one_stays(self, spare: float) -> None:
        variants = [variant("a", 20, 2), variant("b", 5, 2)]
        found = allocation.allocate([need(variants, report({"a": 10, "b": 10}, spare=spare))], UNLIMITED)
        assert (found.replicas["ns/m", "a"], found.replicas["ns/m", "b"]) == (0, 1)

    def test_a_minimum_is_kept(self) -> None:
        variants = [variant("a", 20, 3, low=2)]
        found = allocation.allocate([need(variants, report({"a": 10}, spare=500))], UNLIMITED)
        assert found.replicas["ns/m", "a"] == 2

    @pytest.mark.parametrize(
        ("required", "priority", "free", "right"),
        [((30, 10), 1, 3, (3, 0)), ((20, 20), 1, 2, (1, 1)), ((20, 20), 3, 2, (0, 2))],
    )
    def test_short_accelerators_are_shared(
        self, required: tuple[int, int], priority: float, free: int, right: tuple[int, int]
    ) -> None:
        needs = [
            need([variant("a", 5)], report({"a": 10}, required=required[0]), model="ns/A"),
            need([variant("b", 5)], report({"b": 10}, required=required[1]), model="ns/B", priority=priority),
        ]
        found = allocation.allocate(needs, Inventory(total={"A100": free + 2}, used={"A100": 2}))
        assert (found.replicas["ns/A", "a"] - 1, found.replicas["ns/B", "b"] - 1) == right
        assert found.short, "what was cut is said"


A17 = [({"A": (10, 200), "B": (6, 100)}, 100, 6, 10), ({"A": (10, 200), "B": (6, 100)}, 250, 16, 20),
       ({"A": (10, 200), "B": (6, 100)}, 410, 26, 30),
       ({"A": (10, 80_000), "B": (7, 50_000), "C": (3, 20_000)}, 300_000, 39, 40)]  # fmt: skip


class TestExact:
    @pytest.mark.parametrize(("offers", "required", "best", "greedy"), A17)
    def test_A17_the_cheapest_cover(
        self, offers: dict[str, tuple[int, int]], required: int, best: int, greedy: int
    ) -> None:
        variants = [variant(name, cost, 0) for name, (cost, _) in offers.items()]
        needs = [need(variants, report({n: c for n, (_, c) in offers.items()}, required=required))]
        assert bill(solve(needs), needs) == best
        assert bill(allocation.allocate(needs, UNLIMITED), needs) == greedy

    def test_A17_with_the_cheapest_at_its_maximum(self) -> None:
        variants = [variant("A", 10, 0), variant("B", 6, 1, high=1)]
        found = solve([need(variants, report({"A": 200, "B": 100}, required=100))])
        assert found.replicas == {("ns/m", "A"): 1, ("ns/m", "B"): 1}

    def test_it_says_when_it_had_no_time(self) -> None:
        rng = random.Random(1)
        needs = [
            need([variant(f"v{i}", rng.randint(3, 20)) for i in range(12)],
                 report({f"v{i}": rng.randint(20, 100) for i in range(12)}, required=rng.randint(300, 900)),
                 model=f"ns/m{m}")
            for m in range(40)
        ]  # fmt: skip
        found = exact.allocate(needs, UNLIMITED, time_limit=0)
        assert found.how.startswith("greedy")
        assert found.replicas == allocation.allocate(needs, UNLIMITED).replicas

    def test_a_high_priority_is_served_first(self) -> None:
        needs = [
            need([variant("a", 5, gpus=2)], report({"a": 10}, required=40), model="ns/A", priority=5),
            need([variant("b", 5, gpus=2)], report({"b": 10}, required=40), model="ns/B"),
        ]
        found = solve(needs, Inventory(total={"A100": 12}, used={"A100": 4}))
        assert (found.replicas["ns/A", "a"], found.replicas["ns/B", "b"]) == (5, 1)
        assert found.short == {("ns/B", "both"): "4 more wanted, 0 granted: b takes 2 A100 each, 8 of 12 free"}


class TestAnalyzers:
    BOTH = staticmethod(lambda: [variant("a", 10, 3)])
    SPARE = staticmethod(lambda: report({"a": 10}, spare=25, supply=30))

    def test_growth_takes_the_largest_vote(self) -> None:
        votes = report({"a": 10}, required=5), report({"a": 2}, required=5, analyzer="throughput")
        for way in (solve, lambda needs: allocation.allocate(needs, UNLIMITED)):
            assert way([need(self.BOTH(), *votes)]).replicas["ns/m", "a"] == 6

    def test_shrinking_takes_the_smallest(self) -> None:
        votes = self.SPARE(), report({"a": 2}, spare=3, supply=6, analyzer="throughput")
        for way in (solve, lambda needs: allocation.allocate(needs, UNLIMITED)):
            assert way([need(self.BOTH(), *votes)]).replicas["ns/m", "a"] == 2

    def test_A15_one_without_spare_keeps_what_there_is(self) -> None:
        votes = self.SPARE(), report({"a": 2}, supply=6, analyzer="throughput")
        assert solve([need(self.BOTH(), *votes)]).replicas["ns/m", "a"] == 3

    @pytest.mark.parametrize(("holds", "right"), [(True, 3), (False, 1)])
    def test_A15_a_silent_one_holds_or_abstains(self, holds: bool, right: int) -> None:
        silent = NoReport("throughput", "has not reported for 5 cycles", holds)
        given_need = need(self.BOTH(), self.SPARE(), silent=(silent,))
        assert solve([given_need]).replicas["ns/m", "a"] == right
        assert f"throughput {'holds' if holds else 'abstains'}: has not reported" in sentence(given_need)

    def test_nothing_more_goes_while_those_left_take_over_what_the_last_ones_had(self) -> None:
        given_need = replace(need(self.BOTH(), self.SPARE()), filling=2)
        assert solve([given_need]).replicas["ns/m", "a"] == 3
        assert "while the batches of 2 replicas still fill" in sentence(given_need)
        (target,) = allocated(given_need, solve([given_need]))
        assert target.explanation.cause is Cause.IN_TRANSITION


class TestWhoCanGrow:
    def test_only_who_asks_for_more_must_know_a_variant(self) -> None:
        variants = [variant("a", 10, 2, high=2), variant("b", 5, 0)]
        votes = report({"a": 10, "b": 10}, required=5), report({"a": 2}, analyzer="throughput")
        for way in (solve, lambda needs: allocation.allocate(needs, UNLIMITED)):
            assert way([need(variants, *votes)]).replicas["ns/m", "b"] == 1

    def test_what_nothing_is_known_of_is_said(self) -> None:
        variants = [variant("a", 10, 2, high=2), variant("b", 5, 0)]
        asked = need(variants, report({"a": 10}, required=5))
        (a, b) = allocated(asked, solve([asked]))
        assert (a.replicas, b.replicas) == (2, 0)
        assert a.explanation.cause is Cause.NO_CANDIDATE
        assert "a is at maxReplicas 2; what a replica of b can do is not known" in a.explanation.sentence

    def test_one_that_never_started_is_not_waited_for(self) -> None:
        stalled = replace(variant("a", 5, 3), ready=1, stalled=True)
        found = solve([need([stalled, variant("b", 10, 1)], report({"a": 10, "b": 10}, required=15))])
        assert found.replicas == {("ns/m", "a"): 3, ("ns/m", "b"): 3}


class TestInventory:
    def test_A20_unknown_grants_and_empty_does_not(self) -> None:
        needs = [need([variant("a", 10, 8)], report({"a": 10}, required=15))]
        unknown = Inventory(unknown="nodes may not be listed")
        full = Inventory(total={"A100": 8}, used={"A100": 8})
        for way in (solve, allocation.allocate):
            assert way(needs, unknown).replicas["ns/m", "a"] == 10
            assert way(needs, full).replicas["ns/m", "a"] == 8
            assert "2 more" in way(needs, full).short["ns/m", "both"]
            assert "0 granted" in way(needs, full).short["ns/m", "both"]

    def test_A22_an_unknown_accelerator_gets_what_is_left(self) -> None:
        needs = [
            need([variant("u", 5, accelerator="unknown")], report({"u": 10}, required=60), model="ns/U"),
            need([variant("h", 5, accelerator="H100")], report({"h": 10}, required=20), model="ns/H", priority=9),
        ]
        free = Inventory(total={"A100": 2, "H100": 2})
        for way in (solve, allocation.allocate):
            found = way(needs, free)
            assert (found.replicas["ns/U", "u"], found.replicas["ns/H", "h"]) == (3, 3)


def _needs(draw: st.DrawFn) -> tuple[list[Need], Inventory]:
    kinds = ("A100", "H100", "L40S")
    needs: list[Need] = []
    for m in range(draw(st.integers(1, 4))):
        names = [f"m{m}-{i}" for i in range(draw(st.integers(1, 3)))]
        variants: list[VariantState] = []
        for name in names:
            current = draw(st.integers(0, 4))
            low = draw(st.none() | st.integers(0, current))
            high = draw(st.none() | st.integers(max(1, current), 8))
            variants.append(
                variant(name, draw(st.integers(1, 30)), current, low=low, high=high,
                        accelerator=draw(st.sampled_from(kinds)), gpus=draw(st.integers(1, 4)))
            )  # fmt: skip
        each = {name: draw(st.integers(5, 100)) for name in names}
        change = draw(st.integers(-200, 200))
        supply = sum(v.current * each[v.name] for v in variants)
        one = report(each, required=max(0, change), spare=max(0, -change), supply=supply)
        needs.append(need(variants, one, model=f"ns/m{m}", priority=draw(st.integers(1, 3))))
    total = {kind: draw(st.integers(0, 12)) for kind in kinds}
    limited = draw(st.booleans())
    return needs, Inventory(total=total) if limited else UNLIMITED


fleets = st.composite(_needs)()


class TestProperties:
    @given(fleets)
    @settings(max_examples=150, deadline=None)
    def test_bounds_and_inventory_hold_whoever_allocates(self, fleet: tuple[list[Need], Inventory]) -> None:
        needs, inventory = fleet
        for way in (allocation.allocate, solve):
            found = way(needs, inventory)
            taken = dict.fromkeys(inventory.total, 0)
            for n in needs:
                for v in n.variants:
                    replicas = found.replicas[n.model, v.name]
                    assert replicas >= (v.min_replicas or 0)
                    assert v.max_replicas is None or replicas <= v.max_replicas
                    if replicas > v.current and not inventory.unknown:
                        taken[v.accelerator] += (replicas - v.current) * (v.gpus or 1)
                if any(v.current for v in n.variants):
                    assert any(found.replicas[n.model, v.name] for v in n.variants), "a role keeps one replica"
            assert all(taken[kind] <= count for kind, count in inventory.total.items())

    @given(fleets)
    @settings(max_examples=150, deadline=None)
    def test_the_exact_one_is_never_dearer_for_the_same(self, fleet: tuple[list[Need], Inventory]) -> None:
        needs, _ = fleet
        greedy, best = allocation.allocate(needs, UNLIMITED), solve(needs)
        assert best.how == "exact"
        # A change has a charge of a hundredth, so that much may be paid to have fewer of them.
        changes = sum(abs(greedy.replicas[n.model, v.name] - v.current) for n in needs for v in n.variants)
        dearest = max(v.cost for n in needs for v in n.variants)
        assert bill(best, needs) <= bill(greedy, needs) + dearest * changes / 100

    @given(fleets, st.randoms())
    @settings(max_examples=60, deadline=None)
    def test_the_order_of_the_input_does_not_count(
        self, fleet: tuple[list[Need], Inventory], rng: random.Random
    ) -> None:
        needs, inventory = fleet
        shuffled = [
            replace(n, variants=tuple(rng.sample(n.variants, len(n.variants))))
            for n in rng.sample(needs, len(needs))
        ]
        for way in (allocation.allocate, solve):
            assert way(shuffled, inventory).replicas == way(needs, inventory).replicas

    @given(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=3), st.integers(1, 120)
    )
    @settings(max_examples=100, deadline=None)
    def test_the_exact_one_is_exact(self, offers: list[tuple[int, int]], required: int) -> None:
        variants = [variant(f"v{i}", cost, 0) for i, (cost, _) in enumerate(offers)]
        each = {f"v{i}": capacity for i, (_, capacity) in enumerate(offers)}
        needs = [need(variants, report(each, required=required))]
        cheapest = [0]  # cover of each amount, by dynamic programming
        for amount in range(1, required + 1):
            cheapest.append(min(cost + cheapest[max(0, amount - capacity)] for cost, capacity in offers))
        best = cheapest[required]
        assert bill(solve(needs), needs) == best
