"""How fast decisions may move replicas where no HPA stands behind to say so: steps, and windows like an HPA's.

Within `scale_down_window` the largest decision counts for shrinking, within `scale_up_window` the smallest for
growing; a step is what one cycle may add or take away. Sleep, waking, and bounds are not slowed down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace

from tidemill.api.saturation_config import SaturationSettings
from tidemill.capacity.types import Cause, Direction, Target, VariantState

_NOT_SLOWED = frozenset(
    {
        Cause.IDLE,
        Cause.IN_USE_AGAIN,
        Cause.AT_ZERO,
        Cause.BELOW_MINIMUM,
        Cause.ABOVE_MAXIMUM,
        Cause.SCALE_FROM_ZERO,
    }
)


class Pace:
    """Remembers what was decided lately, by variant (any key)."""

    def __init__(self) -> None:
        self._wanted: dict[object, deque[tuple[float, int]]] = {}

    def slowed(
        self, key: object, target: Target, variant: VariantState, settings: SaturationSettings, now: float
    ) -> Target:
        """`target`, or what may be done of it now. `now` in seconds."""
        longest = max(settings.scale_up_window, settings.scale_down_window)
        wanted = self._wanted.setdefault(key, deque())
        wanted.append((now, target.replicas))
        while wanted[0][0] < now - longest:
            wanted.popleft()
        if target.explanation.cause in _NOT_SLOWED:
            return target
        current, replicas, why = variant.current, target.replicas, ""
        if replicas < current:
            kept = max(value for time, value in wanted if time >= now - settings.scale_down_window)
            if min(kept, current) > replicas:
                replicas = min(kept, current)
                why = f"scaleDownWindow {settings.scale_down_window:g}s: {kept} was wanted within it"
            if (step := settings.scale_down_step) is not None and current - replicas > step:
                replicas, why = current - step, f"scaleDownStep {step}"
        elif replicas > current:
            kept = min(value for time, value in wanted if time >= now - settings.scale_up_window)
            if max(kept, current) < replicas:
                replicas = max(kept, current)
                why = f"scaleUpWindow {settings.scale_up_window:g}s: {kept} was wanted within it"
            if (step := settings.scale_up_step) is not None and replicas - current > step:
                replicas, why = current + step, f"scaleUpStep {step}"
        if replicas == target.replicas:
            return target
        before = current if variant.desired is None else variant.desired
        direction = Direction.UP if replicas > before else Direction.DOWN if replicas < before else Direction.HOLD
        sentence = f"{target.explanation.sentence}; {target.replicas} wanted, {replicas} for now ({why})"
        return replace(
            target,
            replicas=replicas,
            direction=direction,
            explanation=replace(target.explanation, sentence=sentence),
        )

    def forget(self, keys: Collection[object]) -> None:
        """Keep nothing of any variant but these."""
        for gone in [key for key in self._wanted if key not in keys]:
            del self._wanted[gone]
