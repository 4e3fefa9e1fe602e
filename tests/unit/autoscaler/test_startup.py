"""Start-up times by kind of start."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

import orjson

from tidemill.autoscaler.startup import DEFAULT, DualPods, StartupTimes

BEGIN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def member(replicas: int, *pods: tuple[str, str, float | None], target: str = "t", restored: bool = False) -> Any:
    """A target with so many replicas, and its ready pods: uid, node, seconds from creation to Ready."""
    ready = [
        SimpleNamespace(
            pod=SimpleNamespace(
                uid=uid, node=node, created=BEGIN, restored=restored,
                ready_since=None if seconds is None else BEGIN + dt.timedelta(seconds=seconds),
            )
        )
        for uid, node, seconds in pods
    ]  # fmt: skip
    return SimpleNamespace(target=SimpleNamespace(uid=target, replicas=replicas, restored=restored), ready=ready)


def dual(asleep: str = "", **engines: str) -> DualPods:
    """Pods by uid with the engine that another pod runs for them; and the engine that sleeps."""

    def engine_of(pod: Any) -> Any:
        return SimpleNamespace(uid=engines[pod.uid]) if pod.uid in engines else None

    return DualPods(engine_of, frozenset({asleep} - {""}))


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


def test_an_engine_that_sleeps_makes_the_next_start_hot() -> None:
    times = StartupTimes()
    times.lead([member(2, ("a", "n1", 90), ("b", "n2", 85))], dual(a="e1", b="e2"))
    # b is gone, and its engine sleeps until c wakes it.
    times.lead([member(1, ("a", "n1", 90))], dual("e2", a="e1"))
    times.lead([member(2, ("a", "n1", 90), ("c", "n2", 4))], dual(a="e1", c="e2"))
    assert times.dump()["seconds"] == [["t", "cold", [85, 90]], ["t", "hot", [4]]]
    assert times.lead([member(1, ("a", "n1", 90))], dual("e2", a="e1")) == 4
    # Nobody sleeps any more, or an engine of somebody else does.
    assert times.lead([member(2, ("a", "n1", 90), ("c", "n2", 4))], dual(a="e1", c="e2")) == 87.5
    assert times.lead([member(2, ("a", "n1", 90), ("c", "n2", 4))], dual("e9", a="e1", c="e2")) == 87.5
    successor = StartupTimes()
    successor.load(orjson.loads(orjson.dumps(times.dump())))
    assert successor.lead([member(1)], dual("e2")) == 4


def test_a_template_that_names_a_snapshot_is_restored_from_it() -> None:
    times = StartupTimes()
    times.lead([member(2, ("a", "n1", 278), ("b", "n2", 278))])
    restored = member(3, ("c", "n3", 18), restored=True)
    assert times.lead([restored]) == 18
    assert times.lead([member(3)]) == 278


def test_of_a_kind_never_seen_the_slowest_known_counts() -> None:
    times = StartupTimes()
    times.lead([member(1, ("a", "n1", 18), restored=True)])
    assert times.lead([member(3)]) == 18
    times.lead([member(2, ("b", "n2", 278))])
    assert times.lead([member(2, restored=False)], dual("e1")) == 278


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
