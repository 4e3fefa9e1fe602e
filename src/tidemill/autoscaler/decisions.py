"""What was decided: the one place where the engine writes and the reconciler and the web pages read."""

from __future__ import annotations

import datetime as dt
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tidemill.api.variant import Reason
from tidemill.capacity.types import Direction, Explanation
from tidemill.kube.resources import ObjectKey

KEPT = 50


@dataclass(frozen=True, slots=True)
class Verdict:
    """A condition in the making."""

    status: bool
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One variant at one time. `message` is the sentence of when this decision was first made: it stays
    while nothing but the numbers behind it changes."""

    variant: ObjectKey
    uid: str
    replicas: int
    current: int
    direction: Direction
    accelerator: str
    explanation: Explanation
    metrics: Verdict
    optimization: Verdict
    applied: bool
    not_applied: str  # why, when `applied` is False
    at: dt.datetime

    def same_as(self, other: Decision) -> bool:
        """Whether a user would see any difference."""
        return (self.uid, self.replicas, self.accelerator, self.applied, self.not_applied) == (
            other.uid, other.replicas, other.accelerator, other.applied, other.not_applied,
        ) and (
            self.explanation.cause, self.explanation.warnings.keys(), self.metrics, self.optimization.status,
            self.optimization.reason,
        ) == (
            other.explanation.cause, other.explanation.warnings.keys(), other.metrics, other.optimization.status,
            other.optimization.reason,
        )  # fmt: skip

    def as_dict(self) -> dict[str, object]:
        return {
            "variant": str(self.variant),
            "at": self.at.isoformat(),
            "current": self.current,
            "desired": self.replicas,
            "direction": self.direction.value,
            "accelerator": self.accelerator,
            "explanation": self.explanation.as_dict(),
            "metrics": {
                "available": self.metrics.status,
                "reason": self.metrics.reason.value,
                "message": self.metrics.message,
            },
            "applied": self.applied,
            **({"notApplied": self.not_applied} if self.not_applied else {}),
        }


class DecisionStore:
    """The current decision of each variant, and the last ones that differed from their predecessor."""

    def __init__(self) -> None:
        self._current: dict[ObjectKey, Decision] = {}
        self._history: dict[ObjectKey, deque[Decision]] = {}

    def get(self, key: ObjectKey, uid: str) -> Decision | None:
        """The decision for the variant with this name and this identity."""
        found = self._current.get(key)
        return found if found is not None and found.uid == uid else None

    def record(self, decision: Decision) -> bool:
        """Keep `decision`; True when it says anything new."""
        before = self.get(decision.variant, decision.uid)
        if before is not None and before.same_as(decision):
            steady = replace(decision.optimization, message=before.optimization.message)
            self._current[decision.variant] = replace(decision, optimization=steady)
            return False
        self._current[decision.variant] = decision
        self._history.setdefault(decision.variant, deque(maxlen=KEPT)).append(decision)
        return True

    def drop(self, key: ObjectKey) -> None:
        self._current.pop(key, None)
        self._history.pop(key, None)

    def keep_only(self, keys: Iterable[ObjectKey]) -> list[ObjectKey]:
        """Forget all other variants; their keys are returned."""
        gone = sorted(self._current.keys() - set(keys))
        for key in gone:
            self.drop(key)
        return gone

    def history(self, key: ObjectKey) -> list[Decision]:
        """Oldest first; the last one is the present decision with its latest numbers."""
        past = list(self._history.get(key, ()))
        current = self._current.get(key)
        return [*past[:-1], current] if current is not None else past

    def all(self) -> list[Decision]:
        return [self._current[key] for key in sorted(self._current)]
