"""Names inside PromQL."""

from __future__ import annotations

import re
from collections.abc import Iterable

# RE2 gives these a meaning; everything else stands for itself.
_SPECIAL = re.compile(r"[.+*?()|\[\]{}^$\\]")
_STRING_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def quote(value: str) -> str:
    """A PromQL string literal. Characters outside ASCII stay as they are: PromQL has no surrogate pairs."""
    return '"' + "".join(_STRING_ESCAPES.get(char, char) for char in value) + '"'


def any_of(label: str, values: Iterable[str]) -> str:
    """A matcher for exactly these values of a label. Regex matchers are anchored by PromQL itself."""
    listed = sorted(values)
    if len(listed) == 1:
        return f"{label}={quote(listed[0])}"
    return f"{label}=~{quote('|'.join(_SPECIAL.sub(lambda m: chr(92) + m[0], value) for value in listed))}"
