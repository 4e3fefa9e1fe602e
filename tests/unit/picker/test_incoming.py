"""Messages of Envoy read by hand: the same as protobuf reads."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from tidemill.picker.extproc import incoming
from tidemill.picker.extproc.protos import ProcessingRequest

HINT, KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
ABOUT = {
    "request_headers": incoming.REQUEST_HEADERS,
    "response_headers": incoming.RESPONSE_HEADERS,
    "request_body": incoming.REQUEST_BODY,
    "response_body": incoming.RESPONSE_BODY,
    "request_trailers": incoming.REQUEST_TRAILERS,
    "response_trailers": incoming.RESPONSE_TRAILERS,
}
chunks = st.binary(max_size=300) | st.sampled_from(
    [b"\x10\x01", b"x\x10\x01", b"B\x00", bytes(70_000), bytes(127)]
)
names = st.text(max_size=12) | st.sampled_from([":path", "content-type", "x" * 200])
pairs = st.lists(st.tuples(names, chunks, st.booleans()), max_size=6)


@st.composite
def messages(draw: st.DrawFn) -> Any:
    """Any message that a gateway may send, with or without what may come with it."""
    message = ProcessingRequest()
    about = draw(st.sampled_from(sorted(ABOUT)))
    part = getattr(message, about)
    part.SetInParent()
    if about.endswith("body"):
        part.body = draw(chunks)
        part.end_of_stream = draw(st.booleans())
    elif about.endswith("headers"):
        for key, value, raw in draw(pairs):
            part.headers.headers.add(key=key, **{"raw_value" if raw else "value": value})
        part.end_of_stream = draw(st.booleans())
    if draw(st.booleans()):
        message.metadata_context.SetInParent()
        for address in draw(st.lists(st.text(max_size=10), max_size=2)):
            message.metadata_context.filter_metadata[HINT].fields[KEY].list_value.values.add(string_value=address)
    if draw(st.booleans()):
        message.attributes["envoy.filters.http.ext_proc"].fields["upstream.address"].string_value = draw(names)
    if draw(st.booleans()):
        message.protocol_config.request_body_mode = draw(st.integers(0, 5))
        message.protocol_config.response_body_mode = draw(st.integers(0, 5))
    return message


def agrees(found: incoming.Incoming, message: Any) -> None:
    about = message.WhichOneof("request")
    assert found.about == ABOUT.get(about, 0)
    part = getattr(message, about) if about else None
    if about in ("request_body", "response_body"):
        assert (found.body, found.ends) == (part.body, part.end_of_stream)
    elif about in ("request_headers", "response_headers"):
        assert found.headers == {h.key: h.raw_value or h.value for h in part.headers.headers}
        assert found.ends == part.end_of_stream
    assert found.metadata == message.metadata_context.SerializeToString()
    config = message.protocol_config
    modes = (config.request_body_mode, config.response_body_mode) if message.HasField("protocol_config") else None
    assert found.modes == modes
    fields = [field for space in message.attributes.values() for field in space.fields.items()]
    assert found.attributes() == [(name, value.string_value) for name, value in fields]


@given(messages())
def test_a_message_is_read(message: Any) -> None:
    agrees(incoming.read(message.SerializeToString()), message)


@given(messages(), st.data())
def test_a_message_that_is_cut_off_is_an_error(message: Any, data: st.DataObject) -> None:
    """Unless it ends between two of its fields, where it is another message."""
    whole = message.SerializeToString()
    part = whole[: data.draw(st.integers(0, len(whole)))]
    try:
        expected = ProcessingRequest.FromString(part)
    except DecodeError:
        with pytest.raises(ValueError, match="not a ProcessingRequest"):
            incoming.read(part)
    else:
        agrees(incoming.read(part), expected)


@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda rest: bytes((0x12, len(rest))) + rest))
@example(b"\x12\x02\x0a\x7f")  # the inner length reaches beyond the outer one
@example(b"\x23")  # a group
@example(b"\xff" * 11)
def test_nothing_but_a_value_error_comes_of_anything_else(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        found = incoming.read(data)
        found.attributes()
        incoming.addresses_in(found.metadata, HINT, KEY)


def test_fields_that_are_not_known_are_passed_over() -> None:
    message = ProcessingRequest()
    message.request_body.body = b"x"
    unknown = b"\x50\x01" + b"\x81\x01" + bytes(8) + b"\x85\x01" + bytes(4) + b"\x8a\x01\x03abc"
    agrees(incoming.read(unknown + message.SerializeToString() + unknown), message)
