"""Go-style durations ("60s", "1m30s"), as upstream's ConfigMaps write them."""

from __future__ import annotations

import re

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def parse_duration(text: str) -> float:
    """Seconds of a Go duration. Raises ValueError with the rule when `text` is none.

    >>> parse_duration("1m30s")
    90.0
    """
    stripped = text.strip()
    if stripped == "0":
        return 0.0
    seconds, end = 0.0, 0
    for part in _PART.finditer(stripped):
        if part.start() != end:
            break
        seconds += float(part[1]) * _UNITS[part[2]]
        end = part.end()
    if not stripped or end != len(stripped):
        raise ValueError('must be a duration with a unit, such as "30s" or "1m30s"')
    return seconds


def format_duration(seconds: float) -> str:
    """The shortest Go duration of `seconds`: 90 is "1m30s", 0.25 is "250ms"."""
    if seconds < 1:
        return f"{seconds * 1000:g}ms"
    whole, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(whole), 60)
    text = (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "")
    return text + (f"{rest:g}s" if rest or not text else "")
