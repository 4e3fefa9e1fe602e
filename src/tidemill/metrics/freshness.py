"""How old a number may be before it stops deciding."""

from __future__ import annotations

from enum import StrEnum

from tidemill.api.manager_config import FreshnessThresholds


class Freshness(StrEnum):
    """`FRESH` decides. `STALE` and `UNAVAILABLE` hold; they differ in what the user is told."""

    FRESH = "fresh"
    STALE = "stale"
    UNAVAILABLE = "unavailable"


def freshness(age: float | None, thresholds: FreshnessThresholds) -> Freshness:
    """State of a number that is `age` seconds old (None: there is none).

    Between the fresh and the stale threshold a number still decides, so that a scrape interval a little
    above the window does not make a condition flip with each cycle.
    """
    if age is None or age >= thresholds.unavailable:
        return Freshness.UNAVAILABLE
    return Freshness.STALE if age >= thresholds.stale else Freshness.FRESH
