"""What an HPA makes of metrics: worked by the rules of Kubernetes' documentation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.local.controllers.hpa import Behavior, Memory, Reading, limited, parse_quantity, wanted

EXACT = {"scaleUp": {"tolerance": "0"}, "scaleDown": {"tolerance": "0"}}


PLAIN = Behavior()


def by_count(current: int, desired: int, behavior: Behavior = PLAIN) -> int:
    """AverageValue 1 of a metric that says how many replicas there should be."""
    return wanted(current, [Reading(desired, 1.0, average=True)], behavior)


class TestWanted:
    @pytest.mark.parametrize(
        ("current", "up", "down"), [(2, True, True), (9, True, True), (11, False, False), (20, False, False)]
    )
    def test_a28_the_dead_band_eats_single_steps(self, current: int, up: bool, down: bool) -> None:
        assert (by_count(current, current + 1) == current + 1) is up
        assert (by_count(current, current - 1) == current - 1) is down

    @pytest.mark.parametrize(("current", "smallest"), [(11, 2), (20, 3), (50, 6)])
    def test_a28_the_smallest_step_that_is_followed(self, current: int, smallest: int) -> None:
        assert by_count(current, current + smallest) == current + smallest
        assert by_count(current, current + smallest - 1) == current

    @given(st.integers(1, 500), st.integers(1, 500))
    def test_a28_without_tolerance_every_step_is_followed(self, current: int, desired: int) -> None:
        assert by_count(current, desired, Behavior.parse(EXACT)) == desired

    def test_value_is_a_ratio(self) -> None:
        """A29: Value with a count would multiply: 3 of target 1 with 2 replicas is 6."""
        assert wanted(2, [Reading(3.0, 1.0, average=False)], Behavior()) == 6
        assert wanted(4, [Reading(1.5, 1.0, average=False)], Behavior()) == 6  # wva_desired_ratio

    def test_the_largest_of_several_counts(self) -> None:
        readings = [Reading(3.0, 1.0, average=True), Reading(5.0, 1.0, average=True)]
        assert wanted(2, readings, Behavior()) == 5


class TestLimited:
    def at(self, current: int, recommendation: int, memory: Memory, now: float, **behavior: object) -> int:
        return limited(
            current, recommendation, Behavior.parse(behavior), memory, now, least=1, most=100
        )  # fmt: skip

    def test_growth_at_once_by_four_or_double(self) -> None:
        assert self.at(1, 50, Memory(), 0) == 5
        assert self.at(10, 50, Memory(), 0) == 20

    def test_what_has_grown_in_the_period_counts(self) -> None:
        memory = Memory(changes=[(0.0, 4)])
        assert self.at(5, 50, memory, 10) == 5  # from 1 at most 5 within 15 s
        assert self.at(5, 50, memory, 20) == 10

    def test_shrinking_waits_for_the_window(self) -> None:
        memory = Memory()
        assert self.at(10, 10, memory, 0) == 10
        assert self.at(10, 4, memory, 60) == 10
        assert self.at(10, 6, memory, 299) == 10
        assert self.at(10, 4, memory, 301) == 6  # the most that anything in the window asked for

    def test_a_window_of_its_own_and_a_slow_policy(self) -> None:
        policy = {"type": "Pods", "value": 1, "periodSeconds": 60}
        down = {"stabilizationWindowSeconds": 0, "policies": [policy]}
        memory = Memory()
        assert self.at(10, 4, memory, 0, scaleDown=down) == 9
        memory.changes.append((0.0, -1))
        assert self.at(9, 4, memory, 30, scaleDown=down) == 9
        assert self.at(9, 4, memory, 61, scaleDown=down) == 8

    def test_select_policy(self) -> None:
        policies = [
            {"type": "Pods", "value": 1, "periodSeconds": 60},
            {"type": "Percent", "value": 50, "periodSeconds": 60},
        ]
        assert self.at(10, 50, Memory(), 0, scaleUp={"policies": policies}) == 15
        assert self.at(10, 50, Memory(), 0, scaleUp={"policies": policies, "selectPolicy": "Min"}) == 11
        assert self.at(10, 50, Memory(), 0, scaleUp={"selectPolicy": "Disabled"}) == 10

    @given(
        st.integers(1, 50), st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 5),
        st.integers(5, 60),
    )  # fmt: skip
    def test_always_within_the_limits(
        self, current: int, recommendations: list[int], least: int, most: int
    ) -> None:
        memory = Memory()
        for step, recommendation in enumerate(recommendations):
            found = limited(
                current, recommendation, Behavior(), memory, 15.0 * step, least=least, most=most
            )  # fmt: skip
            assert least <= found <= most
            if found != current:
                memory.changes.append((15.0 * step, found - current))
            current = found


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1.0), ("1500m", 1.5), ("2k", 2000.0), ("1Ki", 1024.0), (3, 3.0), ("0.1", 0.1)]
)
def test_quantities(text: object, value: float) -> None:
    assert parse_quantity(text) == pytest.approx(value)
