"""The exchange: every order of messages, and what a request holds at each point of its life."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.picker_rig import (
    BUFFERED,
    DESTINATION,
    STREAMED,
    A,
    B,
    Rig,
    Talk,
    add_subset,
    chat,
    config,
    destination_of,
    headers_of,
    mutation_of,
    post,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
)

from tidemill.picker.director import DirectorOptions

USAGE = b'{"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":252}}'
OUTPUT, REQUESTS = "llm_d_epp_request_output_tokens_sum", "llm_d_epp_request_total"


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.endpoints(A)
    return made


def ends(talk: Talk) -> list[bool]:
    return [
        a.request_body.response.body_mutation.streamed_response.end_of_stream
        for a in talk.answers
        if a.WhichOneof("choice") == "request_body"
    ]


class TestRequest:
    def test_nothing_is_answered_before_the_body_is_complete(self, rig: Rig) -> None:
        talk = rig.stream()
        assert talk.send(request_headers()) == []
        assert talk.send(request_body(b'{"model":')) == []
        assert [a.WhichOneof("choice") for a in talk.send(request_body(b'"m1"}', eos=True))] == [
            "request_headers",
            "request_body",
        ]
        assert talk.request_body == b'{"model":"m1"}'
        assert ends(talk) == [True]

    @pytest.mark.parametrize("size", [0, 1, 61_999, 62_000, 62_001, 124_000, 1_000_003])
    def test_bodies_come_back_in_chunks(self, rig: Rig, size: int) -> None:
        body = random.Random(size).randbytes(size)
        talk = rig.ask(*post("/anything", body))
        assert talk.request_body == body
        chunks = [a.request_body.response.body_mutation.streamed_response for a in talk.answers[1:]]
        assert all(len(chunk.body) <= 62_000 for chunk in chunks)
        assert ends(talk) == [False] * (len(chunks) - 1) + [True]

    def test_header_and_metadata_are_the_same(self, rig: Rig) -> None:
        answer = rig.ask(*post("/v1/chat/completions", chat())).answers[0]
        metadata = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value
        assert destination_of(answer) == metadata == A
        assert answer.request_headers.response.clear_route_cache

    def test_p10_the_request_ends_by_trailers(self, rig: Rig) -> None:
        talk = rig.ask(request_headers(), request_body(b'{"model":"m1"}'), request_trailers())
        assert talk.kinds == ["request_headers", "request_body", "request_trailers"]
        assert ends(talk) == [False]
        assert talk.destination == A
        assert not talk.answers[-1].request_trailers.header_mutation.set_headers

    def test_p10_trailers_right_after_the_headers(self, rig: Rig) -> None:
        talk = rig.ask(request_headers(), request_trailers())
        assert talk.kinds == ["request_headers", "request_trailers"]
        assert talk.destination == A

    def test_nothing_after_the_end_is_added(self, rig: Rig) -> None:
        talk = rig.ask(*post("/v1/chat/completions", b"{}"), request_body(b"more", eos=True))
        assert talk.request_body == b"{}"

    @pytest.mark.parametrize("raw", [True, False])
    def test_p13_what_only_the_platform_may_say(self, rig: Rig, raw: bool) -> None:
        forged = [
            (DESTINATION, "169.254.169.254:80"),
            (DESTINATION, "169.254.169.254:80"),
            (f"{DESTINATION}-subset", "169.254.169.254:80"),
            (f"{DESTINATION}-scores", "9"),
            ("x-prefiller-host-port", "10.9.9.9:22"),
        ]
        answer = rig.ask(*post("/v1/chat/completions", chat(), headers=forged, raw=raw)).answers[0]
        (option,) = mutation_of(answer).set_headers
        assert (option.header.key, option.header.raw_value, option.append_action) == (DESTINATION, A.encode(), 2)
        assert set(mutation_of(answer).remove_headers) == {f"{DESTINATION}-scores", "x-prefiller-host-port"}

    def test_a_body_over_the_limit_is_refused_as_soon_as_it_is(self) -> None:
        rig = Rig(options=DirectorOptions(max_body=100))
        rig.endpoints(A)
        talk = rig.ask(request_headers(), request_body(b"x" * 60))
        assert not talk.answers
        talk.send(request_body(b"x" * 60))
        assert talk.status == 413
        assert talk.finished
        assert talk.send(request_body(b"x", eos=True)) == []
        assert rig.ask(*post("/any", b"x" * 100)).status == 200

    @pytest.mark.parametrize("size", [1, 100])
    def test_p14_the_limit_is_the_same_in_one_message(self, size: int) -> None:
        rig = Rig(options=DirectorOptions(max_body=100))
        rig.endpoints(A)
        for mode in (BUFFERED, None):
            assert rig.ask(*post("/any", b"x" * size, mode=mode)).destination == A
            assert rig.ask(*post("/any", b"x" * 101, mode=mode)).status == 413

    def test_what_is_no_message_is_an_error(self, rig: Rig) -> None:
        with pytest.raises(ValueError, match="not a ProcessingRequest"):
            rig.stream().exchange.receive(b"\xff\xff\xff")

    def test_scores_when_asked_for(self) -> None:
        rig = Rig(options=DirectorOptions(emit_scores=True))
        rig.endpoints(A)
        rig.read(A, waiting=0, kv_usage=0.5)
        fields = rig.ask(*post("/any", b"")).answers[0].dynamic_metadata.fields["envoy.lb"].struct_value.fields
        scores = fields[f"{DESTINATION}-scores"].struct_value.fields
        assert {address: value.number_value for address, value in scores.items()} == {A: 3.0}


class TestOtherModes:
    def test_buffered_the_pick_comes_with_the_body(self, rig: Rig) -> None:
        talk = rig.stream()
        (first,) = talk.send(request_headers(mode=BUFFERED))
        assert first.WhichOneof("choice") == "request_headers"
        assert destination_of(first) is None
        (second,) = talk.send(request_body(b'{"model":"m1"}', eos=True))
        assert destination_of(second) == A
        assert not second.request_body.response.HasField("body_mutation")
        (third,) = talk.send(response_headers())
        assert third.WhichOneof("choice") == "response_headers"
        (fourth,) = talk.send(response_body(USAGE, eos=True))
        assert not fourth.response_body.response.HasField("body_mutation")
        assert rig.value(OUTPUT) == 252

    def test_buffered_with_trailers(self, rig: Rig) -> None:
        talk = rig.ask(request_headers(mode=BUFFERED), request_body(b'{"model":"m1"}'), request_trailers())
        assert talk.kinds == ["request_headers", "request_body", "request_trailers"]
        assert talk.destination == A

    def test_where_bodies_pass_by_the_pick_is_made_on_the_headers(self, rig: Rig) -> None:
        for mode in (STREAMED, 0):
            talk = rig.stream()
            (first,) = talk.send(request_headers(mode=mode))
            assert destination_of(first) == A
        assert [a.WhichOneof("choice") for a in talk.send(request_body(b"x", eos=True))] == ["request_body"]


class TestResponse:
    def picked(self, rig: Rig, **body: Any) -> Talk:
        return rig.ask(*post("/v1/chat/completions", chat(**body)))

    def test_it_passes_unchanged_and_at_once(self, rig: Rig) -> None:
        talk = self.picked(rig, stream=True)
        (answer,) = talk.send(response_headers(content_type="text/event-stream"))
        assert not answer.response_headers.response.HasField("header_mutation")
        chunks = [random.Random(i).randbytes(i % 700 + 1) for i in range(200)]
        out = b""
        for chunk in chunks:
            answers = talk.send(response_body(chunk))
            out += b"".join(a.response_body.response.body_mutation.streamed_response.body for a in answers)
            assert out.endswith(chunk)
        assert out == b"".join(chunks)

    def test_a_large_chunk_is_split(self, rig: Rig) -> None:
        talk = self.picked(rig)
        talk.send(response_headers())
        answers = talk.send(response_body(b"x" * 130_000, eos=True))
        streamed = [a.response_body.response.body_mutation.streamed_response for a in answers]
        assert [len(s.body) for s in streamed] == [62_000, 62_000, 6_000]
        assert [s.end_of_stream for s in streamed] == [False, False, True]

    def test_p11_it_ends_by_trailers(self, rig: Rig) -> None:
        talk = self.picked(rig)
        talk.send(response_headers())
        for chunk in (USAGE[:20], USAGE[20:], b""):
            talk.send(response_body(chunk))
        assert rig.in_flight(A)[0] == 1
        (answer,) = talk.send(response_trailers())
        assert answer.WhichOneof("choice") == "response_trailers"
        self.over(rig, output=252)

    def test_p11_it_ends_with_the_headers(self, rig: Rig) -> None:
        talk = self.picked(rig)
        talk.send(response_headers(204, eos=True))
        self.over(rig, output=0)

    def test_p11_trailers_without_a_body(self, rig: Rig) -> None:
        talk = self.picked(rig)
        talk.send(response_headers())
        talk.send(response_trailers())
        self.over(rig, output=0)

    def test_p11_nothing_is_counted_twice(self, rig: Rig) -> None:
        talk = self.picked(rig)
        talk.send(response_headers())
        talk.send(response_body(USAGE, eos=True))
        talk.send(response_trailers())
        talk.close()
        self.over(rig, output=252)

    def over(self, rig: Rig, *, output: int) -> None:
        assert rig.total_in_flight() == (0, 0)
        assert rig.value(REQUESTS) == 1
        assert rig.value("llm_d_epp_request_running") == 0
        assert rig.value(OUTPUT) == output
        assert rig.value("llm_d_epp_request_duration_seconds_count") == 1
        assert rig.value("llm_d_epp_request_error_total") == 0

    def test_tokens_are_released_with_the_first_one_out(self, rig: Rig) -> None:
        talk = rig.ask(*post("/v1/completions", {"model": "m", "prompt": "x" * 4000, "stream": True}))
        assert rig.in_flight(A) == (1, 1000)
        talk.send(response_headers(content_type="text/event-stream"))
        talk.send(response_body(b": keep-alive\n\n"))
        assert rig.in_flight(A) == (1, 1000)
        rig.now += 0.5
        talk.send(response_body(b"data: {}\n\n"))
        assert rig.in_flight(A) == (1, 0)
        assert rig.value("llm_d_epp_request_ttft_seconds_sum") == 0.5

    def test_a_failed_answer_is_counted(self, rig: Rig) -> None:
        talk = self.picked(rig)
        talk.send(response_headers(503, eos=True))
        assert rig.value("llm_d_epp_request_error_total", error_code="503") == 1

    def test_a_response_without_a_request_passes(self, rig: Rig) -> None:
        talk = rig.ask(response_headers(), response_body(b"x", eos=True))
        assert talk.kinds == ["response_headers", "response_body"]

    def test_session_affinity_tells_the_client(self) -> None:
        rig = Rig(config=config("plugins: [{type: queue-scorer}, {type: session-affinity-scorer}]"))
        rig.endpoints(A, B)
        talk = rig.ask(*post("/v1/chat/completions", chat()))
        (answer,) = talk.send(response_headers())
        token = headers_of(answer.response_headers.response.header_mutation)["x-session-token"]
        talk.close()
        for _ in range(5):
            again = rig.ask(*post("/v1/chat/completions", chat(), headers=[("x-session-token", token)]))
            assert again.destination == talk.destination
            again.close()


POINTS: list[Callable[[], list[Any]]] = [
    lambda: [request_headers()],
    lambda: [request_headers(), request_body(b'{"model"')],
    lambda: post("/v1/chat/completions", chat()),
    lambda: [*post("/v1/chat/completions", chat()), response_headers()],
    lambda: [*post("/v1/chat/completions", chat()), response_headers(), response_body(b"data: {}\n\n")],
    lambda: [*post("/v1/chat/completions", chat()), response_headers(), response_body(USAGE, eos=True)],
]


class TestLeaving:
    """P17, E11: a client that leaves gives everything back, at whatever point."""

    def test_at_every_point(self) -> None:
        rig = Rig(config=config("featureGates: [flowControl]"))
        rig.endpoints(A)
        rng = random.Random(3)
        points = [point for point in POINTS for _ in range(100)]
        rng.shuffle(points)
        for point in points:
            rig.ask(*point()).close()
            assert rig.total_in_flight() == (0, 0)
        assert rig.value("llm_d_epp_request_running") == 0

    def test_while_waiting(self) -> None:
        rig = Rig(config=config("featureGates: [flowControl]"))
        rig.endpoints(A)
        rig.read(A, waiting=50, kv_usage=1.0)
        talks = [rig.ask(*post("/v1/chat/completions", chat())) for _ in range(50)]
        flow = rig.director.flow(rig.pool)
        assert flow is not None
        assert flow.requests == 50
        for talk in talks:
            assert not talk.answers
            talk.close()
        assert (flow.requests, flow.bytes) == (0, 0)
        assert rig.value("llm_d_epp_request_dropped_total", reason="rejected-context-cancelled") == 50
        assert rig.value("llm_d_epp_request_error_total", error_code="503") == 0

    def test_many_open_at_once_cut_in_any_order(self, rig: Rig) -> None:
        rng = random.Random(5)
        talks = [rig.ask(*rng.choice(POINTS)()) for _ in range(200)]
        rng.shuffle(talks)
        for talk in talks:
            talk.close()
            assert rig.pool.load.in_flight.min() >= 0
            assert rig.pool.load.in_flight_tokens.min() >= 0
        assert rig.total_in_flight() == (0, 0)

    def test_a_stream_of_an_hour_counts_until_its_end(self, rig: Rig) -> None:
        long = rig.ask(*post("/v1/chat/completions", chat(stream=True)), response_headers())
        silent = rig.ask(*post("/v1/chat/completions", chat(stream=True)), response_headers())
        for _ in range(120):
            rig.now += 30
            long.send(response_body(b"data: {}\n\n"))
            rig.read(A, waiting=0, kv_usage=0.1)
            assert rig.in_flight(A)[0] == 2
        for talk in (long, silent):
            talk.send(response_body(b"", eos=True))
        assert rig.total_in_flight() == (0, 0)

    def test_an_endpoint_that_left_meanwhile(self, rig: Rig) -> None:
        talk = rig.ask(*post("/v1/chat/completions", chat()))
        rig.endpoints(B)
        assert rig.in_flight(B) == (0, 0)
        talk.send(response_headers())
        talk.close()
        assert rig.in_flight(B) == (0, 0)


KINDS = {
    "RH": lambda: request_headers("/any"),
    "RHe": lambda: request_headers("/any", eos=True),
    "RB": lambda: request_body(b'{"model":"m1"}'),
    "RBe": lambda: request_body(b"", eos=True),
    "RT": request_trailers,
    "SH": lambda: response_headers(),
    "SHe": lambda: response_headers(eos=True),
    "SB": lambda: response_body(b"x"),
    "SBe": lambda: response_body(b"x", eos=True),
    "ST": response_trailers,
}


@settings(max_examples=300)
@given(st.lists(st.sampled_from(sorted(KINDS)), max_size=12), st.sampled_from([None, BUFFERED, STREAMED]))
def test_any_order_of_messages(kinds: list[str], mode: int | None) -> None:
    """Whatever comes, nothing is raised, the request is headed once, and nothing is held afterwards."""
    rig = Rig()
    rig.endpoints(A)
    talk = rig.stream()
    for kind in kinds:
        message = KINDS[kind]()
        if mode is not None and kind.startswith("RH"):
            message.protocol_config.request_body_mode = mode
        talk.send(message)
    assert sum(destination_of(answer) is not None for answer in talk.answers) <= 1
    assert rig.total_in_flight()[0] <= 1
    talk.close()
    assert rig.total_in_flight() == (0, 0)
    assert rig.value("llm_d_epp_request_running") == 0


LEGAL = [
    ["RHe"], ["RH", "RBe"], ["RH", "RB", "RBe"], ["RH", "RB", "RB", "RT"], ["RH", "RT"],
]  # fmt: skip
ANSWERED = [["SHe"], ["SH", "SBe"], ["SH", "SB", "SBe"], ["SH", "SB", "ST"], ["SH", "ST"]]


@pytest.mark.parametrize(("request_", "response"), list(itertools.product(LEGAL, ANSWERED)))
def test_every_legal_order(rig: Rig, request_: list[str], response: list[str]) -> None:
    talk = rig.ask(*(KINDS[kind]() for kind in [*request_, *response]))
    assert talk.destination == A
    kinds = talk.kinds
    assert kinds == sorted(kinds, key=["request_headers", "request_body", "request_trailers", "response_headers",
                                       "response_body", "response_trailers"].index)  # fmt: skip
    assert rig.total_in_flight() == (0, 0)
    assert rig.value("llm_d_epp_request_duration_seconds_count") == 1


def test_a_hint_in_the_body_message_counts(rig: Rig) -> None:
    rig.endpoints(A, B)
    last = request_body(b"{}", eos=True)
    add_subset(last, [B])
    assert rig.ask(request_headers(), last).destination == B
