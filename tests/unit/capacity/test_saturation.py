"""V1 by the contract's worked examples, then by properties."""

from __future__ import annotations

import random
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.api.saturation_config import SaturationSettings
from tidemill.capacity.saturation import analyze
from tidemill.capacity.targets import decide, hold
from tidemill.capacity.types import Cause, Direction, ReplicaLoad, VariantState

DEFAULTS = SaturationSettings()


def loads(*pairs: tuple[str, int], variant: str = "a") -> list[ReplicaLoad]:
    return [
        ReplicaLoad(variant, f"{variant}-{i}", Decimal(kv), Decimal(queue)) for i, (kv, queue) in enumerate(pairs)
    ]


def state(name: str, current: int, **changes: object) -> VariantState:
    base = VariantState(
        name=name, cost=Decimal(10), current=current, desired=None, reporting=current, ready=current
    )
    return replace(base, **changes)


def desired(found: tuple, name: str = "a") -> int:
    return next(t.replicas for t in found if t.variant == name)


class TestWorkedExamples:
    def test_enough_not_to_grow_too_little_to_shrink(self) -> None:
        report = analyze(loads(("0.70", 2), ("0.75", 3), ("0.60", 1), ("0.65", 2), ("0.55", 1)), DEFAULTS)
        assert report is not None
        assert (report.average_spare_kv, report.average_spare_queue) == (Decimal("0.15"), Decimal("3.2"))
        assert (report.up, report.down_safe) == (None, False)
        assert desired(decide(report, [state("a", 5)])) == 5

    def test_spare_kv_below_trigger_grows_the_cheapest(self) -> None:
        report = analyze(loads(("0.75", 0), ("0.78", 0)), DEFAULTS)
        assert report is not None
        assert report.average_spare_kv == Decimal("0.035")
        found = decide(report, [state("a", 2), state("b", 0, cost=Decimal(5))])
        assert (desired(found), desired(found, "b")) == (3, 0)

    def test_spare_shrinks_the_dearest(self) -> None:
        found = decide(
            analyze(loads(("0.20", 0), ("0.20", 0)) + loads(("0.20", 0), variant="b"), DEFAULTS),
            [state("a", 2, cost=Decimal(40)), state("b", 1)],
        )
        assert (desired(found), desired(found, "b")) == (1, 1)

    def test_all_saturated_grows(self) -> None:
        found = decide(analyze(loads(("0.90", 9)), DEFAULTS), [state("a", 1)])
        assert desired(found) == 2
        assert found[0].explanation.cause is Cause.ALL_SATURATED

    def test_an_idle_replica_alone_never_grows(self) -> None:
        current = 1
        for _ in range(100):
            current = desired(
                decide(analyze(loads(("0.10", 0)), DEFAULTS), [state("a", current, desired=current)])
            )
        assert current == 1

    def test_queue_alone_can_saturate_and_can_bind(self) -> None:
        report = analyze(loads(("0.10", 5), ("0.10", 3)), DEFAULTS)
        assert report is not None
        assert report.saturated == ("a-0",)
        assert (report.average_spare_queue, report.up) == (Decimal(2), Cause.QUEUE_SPARE)

    @pytest.mark.parametrize(
        ("pairs", "spare_kv", "spare_queue", "up", "down_safe"),
        [
            ([("0.30", 0)] * 3, "0.50", "5", None, True),
            ([("0.50", 0), ("0.60", 1)], "0.25", "4.5", None, False),
            ([("0.75", 1), ("0.72", 0)], "0.065", "4.5", Cause.KV_SPARE, False),
            ([("0.85", 0), ("0.90", 6)], "0", "0", Cause.ALL_SATURATED, False),
            ([("0.30", 0)], "0.50", "5", None, False),
        ],
    )
    def test_reference_table(self, pairs, spare_kv, spare_queue, up, down_safe) -> None:
        report = analyze(loads(*pairs), DEFAULTS)
        assert report is not None
        assert report.average_spare_kv == Decimal(spare_kv)
        assert report.average_spare_queue == Decimal(spare_queue)
        assert (report.up, report.down_safe) == (up, down_safe)

    def test_reference_costs(self) -> None:
        up = analyze(loads(("0.75", 1), ("0.72", 0)), DEFAULTS)
        down = analyze(loads(("0.30", 0), ("0.30", 0), ("0.30", 0)), DEFAULTS)
        l4, a100 = state("l4", 2, cost=Decimal(5)), state("a100", 2, cost=Decimal(20))
        assert desired(decide(up, [l4, a100]), "l4") == 3
        assert desired(decide(down, [l4, a100]), "a100") == 1
        waiting = [replace(l4, ready=1, reporting=1), a100]
        assert [t.replicas for t in decide(up, waiting)] == [2, 2]

    @pytest.mark.parametrize(("kv", "safe"), [("0.35", True), ("0.36", False)])
    def test_a_spare_equal_to_its_trigger_is_not_below_it(self, kv: str, safe: bool) -> None:
        # In binary, 0.8 - 0.7 is below 0.1 by a hair.
        report = analyze(loads((kv, 0), (kv, 0)), DEFAULTS)
        assert report is not None
        assert report.down_safe is safe
        at_trigger = analyze(loads(("0.70", 2)), DEFAULTS)
        assert at_trigger is not None
        assert at_trigger.up is None


