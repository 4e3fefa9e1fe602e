"""Request bodies: what affinity and routing need of them, and the one change that is made to them.

Nothing is validated beyond what is read: the engine knows its API better, and newer versions of it, than a
picker can.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from tidemill.picker.scheduling.cycle import HeaderLookup
from tidemill.picker.scheduling.prefix import NO_PROMPT, Prompt

_DECODED_LIMIT = 4 * 2**20  # bytes that are decompressed for affinity
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"\s*:\s*")


class Api(StrEnum):
    """APIs whose bodies are understood, by the end of their path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    EMBEDDINGS = "/v1/embeddings"
    MESSAGES = "/v1/messages"


class ParsedBody(NamedTuple):
    """`model` is empty when the body names none (the engine may have a default). `raw` is the body that the
    model can be replaced in: the one that came, or its decompressed form; None when it can not."""

    model: str = ""
    prompt: Prompt = NO_PROMPT
    salt: str = ""
    stream: bool = False
    multimodal: bool = False
    raw: bytes | None = None
    decoded: bool = False


class BodyError(ValueError):
    """A body that is not what its path needs. The message holds no part of the body."""


NO_BODY = ParsedBody()


@lru_cache(maxsize=512)
def api_of(path: str) -> Api | None:
    """The API at a path, whatever prefix a route has put before it; query and last slash do not count."""
    plain = path.partition("?")[0].rstrip("/")
    return next((api for api in Api if plain.endswith(api)), None)


def parse_body(body: bytes, api: Api | None, headers: HeaderLookup) -> ParsedBody:
    """Read a complete body. One that is compressed in a way not known here, or is no JSON by its type, is
    passed unread. Raises BodyError."""
    if api is None or not body or headers.get("content-type", "").startswith("multipart/"):
        return NO_BODY
    encoding = headers.get("content-encoding", "").strip().lower()
    decoded = False
    if encoding not in ("", "identity"):
        plain = _decompressed(body, encoding)
        if plain is None:
            return NO_BODY
        body, decoded = plain, True
    try:
        content: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        if decoded:
            return NO_BODY
        raise BodyError("body: must be JSON") from None
    if not isinstance(content, dict):
        raise BodyError("body: must be a JSON object")
    model = content.get("model")
    if model is not None and not isinstance(model, str):
        raise BodyError("model: must be a string")
    salt = content.get("cache_salt")
    chains, multimodal = _chains(api, content)
    return ParsedBody(
        model or "", Prompt(tuple(chains)), salt if isinstance(salt, str) else "", content.get("stream") is True,
        multimodal, body, decoded,
    )  # fmt: skip


def replace_model(body: bytes, model: str) -> bytes:
    """`body` with the value of its top-level "model" replaced (the last one, which is the one that counts) and
    every other byte as it was. The body must be a JSON object with such a string; see `parse_body`."""
    depth = 0
    position = 0
    span: tuple[int, int] | None = None
    while (token := _STRING_OR_BRACKET.search(body, position)) is not None:
        position = token.end()
        first = body[token.start()]
        if first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
        elif depth == 1 and (colon := _COLON.match(body, position)) is not None:
            position = colon.end()
            # A key may be written with escapes.
            if (
                orjson.loads(token[0]) == "model"
                and (value := _STRING_OR_BRACKET.match(body, position)) is not None
            ):
                span = value.span()
    if span is None:
        raise ValueError("the body has no top-level model")
    return body[: span[0]] + orjson.dumps(model) + body[span[1] :]


def _decompressed(body: bytes, encoding: str) -> bytes | None:
    """The whole of a gzip body when it fits the limit; None otherwise."""
    if encoding != "gzip":
        return None
    inflater = zlib.decompressobj(wbits=31)
    try:
        plain = inflater.decompress(body, _DECODED_LIMIT)
    except zlib.error:
        return None
    return plain if inflater.eof else None


def _chains(api: Api, content: Mapping[str, Any]) -> tuple[list[bytes], bool]:
    """Chains of four-byte tokens for affinity, and whether there is more than text."""
    match api:
        case Api.COMPLETIONS:
            return list(_prompts(content.get("prompt"))), False
        case Api.EMBEDDINGS if "input" in content:
            return list(_prompts(content["input"])), False
        case Api.RESPONSES:
            parts = [content.get("instructions"), content.get("tools"), content.get("input")]
        case Api.MESSAGES:
            parts = [content.get("tools"), content.get("system"), content.get("messages")]
        case _:
            parts = [content.get("tools"), content.get("messages")]
    text: list[str] = []
    multimodal = False
    for part in parts:
        if part:
            multimodal |= _text(part, text)
    return ["".join(text).encode("utf-8", "surrogatepass")] if text else [], multimodal


def _prompts(prompt: Any) -> Iterator[bytes]:
    """One chain for each prompt: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        yield prompt.encode("utf-8", "surrogatepass")
    elif isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            try:
                yield struct.pack(f"<{len(prompt)}I", *prompt)
            except struct.error:
                return  # not token ids: affinity does without
        else:
            for one in prompt:
                yield from _prompts(one)


def _text(part: Any, into: list[str]) -> bool:
    """Collect what a model will read, in order; True when some of it is no text. What is not known is taken as
    it was written, since equal prompts only have to look equal."""
    if isinstance(part, str):
        into.append(part)
        return False
    if isinstance(part, list):
        multimodal = False
        for one in part:
            multimodal |= _text(one, into)
        return multimodal
    if not isinstance(part, dict):
        return False
    if "role" in part:
        into.append(str(part["role"]))
        multimodal = _text(part.get("content"), into)
        if part.get("tool_calls"):
            into.append(orjson.dumps(part["tool_calls"]).decode())
        return multimodal
    if isinstance(part.get("text"), str):
        into.append(part["text"])
        return False
    into.append(orjson.dumps(part).decode())
    return any(kind in str(part.get("type")) for kind in ("image", "audio", "video"))
