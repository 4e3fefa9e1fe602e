"""Flow control: who waits, who goes first, who is dropped and what they are told."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.picker_rig import A, B, Rig, Talk, chat, config, endpoint, post, response_body, response_headers

from tidemill.api.inference import InferenceObjective
from tidemill.picker.director import DirectorOptions
from tidemill.picker.flow import Drop
from tidemill.picker.pools.endpoints import EndpointSet
from tidemill.picker.saturation import SaturationDetector

ON = "featureGates: [flowControl]\n"


def waiting_rig(more: str = "", **options: Any) -> Rig:
    """Flow control on, one endpoint, saturated."""
    rig = Rig(config=config(ON + more), options=DirectorOptions(**options))
    rig.endpoints(A)
    saturate(rig)
    for name, priority in (("high", 10), ("low", -5)):
        found = InferenceObjective.parse(
            {
                "metadata": {"namespace": "ns", "name": name},
                "spec": {"poolRef": {"name": "p"}, "priority": priority},
            }
        )
        rig.pool.objectives = {**rig.pool.objectives, name: found}
    return rig


def saturate(rig: Rig) -> None:
    rig.read(A, waiting=50, kv_usage=1.0)


def relieve(rig: Rig, places: int = 1000) -> None:
    """Room for `places` more requests: each pick counts as one that waits until the next scrape."""
    rig.read(A, waiting=max(0, 5 - places) if places < 5 else 0, kv_usage=0.0)


def ask(rig: Rig, objective: str = "", fairness: str = "", **more: Any) -> Talk:
    headers = [("x-llm-d-inference-objective", objective)] if objective else []
    headers += [("x-llm-d-inference-fairness-id", fairness)] if fairness else []
    return rig.ask(*post("/v1/chat/completions", chat(), headers=headers, **more))


def flow(rig: Rig) -> Any:
    return rig.director.flow(rig.pool)


class TestOrder:
    def test_a_request_goes_at_once_when_there_is_room(self) -> None:
        rig = waiting_rig()
        relieve(rig)
        assert ask(rig).destination == A

    def test_it_waits_and_goes_when_room_appears(self) -> None:
        rig = waiting_rig()
        talk = ask(rig)
        assert not talk.answers
        assert flow(rig).requests == 1
        relieve(rig)
        assert talk.destination == A
        assert flow(rig).requests == 0

    def test_a_release_lets_the_next_one_go(self) -> None:
        rig = Rig(config=config(ON), detector=SaturationDetector(max_requests=1, by_requests=True))
        rig.endpoints(A)
        first, second = ask(rig), ask(rig)
        assert (first.destination, second.destination) == (A, None)
        first.send(response_headers())
        first.send(response_body(b"{}", eos=True))
        assert second.destination == A

    def test_only_as_many_go_as_there_is_room_for(self) -> None:
        rig = waiting_rig()
        talks = [ask(rig) for _ in range(20)]
        relieve(rig)
        assert sum(talk.destination is not None for talk in talks) == 5  # 5 that wait are 1.0
        assert [talk.destination is not None for talk in talks[:5]] == [True] * 5

    def test_priority_first_and_lower_ones_do_not_overtake(self) -> None:
        rig = waiting_rig()
        low, middle, high = ask(rig, "low"), ask(rig), ask(rig, "high")
        relieve(rig, 1)
        assert [t.destination for t in (low, middle, high)] == [None, None, A]
        relieve(rig, 1)
        assert [t.destination for t in (low, middle)] == [None, A]
        relieve(rig, 1)
        assert low.destination == A

    @pytest.mark.parametrize(
        ("policy", "order"),
        [("round-robin-fairness-policy", "xyxx"), ("global-strict-fairness-policy", "xxxy")],
    )
    def test_fairness(self, policy: str, order: str) -> None:
        rig = waiting_rig(f"flowControl: {{defaultPriorityBand: {{fairnessPolicyRef: {policy}}}}}")
        talks = [("x", ask(rig, fairness="x")) for _ in range(3)] + [("y", ask(rig, fairness="y"))]
        gone = ""
        while len(gone) < 4:
            before = {id(t) for _, t in talks if t.destination}
            relieve(rig, 1)
            gone += "".join(name for name, t in talks if t.destination and id(t) not in before)
        assert gone == order

    def test_flows_of_clients_leave_nothing_behind(self) -> None:
        rig = waiting_rig()
        talks = [ask(rig, fairness=f"id-{i}") for i in range(100)]
        for talk in talks:
            talk.close()
        rig.director.tick(rig.pool)
        assert not flow(rig)._bands


class TestP34:
    def drop(self, rig: Rig, talk: Talk) -> tuple[int, str]:
        assert talk.finished
        return talk.status, talk.reason

    def test_empty_and_full(self) -> None:
        rig = waiting_rig("flowControl: {defaultPriorityBand: {maxRequests: 1}}")
        rig.endpoints()
        ask(rig)
        assert self.drop(rig, ask(rig)) == (503, "rejected-no-endpoints")

    def test_empty_and_too_long(self) -> None:
        rig = waiting_rig()
        rig.endpoints()
        talk = ask(rig)
        assert rig.wakes[-1] == rig.now + 60
        self.later(rig, 60)
        assert self.drop(rig, talk) == (503, "rejected-no-endpoints")

    def test_saturated_and_full(self) -> None:
        rig = waiting_rig("flowControl: {defaultPriorityBand: {maxBytes: 100}}")
        ask(rig)
        assert self.drop(rig, ask(rig)) == (429, "rejected-saturated")

    def test_saturated_and_too_long(self) -> None:
        rig = waiting_rig()
        talk = ask(rig)
        self.later(rig, 59)
        assert not talk.answers
        self.later(rig, 1)
        assert self.drop(rig, talk) == (429, "rejected-ttl-expired")

    def test_shutting_down(self) -> None:
        rig = waiting_rig()
        talk = ask(rig)
        rig.director.drain()
        assert self.drop(rig, talk) == (503, "rejected-shutting-down")
        assert self.drop(rig, ask(rig)) == (503, "rejected-shutting-down")

    def test_client_gone(self) -> None:
        rig = waiting_rig()
        talk = ask(rig)
        talk.close()
        assert not talk.answers
        assert rig.value("llm_d_epp_request_dropped_total", reason="rejected-context-cancelled") == 1

    def test_our_own_fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = waiting_rig()
        monkeypatch.setattr(rig.pool.scheduler, "schedule", lambda cycle: 1 / 0)
        talk = ask(rig)
        relieve(rig)
        assert self.drop(rig, talk) == (500, "")
        assert flow(rig).requests == 0

    def test_saturated_and_empty_by_the_time(self) -> None:
        rig = waiting_rig("flowControl: {noEndpointRequestTTL: 30s}")
        talk = ask(rig)
        self.later(rig, 40)
        rig.endpoints()
        self.later(rig, 22)  # the bound: the longer time to live and two seconds
        assert self.drop(rig, talk) == (503, "rejected-no-endpoints")

    def later(self, rig: Rig, seconds: float) -> None:
        rig.now += seconds
        if rig.pool.snapshot.endpoints:
            saturate(rig)
        rig.director.tick(rig.pool)

    def test_contention_and_emptiness_have_budgets_of_their_own(self) -> None:
        rig = waiting_rig("flowControl: {defaultRequestTTL: 30s, noEndpointRequestTTL: 10s}")
        talk = ask(rig)
        self.later(rig, 25)
        rig.endpoints()
        self.later(rig, 6)  # 31 s in all, but only 6 of them without an endpoint
        assert not talk.answers
        self.later(rig, 1)  # the bound of both together: 30 s and a margin of 2
        assert self.drop(rig, talk) == (503, "rejected-no-endpoints")

    def test_each_drop_is_counted_once(self) -> None:
        rig = waiting_rig()
        ask(rig)
        self.later(rig, 60)
        assert rig.value("llm_d_epp_request_dropped_total") == 1
        assert rig.value("llm_d_epp_request_error_total", error_code="429") == 1

    @settings(max_examples=150, deadline=None)
    @given(st.integers(0, 2**32))
    def test_no_interleaving_gives_another_row(self, seed: int) -> None:
        """Random arrivals, scrapes, endpoints that come and go, clients that leave, time that passes."""
        rng = random.Random(seed)
        rig = waiting_rig("flowControl: {defaultPriorityBand: {maxRequests: 4}, defaultRequestTTL: 10s}")
        talks: list[Talk] = []
        left: set[int] = set()
        for _ in range(60):
            action = rng.randrange(7)
            if action <= 2:
                talks.append(ask(rig, rng.choice(["", "high", "low"]), rng.choice("xyz")))
            elif action == 3 and talks:
                gone = rng.randrange(len(talks))
                left.add(gone)
                talks[gone].close()
            elif action == 4:
                rig.endpoints(*rng.choice([(), (A,), (A, B)]))
            elif action == 5 and rig.pool.snapshot.endpoints:
                (saturate if rng.random() < 0.6 else relieve)(rig) if A in rig.pool.snapshot.by_address else None
            rig.now += rng.choice([0, 0.1, 3, 11])
            rig.director.tick(rig.pool)
            assert flow(rig).requests >= 0
            assert flow(rig).bytes >= 0
        rig.director.drain()
        allowed = {(200, ""), *((drop.status, drop.value) for drop in Drop if drop is not Drop.CONTEXT_CANCELLED)}
        for number, talk in enumerate(talks):
            assert len([a for a in talk.answers if a.WhichOneof("choice") == "immediate_response"]) <= 1
            if talk.answers:
                found = (200, "") if talk.refusal is None else (talk.status, talk.reason)
                assert found in allowed
            else:
                assert number in left
        assert (flow(rig).requests, flow(rig).bytes) == (0, 0)
        for talk in talks:
            talk.close()
        assert int(rig.pool.load.in_flight.sum()) == 0


class TestP31:
    def test_all_stale_is_not_load(self) -> None:
        rig = waiting_rig()
        relieve(rig)
        for _ in range(30):
            rig.now += 0.1
            talk = ask(rig)
            assert talk.destination == A
            talk.send(response_headers(eos=True))

    @pytest.mark.parametrize(("fresh_for", "saturation"), [(0.2, 0.5), (0.5, 0.0)])
    def test_how_long_numbers_count_as_fresh(self, fresh_for: float, saturation: float) -> None:
        rig = Rig()
        rig.endpoints(A, B)
        rig.read(A, waiting=0, kv_usage=0.0)
        rig.now += 0.3
        rig.read(B, waiting=0, kv_usage=0.0)
        rows = np.array([rig.seat(A).row, rig.seat(B).row])
        detector = SaturationDetector(fresh_for=fresh_for)
        assert detector.saturation(rig.pool.load, rows, rig.now) == saturation

    def test_one_fresh_gets_it_all(self) -> None:
        rig = waiting_rig()
        rig.endpoints(A, B)
        rig.now += 6
        rig.read(B, waiting=1, kv_usage=0.16)
        talk = ask(rig)
        assert talk.destination == B


class TestP35:
    @pytest.mark.parametrize(
        ("hint", "expected"),
        [
            (None, {A, B}),
            ([A], {A}),
            ([], None),
            (["10.0.0.99:8000"], None),
            ([A, B], {A, B}),
            (f"{B}, {A}", {A, B}),
            ([5, [A], "nonsense"], None),
            ([f"10.9.{i // 250}.{i % 250}:80" for i in range(10_000)], None),
            (7, None),
        ],
    )
    def test_hints(self, hint: Any, expected: set[str] | None) -> None:
        rig = Rig()
        rig.endpoints(A, B)
        talk = ask(rig, subset=hint)
        if expected is None:
            assert (talk.status, talk.reason) == (503, "rejected-no-endpoints")
        else:
            assert talk.destination in expected

    def test_one_of_two_is_not_ready(self) -> None:
        rig = Rig()
        rig.endpoints(B)
        assert ask(rig, subset=[A, B]).destination == B

    def test_an_empty_hint_never_waits(self) -> None:
        rig = waiting_rig()
        rig.endpoints()
        assert ask(rig, subset=[]).status == 503

    def test_an_empty_hint_may_be_ignored(self) -> None:
        rig = waiting_rig(ignore_empty_subset=True)
        rig.endpoints()
        talk = ask(rig, subset=[])
        assert not talk.answers
        rig.endpoints(A)
        relieve(rig)
        assert talk.destination == A

    def test_a_hint_is_looked_at_again_when_the_request_goes(self) -> None:
        rig = waiting_rig()
        rig.endpoints(A, B)
        for address in (A, B):
            rig.read(address, waiting=50, kv_usage=1.0)
        talk = ask(rig, subset=[B])
        rig.endpoints(A)
        relieve(rig)
        assert (talk.status, talk.reason) == (503, "rejected-no-endpoints")


class TestShedding:
    """Without flow control, negative priorities are shed while the pool is saturated."""

    def rig(self) -> Rig:
        rig = waiting_rig()
        off = Rig()
        off.endpoints(A)
        off.pool.objectives = rig.pool.objectives
        return off

    def test_negative_priority_while_saturated(self) -> None:
        rig = self.rig()
        saturate(rig)
        low = ask(rig, "low")
        assert (low.status, low.reason) == (429, "rejected-saturated")
        assert ask(rig).destination == A
        assert ask(rig, "high").destination == A
        relieve(rig)
        assert ask(rig, "low").destination == A

    def test_an_empty_pool_is_503_for_all(self) -> None:
        rig = self.rig()
        rig.endpoints()
        assert ask(rig, "low").status == 503
        assert ask(rig).status == 503


def test_scale_from_zero_waits_for_an_endpoint() -> None:
    rig = waiting_rig()
    rig.endpoints()
    talk = ask(rig)
    rig.now += 45
    rig.director.tick(rig.pool)
    rig.pool.replace(EndpointSet((endpoint(A),)))
    assert talk.destination == A  # nobody has numbers: what is in flight decides, and nothing is
    assert rig.value("llm_d_epp_flow_control_request_queue_duration_seconds_sum", outcome="dispatched") == 45
