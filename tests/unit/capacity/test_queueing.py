"""The queueing model against the engine that schedules real batches, and its fit against what that exports."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy_lab import times_of

from tidemill.capacity.calibration import Calibration, Observation
from tidemill.capacity.queueing import LatencyTarget, ReplicaModel, ServiceTimes, Workload
from tidemill.sim.presets import presets
from tidemill.sim.replay import Lengths, replay

L40S = "llama-3.1-8b/l40s"


def model(size_in: float = 1024, size_out: float = 256, preset: str = L40S) -> ReplicaModel:
    times, kv_tokens = times_of(preset)
    return ReplicaModel(times, Workload(input_tokens=size_in, output_tokens=size_out), kv_tokens=kv_tokens)


@pytest.mark.parametrize(
    ("preset", "size_in", "size_out", "load", "requests"),
    [
        (L40S, 256, 256, 0.5, 1000),
        (L40S, 2048, 512, 0.2, 1000),
        ("qwen3-32b/h100", 1024, 1024, 0.5, 1000),
        # Nearly all of the time goes into prompts: one long step makes the next one long, for long.
        (L40S, 1024, 128, 0.75, 10_000),
        ("llama-3.1-8b/h100", 4096, 64, 0.75, 10_000),
    ],
)
def test_means_are_those_of_the_engine(
    preset: str, size_in: int, size_out: int, load: float, requests: int
) -> None:
    """Within 15%; the whole grid is in docs/capacity.md, made by benchmarks/queueing.py."""
    found = model(size_in, size_out, preset)
    rate = load * found.max_rate
    met = replay(
        presets()[preset].parameters, Lengths(size_in, size_out), rate=rate, seconds=requests / rate,
        rng=random.Random(5),
    )  # fmt: skip
    said = found.at(rate)
    assert said.ttft == pytest.approx(met.mean_ttft, rel=0.15)
    assert said.itl == pytest.approx(met.mean_itl, rel=0.15)


class TestReplicaModel:
    @given(st.floats(16, 8192), st.floats(1, 2048), st.sampled_from(sorted(presets())))
    def test_more_load_is_never_faster(self, size_in: float, size_out: float, preset: str) -> None:
        found = model(size_in, size_out, preset)
        seen = [found.at(share * found.max_rate) for share in (0.1, 0.4, 0.7, 0.95, 1.3)]
        for before, after in pairwise(seen):
            assert after.ttft >= before.ttft * 0.999
            assert after.itl >= before.itl * 0.999
            assert after.inside >= before.inside

    @given(st.floats(0.05, 5), st.floats(0.01, 0.2), st.sampled_from((0.0, 50.0, 90.0, 99.0)))
    def test_the_largest_rate_meets_the_target_and_a_larger_one_does_not(
        self, ttft: float, itl: float, percentile: float
    ) -> None:
        found, target = model(), LatencyTarget(ttft, itl, percentile)
        rate = found.largest_rate(target)
        if not rate:
            assert not found.floor.meets(target)
            return
        assert found.at(rate).meets(target)
        if rate < 0.99 * found.max_rate:
            assert not found.at(rate * 1.02).meets(target)

    @given(
        st.sampled_from((1e-6, 0.02)), st.sampled_from((0.0, 1e-5)), st.sampled_from((0.0, 1e-8)),
        st.sampled_from((0.0, 1e-5)), st.sampled_from((0.0, 1000.0)), st.sampled_from((1.0, 1.001, 200.0)),
    )  # fmt: skip
    def test_costs_and_sizes_may_be_nothing(
        self, base: float, sequence: float, context: float, prompt: float, size_in: float, size_out: float
    ) -> None:
        """A prompt that is wholly cached, an answer of one token, a cost that was never seen."""
        times = ServiceTimes(base=base, per_sequence=sequence, per_context_token=context, per_prompt_token=prompt)
        workload = Workload(input_tokens=size_in, output_tokens=size_out)
        found = ReplicaModel(times, workload, kv_tokens=100_000)
        for share in (0.001, 0.5, 1.2):
            seen = found.at(share * found.max_rate)
            assert 0 < seen.ttft < math.inf
            assert 0 < seen.itl < math.inf

    def test_memory_bounds_the_batch(self) -> None:
        times, _ = times_of(L40S)
        workload = Workload(input_tokens=4000, output_tokens=100)
        small = ReplicaModel(times, workload, kv_tokens=40_000)
        large = ReplicaModel(times, workload, kv_tokens=4_000_000)
        assert small.batch < 10
        assert large.batch == 256
        assert small.max_rate < large.max_rate

    def test_a_higher_percentile_asks_for_more(self) -> None:
        found = model()
        rates = [found.largest_rate(LatencyTarget(0.5, 0.06, p)) for p in (0.0, 90.0, 99.0)]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] > rates[2]


def test_a_cached_prompt_is_not_computed_but_read_in_each_step() -> None:
    """Half of the prompt found in a cache: more than with all of it to compute, less than with half a prompt."""
    times, kv_tokens = times_of(L40S)

    def most(computed: float, cached: float) -> float:
        workload = Workload(input_tokens=computed, output_tokens=256, cached_tokens=cached)
        return ReplicaModel(times, workload, kv_tokens=kv_tokens).largest_rate(LatencyTarget(ttft=0.5, itl=0.06))

    assert most(2048, 0) < most(1024, 1024) < most(1024, 0)


class TestCalibration:
    def seen(
        self, times: ServiceTimes, size_in: float, size_out: float, load: float, rng: random.Random
    ) -> Observation:
        """What an engine with these times would export over a window, with some noise."""
        found = ReplicaModel(
            times, Workload(input_tokens=size_in, output_tokens=size_out), kv_tokens=times_of(L40S)[1]
        )
        rate = load * found.max_rate
        at = found.at(rate)
        return Observation(
            itl=at.itl * rng.gauss(1, 0.03),
            ttft=at.ttft * rng.gauss(1, 0.1),
            decoding=rate * (size_out - 1) * at.itl,
            context=size_in + 0.75 * size_out,
            request_rate=rate,
            prompt_tokens=size_in,
        )

    @pytest.mark.parametrize("preset", ["llama-3.1-8b/l40s", "llama-3.1-8b/h100", "llama-3.1-70b/a100"])
    def test_it_finds_what_a_replica_can_do(self, preset: str) -> None:
        """From a prior that is wrong by a factor of several, by what is seen at changing loads and shapes."""
        rng = random.Random(5)
        times, kv_tokens = times_of(preset)
        fit = Calibration()
        for _ in range(60):
            size_in, size_out = rng.choice(((512, 128), (1024, 256), (2048, 256)))
            fit.observe([self.seen(times, size_in, size_out, rng.uniform(0.2, 0.8), rng)])
        workload = Workload(input_tokens=1024, output_tokens=256)
        right = ReplicaModel(times, workload, kv_tokens=kv_tokens)
        learned = ReplicaModel(fit.times, workload, kv_tokens=kv_tokens)
        target = LatencyTarget(ttft=3 * right.floor.ttft, itl=2 * right.floor.itl)
        assert learned.largest_rate(target) == pytest.approx(right.largest_rate(target), rel=0.15)

    def test_one_wild_window_changes_little(self) -> None:
        rng = random.Random(5)
        times, _ = times_of(L40S)
        fit = Calibration()
        for _ in range(40):
            fit.observe([self.seen(times, 1024, 256, rng.uniform(0.2, 0.8), rng)])
        before = fit.times
        wild = Observation(itl=5.0, ttft=30.0, decoding=20, context=1200, request_rate=2.0, prompt_tokens=1024)
        fit.observe([wild])
        assert fit.times.base == pytest.approx(before.base, rel=0.2)

    def test_what_says_nothing_is_not_counted(self) -> None:
        fit = Calibration()
        idle = Observation(itl=0.0, ttft=None, decoding=0, context=1000, request_rate=0.0, prompt_tokens=1000)
        fit.observe([idle])
        assert fit.observations == 0
