"""How long replicas take from their creation to Ready, as seen: by kind of start, as far as that can be told.

A node that has run a target before has its image and, with a cache on the node, its weights: the next start there
is warm. The first one on a node is cold. Which one the next replica will get is told by whether more nodes have
run the target than it has replicas now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from statistics import median

from tidemill.autoscaler.members import Member
from tidemill.capacity.report import Json

DEFAULT = 60.0  # seconds, before any start was seen
KEPT = 10  # starts of a kind that count
LONGEST = 3600.0  # a pod that was ready later than this after its creation did not just start


class StartKind(StrEnum):
    COLD = "cold"
    WARM = "warm"


class StartupTimes:
    """By uid of the target. A pod counts once, when it is first seen Ready."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}  # uids of pods
        self._nodes: dict[str, set[str]] = {}
        self._seconds: dict[tuple[str, StartKind], deque[float]] = {}

    def lead(self, members: Sequence[Member]) -> float:
        """Seconds until a replica that is started now would serve: that of the slowest variant."""
        found: list[float] = []
        for member in members:
            self._learn(member)
            target = member.target
            kind = StartKind.WARM if len(self._nodes.get(target.uid, ())) > target.replicas else StartKind.COLD
            # Of a kind that was never seen the other one is a better guess than none.
            times = self._seconds.get((target.uid, kind)) or next(
                (self._seconds[target.uid, k] for k in StartKind if (target.uid, k) in self._seconds), None
            )
            if times:
                found.append(median(times))
        return max(found, default=DEFAULT)

    def dump(self) -> Json:
        return {
            "seconds": [[*slot, list(times)] for slot, times in self._seconds.items()],
            "nodes": {target: sorted(nodes) for target, nodes in self._nodes.items()},
        }

    def load(self, state: Json) -> None:
        for target, kind, times in state["seconds"]:
            self._seconds[target, StartKind(kind)] = deque(map(float, times), maxlen=KEPT)
        for target, nodes in state["nodes"].items():
            self._nodes[target] = set(nodes)

    def _learn(self, member: Member) -> None:
        target = member.target.uid
        known = self._seen.get(target, set())
        nodes = self._nodes.setdefault(target, set())
        ready = [replica.pod for replica in member.ready]
        for pod in sorted(ready, key=lambda p: (p.ready_since is None, p.ready_since)):
            if pod.uid not in known and pod.ready_since is not None and pod.created is not None:
                seconds = (pod.ready_since - pod.created).total_seconds()
                # Ready may come back without a start, but then long after the creation.
                if 0 <= seconds < LONGEST:
                    kind = StartKind.WARM if pod.node in nodes else StartKind.COLD
                    self._seconds.setdefault((target, kind), deque(maxlen=KEPT)).append(seconds)
            if pod.node:
                nodes.add(pod.node)
        self._seen[target] = {pod.uid for pod in ready}
