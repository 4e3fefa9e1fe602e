"""Times as Kubernetes writes them."""

from __future__ import annotations

import datetime as dt


def utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def rfc3339(time: dt.datetime) -> str:
    """Seconds precision, as metav1.Time."""
    return time.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(time: dt.datetime) -> str:
    """Microseconds precision, as metav1.MicroTime."""
    return time.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> dt.datetime:
    """A metav1.Time or MicroTime. Raises ValueError."""
    return dt.datetime.fromisoformat(text)
