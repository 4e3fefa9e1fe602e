"""What Envoy says, read from the wire by hand.

There are six messages in a request, and a tree of protobuf's objects for each cost as much as the rest of what is
done with it. Only what is free in form (metadata, attributes) is left to protobuf, and read when it is asked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from google.protobuf.message import DecodeError

from tidemill.api.wire import BYTES, NUMBER, field
from tidemill.picker.extproc.protos import Message, Metadata, ProcessingRequest

# Fields of ProcessingRequest: what a message may be about, and what comes with it.
REQUEST_HEADERS: Final = 2
RESPONSE_HEADERS: Final = 3
REQUEST_BODY: Final = 4
RESPONSE_BODY: Final = 5
REQUEST_TRAILERS: Final = 6
RESPONSE_TRAILERS: Final = 7
_METADATA_CONTEXT: Final = 8
_ATTRIBUTES: Final = 9
_PROTOCOL_CONFIG: Final = 11


class Incoming:
    """One ProcessingRequest. `about` is one of the fields above, 0 for one that is not known here; `ends` is its
    end_of_stream. `metadata` is a serialised Metadata as it came; `modes` are those of bodies, the request's and
    the response's, when the message says them."""

    __slots__ = ("_data", "about", "body", "ends", "has_attributes", "headers", "metadata", "modes")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.about = 0
        self.headers: dict[str, bytes] = {}
        self.body = b""
        self.ends = False
        self.metadata = b""
        self.has_attributes = False
        self.modes: tuple[int, int] | None = None

    def attributes(self) -> list[tuple[str, str]]:
        """Expression and text of each attribute; empty where it is no text."""
        if not self.has_attributes:
            return []
        try:
            spaces = ProcessingRequest.FromString(self._data).attributes.values()
        except DecodeError as error:
            raise ValueError(f"not a ProcessingRequest: {error}") from None
        return [(expression, value.string_value) for space in spaces for expression, value in space.fields.items()]


def read(data: bytes) -> Incoming:
    """A serialised ProcessingRequest. Raises ValueError when it is none. Of a field that comes twice, which no
    encoder writes, the last counts."""
    found = Incoming(data)
    position, end = 0, len(data)
    try:
        while position < end:
            tag, start, position = field(data, position, end)
            if tag & 7 != BYTES:
                continue
            number = tag >> 3
            if number in (REQUEST_BODY, RESPONSE_BODY):
                found.about = number
                found.body, found.ends = _body(data, start, position)
            elif number in (REQUEST_HEADERS, RESPONSE_HEADERS):
                found.about = number
                found.headers, found.ends = _http_headers(data, start, position)
            elif number in (REQUEST_TRAILERS, RESPONSE_TRAILERS):
                found.about = number
            elif number == _METADATA_CONTEXT:
                found.metadata = data[start:position]
            elif number == _ATTRIBUTES:
                found.has_attributes = True
            elif number == _PROTOCOL_CONFIG:
                found.modes = _modes(data, start, position)
    except (ValueError, IndexError) as error:
        raise ValueError(f"not a ProcessingRequest: {error}") from None
    return found


def _body(data: bytes, position: int, end: int) -> tuple[bytes, bool]:
    """HttpBody."""
    body, ends = b"", False
    while position < end:
        tag, start, position = field(data, position, end)
        if tag == 1 << 3 | BYTES:
            body = data[start:position]
        elif tag == 2 << 3 | NUMBER:
            ends = start != 0
    return body, ends


def _http_headers(data: bytes, position: int, end: int) -> tuple[dict[str, bytes], bool]:
    """HttpHeaders."""
    headers: dict[str, bytes] = {}
    ends = False
    while position < end:
        tag, start, position = field(data, position, end)
        if tag == 1 << 3 | BYTES:
            within = start
            while within < position:
                inner, start, within = field(data, within, position)
                if inner == 1 << 3 | BYTES:
                    _header(data, start, within, headers)
        elif tag == 3 << 3 | NUMBER:
            ends = start != 0
    return headers, ends


def _header(data: bytes, position: int, end: int, into: dict[str, bytes]) -> None:
    """HeaderValue: its value is in one of two fields."""
    key, value, raw = "", b"", b""
    while position < end:
        tag, start, position = field(data, position, end)
        if tag == 1 << 3 | BYTES:
            key = data[start:position].decode()
        elif tag == 2 << 3 | BYTES:
            value = data[start:position]
        elif tag == 3 << 3 | BYTES:
            raw = data[start:position]
    into[key] = raw or value


def _modes(data: bytes, position: int, end: int) -> tuple[int, int]:
    """ProtocolConfiguration."""
    request = response = 0
    while position < end:
        tag, value, position = field(data, position, end)
        if tag == 1 << 3 | NUMBER:
            request = value
        elif tag == 2 << 3 | NUMBER:
            response = value
    return request, response


# Metadata is the same for many messages: that of an answer names the endpoint, and a gateway has few subsets.


@lru_cache(maxsize=2048)
def text_in(metadata: bytes, namespace: str, name: str) -> str:
    """A text in serialised metadata; empty where there is none."""
    value = _value(metadata, namespace, name)
    return "" if value is None else value.string_value


@lru_cache(maxsize=64)
def addresses_in(metadata: bytes, namespace: str, name: str) -> tuple[str, ...] | None:
    """A list of addresses in serialised metadata, written as a list or with commas; None where there is none."""
    value = _value(metadata, namespace, name)
    kind = None if value is None else value.WhichOneof("kind")
    if value is None or kind is None or kind == "null_value":
        return None
    if kind == "string_value":
        return tuple(part for part in value.string_value.split(",") if part.strip())
    if kind == "list_value":
        # What is no text is no address: it matches nothing, but it does not lift the restriction.
        return tuple(v.string_value for v in value.list_value.values if v.string_value)
    return ()


def _value(metadata: bytes, namespace: str, name: str) -> Message | None:
    try:
        namespaces = Metadata.FromString(metadata).filter_metadata
    except DecodeError as error:
        raise ValueError(f"not a ProcessingRequest: metadata: {error}") from None
    if namespace not in namespaces:
        return None
    fields = namespaces[namespace].fields
    return fields.get(name)
