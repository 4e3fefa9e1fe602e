"""What Envoy sends of one request, serialised."""

from __future__ import annotations

import orjson

from benchmarks.backend import ANSWER
from tidemill.picker.extproc.protos import ProcessingRequest

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
    """Headers and body of a request."""
    head, body = ProcessingRequest(), ProcessingRequest()
    for key, value in _HEADERS.items():
        head.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    body.request_body.body = completion(prompt.decode())
    body.request_body.end_of_stream = True
    return [head.SerializeToString(), body.SerializeToString()]


def answered() -> list[bytes]:
    """Headers and body of its answer."""
    head, body = ProcessingRequest(), ProcessingRequest()
    for key, value in ((":status", "200"), ("content-type", "application/json"), ("content-length", "73")):
        head.response_headers.headers.headers.add(key=key, raw_value=value.encode())
    body.response_body.body = ANSWER
    body.response_body.end_of_stream = True
    return [head.SerializeToString(), body.SerializeToString()]
