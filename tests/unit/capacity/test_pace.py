"""Steps and windows."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from tests.policy_lab import settings

from tidemill.api.saturation_config import SaturationSettings
from tidemill.capacity.pace import Pace
from tidemill.capacity.types import Cause, Direction, Explanation, Target, VariantState


def moves(chosen: SaturationSettings, current: int, *wanted: int, cause: Cause = Cause.DEMAND) -> list[int]:
    """What is done, a cycle a minute, of what is wanted; the replicas follow."""
    pace, found = Pace(), list[int]()
    for i, replicas in enumerate(wanted):
        variant = VariantState(
            name="a", cost=Decimal(1), current=current, desired=current, reporting=current, ready=current
        )
        target = Target("a", replicas, Direction.HOLD, Explanation("saturation", cause, "because"))
        current = pace.slowed("a", target, variant, chosen, 60.0 * i).replicas
        found.append(current)
    return found


def test_by_default_nothing_is_slowed() -> None:
    assert moves(settings(), 2, 9, 1, 5) == [9, 1, 5]


def test_steps() -> None:
    assert moves(settings(scale_up_step=2), 1, 6, 6, 6) == [3, 5, 6]
    assert moves(settings(scale_down_step=3), 9, 1, 1, 1) == [6, 3, 1]


def test_the_largest_within_the_window_stays() -> None:
    assert moves(settings(scale_down_window=120.0), 5, 5, 2, 3, 2, 2, 2) == [5, 5, 5, 3, 3, 2]


def test_growth_waits_until_it_was_wanted_throughout() -> None:
    assert moves(settings(scale_up_window=120.0), 2, 2, 5, 5, 5, 5) == [2, 2, 2, 5, 5]


@pytest.mark.parametrize("cause", [Cause.IDLE, Cause.IN_USE_AGAIN, Cause.BELOW_MINIMUM])
def test_sleep_waking_and_bounds_are_not_slowed(cause: Cause) -> None:
    chosen = settings(scale_up_step=1, scale_down_step=1, scale_down_window=600.0)
    assert moves(chosen, 5, 0, cause=cause) == [0]
    assert moves(chosen, 1, 5, cause=cause) == [5]


def test_it_says_what_held_it() -> None:
    variant = VariantState(name="a", cost=Decimal(1), current=1, desired=1, reporting=1, ready=1)
    target = Target("a", 4, Direction.UP, Explanation("saturation", Cause.DEMAND, "because"))
    found = Pace().slowed("a", target, variant, settings(scale_up_step=1), 0.0)
    assert found == replace(
        target, replicas=2, explanation=replace(
            target.explanation, sentence="because; 4 wanted, 2 for now (scaleUpStep 1)"
        )
    )  # fmt: skip
