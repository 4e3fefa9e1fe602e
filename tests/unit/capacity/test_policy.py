"""What the analyzers, the judge and the allocation do together over time, in simulated time."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from tests.policy_lab import Lab, changes_after, settings, times_of

from tidemill.api.saturation_config import AnalyzerEntry, SaturationSettings
from tidemill.capacity.demand import Level
from tidemill.capacity.experience import Experience
from tidemill.capacity.judgement import SILENT_CYCLES, Judge
from tidemill.capacity.queueing import LatencyTarget, ReplicaModel, Workload
from tidemill.capacity.report import CapacityReport, NoReport, Thresholds
from tidemill.capacity.types import Role, VariantState
from tidemill.capacity.view import EngineLoad, RequestShape, RoleView

BOTH = (AnalyzerEntry(name="saturation"), AnalyzerEntry(name="throughput"))
LATENCY = {"ttft_target": 0.6, "itl_target": 0.07, "target_percentile": 90.0}

JUDGES = pytest.mark.parametrize(
    "more",
    [{}, {"analyzers": BOTH}, {"ttft_target": 0.5}, LATENCY],
    ids=["tokens", "throughput", "ttft", "ttft and itl"],
)


class TestConstantLoad:
    """One simulated hour at each of 50 levels, from a tenth of what a replica can do to eight times as much."""

    def history(self, level: int, chosen: SaturationSettings, window: float = 60.0) -> list[tuple[float, int]]:
        lab = Lab(rate=lambda now: 0.0, settings=chosen, seed=level, window=window)
        rate = (0.1 + 0.16 * level) * lab.capacity
        lab.rate = lambda now: rate
        return lab.run(3600)

    @JUDGES
    def test_nothing_moves_after_five_minutes(self, more: dict[str, object]) -> None:
        moved = {level: changes_after(self.history(level, settings(**more)), 300) for level in range(50)}
        assert {level: changes for level, changes in moved.items() if changes} == {}

    @JUDGES
    def test_rates_over_five_minutes_settle_within_three_times_as_long(self, more: dict[str, object]) -> None:
        """As Prometheus gives them: the overload of the first minutes is in them until then."""
        moved = {
            level: changes_after(self.history(level, settings(**more), 300), 900) for level in range(0, 50, 5)
        }
        assert {level: changes for level, changes in moved.items() if changes} == {}

    @pytest.mark.parametrize("level", [10, 24, 38])
    def test_an_hour_of_the_same_teaches_nothing_wrong(self, level: int) -> None:
        """One operating point tells one equation of four costs; its noise, and what formulas leave out, none."""
        target = LatencyTarget(ttft=0.5)
        lab = Lab(rate=lambda now: 0.0, settings=settings(ttft_target=0.5), seed=level)
        rate = (0.1 + 0.16 * level) * lab.capacity
        lab.rate = lambda now: rate
        lab.run(3600)
        right, learned = lab.within(target)
        assert learned == pytest.approx(right, rel=0.2)

    def test_what_is_kept_is_enough_and_not_much_more(self) -> None:
        for level in (10, 20, 30, 40):
            (*_, (_, target)) = self.history(level, settings())
            load = 0.1 + 0.16 * level
            assert load < target <= load / 0.7 + 1


class TestStep:
    def served(self, chosen: SaturationSettings, *, seconds: float = 1800) -> Lab:
        lab = Lab(rate=lambda now: 0.0, settings=chosen, replicas=1)
        low = 0.4 * lab.capacity
        lab.rate = lambda now: low if now <= 600 else 4 * low
        lab.run(seconds)
        return lab

    @pytest.mark.parametrize("chosen", [settings(), settings(analyzers=BOTH), settings(**LATENCY)])
    def test_four_times_the_load_is_followed_within_three_minutes(self, chosen: SaturationSettings) -> None:
        lab = self.served(chosen)
        ready = [target for now, target in lab.history if now <= 600 + 180 - lab.startup]
        assert ready[-1] * lab.capacity > 1.6 * lab.capacity
        assert lab.history[-1][1] <= 1.6 / 0.7 * (4 if chosen.has_latency_target else 1.75)

    @pytest.mark.parametrize("interval", [60.0, 5.0])
    def test_what_piled_up_does_not_keep_replicas_for_ever(self, interval: float) -> None:
        lab = Lab(rate=lambda now: 0.0, settings=settings(ttft_target=0.5), replicas=1, interval=interval)
        low = 0.45 * lab.capacity
        lab.rate = lambda now: low if now <= 600 else 4 * low
        lab.run(1800)
        assert max(target for _, target in lab.history) >= 3
        assert lab.history[-1][1] <= 4

    def test_and_given_back(self) -> None:
        lab = Lab(rate=lambda now: 0.0, settings=settings(), replicas=1)
        lab.rate = lambda now: (6.0 if 600 < now <= 1800 else 0.4) * lab.capacity
        lab.run(3000)
        by_time = dict(lab.history)
        assert by_time[1800] >= 6
        assert by_time[3000] == 1


class TestLevel:
    def test_the_first_sample_counts_as_it_is(self) -> None:
        level = Level()
        level.observe(0, 100, window=0)
        assert level.upper(60) == 100

    def test_noise_is_averaged_and_what_was_provided_stays(self) -> None:
        level = Level()
        for i, value in enumerate((100, 104, 96, 102, 98, 100, 101, 99, 100, 100)):
            level.observe(60 * i, value, window=0)
            if i == 3:
                early = level.upper(60)
        assert 100 <= level.upper(60) <= 105
        assert level.upper(60) >= early * 0.999

    @pytest.mark.parametrize(("samples", "value"), [(4, 400.0), (4, 25.0), (10, 400.0)])
    def test_a_jump_counts_at_once(self, samples: int, value: float) -> None:
        level = Level()
        for i in range(samples):
            level.observe(60 * i, 100 + i % 2, window=0)
        level.observe(60 * samples, value, window=0)
        assert level.upper(60) == value

    def test_what_has_stayed_for_long_is_not_left_for_one_low_sample(self) -> None:
        level = Level()
        for i in range(10):
            level.observe(60 * i, 100 + i % 2, window=0)
        level.observe(600, 25, window=0)
        assert level.upper(60) > 100
        level.observe(660, 100, window=0)
        level.observe(720, 25, window=0)
        assert level.upper(60) > 100
        level.observe(780, 26, window=0)
        assert level.upper(60) == 26

    def test_what_rises_is_looked_at_for_when_a_replica_would_be_ready(self) -> None:
        level = Level()
        for i, value in enumerate((100, 130, 169)):
            level.observe(60 * i, value, window=0)
        assert level.upper(120) > 169 * 1.2
        assert level.upper(0) == 169

    def test_a_step_seen_through_a_window_is_no_climb(self) -> None:
        """Four times the load, as means over a minute show it every 15 s; and a climb that goes on for longer."""
        level = Level()
        for i, value in enumerate((100, 100, 100, 100, 175, 250, 325, 400)):
            level.observe(15 * i, value, window=60)
            assert level.upper(60) <= value
        for i, value in enumerate((100, 130, 169, 220, 286, 371, 483)):
            level.observe(300 + 15 * i, value, window=60)
        assert level.upper(60) > 483 * 1.2


def view(kv: float, *, rate: float | None = 2.0, replicas: int = 2) -> RoleView:
    state = VariantState(
        name="a", cost=Decimal(1), current=replicas, desired=replicas, reporting=replicas, ready=replicas
    )
    engines = tuple(
        EngineLoad(
            variant="a", replica=f"p{i}", kv_usage=Decimal(str(kv)), queue_length=Decimal(0), kv_tokens=100_000,
            request_rate=None if rate is None else rate / replicas,
        )
        for i in range(replicas)
    )  # fmt: skip
    shape = RequestShape(input_tokens=Decimal(1000), output_tokens=Decimal(200))
    return RoleView(model="ns/m", role=Role.BOTH, variants=(state,), engines=engines, shape=shape)


class TestExperience:
    def short(self, seen: RoleView) -> CapacityReport:
        return CapacityReport(
            analyzer="saturation", unit="", per_replica={"a": Decimal(80_000)}, supply=Decimal(160_000),
            anticipated=Decimal(160_000), demand=Decimal(200_000), thresholds=Thresholds(),
        )  # fmt: skip

    def test_a_rate_that_was_too_much_is_not_gone_back_to(self) -> None:
        experience = Experience()
        for i in range(2):
            seen = view(1.0, rate=4.0, replicas=2)
            experience.observe(seen, [self.short(seen)], 60.0 * i)
        vote = experience.vote(view(0.1, rate=4.0, replicas=6), [])
        assert vote is not None
        assert float(vote.per_replica["a"]) == pytest.approx(2.0, rel=0.01)
        # 4 requests/s need more than two replicas: with three each has 1.33, which is well below 2.
        assert vote.spare // vote.per_replica["a"] == 3
        assert vote.required == 0

    def test_what_is_being_worked_off_teaches_nothing(self) -> None:
        experience = Experience()
        for i, demand in enumerate((400_000, 300_000, 250_000, 200_000)):
            seen = view(1.0, rate=4.0, replicas=2)
            experience.observe(seen, [replace(self.short(seen), demand=Decimal(demand))], 60.0 * i)
        assert experience.vote(view(0.1, rate=4.0), []) is None

    @pytest.mark.parametrize("interval", [60.0, 5.0])
    def test_a_rate_that_climbs_teaches_nothing(self, interval: float) -> None:
        """It is a mean over a window, which has not caught up with what comes."""
        experience = Experience()
        for i in range(int(240 / interval)):
            seen = view(1.0, rate=1.0 * 1.004 ** (i * interval))
            experience.observe(seen, [self.short(seen)], interval * i)
        assert experience.vote(view(0.1), []) is None

    def test_of_one_shortage_the_highest_rate_counts(self) -> None:
        """Rates are means over a minute: when a step of load makes a replica short, they still tell of before."""
        experience = Experience()
        for now in range(0, 300, 5):
            rate = 2.0 + 2.4 * min(1.0, max(0.0, (now - 200) / 60))  # the load steps from 2 to 8, 4.4 are served
            seen = view(1.0, rate=rate)
            demand = Decimal(200_000 + 1000 * now - 40_000 * (now % 15 == 0))  # it climbs, now and then it is less
            # And what a replica holds is measured anew in each cycle.
            supply = Decimal(160_000 - now % 7)
            votes = [replace(self.short(seen), demand=demand, supply=supply)] if now >= 200 else []
            experience.observe(seen, votes, float(now))
        vote = experience.vote(view(0.1, rate=4.4), [])
        assert vote is not None
        assert float(vote.supply) == pytest.approx(4.4, rel=0.02)
        # Another shortage at a lower rate is another lesson.
        experience.observe(view(0.1, rate=3.0), [], 390.0)
        for now in (400.0, 405.0):
            seen = view(1.0, rate=3.0)
            experience.observe(seen, [self.short(seen)], now)
        lower = experience.vote(view(0.1, rate=3.0), [])
        assert lower is not None
        assert float(lower.supply) == pytest.approx(3.0, rel=0.02)

    def test_requests_of_another_shape_begin_anew(self) -> None:
        experience = Experience()
        for i in range(2):
            seen = view(1.0, rate=4.0)
            experience.observe(seen, [self.short(seen)], 60.0 * i)
        other = view(0.1, rate=4.0)
        changed = RoleView(
            model=other.model, role=other.role, variants=other.variants, engines=other.engines,
            shape=RequestShape(input_tokens=Decimal(4000), output_tokens=Decimal(200)),
        )  # fmt: skip
        experience.observe(changed, [], 120.0)
        assert experience.vote(changed, []) is None


class TestShape:
    def test_means_of_few_requests_are_taken_together_while_they_are_alike(self) -> None:
        judge = Judge()
        seen: list[RequestShape] = []

        class Asked:
            name = "saturation"

            def report(self, asked: RoleView) -> NoReport:
                seen.append(asked.shape)
                return NoReport(self.name, "only looks", holds=False)

        judge._analyzers["saturation"] = Asked()  # type: ignore[assignment]
        for i, tokens in enumerate((1000, 1100, 900, 4000, 4100)):
            shape = RequestShape(input_tokens=Decimal(tokens), output_tokens=None, hit_rate=Decimal(0))
            judge.need(replace(view(0.3), shape=shape), settings(), now=60.0 * i, lead=60)
        assert [shape.input_tokens for shape in seen] == [1000, 1050, 1000, 4000, 4050]
        assert {shape.output_tokens for shape in seen} == {None}


class TestSilence:
    """A15: an analyzer that is enabled and never reports."""

    def needs(self, judge: Judge, cycles: int) -> list[tuple[NoReport, ...]]:
        chosen = settings(analyzers=BOTH)
        return [judge.need(view(0.2), chosen, now=60.0 * i, lead=60).silent for i in range(cycles)]

    def test_it_holds_for_three_cycles_and_then_abstains(self) -> None:
        found = self.needs(Judge(), 4)
        assert [silent[0].holds for silent in found] == [True] * (SILENT_CYCLES - 1) + [False, False]
        assert {silent[0].analyzer for silent in found} == {"throughput"}

    def test_a_disabled_one_is_not_asked(self) -> None:
        off = (AnalyzerEntry(name="saturation"), AnalyzerEntry(name="throughput", enabled=False))
        need = Judge().need(view(0.2), settings(analyzers=off), now=0, lead=60)
        assert need.silent == ()
        assert need.may_shrink


class TestStandIn:
    """A latency target and no list of analyzers: percentages count until the times of the engines are known."""

    def votes(self, chosen: SaturationSettings) -> list[list[str]]:
        times, kv_tokens = times_of("llama-3.1-8b/l40s")
        model = ReplicaModel(times, Workload(input_tokens=1000, output_tokens=200), kv_tokens=kv_tokens)
        seen = model.at(0.5 * model.max_rate)
        quiet = view(0.3, rate=seen.rate, replicas=1)
        one = replace(quiet.engines[0], itl=seen.itl, ttft=seen.ttft, running=seen.inside)
        serving = replace(quiet, engines=(one,), target=LatencyTarget(ttft=0.5))
        judge = Judge()
        needs = [judge.need(serving, chosen, now=60.0 * i, lead=60) for i in range(4)]
        self.said = {silent.reason for silent in needs[-1].silent}
        # A replica that has only just come says nothing of its rate yet.
        unknown = replace(one, replica="p1", request_rate=None)
        needs += [
            judge.need(replace(serving, engines=(one, unknown)), chosen, now=300.0 + 60 * i, lead=60)
            for i in range(SILENT_CYCLES)
        ]
        return [[vote.analyzer for vote in need.votes] for need in needs]

    def test_tokens_stand_in(self) -> None:
        """And stand back while the model is at a loss for a moment."""
        ours, theirs = ["queueing-model"], ["saturation"]
        silence: list[list[str]] = [[]] * (SILENT_CYCLES - 1)
        assert self.votes(settings(ttft_target=0.5)) == [theirs, theirs, ours, ours, *silence, theirs]
        assert self.said == {"stands in for queueing-model, which has its say"}

    def test_who_is_asked_for_by_name_counts(self) -> None:
        named = settings(ttft_target=0.5, analyzers=(AnalyzerEntry(name="saturation"),))
        assert self.votes(named)[3] == ["queueing-model", "saturation"]


class TestDepartures:
    def test_the_load_of_who_left_still_counts_in_what_is_asked_for(self) -> None:
        """Two replicas share 4 requests a second; one leaves, which the rate of the other does not tell of yet."""
        judge = Judge()
        both = view(1.0, rate=4.0, replicas=2)
        for now in (0.0, 60.0):
            judge.need(both, settings(), now=now, lead=60)
        need = judge.need(replace(both, engines=both.engines[:1]), settings(), now=75.0, lead=60)
        (vote,) = [vote for vote in need.votes if vote.analyzer == "experience"]
        # A quarter of the window has passed since it was seen.
        assert float(vote.demand) == pytest.approx(2.0 + 0.75 * 2.0)


class TestArrivals:
    def test_what_comes_and_does_not_finish_counts_and_a_batch_that_fills_teaches_nothing(self) -> None:
        """Two requests a second finish, and in the minute between 120 more have come to wait and 60 to run."""
        times, kv_tokens = times_of("llama-3.1-8b/l40s")
        quiet = view(0.3, rate=2.0, replicas=1)
        one = replace(quiet.engines[0], itl=0.03, ttft=0.2, running=10.0, kv_tokens=kv_tokens)
        seen = replace(quiet, engines=(one,), target=LatencyTarget(ttft=0.5), presets={"a": times})
        judge = Judge()
        judge.need(seen, settings(ttft_target=0.5), now=0, lead=60)
        learned = judge.dump()["analyzers"]["queueing-model"]
        full = replace(one, queue_length=Decimal(120), running=70.0)
        need = judge.need(replace(seen, engines=(full,)), settings(ttft_target=0.5), now=60, lead=60)
        (vote,) = need.votes
        assert float(vote.demand) == pytest.approx(2.0 + (120 + 60) / 60)
        assert judge.dump()["analyzers"]["queueing-model"] == learned
