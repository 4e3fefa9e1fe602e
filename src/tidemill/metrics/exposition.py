"""Reading the Prometheus text format. Own code because it is on the path of every scrape: it looks only at
lines whose name is wanted, where the reference parser builds an object for each of a server's thousands."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)', re.DOTALL)
# Everything up to the brace that closes the labels: the first one outside quotes.
_INSIDE = re.compile(r'[^"}]*(?:"(?:[^"\\]|\\.)*"[^"}]*)*', re.DOTALL)
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


def _labels(line: str, start: int) -> tuple[Mapping[str, str] | None, str]:
    if start >= len(line) or line[start] != "{":
        return {}, line[start:]
    end = _INSIDE.match(line, start + 1)
    if end is None:
        return None, ""
    position = end.end()
    return _pairs(line[start + 1 : position]), line[position + 1 :]


@lru_cache(maxsize=16_384)
def _pairs(text: str) -> Mapping[str, str] | None:
    """Labels between braces. Servers repeat theirs with every scrape, so they are read once."""
    labels: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None:
            return None
        labels[match[1]] = _unescape(match[2])
        position = match.end()
    return labels


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], text)
