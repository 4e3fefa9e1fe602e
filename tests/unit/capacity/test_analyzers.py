"""Throughput and latency: what is learned, what is said, and when nothing can be."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from tests.policy_lab import times_of

from tidemill.capacity.calibration import ENOUGH, PATIENCE
from tidemill.capacity.latency import QueueingModelAnalyzer
from tidemill.capacity.queueing import LatencyTarget, ReplicaModel, Workload
from tidemill.capacity.report import CapacityReport, NoReport
from tidemill.capacity.throughput import Curve, ThroughputAnalyzer, kv_per_request
from tidemill.capacity.types import Role, VariantState
from tidemill.capacity.view import EngineLoad, RequestShape, RoleView, UpstreamQueue


def D(value: float | str) -> Decimal:
    return Decimal(str(value))


def view(
    *engines: EngineLoad, replicas: int | None = None, shape: tuple[float, float, float] | None = (640, 0, 0),
    target: LatencyTarget | None = None, waiting: int = 0, role: Role = Role.BOTH,
) -> RoleView:  # fmt: skip
    count = len(engines) if replicas is None else replicas
    state = VariantState(
        name="a", cost=D(1), current=count, desired=count, reporting=count, ready=count, role=role
    )
    found = RequestShape()
    if shape is not None:
        found = RequestShape(input_tokens=D(shape[0]), output_tokens=D(shape[1]), hit_rate=D(shape[2]))
    return RoleView(
        model="ns/m", role=role, variants=(state,), engines=engines, shape=found, target=target,
        upstream=UpstreamQueue(D(waiting)),
    )  # fmt: skip


def engine(
    kv: float, itl: float | None, *, rate: float = 1.0, tokens: int = 16_000, queue: float = 0, out: float = 256,
    ttft: float | None = None, replica: str = "p",
) -> EngineLoad:  # fmt: skip
    return EngineLoad(
        variant="a", replica=replica, kv_usage=D(kv), queue_length=D(queue), kv_tokens=tokens, request_rate=rate,
        output_rate=rate * out, itl=itl, ttft=ttft,
    )  # fmt: skip


class TestThroughput:
    """autoscaler-reference.md, 9: KVreq 640, KVmax 16,000, A 0.02, B 0.006."""

    SHAPE = (512, 256, 0)

    def analyzer(self) -> ThroughputAnalyzer:
        found = ThroughputAnalyzer()
        found.report(view(engine(0.5, 0.016), shape=self.SHAPE))  # one point: A is 0.02
        return found

    def report(self, *, rate: float, queue: int = 0) -> CapacityReport:
        two = [engine(0.5, 0.016, rate=rate / 2, replica=f"p{i}") for i in range(2)]
        found = self.analyzer().report(view(*two, shape=self.SHAPE, waiting=queue))
        assert isinstance(found, CapacityReport)
        return found

    def test_tokens_that_a_request_holds(self) -> None:
        shape = RequestShape(input_tokens=D(512), output_tokens=D(256), hit_rate=D(0))
        assert kv_per_request(shape) == 640
        assert kv_per_request(replace(shape, hit_rate=D(0.25))) == 512

    def test_one_point_gives_a_line_through_the_base(self) -> None:
        curve = Curve()
        curve.observe(0.5, 0.016, (512, 256))
        assert curve.line() == pytest.approx((0.02, 0.006))

    def test_capacity_and_demand(self) -> None:
        enough = self.report(rate=5)
        assert float(enough.per_replica["a"]) == pytest.approx(923.9, abs=0.1)
        assert (float(enough.demand), enough.required) == (1280, 0)
        assert float(enough.spare) == pytest.approx(19.3, abs=0.2)
        short = self.report(rate=8)
        assert float(short.demand) == 2048
        assert float(short.required) == pytest.approx(561.6, abs=0.2)

    def test_what_waits_adds_to_the_demand(self) -> None:
        assert float(self.report(rate=8, queue=10).demand) == pytest.approx(2048 + 217.4, abs=0.1)

    def test_a_wide_range_gives_a_line_of_its_own(self) -> None:
        curve = Curve()
        for i in range(12):
            usage = 0.2 + 0.05 * i
            curve.observe(usage, 0.05 * usage + 0.01, (512, 256))
        assert curve.line() == pytest.approx((0.05, 0.01))

    def test_requests_of_another_shape_begin_anew(self) -> None:
        curve = Curve()
        for i in range(12):
            curve.observe(0.2 + 0.05 * i, 0.02, (512, 256))
        curve.observe(0.5, 0.03, (1024, 256))
        assert len(curve.samples) == 1

    def test_predictions_that_keep_failing_begin_anew(self) -> None:
        curve = Curve()
        for i in range(12):
            curve.observe(0.2 + 0.05 * i, 0.02, (512, 256))
        for _ in range(3):
            curve.observe(0.6, 0.05, (512, 256))
        assert len(curve.samples) == 1

    def test_a_variant_at_zero_keeps_its_capacity(self) -> None:
        found = self.analyzer()
        other = replace(view(engine(0.5, 0.016), shape=self.SHAPE).variants[0], name="b", current=0, ready=0)
        seen = view(engine(0.5, 0.016), shape=self.SHAPE)
        report = found.report(replace(seen, variants=(*seen.variants, other)))
        assert isinstance(report, CapacityReport)
        assert set(report.per_replica) == {"a"}  # of b nothing was ever seen

    @pytest.mark.parametrize(
        ("seen", "reason"),
        [
            (view(engine(0.5, 0.016), shape=None), "size is not known"),
            (view(engine(0.05, 0.016), shape=SHAPE), "no step times"),
            (view(engine(0.5, None), shape=SHAPE), "no step times"),
            (view(engine(0.5, 0.016), shape=SHAPE, role=Role.PREFILL), "no output tokens"),
        ],
    )
    def test_when_nothing_can_be_said(self, seen: RoleView, reason: str) -> None:
        found = ThroughputAnalyzer().report(seen)
        assert isinstance(found, NoReport)
        assert reason in found.reason
        assert not found.holds


class TestLatency:
    TARGET = LatencyTarget(ttft=0.4, itl=0.05)

    def serving(self, load: float, *, queue: float = 0, target: LatencyTarget | None = TARGET) -> RoleView:
        """One replica with the times of an L40S, as it runs at this share of what it can do."""
        times, kv_tokens = times_of("llama-3.1-8b/l40s")
        model = ReplicaModel(times, Workload(input_tokens=1024, output_tokens=256), kv_tokens=kv_tokens)
        seen = model.at(load * model.max_rate)
        one = engine(0.3, seen.itl, rate=seen.rate, tokens=kv_tokens, queue=queue, ttft=seen.ttft, out=256)
        return view(one, shape=(1024, 256, 0), target=target)

    def learned(self) -> QueueingModelAnalyzer:
        found = QueueingModelAnalyzer()
        for load in (0.2, 0.5, 0.3, 0.7, 0.4, 0.6, 0.25, 0.65):
            found.report(self.serving(load))
        return found

    def test_capacity_is_the_largest_rate_within_the_target(self) -> None:
        times, kv_tokens = times_of("llama-3.1-8b/l40s")
        model = ReplicaModel(times, Workload(input_tokens=1024, output_tokens=256), kv_tokens=kv_tokens)
        found = self.learned().report(self.serving(0.5))
        assert isinstance(found, CapacityReport)
        assert float(found.per_replica["a"]) == pytest.approx(model.largest_rate(self.TARGET), rel=0.1)
        assert float(found.demand) == pytest.approx(0.5 * model.max_rate, rel=0.01)
        assert found.numbers["ttftTarget"] == "400 ms"

    def test_what_waits_before_the_replicas_is_to_be_worked_off_in_a_minute(self) -> None:
        assert self.demand(upstream=UpstreamQueue(requests=Decimal(120))) - self.demand() == pytest.approx(2.0)

    def test_what_waits_at_a_replica_is_its_own_and_counts_by_what_it_grows(self) -> None:
        assert self.demand(queue=120) == self.demand()
        assert self.demand(queue=120, growth=1.5) - self.demand() == pytest.approx(1.5)

    def demand(self, *, queue: float = 0, **more: Any) -> float:
        found = self.learned().report(replace(self.serving(0.5, queue=queue), **more))
        assert isinstance(found, CapacityReport)
        return float(found.demand)

    def test_published_times_count_before_anything_was_seen(self) -> None:
        """And what is seen corrects them: here the engine is of another kind than was said."""
        times, kv_tokens = times_of("llama-3.1-8b/l40s")
        model = ReplicaModel(times, Workload(input_tokens=1024, output_tokens=256), kv_tokens=kv_tokens)
        right = model.largest_rate(self.TARGET)
        analyzer = QueueingModelAnalyzer()
        assert float(self.each(analyzer, "llama-3.1-8b/l40s")) == pytest.approx(right, rel=0.05)
        analyzer = QueueingModelAnalyzer()
        first = float(self.each(analyzer, "llama-3.1-8b/h100"))
        for load in (0.2, 0.7, 0.4, 0.8) * 5:
            last = float(self.each(analyzer, "llama-3.1-8b/h100", load))
        assert first > 1.5 * right
        assert last == pytest.approx(right, rel=0.2)

    def each(self, analyzer: QueueingModelAnalyzer, preset: str, load: float = 0.5) -> Decimal:
        found = analyzer.report(replace(self.serving(load), presets={"a": times_of(preset)[0]}))
        assert isinstance(found, CapacityReport)
        return found.per_replica["a"]

    def test_means_of_no_one_state_teach_nothing(self) -> None:
        analyzer = self.learned()
        before = analyzer.dump()
        seen = self.serving(0.9)
        analyzer.report(replace(seen, unsettled=frozenset({seen.engines[0].replica_id})))
        assert analyzer.dump() == before

    def test_a_target_that_no_size_meets_is_said_with_what_the_engine_can_do(self) -> None:
        analyzer = self.learned()
        found = analyzer.report(self.serving(0.5, target=LatencyTarget(ttft=0.02)))
        assert isinstance(found, NoReport)
        assert "a cannot meet the target at any size" in found.reason
        assert "of 20 ms" in found.reason
        assert not found.holds

    def test_first_tokens_that_had_a_queue_before_them_teach_nothing(self) -> None:
        """The window still holds what waited, though nothing waits any more."""
        alone, behind = self.learned(), self.learned()
        seen = self.serving(0.5)
        slow = replace(seen, engines=(replace(seen.engines[0], ttft=9.0),))
        for _ in range(3):
            behind.report(replace(slow, queued=frozenset({seen.engines[0].replica_id})))
            alone.report(replace(slow, engines=(replace(slow.engines[0], ttft=None),)))
        assert behind.dump() == alone.dump()

    def test_where_only_such_ones_come_they_have_to_do(self) -> None:
        """Bursts, say: after ten cycles of holding on, their means are better than no say at all."""
        analyzer = QueueingModelAnalyzer()
        seen = self.serving(0.5)
        bursts = replace(seen, unsettled=frozenset({seen.engines[0].replica_id}))
        found = [analyzer.report(bursts) for _ in range(PATIENCE + ENOUGH)]
        assert [isinstance(one, CapacityReport) for one in found] == [False] * (PATIENCE + ENOUGH - 1) + [True]

    def test_an_engine_that_does_not_say_how_much_it_holds_is_named_and_holds_nothing_up(self) -> None:
        seen = self.serving(0.5)
        unsized = replace(seen, engines=(replace(seen.engines[0], kv_tokens=None),))
        found = [QueueingModelAnalyzer().report(unsized) for _ in range(5)][-1]
        assert isinstance(found, NoReport)
        assert "vllm:cache_config_info) for a" in found.reason
        assert not found.holds

    def test_while_it_learns_from_what_serves_nothing_shrinks(self) -> None:
        """What the tokens spare says nothing of a latency. Demand counts meanwhile, so that its level is known."""
        analyzer = QueueingModelAnalyzer()
        serving = self.serving(0.5)
        found = [analyzer.report(serving) for _ in range(3)]
        assert [isinstance(one, NoReport) and (one.holds, one.demand is not None) for one in found[:2]] == [
            (True, True)
        ] * 2
        assert isinstance(found[2], CapacityReport)
        idle = replace(serving.engines[0], itl=None, ttft=None, request_rate=0.0)
        nothing = QueueingModelAnalyzer().report(replace(serving, engines=(idle,)))
        assert isinstance(nothing, NoReport)
        assert not nothing.holds

    @pytest.mark.parametrize(
        ("seen", "reason"),
        [
            (view(engine(0.5, 0.03)), "no latency target"),
            (view(engine(0.5, 0.03), shape=None, target=TARGET), "size is not known"),
            (view(engine(0.5, 0.03), shape=(1024, 256, 0), target=TARGET), "fewer than 3 windows"),
        ],
    )
    def test_when_nothing_can_be_said(self, seen: RoleView, reason: str) -> None:
        found = QueueingModelAnalyzer().report(seen)
        assert isinstance(found, NoReport)
        assert reason in found.reason
