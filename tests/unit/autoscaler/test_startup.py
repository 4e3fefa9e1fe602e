"""Start-up times by kind of start."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

import orjson

from tidemill.autoscaler.startup import DEFAULT, StartupTimes

BEGIN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def member(replicas: int, *pods: tuple[str, str, float | None], target: str = "t") -> Any:
    """A target with so many replicas, and its ready pods: uid, node, seconds from creation to Ready."""
    ready = [
        SimpleNamespace(
            pod=SimpleNamespace(
                uid=uid, node=node, created=BEGIN,
                ready_since=None if seconds is None else BEGIN + dt.timedelta(seconds=seconds),
            )
        )
        for uid, node, seconds in pods
    ]  # fmt: skip
    return SimpleNamespace(target=SimpleNamespace(uid=target, replicas=replicas), ready=ready)


def test_before_any_start_it_is_a_guess() -> None:
    assert StartupTimes().lead([member(0)]) == DEFAULT


def test_the_first_start_on_a_node_is_cold() -> None:
    times = StartupTimes()
    assert times.lead([member(1, ("a", "n1", 240))]) == 240
    assert times.lead([member(2, ("a", "n1", 240), ("b", "n2", 200))]) == 220


def test_a_node_that_has_run_it_is_warm_and_the_next_replica_may_get_it() -> None:
    times = StartupTimes()
    times.lead([member(2, ("a", "n1", 240), ("b", "n2", 240))])
    times.lead([member(1, ("a", "n1", 240))])
    times.lead([member(2, ("a", "n1", 240), ("c", "n2", 30))])
    # Two nodes know it and both are in use: another replica would be cold. With one less it would be warm.
    assert times.lead([member(2, ("a", "n1", 240), ("c", "n2", 30))]) == 240
    assert times.lead([member(1, ("a", "n1", 240))]) == 30


def test_a_pod_counts_once() -> None:
    times = StartupTimes()
    for _ in range(5):
        times.lead([member(2, ("a", "n1", 240), ("b", "n2", 100))])
    assert times.dump()["seconds"] == [["t", "cold", [100, 240]]]


def test_readiness_that_came_back_is_no_start() -> None:
    assert StartupTimes().lead([member(1, ("a", "n1", 86_400), ("b", "n1", None))]) == DEFAULT


def test_the_slowest_variant_counts_and_a_successor_knows_it() -> None:
    times = StartupTimes()
    both = [member(1, ("a", "n1", 50)), member(1, ("b", "n1", 90), target="u")]
    assert times.lead(both) == 90
    successor = StartupTimes()
    successor.load(orjson.loads(orjson.dumps(times.dump())))
    assert successor.lead([member(0), member(0, target="u")]) == 90
