"""Which pool, which model, what is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.picker_rig import A, B, C, Rig, chat, post, request_headers, response_body, response_headers
from tests.unit.picker.test_bodies import with_rewrite

from tidemill.kube.resources import ObjectKey
from tidemill.picker.director import DirectorOptions
from tidemill.picker.instruments import LABEL_LIMIT
from tidemill.picker.pools.pool import Pool


def two_pools(**options: Any) -> tuple[Rig, Pool]:
    """p with A, q with B."""
    rig = Rig(options=DirectorOptions(**options))
    rig.endpoints(A)
    other = rig.add_pool("ns", "q")
    rig.endpoints(B, pool=other)
    return rig, other


def ask(rig: Rig, model: str = "m1", **info: Any):
    return rig.ask(*post("/v1/chat/completions", chat(model=model)), **info)


class TestWhichPool:
    @pytest.mark.parametrize("name", ["q", "ns/q"])
    def test_by_name_in_the_metadata(self, name: str) -> None:
        rig, _ = two_pools()
        assert ask(rig, metadata={"x-inference-pool": name}).destination == B

    def test_by_an_attribute(self) -> None:
        rig, _ = two_pools()
        message = request_headers("/any", eos=True)
        expression = "xds.route_metadata.filter_metadata['tidemill']['inference_pool']"
        message.attributes["envoy.filters.http.ext_proc"].fields[expression].string_value = "ns/q"
        assert rig.ask(message).destination == B

    def test_an_unknown_name_is_never_another_pool(self) -> None:
        rig, _ = two_pools()
        talk = ask(rig, metadata={"x-inference-pool": "r"})
        assert talk.status == 404
        assert b"'r' is not served by this picker" in talk.refusal.body

    def test_an_ambiguous_name(self) -> None:
        rig, _ = two_pools()
        rig.endpoints(C, pool=rig.add_pool("other", "q"))
        talk = ask(rig, metadata={"x-inference-pool": "q"})
        assert talk.status == 404
        assert b"ns/q, other/q" in talk.refusal.body

    def test_by_port(self) -> None:
        rig, other = two_pools()
        rig.pools.assign(9102, other.key)
        assert ask(rig, port=9102).destination == B
        rig.pools.assign(9103, ObjectKey("ns", "gone"))
        assert ask(rig, port=9103).status == 404

    def test_by_a_model_that_one_pool_serves(self) -> None:
        rig, other = two_pools()
        rig.read(A, waiting=0, models=frozenset({"m1"}))
        rig.read(B, waiting=0, models=frozenset({"m2", "both"}), pool=other)
        assert ask(rig, "m1").destination == A
        assert ask(rig, "m2").destination == B
        talk = ask(rig, "m3")
        assert talk.status == 404
        assert b"none of the 2 pools" in talk.refusal.body
        rig.read(A, waiting=0, models=frozenset({"m1", "both"}))
        assert b"served by 2 pools (ns/p, ns/q)" in ask(rig, "both").refusal.body

    def test_neither_name_nor_model(self) -> None:
        rig, _ = two_pools()
        talk = rig.ask(*post("/v1/chat/completions", {}))
        assert talk.status == 404
        assert b"names neither a pool nor a model" in talk.refusal.body

    def test_the_only_one(self) -> None:
        rig = Rig()
        rig.endpoints(A)
        assert ask(rig, "anything").destination == A

    def test_ps3_interleaved_streams_of_two_pools(self) -> None:
        rig, other = two_pools()
        rig.endpoints(pool=other)
        talks = [ask(rig, metadata={"x-inference-pool": "pq"[i % 2]}) for i in range(200)]
        assert {talk.destination for talk in talks[::2]} == {A}
        assert {talk.status for talk in talks[1::2]} == {503}


class TestNobody:
    """Three reasons for 503 that must not look alike."""

    def test_the_pool_is_not_known(self) -> None:
        rig = Rig()
        rig.pool.clear("the pool is not known yet: the API server has not been heard")
        assert b"not known yet" in ask(rig).refusal.body

    def test_its_pods_have_not_been_listed(self) -> None:
        rig = Rig()
        talk = ask(rig)
        assert (talk.status, talk.reason) == (503, "rejected-no-endpoints")
        assert b"have not been listed yet" in talk.refusal.body

    def test_it_has_no_ready_endpoint(self) -> None:
        rig = Rig()
        rig.endpoints()
        assert b"no ready endpoint" in ask(rig).refusal.body

    def test_every_message_is_json_and_short(self) -> None:
        talk = ask(Rig())
        assert json.loads(talk.refusal.body)["error"]["code"] == 503
        assert len(talk.refusal.body) <= 256


class TestModels:
    def test_the_union_of_all_pools(self) -> None:
        rig, other = two_pools(answer_models=True)
        rig.read(A, waiting=0, models=frozenset({"m1", "both"}))
        rig.read(B, waiting=0, models=frozenset({"m2", "both"}), pool=other)
        talk = rig.ask(request_headers("/v1/models", method="GET", eos=True))
        found = json.loads(talk.refusal.body)
        assert talk.refusal.status.code == 200
        assert sorted(card["id"] for card in found["data"]) == ["both", "m1", "m2"]

    def test_only_when_asked_for(self) -> None:
        rig = Rig()
        rig.endpoints(A)
        assert rig.ask(request_headers("/v1/models", method="GET", eos=True)).destination == A

    @pytest.mark.parametrize("header", ["x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"])
    def test_a_header_says_what_the_model_is_called_there(self, header: str) -> None:
        rig = Rig()
        rig.endpoints(A)
        talk = rig.ask(*post("/v1/chat/completions", chat(model="m1"), headers=[(header, "m2")]))
        assert json.loads(talk.request_body)["model"] == "m2"


class TestPS1:
    def test_labels_of_clients_are_capped(self) -> None:
        rig = Rig()
        rig.endpoints(A)
        for i in range(3 * LABEL_LIMIT):
            talk = rig.ask(
                *post(
                    "/v1/chat/completions",
                    chat(model=f"model-{i}"),
                    headers=[("x-llm-d-inference-fairness-id", f"id-{i}")],
                )
            )
            talk.send(response_headers())
            talk.send(response_body(b"{}", eos=True))
        values: dict[str, set[str]] = {}
        for family in rig.registry.collect():
            for sample in family.samples:
                for label, value in sample.labels.items():
                    values.setdefault(label, set()).add(value)
        for label in ("model_name", "target_model_name", "fairness_id"):
            assert len(values[label]) <= LABEL_LIMIT + 1
            assert "other" in values[label]
        assert rig.value("llm_d_epp_request_total") == 3 * LABEL_LIMIT
        with_rewrite(rig)
        rig.complete(chat(model="food-review"), "/v1/chat/completions")
        assert (
            rig.value("llm_d_epp_request_total", model_name="food-review", target_model_name="food-review-v2") == 1
        )
        assert rig.value("llm_d_epp_request_running") == 0


def test_older_names_say_the_same() -> None:
    rig = Rig()
    rig.endpoints(A)
    rig.complete(chat(), "/v1/chat/completions")
    for name in ("request_total", "request_duration_seconds_count"):
        assert rig.value(f"llm_d_epp_{name}") == rig.value(f"inference_objective_{name}") == 1


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=80))
def test_in_flight_is_never_negative_and_ends_at_zero(steps: list[tuple[int, int]]) -> None:
    """Picks and releases mixed with endpoints that leave and come back."""
    rig = Rig()
    addresses = [f"10.0.2.{i}:8000" for i in range(4)]
    rig.endpoints(*addresses)
    tickets: list[Any] = []
    load = rig.pool.load
    for action, number in steps:
        present = [e.address for e in rig.pool.snapshot.endpoints]
        if action == 0 and present:
            tickets.append(load.take(rig.seat(present[number % len(present)]), number))
        elif action == 1 and tickets:
            load.release(tickets[number % len(tickets)])
        elif action == 2:
            rig.endpoints(*(a for i, a in enumerate(addresses) if number >> i & 1))
        elif action == 3 and present:
            rig.read(present[number % len(present)], waiting=0)
        for column in (load.in_flight, load.in_flight_tokens):
            assert column.min() >= 0
    for ticket in tickets:
        load.release(ticket)
    assert load.in_flight.sum() == load.in_flight_tokens.sum() == 0
