"""Reading the Prometheus text format. Own code because it is on the path of every scrape: it looks only at
lines whose name is wanted, where the reference parser builds an object for each of a server's thousands."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str, wanted: Collection[str]) -> Iterator[Sample]:
    """Samples of the metrics named in `wanted`, in order. Lines that cannot be read are skipped, because
    one bad line of a server must not hide the good ones; what was asked for and is not there is absent."""
    for line in text.split("\n"):
        if not line or line[0] == "#":
            continue
        match = _NAME.match(line)
        if match is None or match[0] not in wanted:
            continue
        labels, rest = _labels(line, match.end())
        if labels is None:
            continue
        # After the value may come a timestamp and, in OpenMetrics, an exemplar.
        fields = rest.split(None, 1)
        if not fields:
            continue
        try:
            value = float(fields[0])
        except ValueError:
            continue
        yield Sample(match[0], labels, value)


def _labels(line: str, start: int) -> tuple[dict[str, str] | None, str]:
    if start >= len(line) or line[start] != "{":
        return {}, line[start:]
    labels: dict[str, str] = {}
    position = start + 1
    while position < len(line) and line[position] != "}":
        end = _closing(line, position)
        match = _LABEL.match(line, position, end)
        if match is None:
            return None, ""
        labels[match[1]] = _unescape(match[2])
        position = match.end()
    return labels, line[position + 1 :]


def _closing(line: str, position: int) -> int:
    """Index of the `}` that closes the labels: the first one outside quotes."""
    quoted = False
    while position < len(line):
        char = line[position]
        if char == "\\" and quoted:
            position += 1
        elif char == '"':
            quoted = not quoted
        elif char == "}" and not quoted:
            return position
        position += 1
    return len(line)


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], text)