class TestTransition:
    saturated = analyze(loads(("0.90", 9), ("0.90", 9)), DEFAULTS)

    def test_w5_a_pending_replica_is_not_asked_for_again(self) -> None:
        for _ in range(5):
            found = decide(self.saturated, [state("a", 3, desired=3, reporting=2, ready=2)])
            assert desired(found) == 3
        assert found[0].explanation.cause is Cause.IN_TRANSITION
        assert "2 report" in found[0].explanation.sentence
        after = decide(self.saturated, [state("a", 3, desired=3)])
        assert desired(after) == 4

    def test_w5_until_startup_is_given_up(self) -> None:
        given_up = state("a", 3, desired=3, reporting=2, ready=2, stalled=True)
        alone = decide(self.saturated, [given_up])
        assert desired(alone) == 3
        assert "did not start in time" in alone[0].explanation.sentence
        with_other = decide(self.saturated, [given_up, state("b", 1, cost=Decimal(50))])
        assert desired(with_other, "b") == 2

    def test_a_decision_on_its_way_is_kept(self) -> None:
        found = decide(self.saturated, [state("a", 2, desired=3)])
        assert (desired(found), found[0].direction) == (3, Direction.HOLD)


class TestBounds:
    def test_a_variant_at_its_maximum_lets_the_next_one_grow(self) -> None:
        report = analyze(loads(("0.90", 9)), DEFAULTS)
        found = decide(report, [state("a", 1, max_replicas=1), state("b", 1, cost=Decimal(99))])
        assert [t.replicas for t in found] == [1, 2]

    def test_a_raised_minimum_holds_without_numbers(self) -> None:
        found = hold([state("a", 4, desired=4, min_replicas=6)], Cause.METRICS_UNAVAILABLE, "away")
        assert (desired(found), found[0].direction) == (6, Direction.UP)
        assert "raised from 4 to minReplicas 6" in found[0].explanation.sentence

    def test_zero_is_left_alone_and_blocks_nobody(self) -> None:
        report = analyze(loads(("0.90", 9)), DEFAULTS)
        found = decide(report, [state("a", 1), state("b", 0, desired=2, min_replicas=1, reporting=0)])
        assert [t.replicas for t in found] == [2, 0]
        assert found[1].explanation.cause is Cause.AT_ZERO

    def test_no_replicas_means_no_knowledge_not_saturation(self) -> None:
        assert analyze([], DEFAULTS) is None
        assert desired(decide(None, [state("a", 2, reporting=0)])) == 2


kv_values = st.decimals(0, 1, places=3)
queues = st.integers(0, 12).map(Decimal)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[ReplicaLoad], list[VariantState]]:
    found_loads: list[ReplicaLoad] = []
    states: list[VariantState] = []
    for index in range(draw(st.integers(1, 4))):
        name = f"v{index}"
        count = draw(st.integers(1, 4))
        reporting = draw(st.sampled_from([count, count, count, max(0, count - 1)]))
        found_loads += [ReplicaLoad(name, f"{name}-{i}", draw(kv_values), draw(queues)) for i in range(reporting)]
        states.append(
            VariantState(
                name=name,
                cost=Decimal(draw(st.integers(1, 3))),
                current=count,
                desired=draw(st.sampled_from([None, count, count, count + 1])),
                reporting=reporting,
                ready=reporting,
                stalled=draw(st.booleans()),
            )
        )
    return found_loads, states


class TestProperties:
    @given(fleets())
    def test_at_most_one_step_and_never_below_one(self, fleet) -> None:
        found_loads, states = fleet
        before = {s.name: s.current if s.desired is None else s.desired for s in states}
        found = decide(analyze(found_loads, DEFAULTS), states)
        steps = [abs(t.replicas - before[t.variant]) for t in found]
        assert sum(steps) <= 1
        assert all(t.replicas >= 1 for t in found)

    @given(fleets(), st.randoms(use_true_random=False))
    def test_the_order_of_inputs_does_not_matter(self, fleet, rng: random.Random) -> None:
        found_loads, states = fleet
        expected = decide(analyze(found_loads, DEFAULTS), states)
        rng.shuffle(found_loads)
        rng.shuffle(states)
        assert decide(analyze(found_loads, DEFAULTS), states) == expected

    @given(st.integers(1, 20), st.decimals(0, "0.3", places=3))
    def test_an_idle_fleet_never_grows(self, count: int, kv: Decimal) -> None:
        idle = [ReplicaLoad("a", f"a-{i}", kv, Decimal(0)) for i in range(count)]
        assert desired(decide(analyze(idle, DEFAULTS), [state("a", count)])) <= count

    @given(fleets())
    def test_every_target_says_why(self, fleet) -> None:
        found_loads, states = fleet
        for target in decide(analyze(found_loads, DEFAULTS), states):
            assert target.explanation.sentence
            assert "NaN" not in str(target.explanation.as_dict())

    @given(st.lists(st.tuples(kv_values, queues), min_size=2, max_size=8))
    def test_removal_that_was_called_safe_does_not_call_for_growth(self, pairs) -> None:
        report = analyze([ReplicaLoad("a", str(i), kv, q) for i, (kv, q) in enumerate(pairs)], DEFAULTS)
        assert report is not None
        if not report.down_safe or report.saturated:
            return
        rest = len(pairs) - 1
        kv, queue = sum(p[0] for p in pairs) / rest, sum(p[1] for p in pairs) / rest
        after = analyze([ReplicaLoad("a", str(i), kv, queue) for i in range(rest)], DEFAULTS)
        assert after is not None
        # The division may round in the 28th digit; a hair of slack for it.
        slack = replace(
            DEFAULTS,
            kv_spare_trigger=DEFAULTS.kv_spare_trigger - Decimal("1e-20"),
            queue_spare_trigger=DEFAULTS.queue_spare_trigger - Decimal("1e-20"),
        )
        again = analyze([ReplicaLoad("a", str(i), kv, queue) for i in range(rest)], slack)
        assert again is not None
        assert again.up is None
