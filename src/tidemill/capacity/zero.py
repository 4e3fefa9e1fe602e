"""Sleep: a model that nobody has used for its retention period needs no replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from tidemill.api.durations import format_duration
from tidemill.api.scale_to_zero_config import ScaleToZeroSettings
from tidemill.capacity.types import Cause, Direction, Explanation, ReplicaLoad, Target, VariantState

ANALYZER = "scale-to-zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What is known of a model's use. None is unknown, and unknown is not zero.

    `requests` are those that succeeded within the retention period; `running` those under way; `ready_for`
    seconds since its oldest replica became ready.
    """

    requests: float | None
    running: float | None
    ready_for: float | None


def sleep(
    targets: Sequence[Target],
    variants: Sequence[VariantState],
    loads: Sequence[ReplicaLoad],
    usage: Usage,
    settings: ScaleToZeroSettings,
) -> tuple[Target, ...]:
    """`targets`, or all variants at their minimum (0 where there is none) when the model may sleep.

    A model sleeps when that is enabled for it, nothing was served within the retention period, nothing runs
    or waits, and it has been ready for at least that long: one that was just woken is not idle yet.
    """
    by_name = {variant.name: variant for variant in variants}
    if not settings.enabled or not _idle(loads, usage, settings.retention):
        return tuple(_awake(target, by_name[target.variant]) for target in targets)
    period = format_duration(settings.retention)

    def put_to_sleep(target: Target) -> Target:
        variant = by_name[target.variant]
        before = variant.current if variant.desired is None else variant.desired
        rest = min(variant.min_replicas or 0, target.replicas) if variant.current else 0
        if rest >= target.replicas:
            return target
        sentence = f"no request within {period}, none running or waiting: down to {rest}"
        explanation = Explanation(ANALYZER, Cause.IDLE, sentence, {"retention": period})
        direction = Direction.DOWN if rest < before else Direction.HOLD
        return replace(target, replicas=rest, direction=direction, explanation=explanation)

    return tuple(put_to_sleep(target) for target in targets)


def _awake(target: Target, variant: VariantState) -> Target:
    """A replica that was to go to sleep and is in use again, or not known to be idle any more, stays. One that can
    be spared because another variant suffices goes."""
    if target.replicas or not variant.current or target.explanation.cause is Cause.SPARE_CAPACITY:
        return target
    sentence = f"not idle any more before it slept: stays at {variant.current}"
    explanation = Explanation(ANALYZER, Cause.IN_USE_AGAIN, sentence, {})
    return replace(target, replicas=variant.current, direction=Direction.UP, explanation=explanation)


def _idle(loads: Sequence[ReplicaLoad], usage: Usage, retention: float) -> bool:
    waiting = sum((load.queue_length for load in loads), Decimal())
    return (
        bool(loads)
        and not waiting
        and usage.requests == 0
        and usage.running == 0
        and usage.ready_for is not None
        and usage.ready_for >= retention
    )
