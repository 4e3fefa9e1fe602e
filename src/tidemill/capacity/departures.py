"""What replicas that left had finished: part of the load until the rates of those that stayed tell of it.

Rates are means over a window. A replica that leaves takes its rate out of the sum at once, while the requests that
the others now get in its place show in theirs only bit by bit: for the length of the window the sum would be too
low, and one replica that leaves would draw the next one after it. So its last rate counts on, and fades over the
window as theirs rise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tidemill.capacity.view import EngineLoad, Rates, ReplicaId


@dataclass(slots=True)
class Departures:
    """Of one role of one model."""

    _seen: float = 0.0  # when `_present` was
    _present: dict[ReplicaId, Rates] = field(default_factory=dict)
    _gone: dict[ReplicaId, tuple[float, Rates]] = field(
        default_factory=dict
    )  # last seen when, and with which rates

    def observe(self, engines: Iterable[EngineLoad], *, now: float, window: float) -> Rates:
        """Take the engines of this cycle into account. Gives what those that left within `window` seconds before
        `now` still stand for, per second."""
        present: dict[ReplicaId, Rates] = {}
        for engine in engines:
            before = present.get(engine.replica_id, Rates())
            present[engine.replica_id] = Rates(
                before.requests + (engine.request_rate or 0.0), before.output_tokens + (engine.output_rate or 0.0)
            )
        for replica, rates in self._present.items():
            if replica not in present:
                self._gone[replica] = (self._seen, rates)
        self._seen, self._present = now, present
        self._gone = {
            replica: left
            for replica, left in self._gone.items()
            if replica not in present and now - left[0] < window
        }
        faded = [(1 - (now - since) / window, rates) for since, rates in self._gone.values()]
        return Rates(
            sum(share * rates.requests for share, rates in faded),
            sum(share * rates.output_tokens for share, rates in faded),
        )
