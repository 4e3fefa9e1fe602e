"""What Envoy sends of one request, serialised."""

from __future__ import annotations

import orjson

from benchmarks.backend import ANSWER
from tidemill.picker.extproc.messages import DESTINATION, METADATA
from tidemill.picker.extproc.protos import Mode, ProcessingRequest

_HEADERS = {
    ":method": "POST", ":path": "/v1/completions", ":scheme": "http", ":authority": "gateway.example:8080",
    "content-type": "application/json", "user-agent": "openai-python/1.50", "accept": "application/json",
    "accept-encoding": "gzip, deflate", "authorization": "Bearer x" * 6, "x-forwarded-proto": "http",
    "x-request-id": "0f9a6a0e-7a8a-4a5e-9a51-7a1c5be9cf9c", "x-stainless-lang": "python",
    "x-stainless-os": "Linux",
}  # fmt: skip


def completion(prompt: str) -> bytes:
    return orjson.dumps({"model": "meta-llama/Llama-3.1-8B-Instruct", "max_tokens": 64, "prompt": prompt})


def asked(prompt: bytes) -> list[bytes]:
    """Headers, body and end of a request. Envoy says how it sends bodies once, and its metadata each time."""
    head, body, end = ProcessingRequest(), ProcessingRequest(), ProcessingRequest()
    for key, value in _HEADERS.items():
        head.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    head.protocol_config.request_body_mode = head.protocol_config.response_body_mode = Mode.FULL_DUPLEX_STREAMED
    body.request_body.body = completion(prompt.decode())
    end.request_body.end_of_stream = True
    messages = [head, body, end]
    for message in messages:
        message.metadata_context.SetInParent()
    return [message.SerializeToString() for message in messages]


def answered() -> list[bytes]:
    """Headers, body and end of its answer, with the pick that Envoy remembers."""
    head, body, end = ProcessingRequest(), ProcessingRequest(), ProcessingRequest()
    for key, value in ((":status", "200"), ("content-type", "application/json"), ("content-length", "73")):
        head.response_headers.headers.headers.add(key=key, raw_value=value.encode())
    body.response_body.body = ANSWER
    end.response_body.end_of_stream = True
    messages = [head, body, end]
    for message in messages:
        fields = message.metadata_context.filter_metadata[METADATA].fields
        fields[DESTINATION].string_value = "10.0.0.10:8000"
    return [message.SerializeToString() for message in messages]
