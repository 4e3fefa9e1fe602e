"""Counting the tokens of an answer while it passes: from the last usage of an event stream, or from JSON.

Nothing here can hold up or change the answer, and nothing a server sends can make it fail.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

_LINE_LIMIT = 256 * 1024  # a longer line is not read
_JSON_LIMIT = 8 * 2**20
_LARGEST = 2**53


class Usage(NamedTuple):
    """Token counts of one answer; None is what it did not say."""

    input: int | None = None
    output: int | None = None
    cached: int | None = None


NO_USAGE = Usage()


class UsageReader:
    """Fed with the chunks of one answer. `malformed` names a usage field that held no count, if any did."""

    def __init__(self, *, content_type: str, content_encoding: str, streaming: bool) -> None:
        self._events = "text/event-stream" in content_type or (streaming and "json" not in content_type)
        self._readable = content_encoding in ("", "identity")
        self._chunks: list[bytes] = []
        self._rest = b""
        self._skipping = False  # inside a line that is too long
        self._size = 0
        self._begun = False
        self._usage = NO_USAGE
        self.malformed = ""

    @property
    def begun(self) -> bool:
        """Whether the first token is out: the first data of an event stream, or any byte of something else."""
        return self._begun

    def feed(self, chunk: bytes) -> None:
        if not chunk:
            return
        if not self._readable:
            self._begun = True
        elif self._events:
            self._feed_lines(chunk)
        else:
            self._begun = True
            self._size += len(chunk)
            if self._size <= _JSON_LIMIT:
                self._chunks.append(chunk)
            else:
                self._chunks.clear()

    def finish(self) -> Usage:
        """The answer is over."""
        if self._events:
            self._line(self._rest)
            self._rest = b""
        elif self._chunks:
            body = b"".join(self._chunks)
            self._chunks.clear()
            if b'"usage"' in body:
                self._read(body)
        return self._usage

    def _feed_lines(self, chunk: bytes) -> None:
        if self._skipping:
            end = chunk.find(b"\n")
            if end < 0:
                return
            chunk = chunk[end + 1 :]
            self._skipping = False
        text = self._rest + chunk if self._rest else chunk
        end = text.rfind(b"\n") + 1
        self._rest = text[end:]
        if len(self._rest) > _LINE_LIMIT:
            self._rest = b""
            self._skipping = True
        if not end:
            return
        # Most chunks hold neither the first token nor a usage.
        if not self._begun or b'"usage"' in text:
            for line in text[:end].splitlines():
                self._line(line)

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if not data:
            return
        self._begun = True
        if b'"usage"' in data:
            self._read(data)

    def _read(self, data: bytes) -> None:
        try:
            content: Any = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if not isinstance(content, dict):
            return
        # Chat and completions at the top; Responses under response; Anthropic's first event under message.
        for holder in (content, content.get("response"), content.get("message")):
            if isinstance(holder, dict) and holder.get("usage") is not None:
                self._merge(holder["usage"])

    def _merge(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            self.malformed = "usage"
            return
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        if not isinstance(details, dict):
            self.malformed = "prompt_tokens_details"
            details = {}
        known = self._usage
        self._usage = Usage(
            self._count(usage, "prompt_tokens", "input_tokens", known.input),
            self._count(usage, "completion_tokens", "output_tokens", known.output),
            self._count(details, "cached_tokens", "cache_read_input_tokens", known.cached),
        )

    def _count(self, fields: dict[str, Any], name: str, other: str, before: int | None) -> int | None:
        value = fields.get(name, fields.get(other))
        if value is None:
            return before
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            self.malformed = name
            return before
        return value
