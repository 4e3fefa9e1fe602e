"""Requests that come, told from those that finish: what comes and does not finish makes those inside more.

Rates of engines are of requests that finish. While a replica is short they say what it can do, and while it works
off what had piled up they say more than what comes. The difference is by how much the number of its requests
(running and waiting) has grown: arrivals = finished + growth, whatever happens in between (conservation of flow).
So what waits at a replica, which no other replica can take over, is not asked for again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.capacity.view import EngineLoad, ReplicaId

SHORT = 60.0  # seconds over which growth is seen soon, whatever the window of the rates
QUEUE = 1.0  # requests that may wait for the step under way to end
CHANCE = 4.0  # standard deviations by which a batch may differ from itself


class Inside(NamedTuple):
    """Requests in one replica."""

    running: float = 0.0
    waiting: float = 0.0

    @property
    def all(self) -> float:
        return self.running + self.waiting


class Flow(NamedTuple):
    """`growth` is by how many requests a second those inside the engines become more. `unsettled` are replicas
    whose batch has filled or emptied during the window: means over it are of no one state. `filling` are those
    that served before and whose batch has filled of late: what they hold is not all that they will. `queued` are
    those where requests waited for each other at some time in the window: first tokens tell of the queue then."""

    growth: float
    unsettled: frozenset[ReplicaId]
    filling: frozenset[ReplicaId]
    queued: frozenset[ReplicaId]


@dataclass(slots=True)
class Arrivals:
    """Of one role of one model."""

    _looks: deque[tuple[float, Mapping[ReplicaId, Inside]]] = field(default_factory=deque)  # the oldest first

    def observe(self, engines: Iterable[EngineLoad], *, now: float, window: float) -> Flow:
        """Take the engines of this cycle into account. `window` is that of their rates, in seconds: over it the
        sum of rates and growth is exact. What grows within a shorter time counts at once."""
        present: dict[ReplicaId, Inside] = {}
        for engine in engines:
            before = present.get(engine.replica_id, Inside())
            present[engine.replica_id] = Inside(
                before.running + (engine.running or 0.0), before.waiting + float(engine.queue_length)
            )
        growth = max(self._growth(present, now, span) for span in {min(SHORT, window), window})
        then = self._look(now - window)[1] if self._looks else present
        unsettled = frozenset(
            replica for replica, inside in present.items() if _differs(inside, then.get(replica, Inside()))
        )
        lately = self._look(now - min(SHORT, window))[1] if self._looks else present
        filling = frozenset(
            replica
            for replica, inside in present.items()
            if (before := lately.get(replica)) is not None
            and inside.running > before.running
            and _differs(inside, before)
        )
        self._looks.append((now, present))
        while len(self._looks) > 1 and self._looks[1][0] <= now - window:
            self._looks.popleft()
        queued = frozenset(
            replica for _, look in self._looks for replica, inside in look.items() if inside.waiting > QUEUE
        )
        return Flow(growth, unsettled, filling, queued)

    def _look(self, until: float) -> tuple[float, Mapping[ReplicaId, Inside]]:
        """The latest that is at least so old, else the first one."""
        found = self._looks[0]
        for look in self._looks:
            if look[0] > until:
                break
            found = look
        return found

    def _growth(self, present: Mapping[ReplicaId, Inside], now: float, span: float) -> float:
        """Per second of the last `span` seconds. A replica that has come since began with nothing; one that has
        left took its requests to their end, or to the others."""
        if not self._looks:
            return 0.0
        since, then = self._look(now - span)
        grown = sum(inside.all - then.get(replica, Inside()).all for replica, inside in present.items())
        return grown / max(span, now - since)


def _differs(now: Inside, then: Inside) -> bool:
    """By more than the chance of a batch whose size is about Poisson's."""
    most = max(now.running, then.running, 1.0)
    return abs(now.running - then.running) > CHANCE * math.sqrt(most)
