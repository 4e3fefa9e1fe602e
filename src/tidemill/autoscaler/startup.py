"""How long replicas take from their creation to Ready, as seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from tidemill.autoscaler.members import Member

DEFAULT = 60.0  # seconds, before any start was seen
KEPT = 10  # starts of a variant that count


class StartupTimes:
    """By target, the last starts. A pod counts once, when it is first seen Ready."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}  # uid of a pod: uid of its target
        self._seconds: dict[str, deque[float]] = {}

    def lead(self, members: Sequence[Member]) -> float:
        """Seconds until a replica that is started now would serve: the slowest variant's median."""
        found: list[float] = []
        for member in members:
            target = member.target.uid
            for replica in member.ready:
                pod = replica.pod
                if pod.uid in self._seen or pod.ready_since is None or pod.created is None:
                    continue
                self._seen[pod.uid] = target
                seconds = (pod.ready_since - pod.created).total_seconds()
                # A pod that lost its readiness and found it again did not start anew.
                if 0 <= seconds < 3600:
                    self._seconds.setdefault(target, deque(maxlen=KEPT)).append(seconds)
            if target in self._seconds:
                found.append(median(self._seconds[target]))
        return max(found, default=DEFAULT)
