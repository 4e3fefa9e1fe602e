"""Scorers and pickers against worked examples, and what holds for all of them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.picker_rig import A, B, C, Rig, config, endpoint

from tidemill.picker.load import Lora, Reading
from tidemill.picker.scheduling.plugin import Outcome
from tidemill.picker.scheduling.prefix import Blocks, Prompt
from tidemill.picker.scheduling.scheduler import PLUGIN_TYPES
from tidemill.picker.scheduling.scorers import SCORERS, session_token

ADDRESSES = [A, B, C, "10.0.0.14:8000"]


def rig_with(values: list[dict[str, Any]], **options: Any) -> Rig:
    rig = Rig(**options)
    rig.endpoints(*ADDRESSES[: len(values)])
    for address, numbers in zip(ADDRESSES, values, strict=False):
        rig.read(address, **numbers)
    return rig


def score(kind: str, rig: Rig, prompt: bytes = b"", **parameters: Any) -> list[float]:
    return SCORERS[kind].model_validate(parameters).score(rig.cycle(prompt)).tolist()


def hold(rig: Rig, address: str, prompt: bytes, blocks: int) -> None:
    """Have an endpoint hold the first `blocks` blocks of a prompt."""
    prefix = rig.pool.scheduler.prefix
    all_blocks = prefix.blocks(Prompt((prompt,)), model="m", salt="")
    prefix.served(Blocks((all_blocks.chains[0][:blocks],)), rig.seat(address).row)


@pytest.mark.parametrize(
    ("kind", "field", "values", "expected"),
    [
        ("queue-scorer", "waiting", [2, 0, 5], [0.6, 1, 0]),
        ("queue-scorer", "waiting", [3, 3], [1, 1]),
        ("running-requests-size-scorer", "running", [10, 20, 30], [1, 0.5, 0]),
        ("running-requests-size-scorer", "running", [0], [1]),
        ("kv-cache-utilization-scorer", "kv_usage", [0.4, 1.0], [0.6, 0]),
        ("load-aware-scorer", "waiting", [0, 64, 200], [0.5, 0.25, 0]),
    ],
)
def test_scorers_of_scraped_numbers(kind: str, field: str, values: list[float], expected: list[float]) -> None:
    assert score(kind, rig_with([{field: value} for value in values])) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("in_flight", "parameters", "expected"),
    [
        ([0, 2, 5], {}, [1, 0.6, 0]),
        ([3, 5], {"maxBusyScore": 0.5}, [0.2, 0]),
        ([1, 2], {"idleThreshold": 1}, [1, 0]),
    ],
)
def test_active_request_scorer(in_flight: list[int], parameters: dict[str, Any], expected: list[float]) -> None:
    rig = rig_with([{"waiting": 0}] * len(in_flight))
    for address, count in zip(ADDRESSES, in_flight, strict=False):
        for _ in range(count):
            rig.pool.load.take(rig.seat(address), 0)
    assert score("active-request-scorer", rig, **parameters) == pytest.approx(expected)


def test_token_load_scorer() -> None:
    rig = rig_with([{"waiting": 0}, {"waiting": 0}])
    rig.pool.load.take(rig.seat(A), 2_000_000)
    assert score("token-load-scorer", rig) == pytest.approx([0.5232, 1.0], abs=1e-4)


@pytest.mark.parametrize(
    ("matched", "total", "parameters", "expected"),
    [
        (3, 4, {}, 0.75),
        (100, 200, {"matchLengthWeight": 0.5}, 0.5552),
        (2, 2, {"matchLengthWeight": 0.5}, 0.5001),
        (0, 4, {}, 0.0),
    ],
)
def test_prefix_scorer(matched: int, total: int, parameters: dict[str, Any], expected: float) -> None:
    rig = rig_with([{"waiting": 0}])
    prompt = os.urandom(total * 64 * 4)
    if matched:
        hold(rig, A, prompt, matched)
    assert score("prefix-cache-scorer", rig, prompt, **parameters) == pytest.approx([expected], abs=1e-4)


@pytest.mark.parametrize(
    ("lora", "adapter", "expected"),
    [
        (Lora(frozenset({"a"}), frozenset(), 4), "a", 1.0),
        (Lora(frozenset({"a"}), frozenset(), 4), "b", 0.8),
        (Lora(frozenset({"a"}), frozenset(), 1), "b", 0.0),
        (Lora(frozenset({"a"}), frozenset({"b"}), 1), "b", 0.6),
        (None, "a", 0.0),
    ],
)
def test_lora_scorer(lora: Lora | None, adapter: str, expected: float) -> None:
    rig = rig_with([{"waiting": 0, "lora": lora}])
    assert SCORERS["lora-affinity-scorer"]().score(rig.cycle(model=adapter)).tolist() == [expected]


def test_cold_requests_go_round() -> None:
    rig = rig_with([{"waiting": 0}] * 4)
    scorer = SCORERS["no-hit-lru-scorer"]()
    ends = rig.pool.snapshot.endpoints
    cycle = rig.cycle()
    for used in (ends[1], ends[0]):  # B is the one whose last use is the longest ago
        scorer.picked(cycle, used)
    assert scorer.score(rig.cycle()).tolist() == pytest.approx([0, 1 / 3, 1, 2 / 3])
    prompt = os.urandom(256)
    hold(rig, A, prompt, 1)
    assert scorer.score(rig.cycle(prompt)).tolist() == [0.5] * 4


def test_session_affinity() -> None:
    rig = rig_with([{"waiting": 0}, {"waiting": 0}])
    token = session_token(rig.pool.snapshot.endpoints[1])
    cycle = rig.cycle(headers={"x-session-token": token})
    assert SCORERS["session-affinity-scorer"]().score(cycle).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("a", "b", "picks"),
    [
        ((0, 0.2, 0), (4, 0.6, 4), {B}),
        ((0, 0.2, 0), (4, 0.9, 4), {A}),
        ((3, 0.5, 2), (3, 0.5, 2), {A, B}),
    ],
)
def test_the_default_profile(a: tuple[float, float, int], b: tuple[float, float, int], picks: set[str]) -> None:
    rig = rig_with([{"waiting": q, "kv_usage": kv} for q, kv, _ in (a, b)])
    prompt = os.urandom(4 * 64 * 4)
    for address, (_, _, blocks) in zip((A, B), (a, b), strict=True):
        hold(rig, address, prompt, blocks)
    found: set[str] = set()
    for _ in range(40):
        outcome = rig.pool.scheduler.schedule(rig.cycle(prompt))
        assert isinstance(outcome, Outcome)
        found.add(outcome.primary.endpoints[0].address)
    assert found == picks


def test_the_default_profile_adds_up() -> None:
    rig = rig_with([{"waiting": q, "kv_usage": kv} for q, kv in ((2, 0.4), (0, 0.7), (5, 0.1))])
    prompt = os.urandom(4 * 64 * 4)
    hold(rig, A, prompt, 3)
    hold(rig, C, prompt, 1)
    rows = rig.pool.scheduler.profiles["default"].explain(rig.cycle(prompt))
    assert [row["total"] for row in rows] == pytest.approx([4.65, 2.60, 2.55])


class TestBurst:
    def test_64_requests_at_once_over_8_equal_endpoints(self) -> None:
        rig = Rig()
        addresses = [f"10.0.1.{i}:8000" for i in range(8)]
        rig.endpoints(*addresses)
        for address in addresses:
            rig.read(address, waiting=0, kv_usage=0.3)
        for _ in range(64):
            pick(rig)
        assert max(rig.in_flight(address)[0] for address in addresses) <= 9

    def test_a_scrape_in_the_middle_does_not_undo_it(self) -> None:
        rig = Rig()
        addresses = [f"10.0.1.{i}:8000" for i in range(8)]
        rig.endpoints(*addresses)
        for i in range(64):
            if i % 10 == 0:
                for address in addresses:
                    rig.read(address, waiting=0, kv_usage=0.3)
            pick(rig)
        assert max(rig.in_flight(address)[0] for address in addresses) <= 9

    def test_an_old_scrape_does_not_hide_a_pick_made_meanwhile(self) -> None:
        rig = rig_with([{"waiting": 0}, {"waiting": 0}])
        load = rig.pool.load
        begun = load.mark
        first = load.take(rig.seat(A), 0)
        load.record(rig.seat(A), Reading(waiting=0), mark=begun, now=rig.now)
        assert rig.cycle().waiting.tolist() == [1, 0]
        load.record(rig.seat(A), Reading(waiting=0), mark=load.mark, now=rig.now)
        assert rig.cycle().waiting.tolist() == [0, 0]
        load.release(first)
        load.release(first)
        assert rig.in_flight(A) == (0, 0)


def pick(rig: Rig) -> str:
    outcome = rig.pool.scheduler.schedule(rig.cycle())
    assert isinstance(outcome, Outcome)
    chosen = outcome.primary.endpoints[0]
    rig.pool.load.take(rig.seat(chosen.address), 0)
    return chosen.address


class TestUnknownIsNotZero:
    def test_an_endpoint_without_numbers_is_taken_only_when_no_other_is_left(self) -> None:
        rig = Rig()
        rig.endpoints(A, B)
        rig.read(A, waiting=2, kv_usage=0.5)
        assert {pick(rig) for _ in range(100)} == {A}
        rig.read(B, waiting=0, kv_usage=0.0)
        assert B in {pick(rig) for _ in range(10)}

    def test_whatever_else_speaks_for_it(self) -> None:
        """Neither a prefix that it has cached nor the lot of a random picker."""
        for text in ("{type: prefix-cache-scorer}", "{type: random-picker}"):
            rig = Rig(config=config(f"plugins: [{text}]"))
            rig.endpoints(A, B)
            rig.read(A, waiting=2, kv_usage=0.5)
            prompt = os.urandom(1024)
            hold(rig, B, prompt, 4)
            for _ in range(20):
                outcome = rig.pool.scheduler.schedule(rig.cycle(prompt))
                assert isinstance(outcome, Outcome)
                assert outcome.primary.endpoints[0].address == A

    def test_alone_it_is_taken(self) -> None:
        rig = Rig()
        rig.endpoints(B)
        assert pick(rig) == B

    def test_numbers_expire(self) -> None:
        rig = rig_with([{"waiting": 0, "kv_usage": 0.0}, {"waiting": 9, "kv_usage": 0.9}])
        rig.now += 6
        rig.read(B, waiting=9, kv_usage=0.9)
        assert {pick(rig) for _ in range(20)} == {B}

    def test_a_missing_gauge_gets_the_worst_of_its_scorer(self) -> None:
        rig = rig_with([{"waiting": 0}, {"waiting": 0, "kv_usage": 0.99}])
        assert score("kv-cache-utilization-scorer", rig) == pytest.approx([0, 0.01])

    def test_when_all_are_unknown_requests_in_flight_decide(self) -> None:
        rig = Rig()
        rig.endpoints(A, B, C)
        for _ in range(30):
            pick(rig)
        assert [rig.in_flight(a)[0] for a in (A, B, C)] == [10, 10, 10]


class TestSleep:
    def test_one_that_sleeps_is_not_picked_while_another_is_awake(self) -> None:
        rig = rig_with([{"waiting": 0, "awake": False}, {"waiting": 5}])
        assert {pick(rig) for _ in range(10)} == {B}

    def test_when_all_sleep_nobody_is_picked(self) -> None:
        rig = rig_with([{"waiting": 0, "awake": False}])
        outcome = rig.pool.scheduler.schedule(rig.cycle())
        assert not isinstance(outcome, Outcome)


class TestPickers:
    def outcome(self, kind: str, seed_waiting: list[int], **parameters: Any) -> list[str]:
        text = {"type": kind, "parameters": parameters}
        rig = rig_with(
            [{"waiting": q} for q in seed_waiting],
            config=config(f"plugins: [{{type: queue-scorer}}, {text}]"),
        )
        found = rig.pool.scheduler.schedule(rig.cycle())
        assert isinstance(found, Outcome)
        return [e.address for e in found.primary.endpoints]

    def test_a_list_is_ordered_by_score(self) -> None:
        assert self.outcome("max-score-picker", [5, 0, 2], maxNumOfEndpoints=3) == [B, C, A]

    def test_zero_or_less_means_one(self) -> None:
        assert self.outcome("max-score-picker", [5, 0, 2], maxNumOfEndpoints=0) == [B]

    def test_no_more_than_there_are(self) -> None:
        assert sorted(self.outcome("random-picker", [5, 0, 2], maxNumOfEndpoints=9)) == [A, B, C]

    def test_weighted_random_is_in_proportion(self) -> None:
        rig = rig_with(
            [{"waiting": q} for q in (0, 3, 4)],  # scores 1, 0.25, 0
            config=config("plugins: [{type: queue-scorer}, {type: weighted-random-picker}]"),
        )
        found = {A: 0, B: 0, C: 0}
        for _ in range(2000):
            outcome = rig.pool.scheduler.schedule(rig.cycle())
            assert isinstance(outcome, Outcome)
            found[outcome.primary.endpoints[0].address] += 1
        assert found[C] == 0
        assert found[A] / 2000 == pytest.approx(0.8, abs=0.04)


numbers = st.one_of(st.none(), st.floats(0, 1000))


@given(
    st.lists(
        st.tuples(numbers, numbers, st.one_of(st.none(), st.floats(0, 1)), st.integers(0, 5)),
        min_size=1,
        max_size=4,
    ),
    st.binary(max_size=2000),
    st.sampled_from(sorted(SCORERS)),
)
def test_every_score_is_between_0_and_1(values: list[Any], prompt: bytes, kind: str) -> None:
    rig = Rig()
    rig.endpoints(*ADDRESSES[: len(values)])
    for address, (waiting, running, kv, flights) in zip(ADDRESSES, values, strict=False):
        rig.read(address, waiting=waiting, running=running, kv_usage=kv)
        for _ in range(flights):
            rig.pool.load.take(rig.seat(address), 100)
    found = SCORERS[kind]().score(rig.cycle(prompt))
    assert len(found) == len(values)
    assert not np.isnan(found).any()
    assert ((found >= 0) & (found <= 1)).all()


def test_every_plugin_of_the_table_can_be_made() -> None:
    for kind in PLUGIN_TYPES:
        parameters = {"label": "x"} if kind == "by-label" else {}
        PLUGIN_TYPES[kind].model_validate(parameters)


def test_an_ipv6_endpoint_can_be_picked() -> None:
    rig = Rig()
    rig.endpoints(endpoint("[fd00::5]:8000"))
    assert pick(rig) == "[fd00::5]:8000"
