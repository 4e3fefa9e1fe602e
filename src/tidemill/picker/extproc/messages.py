"""ext_proc answers as bytes. Those that every request needs are constants or cached; the bodies that pass through
are framed by hand, because a message object for each chunk costs more than all the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import orjson

from tidemill.picker.extproc.protos import OVERWRITE_IF_EXISTS_OR_ADD, Message, ProcessingResponse

DESTINATION = "x-gateway-destination-endpoint"
SCORES = "x-gateway-destination-endpoint-scores"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
METADATA = "envoy.lb"
SUBSET_METADATA = "envoy.lb.subset_hint"
DROP_REASON = "x-llm-d-request-dropped-reason"
# What only the platform may say. The destination is overwritten, so it needs no removal.
CLIENT_MAY_NOT_SEND = (
    SCORES,
    SERVED,
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
)
CHUNK_LIMIT = 62_000  # bytes; Envoy refuses streamed body answers above 64 KiB less what frames them


def _plain(field: str) -> bytes:
    message = ProcessingResponse()
    getattr(message, field).SetInParent()
    return message.SerializeToString()


REQUEST_HEADERS = _plain("request_headers")
REQUEST_BODY = _plain("request_body")
REQUEST_TRAILERS = _plain("request_trailers")
RESPONSE_HEADERS = _plain("response_headers")
RESPONSE_BODY = _plain("response_body")
RESPONSE_TRAILERS = _plain("response_trailers")


@lru_cache(maxsize=8192)
def pick_on_headers(
    destination: str, headers: tuple[tuple[str, str], ...] = (), remove: tuple[str, ...] = (), scores: bytes = b""
) -> bytes:
    """The answer to request headers that names the destination, in header and metadata alike."""
    message = ProcessingResponse()
    common = message.request_headers.response
    _mutate(common.header_mutation, destination, headers, remove)
    common.clear_route_cache = True
    _say(message, destination, scores)
    return message.SerializeToString()


def pick_on_body(
    destination: str,
    headers: tuple[tuple[str, str], ...],
    remove: tuple[str, ...],
    body: bytes | None,
    scores: bytes = b"",
) -> bytes:
    """The same as the answer to a buffered body, with the body where it changes."""
    message = ProcessingResponse()
    common = message.request_body.response
    if body is not None:
        headers = (*headers, ("content-length", str(len(body))))
        common.body_mutation.body = body
    _mutate(common.header_mutation, destination, headers, remove)
    common.clear_route_cache = True
    _say(message, destination, scores)
    return message.SerializeToString()


@lru_cache(maxsize=1024)
def response_headers(headers: tuple[tuple[str, str], ...]) -> bytes:
    """The answer to response headers that sets some more."""
    message = ProcessingResponse()
    for name, value in headers:
        _set(message.response_headers.response.header_mutation, name, value)
    return message.SerializeToString()


def immediate(status: int, message: str, *, reason: str = "") -> bytes:
    """An answer instead of the server's, in the form that OpenAI's clients read."""
    body = orjson.dumps({"error": {"message": message, "type": _error_type(status), "code": status}})
    response = _immediate(status, body)
    answer = response.immediate_response
    answer.details = reason or f"tidemill_{status}"
    if reason:
        _set(answer.headers, DROP_REASON, reason)
    return response.SerializeToString()


def immediate_json(body: bytes) -> bytes:
    """A good answer of the picker's own."""
    return _immediate(200, body).SerializeToString()


def _immediate(status: int, body: bytes) -> Message:
    response = ProcessingResponse()
    response.immediate_response.status.code = status
    response.immediate_response.body = body
    _set(response.immediate_response.headers, "content-type", "application/json")
    return response


def streamed_request_body(body: bytes, *, end_of_stream: bool) -> Iterable[bytes]:
    """A whole request body as streamed answers, the last one with `end_of_stream` as given."""
    return _in_chunks(3, body, end_of_stream)


def streamed_response_body(chunk: bytes, *, end_of_stream: bool) -> Iterable[bytes]:
    """A chunk of the response as it came."""
    return _in_chunks(4, chunk, end_of_stream)


def _in_chunks(field: int, body: bytes, end_of_stream: bool) -> Iterable[bytes]:
    if len(body) <= CHUNK_LIMIT:
        return (_streamed(field, body, end_of_stream),)
    view = memoryview(body)
    return [
        _streamed(field, view[start : start + CHUNK_LIMIT], end_of_stream and start + CHUNK_LIMIT >= len(body))
        for start in range(0, len(body), CHUNK_LIMIT)
    ]


def _streamed(field: int, chunk: bytes | memoryview, end_of_stream: bool) -> bytes:
    return b"".join((_before_chunk(field, len(chunk), end_of_stream), chunk, _END if end_of_stream else b""))


_END = b"\x10\x01"  # end_of_stream: true


@lru_cache(maxsize=4096)
def _before_chunk(field: int, size: int, end_of_stream: bool) -> bytes:
    """What stands before a chunk of `size` bytes in ProcessingResponse{field: BodyResponse{response:
    CommonResponse{body_mutation: BodyMutation{streamed_response: StreamedBodyResponse{body, end_of_stream}}}}}."""
    head = b"\x0a" + _varint(size) if size else b""
    length = len(head) + size + (len(_END) if end_of_stream else 0)
    # From the inside out: streamed_response 3, body_mutation 3, response 1, then the field itself.
    for tag in (0x1A, 0x1A, 0x0A, field << 3 | 2):
        prefix = bytes((tag,)) + _varint(length)
        head = prefix + head
        length += len(prefix)
    return head


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _mutate(
    mutation: Message, destination: str, headers: Iterable[tuple[str, str]], remove: Iterable[str]
) -> None:
    _set(mutation, DESTINATION, destination)
    for name, value in headers:
        _set(mutation, name, value)
    mutation.remove_headers.extend(remove)


def _set(mutation: Message, name: str, value: str) -> None:
    option = mutation.set_headers.add()
    option.header.key = name
    option.header.raw_value = value.encode()
    option.append_action = OVERWRITE_IF_EXISTS_OR_ADD


def _say(message: Message, destination: str, scores: bytes) -> None:
    fields = message.dynamic_metadata.fields[METADATA].struct_value.fields
    fields[DESTINATION].string_value = destination
    if scores:
        numbers: Mapping[str, float] = orjson.loads(scores)
        for address, score in numbers.items():
            fields[SCORES].struct_value.fields[address].number_value = score


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_exceeded"
    return "invalid_request_error" if status < 500 else "service_unavailable" if status == 503 else "server_error"
