"""Token counts of answers, however they are cut."""

from __future__ import annotations

import gzip
import hashlib
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.picker_rig import A, Rig, chat, post, response_body, response_headers, response_trailers

from tidemill.picker.usage import Usage, UsageReader

LINES = [
    ": keep-alive",
    'data: {"id":"c1","choices":[],"usage":{"prompt_tokens":11,"completion_tokens":4}}',
    'data: {"id":"c1","choices":[{"index":0,"delta":{"content":"☃"}}]}',
    'data: {"id":"c1","choices":[],"usage":{"prompt_tokens":11,"completion_tokens":252}}',
    "data: [DONE]",
]
P15 = "".join(line + "\r\n\r\n" for line in LINES).encode()


def read(chunks: list[bytes], *, content_type: str = "text/event-stream") -> UsageReader:
    reader = UsageReader(content_type=content_type, content_encoding="", streaming=True)
    for chunk in chunks:
        reader.feed(chunk)
    return reader


class TestP15:
    def test_the_input_is_the_one_of_the_case(self) -> None:
        assert len(P15) == 275
        assert hashlib.sha256(P15).hexdigest().startswith("b32edc71a229d9f6")

    @pytest.mark.parametrize("cuts", [[], [161, 251], list(range(1, 275))])
    def test_cut_anywhere(self, cuts: list[int], capsys: pytest.CaptureFixture[str]) -> None:
        rig = Rig()
        rig.endpoints(A)
        capsys.readouterr()
        talk = rig.ask(*post("/v1/chat/completions", chat(stream=True)))
        talk.send(response_headers(content_type="text/event-stream"))
        out = b""
        places = [0, *cuts, len(P15)]
        for start, end in itertools.pairwise(places):
            (answer,) = talk.send(response_body(P15[start:end], eos=end == len(P15)))
            out += answer.response_body.response.body_mutation.streamed_response.body
        assert out == P15
        assert rig.value("llm_d_epp_request_input_tokens_sum") == 11
        assert rig.value("llm_d_epp_request_output_tokens_sum") == 252
        assert not capsys.readouterr().out

    @pytest.mark.parametrize(
        "text", [P15.replace(b"\r\n", b"\n"), P15[:-2], P15.removesuffix(b"data: [DONE]\r\n\r\n")]
    )
    def test_other_line_ends_and_ends(self, text: bytes) -> None:
        rig = Rig()
        rig.endpoints(A)
        talk = rig.ask(*post("/v1/chat/completions", chat(stream=True)))
        talk.send(response_headers(content_type="text/event-stream"))
        talk.send(response_body(text))
        talk.send(response_trailers())
        assert rig.value("llm_d_epp_request_output_tokens_sum") == 252

    @given(st.lists(st.integers(0, 275), max_size=12))
    def test_every_cut(self, cuts: list[int]) -> None:
        places = [0, *sorted(cuts), len(P15)]
        reader = read([P15[a:b] for a, b in itertools.pairwise(places)])
        assert reader.finish() == Usage(11, 252)

    def test_the_first_token_is_the_first_data(self) -> None:
        reader = read([b": keep-alive\r\n\r\n"])
        assert not reader.begun
        reader.feed(b"data: {}\r\n")
        assert reader.begun

    def test_a_line_without_end_takes_no_memory(self) -> None:
        reader = read([b"data: " + b"x" * 65_536] + [b"x" * 65_536] * 100)
        assert len(reader._rest) <= 2**18 + 65_536
        reader.feed(b'"}\n\ndata: {"usage":{"completion_tokens":5}}\n\n')
        assert reader.finish() == Usage(None, 5)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (['data:{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}', "data:[DONE]"], Usage(3, 7)),
        (
            [
                "event: message_start",
                'data: {"type":"message_start","message":{"usage":{"input_tokens":25,"output_tokens":1}}}',
                "event: message_delta",
                'data: {"type":"message_delta","usage":{"output_tokens":15}}',
            ],
            Usage(25, 15),
        ),
        (
            ['data: {"type":"response.completed","response":{"usage":{"input_tokens":9,"output_tokens":4}}}'],
            Usage(9, 4),
        ),
        (['data: {"choices":[{"delta":{"content":"x"}}]}', "data: [DONE]"], Usage()),
        (['data: {"usage":null}'], Usage()),
        (['data: {"choices":[{"delta":{"content":"\\"usage\\": 5"}}]}'], Usage()),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_e12_dialects(events: list[str], expected: Usage, newline: str) -> None:
    text = "".join(event + newline * 2 for event in events).encode()
    for cut in range(0, len(text), 3):
        assert read([text[:cut], text[cut:]]).finish() == expected


class TestP16:
    @pytest.mark.parametrize(
        "usage",
        ['["x"]', '{"prompt_tokens":"77"}', '{"completion_tokens":true}', '{"prompt_tokens":-1}',
         '{"prompt_tokens":1e308}', '{"prompt_tokens_details":7}'],
    )  # fmt: skip
    def test_a_wrong_type_counts_nothing_and_is_said_once(
        self, usage: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rig = Rig()
        rig.endpoints(A)
        capsys.readouterr()
        body = f'{{"usage":{usage}}}'.encode()
        for _ in range(3):
            self.answer(rig, body)
        assert capsys.readouterr().out.count("usage that is no count") == 1
        assert rig.value("llm_d_epp_request_input_tokens_sum") == 0
        assert rig.value("llm_d_epp_request_output_tokens_sum") == 0

    @pytest.mark.parametrize("body", [b'{"usage":null}', b"<html>", b'{"usage":', gzip.compress(b"{}", mtime=0)])
    def test_what_cannot_be_read_counts_nothing(self, body: bytes) -> None:
        rig = Rig()
        rig.endpoints(A)
        self.answer(rig, body, encoding="gzip" if body.startswith(b"\x1f") else "")
        assert rig.value("llm_d_epp_request_output_tokens_count") == 0

    def test_50_megabytes_are_not_kept(self) -> None:
        reader = UsageReader(content_type="application/json", content_encoding="", streaming=False)
        for _ in range(50):
            reader.feed(b"x" * 2**20)
        assert not reader._chunks
        assert reader.finish() == Usage()

    def answer(self, rig: Rig, body: bytes, **more: Any) -> None:
        talk = rig.ask(*post("/v1/chat/completions", chat()), response_headers(**more))
        (answer,) = talk.send(response_body(body, eos=True))
        assert answer.response_body.response.body_mutation.streamed_response.body == body
        assert rig.total_in_flight() == (0, 0)


def test_cached_tokens_are_read() -> None:
    body = b'{"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}'
    assert read([body], content_type="application/json").finish() == Usage(9, 1, 4)
