"""Replicas that left, while rates over a window do not tell of it yet."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.capacity.departures import Departures
from tidemill.capacity.view import EngineLoad, Rates


def engines(**rates: float | None) -> list[EngineLoad]:
    return [
        EngineLoad(
            variant="v", replica=name, kv_usage=Decimal(0), queue_length=Decimal(0), request_rate=rate,
            output_rate=None if rate is None else 100 * rate,
        )
        for name, rate in rates.items()
    ]  # fmt: skip


def test_a_rate_fades_over_the_window() -> None:
    left = Departures()
    assert left.observe(engines(a=2.0, b=2.0), now=0, window=60) == Rates()
    assert left.observe(engines(a=2.0, b=2.0), now=10, window=60) == Rates()
    # It left after it was seen last.
    assert left.observe(engines(a=2.0), now=10, window=60) == Rates(2.0, 200.0)
    assert left.observe(engines(a=3.0), now=40, window=60) == Rates(1.0, 100.0)
    assert left.observe(engines(a=4.0), now=70, window=60) == Rates()


def test_cycles_as_long_as_the_window_need_nothing() -> None:
    left = Departures()
    left.observe(engines(a=2.0, b=2.0), now=0, window=60)
    assert left.observe(engines(a=4.0), now=60, window=60) == Rates()


def test_who_comes_back_speaks_for_itself() -> None:
    left = Departures()
    left.observe(engines(a=2.0, b=2.0), now=0, window=60)
    left.observe(engines(a=2.0), now=10, window=60)
    assert left.observe(engines(a=2.0, b=2.0), now=20, window=60) == Rates()


def test_ranks_of_a_replica_count_together_and_an_unknown_rate_stands_for_nothing() -> None:
    left = Departures()
    left.observe([*engines(a=2.0), *engines(a=3.0), *engines(b=None)], now=0, window=60)
    assert left.observe([], now=0, window=60) == Rates(5.0, 500.0)


@given(
    st.floats(0.1, 100), st.integers(2, 6), st.integers(30, 300),
    st.lists(st.integers(0, 300), min_size=5, max_size=5),
)  # fmt: skip
@settings(max_examples=50)
def test_a_constant_load_stays_constant_whoever_leaves(
    load: float, count: int, window: int, when: list[int]
) -> None:
    """Each rate is the mean over the window of a share that steps up as others leave; the sum with what departed
    stands for stays near the load, where the bare sum falls by the share of who left."""
    leaves = {f"r{i}": when[i - 1] + 100 if i < len(when) + 1 else 10**6 for i in range(1, count)}
    share_at = [load / (1 + sum(at > second for at in leaves.values())) for second in range(-window, 800)]
    left = Departures()
    for now in range(0, 800, 2):
        mean = sum(share_at[now : now + window]) / window
        there = {"r0": mean, **{name: mean for name, at in leaves.items() if at > now}}
        found = left.observe(engines(**there), now=now, window=window)
        total = sum(there.values()) + found.requests
        assert 0.8 * load <= total <= 1.6 * load  # to a cycle and what it may miss


def test_engines_that_said_nothing_last_are_not_kept() -> None:
    left = Departures()
    left.observe(engines(a=2.0), now=0, window=60)
    left.observe([], now=1, window=60)
    assert left.observe([], now=30.0, window=60).requests == pytest.approx(1.0)
    assert left.observe([], now=60, window=60) == Rates()
