"""What comes, told from what finishes."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.capacity.arrivals import Arrivals
from tidemill.capacity.types import Role
from tidemill.capacity.view import EngineLoad, RoleView


def engine(
    name: str, *, running: float = 0, waiting: int = 0, rate: float = 0.0, seconds: float | None = None
) -> EngineLoad:
    return EngineLoad(
        variant="v", replica=name, kv_usage=Decimal(0), queue_length=Decimal(waiting), running=running,
        request_rate=rate, rate_seconds=seconds,
    )  # fmt: skip


class TestGrowth:
    def test_the_first_look_knows_of_none(self) -> None:
        assert Arrivals().observe([engine("a", waiting=300)], now=0, window=60).growth == 0

    def test_a_queue_that_grows_is_load_that_comes(self) -> None:
        """4 a second finish and 210 more wait after a minute: 7.5 a second came."""
        arrivals = Arrivals()
        arrivals.observe([engine("a", running=20)], now=0, window=60)
        assert arrivals.observe([engine("a", running=20, waiting=210)], now=60, window=60).growth == 3.5

    def test_one_that_is_worked_off_is_none(self) -> None:
        """12 a second finish while 264 that waited become none: 7.6 a second come."""
        arrivals = Arrivals()
        arrivals.observe([engine("a", waiting=264), engine("b")], now=0, window=60)
        assert arrivals.observe([engine("a"), engine("b")], now=60, window=60).growth == pytest.approx(-4.4)

    def test_with_a_long_window_growth_is_seen_soon_and_shrinking_over_all_of_it(self) -> None:
        arrivals = Arrivals()
        for minute, waiting in enumerate((0, 0, 0, 0, 0, 240)):
            found = arrivals.observe([engine("a", waiting=waiting)], now=60 * minute, window=300)
        assert found.growth == 4.0
        found = arrivals.observe([engine("a", waiting=0)], now=360, window=300)
        assert found.growth == 0.0  # what came and went within the window is in the rates

    def test_a_new_replica_began_with_nothing_and_one_that_left_counts_no_more(self) -> None:
        arrivals = Arrivals()
        arrivals.observe([engine("a", waiting=60)], now=0, window=60)
        assert arrivals.observe([engine("b", waiting=30)], now=60, window=60).growth == 0.5

    def test_a_replica_that_takes_over_fills_and_a_new_one_has_only_begun(self) -> None:
        arrivals = Arrivals()
        arrivals.observe([engine("a", running=30), engine("b", running=30)], now=0, window=300)
        found = arrivals.observe([engine("a", running=70), engine("c", running=60)], now=60, window=300)
        assert found.filling == {("v", "a")}
        # Over the window it is not of one state for longer; it fills no more after a minute.
        found = arrivals.observe([engine("a", running=75), engine("c", running=60)], now=120, window=300)
        assert found.filling == frozenset()
        assert found.unsettled == {("v", "a"), ("v", "c")}

    def test_a_queue_is_remembered_for_as_long_as_it_is_in_the_means(self) -> None:
        arrivals = Arrivals()
        for now, waiting, queued in ((0, 1, False), (15, 20, True), (30, 0, True), (75, 0, True), (90, 0, False)):
            found = arrivals.observe([engine("a", waiting=waiting)], now=now, window=60)
            assert bool(found.queued) == queued

    @given(
        st.lists(
            st.tuples(st.integers(0, 40), st.lists(st.integers(0, 25), min_size=3, max_size=3)), min_size=5,
            max_size=30,
        )
    )  # fmt: skip
    def test_nothing_is_lost_or_counted_twice(self, cycles: list[tuple[int, list[int]]]) -> None:
        """Whatever comes to whichever of three replicas, the second and third of which come later, and however
        many each finishes: rates and growth together are what came within the window."""
        interval, window = 15.0, 60.0
        arrivals = Arrivals()
        queues = {name: 0 for name in "abc"}
        finished: dict[str, list[int]] = {}
        came: list[int] = []
        for number, (coming, most) in enumerate(cycles):
            present = "abc"[: 1 + min(2, number // 3)]
            queues[min(present, key=lambda name: queues[name])] += coming
            came.append(coming)
            for name, limit in zip(present, most, strict=False):
                done = min(queues[name], limit)
                queues[name] -= done
                finished.setdefault(name, []).append(done)
            engines = tuple(
                engine(
                    name,
                    waiting=queues[name],
                    rate=sum(recent) / len(recent) / interval,
                    seconds=len(recent) * interval,
                )
                for name in present
                for recent in [finished[name][-4:]]
            )
            view = RoleView(model="m", role=Role.BOTH, variants=(), engines=engines)
            flow = arrivals.observe(engines, now=interval * number, window=view.window)
            if number >= 4:
                assert view.request_rate is not None
                assert view.request_rate + flow.growth == pytest.approx(sum(came[-4:]) / window)


class TestSettled:
    def test_a_batch_that_fills_is_of_no_one_state_until_the_window_has_passed(self) -> None:
        arrivals = Arrivals()
        seen: list[bool] = []
        for number, running in enumerate((10, 10, 40, 77, 77, 77, 77, 77)):
            flow = arrivals.observe([engine("a", running=running)], now=15.0 * number, window=60)
            seen.append(("v", "a") in flow.unsettled)
        assert seen == [False, False, True, True, True, True, True, False]

    def test_chance_is_no_change(self) -> None:
        arrivals = Arrivals()
        arrivals.observe([engine("a", running=30)], now=0, window=60)
        assert not arrivals.observe([engine("a", running=42)], now=60, window=60).unsettled
