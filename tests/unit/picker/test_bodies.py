"""Request bodies: what is understood, what is refused, and that a rewrite changes one value only."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.picker_rig import (
    BUFFERED,
    DESTINATION,
    A,
    B,
    Rig,
    chat,
    headers_of,
    mutation_of,
    post,
    request_body,
    request_headers,
)

from tidemill.api.inference import InferenceModelRewrite
from tidemill.picker.body import Api, BodyError, api_of, parse_body, replace_model

P01 = (
    '{"model":"food-review","prompt":"caf\\u00e9 ☃","seed":9007199254740995,"n64":18446744073709551616,'
    '"temperature":1.0,"top_p":1e0,"logit_bias":{"9":-100}}'
).encode()


def with_rewrite(rig: Rig) -> Rig:
    rig.pool.rewrites = (
        InferenceModelRewrite.parse(
            {
                "metadata": {"namespace": "ns", "name": "r"},
                "spec": {
                    "poolRef": {"name": "p"},
                    "rules": [
                        {
                            "matches": [{"model": {"type": "Exact", "value": "food-review"}}],
                            "targets": [{"modelRewrite": "food-review-v2", "weight": 1}],
                        }
                    ],
                },
            }
        ),
    )
    return rig


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.endpoints(A, B)
    return made


class TestP01:
    def test_every_other_byte_stays(self, rig: Rig) -> None:
        assert len(P01) == 153
        talk = with_rewrite(rig).ask(*post("/v1/completions", P01))
        assert talk.request_body == P01.replace(b'"food-review"', b'"food-review-v2"')
        assert len(talk.request_body) == 156
        assert "content-length" not in headers_of(mutation_of(talk.answers[0]))

    def test_only_the_outer_value(self, rig: Rig) -> None:
        body = b'{"metadata":{"model":"food-review"},"model":"food-review"}'
        talk = with_rewrite(rig).ask(*post("/v1/completions", body))
        assert talk.request_body == b'{"metadata":{"model":"food-review"},"model":"food-review-v2"}'

    def test_buffered_mode_sets_the_length_once(self, rig: Rig) -> None:
        talk = with_rewrite(rig).ask(
            *post("/v1/completions", P01, mode=BUFFERED, headers=[("content-length", "153")])
        )
        mutation = mutation_of(talk.answers[1])
        lengths = [o.header.raw_value for o in mutation.set_headers if o.header.key == "content-length"]
        assert lengths == [b"156"]
        assert len(talk.answers[1].request_body.response.body_mutation.body) == 156

    def test_an_untouched_body_sets_no_length(self, rig: Rig) -> None:
        for mode in (None, BUFFERED):
            talk = rig.ask(*post("/v1/completions", P01, mode=mode))
            for answer in talk.answers:
                if (mutation := mutation_of(answer)) is not None:
                    assert not {"content-length", "transfer-encoding"} & headers_of(mutation).keys()

    @pytest.mark.parametrize(
        "body",
        [
            b'{ "model" :\n "x" , "a":1}',
            b'{"mod\\u0065l":"x"}',
            b'{"a":"\\"model\\":\\"y\\"","model":"x"}',
            b'{"model":"y","model":"x"}',
            b'{"a":[{"model":"z"}],"b":"}","model":"x","c":{"model":"z"}}',
        ],
    )
    def test_where_the_model_is_found(self, body: bytes) -> None:
        changed = replace_model(body, "new")
        before, after = json.loads(body), json.loads(changed)
        assert before["model"] == "x"
        assert after == {**before, "model": "new"}
        assert len(changed) == len(body) + 2

    @given(
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["model", "a", 'mo"del']), inner, max_size=3)
            ),
            max_leaves=10,
        ),
        st.text(),
    )
    def test_any_document(self, value: Any, model: str) -> None:
        document = {"a": value, "model": "x", "b": value}
        for text in (json.dumps(document), json.dumps(document, ensure_ascii=False, indent=1)):
            changed = replace_model(text.encode("utf-8", "surrogatepass"), "y")
            assert json.loads(changed) == {**document, "model": "y"}


class TestP04:
    def test_what_the_engine_takes_is_taken(self, rig: Rig) -> None:
        body = {
            "model": "m1",
            "zz": {"a": [1]},
            "tools": [{"type": "function", "function": {"name": "now"}}],
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
                {"role": "user"},
                {"role": "user", "content": [{"type": "brand_new_part", "x": 1}]},
                {"role": "user", "content": []},
            ],
        }
        data = json.dumps(body).encode()
        talk = rig.ask(*post("/v1/chat/completions", data))
        assert talk.status == 200
        assert talk.request_body == data


class TestP05:
    @pytest.mark.parametrize("body", [b"{", b"nonsense", b"{}{}", b"[]", b"null", b'"x"', b"7"])
    def test_what_is_no_object(self, rig: Rig, body: bytes) -> None:
        talk = rig.ask(*post("/v1/chat/completions", body))
        assert talk.status == 400
        assert len(talk.refusal.body) <= 256
        if len(body) > 4:
            assert body not in talk.refusal.body
        assert rig.ask(*post("/v1/chat/completions", chat())).status == 200

    @pytest.mark.parametrize("model", [7, {}, [], True])
    def test_a_model_that_is_no_string_is_named(self, rig: Rig, model: Any) -> None:
        talk = rig.ask(*post("/v1/chat/completions", {"model": model, "messages": []}))
        assert talk.status == 400
        assert b"model: must be a string" in talk.refusal.body

    @pytest.mark.parametrize(
        "body", [{"messages": []}, {"model": None, "messages": []}, {"model": "", "messages": []}]
    )
    def test_no_model_is_the_engines_matter(self, rig: Rig, body: Any) -> None:
        assert rig.ask(*post("/v1/chat/completions", body)).status == 200

    @pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 2_000])
    def test_depth_is_refused(self, rig: Rig, body: bytes) -> None:
        assert rig.ask(*post("/v1/chat/completions", body)).status == 400

    def test_depth_900_is_fine(self, rig: Rig) -> None:
        body = b'{"model":"m","a":' + b"[" * 900 + b"]" * 900 + b"}"
        assert rig.ask(*post("/v1/chat/completions", body)).status == 200

    @pytest.mark.parametrize(
        "body",
        [
            b'{"model":"m1","messages":[{"role":"user","content":"\\ud800"}]}',
            b'{"model":"m1\xff","messages":[]}',
            '{"model":"m1"}'.encode("utf-16"),
            b"\xef\xbb\xbf" + b'{"model":"m1","messages":[]}',
            b'{"t":NaN,"model":"m1","messages":[]}',
            b'{"t":1e400,"model":"m1","messages":[]}',
        ],
    )
    def test_oddities_never_are_our_fault(self, rig: Rig, body: bytes) -> None:
        assert rig.ask(*post("/v1/chat/completions", body)).status in (200, 400)

    def test_the_last_of_two_models_counts_everywhere(self, rig: Rig) -> None:
        body = b'{"model":"m1","model":"food-review","messages":[]}'
        talk = with_rewrite(rig).ask(*post("/v1/chat/completions", body))
        assert talk.request_body == b'{"model":"m1","model":"food-review-v2","messages":[]}'
        assert (
            rig.value("llm_d_epp_request_total", model_name="food-review", target_model_name="food-review-v2") == 1
        )

    def test_both_forms_of_no_body_get_a_pick(self, rig: Rig) -> None:
        one = rig.ask(request_headers(eos=True, headers=[("content-length", "0")]))
        other = rig.ask(request_headers(), request_body(b"", eos=True))
        assert one.status == other.status == 200
        assert other.kinds == ["request_headers", "request_body"]


class TestP06:
    GZIP = bytes.fromhex(
        "1f8b0800000000000203ab56cacd4f49cd51b252ca3554d2512a28cacf2d2801f23232956a01b0a67c721c000000"
    )

    def test_gzip_is_read_and_passed_as_it_came(self, rig: Rig) -> None:
        talk = rig.ask(*post("/v1/completions", self.GZIP, headers=[("content-encoding", "gzip")]))
        assert talk.status == 200
        assert talk.request_body == self.GZIP
        assert rig.value("llm_d_epp_request_total", model_name="m1") == 1

    @pytest.mark.parametrize("encoding", ["zstd", "br", "gzip"])
    def test_unknown_bytes_pass(self, rig: Rig, encoding: str) -> None:
        talk = rig.ask(*post("/v1/completions", b"\x28\xb5\x2f\xfd", headers=[("content-encoding", encoding)]))
        assert (talk.status, talk.request_body) == (200, b"\x28\xb5\x2f\xfd")

    def test_a_bomb_is_not_unpacked(self, rig: Rig) -> None:
        bomb = gzip.compress(bytes(200 * 2**20), compresslevel=9)
        assert len(bomb) < 300_000
        talk = rig.ask(*post("/v1/completions", bomb, headers=[("content-encoding", "gzip")]))
        assert (talk.status, talk.request_body) == (200, bomb)

    def test_a_rewritten_body_is_not_labelled_gzip(self, rig: Rig) -> None:
        talk = with_rewrite(rig).ask(
            *post("/v1/completions", gzip.compress(P01), headers=[("content-encoding", "gzip")])
        )
        assert talk.request_body == P01.replace(b'"food-review"', b'"food-review-v2"')
        assert "content-encoding" in mutation_of(talk.answers[0]).remove_headers


def test_p07_multipart_passes(rig: Rig) -> None:
    body = (
        b'--XBOUND\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
        b'--XBOUND\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
        b"RIFF\x00\xff\xfe\r\n--XBOUN\x00\r\n--XBOUND--\r\n"
    )
    headers = [("content-type", "multipart/form-data; boundary=XBOUND")]
    for path in ("/v1/audio/transcriptions", "/v1/completions"):
        talk = rig.ask(request_headers(path, headers=headers))
        cut = [0, body.index(b"--XBOUN\x00") + 3, body.index(b"--XBOUND--") + 5, len(body)]
        for start, end in itertools.pairwise(cut):
            talk.send(request_body(body[start:end], eos=end == len(body)))
        assert hashlib.sha256(talk.request_body).digest() == hashlib.sha256(body).digest()
        assert talk.status == 200


class TestP08:
    @pytest.mark.parametrize(
        ("path", "api"),
        [
            ("/v1/completions", Api.COMPLETIONS),
            ("/v1/completions?trace=1", Api.COMPLETIONS),
            ("/v1/completions/", Api.COMPLETIONS),
            ("/team-a/v1/completions", Api.COMPLETIONS),
            ("/v1/chat/completions", Api.CHAT),
            ("/v1/completions/render", None),
            ("/xv1/completions", None),
            ("/tokenize", None),
            ("", None),
            ("/" + "x" * 8192, None),
        ],
    )
    def test_paths(self, rig: Rig, path: str, api: Api | None) -> None:
        assert api_of(path) == api
        assert rig.ask(*post(path, b"\x00\x01\x02" if api is None else b"{}")).status == 200

    @pytest.mark.parametrize(
        ("method", "path"), [("GET", "/v1/models"), ("HEAD", "/health"), ("OPTIONS", "/v1/completions")]
    )
    def test_without_a_body_the_answer_comes_at_once(self, rig: Rig, method: str, path: str) -> None:
        talk = rig.stream()
        (answer,) = talk.send(request_headers(path, method=method, eos=True))
        assert headers_of(mutation_of(answer))[DESTINATION] in (A, B)


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/chat/completions", chat("hello"), b"userhello"),
        ("/v1/chat/completions", chat([{"type": "text", "text": "hello"}]), b"userhello"),
        ("/v1/responses", {"model": "m", "instructions": "be", "input": "hello"}, b"behello"),
        ("/v1/messages", {**chat("hello"), "system": "be"}, b"beuserhello"),
        ("/v1/embeddings", {"model": "m", "input": ["a", "b"]}, b"a|b"),
    ],
)  # fmt: skip
def test_what_affinity_sees(path: str, body: Any, text: bytes) -> None:
    parsed = parse_body(json.dumps(body).encode(), api_of(path), {})
    assert b"|".join(parsed.prompt.chains) == text


def test_images_make_a_request_multimodal() -> None:
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "tools": [{"name": "x"}]}
    assert parse_body(json.dumps(body).encode(), Api.CHAT, {}).multimodal
    assert not parse_body(json.dumps({**body, "messages": []}).encode(), Api.CHAT, {}).multimodal


@given(st.binary(max_size=200), st.sampled_from(list(Api)), st.sampled_from(["", "gzip", "identity", "deflate"]))
def test_any_bytes(body: bytes, api: Api, encoding: str) -> None:
    with contextlib.suppress(BodyError):
        parse_body(body, api, {"content-encoding": encoding})
