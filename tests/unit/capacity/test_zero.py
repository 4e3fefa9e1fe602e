from __future__ import annotations

from decimal import Decimal

import pytest

from tidemill.api.scale_to_zero_config import (
    ScaleToZeroSettings,
    read_scale_to_zero_map,
    resolve_scale_to_zero,
)
from tidemill.capacity.types import Cause, Direction, Explanation, ReplicaLoad, Target, VariantState
from tidemill.capacity.zero import Usage, sleep

ON = ScaleToZeroSettings(enabled=True, retention=600)
IDLE = Usage(requests=0, running=0, ready_for=600)


def load(queue: int = 0) -> ReplicaLoad:
    return ReplicaLoad("a", "a-0", Decimal(0), Decimal(queue))


def decided(replicas: int = 2, **changes: object) -> tuple[tuple[Target, ...], list[VariantState]]:
    base = {"name": "a", "cost": Decimal(1), "current": 2, "desired": 2, "reporting": 2, "ready": 2}
    variant = VariantState(**{**base, **changes})
    target = Target("a", replicas, Direction.HOLD, Explanation("saturation", Cause.STEADY, "steady"))
    return (target,), [variant]


def test_an_idle_model_sleeps_and_says_so() -> None:
    targets, variants = decided()
    (found,) = sleep(targets, variants, [load()], IDLE, ON)
    assert (found.replicas, found.direction, found.explanation.cause) == (0, Direction.DOWN, Cause.IDLE)
    assert found.explanation.sentence == "no request within 10m, none running or waiting: down to 0"


@pytest.mark.parametrize(
    ("usage", "queue"),
    [
        (Usage(requests=1, running=0, ready_for=900), 0),
        (Usage(requests=None, running=0, ready_for=900), 0),
        (Usage(requests=0, running=1, ready_for=900), 0),
        (Usage(requests=0, running=None, ready_for=900), 0),
        (Usage(requests=0, running=0, ready_for=599.9), 0),
        (Usage(requests=0, running=0, ready_for=None), 0),
        (IDLE, 1),
    ],
)
def test_what_is_used_or_unknown_does_not(usage: Usage, queue: int) -> None:
    targets, variants = decided()
    assert sleep(targets, variants, [load(queue)], usage, ON) == targets
    assert sleep(targets, variants, [], IDLE, ON) == targets


def test_off_means_off() -> None:
    targets, variants = decided()
    assert sleep(targets, variants, [load()], IDLE, ScaleToZeroSettings()) == targets


def test_a_minimum_holds_and_nothing_grows_by_sleeping() -> None:
    targets, variants = decided(replicas=2, min_replicas=1)
    assert sleep(targets, variants, [load()], IDLE, ON)[0].replicas == 1
    targets, variants = decided(replicas=2, min_replicas=3)
    assert sleep(targets, variants, [load()], IDLE, ON)[0].replicas == 2


def test_in_use_again_before_it_slept() -> None:
    targets, variants = decided(replicas=0, desired=0)
    (found,) = sleep(targets, variants, [load(1)], IDLE, ON)
    assert (found.replicas, found.explanation.cause) == (2, Cause.IN_USE_AGAIN)
    asleep, variants = decided(replicas=0, desired=0, current=0)
    assert sleep(asleep, variants, [], IDLE, ON) == asleep


def test_configuration_in_layers() -> None:
    world, problems = read_scale_to_zero_map(
        {
            "default": "enable_scale_to_zero: true\nretention_period: 5m",
            "b": "model_id: m\nretention_period: 1m",
            "a": "model_id: m\nretention_period: 2m",
        },
        object_name="ConfigMap s/c",
    )
    assert not problems
    off = {"x": "model_id: m\nenable_scale_to_zero: false"}
    local, _ = read_scale_to_zero_map(off, object_name="ConfigMap n/c")

    def resolved(*maps, model: str = "m", enabled: bool = False) -> tuple[bool, float]:
        found = resolve_scale_to_zero(maps, model=model, enabled=enabled)
        return found.enabled, found.retention

    # Of two entries for one model the first by name counts.
    assert resolved(world) == (True, 120)
    assert resolved(world, model="other") == (True, 300)
    assert resolved(world, local) == (False, 120)
    assert resolved(enabled=True) == (True, 600)


@pytest.mark.parametrize(
    ("entry", "text", "field"),
    [
        ("default", "retention_period: 0s", "default.retention_period"),
        ("default", "retention_period: soon", "default.retention_period"),
        ("default", "enable_scale_to_zero: maybe", "default.enable_scale_to_zero"),
        ("x", "retention_period: 1m", "x.model_id"),
        ("default", "[", "default"),
    ],
)
def test_a_bad_entry_keeps_its_last_good_state(entry: str, text: str, field: str) -> None:
    good, _ = read_scale_to_zero_map({entry: "model_id: m\nretention_period: 3m"}, object_name="c")
    found, (problem,) = read_scale_to_zero_map({entry: text}, object_name="c", last_good=good)
    assert problem.field == field
    assert found.layers == good.layers
