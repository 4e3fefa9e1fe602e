"""How long replicas take from their creation to Ready, as seen: by kind of start, as far as that can be told.

Hot: another pod runs the engine (fast model actuation), and has served this target before: it slept, and only had
to wake. Snapshot: the pod template names one to restore from. Warm: the node has run the target before, so that it
has the image and, with a cache on the node, the weights. Cold: the first start on a node.

Which kind the next replica will get is told in the same order: by whether an engine of the target sleeps, by the
template, by whether more nodes have run the target than it has replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from tidemill.autoscaler.members import Member
from tidemill.autoscaler.views import PodView
from tidemill.capacity.report import Json

DEFAULT = 60.0  # seconds, before any start was seen
KEPT = 10  # starts of a kind that count
LONGEST = 3600.0  # a pod that was ready later than this after its creation did not just start


class StartKind(StrEnum):
    """From the slowest to the fastest."""

    COLD = "cold"
    WARM = "warm"
    SNAPSHOT = "snapshot"
    HOT = "hot"


@dataclass(frozen=True, slots=True)
class DualPods:
    """`engine_of` gives the pod that runs the engine of another one, None where that one runs it itself; `asleep`
    are the uids of pods whose engine sleeps."""

    engine_of: Callable[[PodView], PodView | None] = lambda pod: None
    asleep: frozenset[str] = frozenset()


class StartupTimes:
    """By uid of the target. A pod counts once, when it is first seen Ready."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}  # uids of pods
        self._nodes: dict[str, set[str]] = {}
        self._engines: dict[str, set[str]] = {}  # uids of pods that ran an engine for a target
        self._seconds: dict[tuple[str, StartKind], deque[float]] = {}

    def lead(self, members: Sequence[Member], dual: DualPods = DualPods()) -> float:
        """Seconds until a replica that is started now would serve: that of the slowest variant."""
        found: list[float] = []
        for member in members:
            self._learn(member, dual)
            kind = self._next(member, dual)
            # Of a kind that was never seen another one is a better guess than none, the slowest first.
            target = member.target.uid
            known = (k for k in (kind, *StartKind) if (target, k) in self._seconds)
            if (nearest := next(known, None)) is not None:
                found.append(median(self._seconds[target, nearest]))
        return max(found, default=DEFAULT)

    def dump(self) -> Json:
        return {
            "seconds": [[*slot, list(times)] for slot, times in self._seconds.items()],
            "nodes": {target: sorted(nodes) for target, nodes in self._nodes.items()},
            "engines": {target: sorted(engines) for target, engines in self._engines.items()},
        }

    def load(self, state: Json) -> None:
        for target, kind, times in state["seconds"]:
            self._seconds[target, StartKind(kind)] = deque(map(float, times), maxlen=KEPT)
        for target, nodes in state["nodes"].items():
            self._nodes[target] = set(nodes)
        for target, engines in state.get("engines", {}).items():  # not in what earlier releases wrote
            self._engines[target] = set(engines)

    def _next(self, member: Member, dual: DualPods) -> StartKind:
        """What the next replica of a target will get."""
        target = member.target
        if not dual.asleep.isdisjoint(self._engines.get(target.uid, ())):
            return StartKind.HOT
        if target.restored:
            return StartKind.SNAPSHOT
        return StartKind.WARM if len(self._nodes.get(target.uid, ())) > target.replicas else StartKind.COLD

    def _learn(self, member: Member, dual: DualPods) -> None:
        target = member.target.uid
        known = self._seen.get(target, set())
        nodes = self._nodes.setdefault(target, set())
        engines = self._engines.setdefault(target, set())
        ready = [replica.pod for replica in member.ready]
        for pod in sorted(ready, key=lambda p: (p.ready_since is None, p.ready_since)):
            engine = dual.engine_of(pod)
            if pod.uid not in known and pod.ready_since is not None and pod.created is not None:
                seconds = (pod.ready_since - pod.created).total_seconds()
                # Ready may come back without a start, but then long after the creation.
                if 0 <= seconds < LONGEST:
                    if engine is not None and engine.uid in engines:
                        kind = StartKind.HOT
                    elif pod.restored:
                        kind = StartKind.SNAPSHOT
                    else:
                        kind = StartKind.WARM if pod.node in nodes else StartKind.COLD
                    self._seconds.setdefault((target, kind), deque(maxlen=KEPT)).append(seconds)
            if pod.node:
                nodes.add(pod.node)
            if engine is not None:
                engines.add(engine.uid)
        self._seen[target] = {pod.uid for pod in ready}
