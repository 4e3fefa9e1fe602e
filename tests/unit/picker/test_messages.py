"""Bodies read by hand: the same as protobuf reads, or not at all."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from tidemill.picker.extproc.messages import REQUEST_BODY_FIELD, RESPONSE_BODY_FIELD, plain_body
from tidemill.picker.extproc.protos import ProcessingRequest

FIELDS = {"request_body": REQUEST_BODY_FIELD, "response_body": RESPONSE_BODY_FIELD}
chunks = st.binary(max_size=300) | st.sampled_from([b"\x10\x01", b"x\x10\x01", b"\x10", bytes(70_000), bytes(126)])


def message(field: str, chunk: bytes, ends: bool) -> bytes:
    made = ProcessingRequest()
    body = getattr(made, field)
    body.SetInParent()
    body.body = chunk
    body.end_of_stream = ends
    return made.SerializeToString()


@given(st.sampled_from(sorted(FIELDS)), chunks, st.booleans())
@example("response_body", b"\x10\x01", True)
@example("response_body", b"\x10\x01", False)
@example("request_body", b"", True)
@example("request_body", b"", False)
def test_a_body_alone_is_read(field: str, chunk: bytes, ends: bool) -> None:
    assert plain_body(message(field, chunk, ends)) == (FIELDS[field], chunk, ends)


@given(st.sampled_from(sorted(FIELDS)), chunks, st.booleans())
def test_a_body_with_company_is_left_to_protobuf(field: str, chunk: bytes, ends: bool) -> None:
    made = ProcessingRequest.FromString(message(field, chunk, ends))
    made.attributes["envoy.filters.http.ext_proc"].fields["x"].string_value = "y"
    assert plain_body(made.SerializeToString()) is None


@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda rest: b"\x22" + rest), st.data())
def test_what_is_read_is_what_protobuf_reads(data: bytes, drawn: st.DataObject) -> None:
    if drawn.draw(st.booleans()):
        whole = message("response_body", data, True)
        data = whole[: drawn.draw(st.integers(0, len(whole)))]
    found = plain_body(data)
    if found is None:
        return
    try:
        parsed = ProcessingRequest.FromString(data)
    except DecodeError:
        pytest.fail(f"{data!r} is no message, and was read as {found}")
    body = parsed.request_body if found[0] == REQUEST_BODY_FIELD else parsed.response_body
    assert (body.body, body.end_of_stream) == found[1:]
    assert parsed.WhichOneof("request") == ("request_body" if found[0] == REQUEST_BODY_FIELD else "response_body")
