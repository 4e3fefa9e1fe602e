"""At which rate of requests replicas were short before: what keeps a constant load from shrinking a fleet into the
very shortage that made it grow.

What analyzers measure are stocks (tokens held, requests waiting), and stocks do not fall in proportion when
replicas are added: a queue that cried for ten replicas is gone with three. The rate of requests stays the same. So
each time a role is short, the rate per replica is remembered, and as a vote of its own it lets
replicas go only where those left stay well below it. It never asks for more.

Rates are means over a window, which still holds the time before the shortage when that begins: of one shortage
the highest rate counts, of several the lowest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from tidemill.capacity.report import CapacityReport, Thresholds
from tidemill.capacity.view import RoleView

NAME = "experience"
UNIT = "requests/s"
RISING = 0.15  # growth of the rate within SETTLE from which on its window has not caught up with it
SETTLE = 60.0  # seconds
FALLING = 0.99  # share of the demand of the cycle before below which what had piled up is being worked off
SHIFT = 0.25  # of mean tokens in or out: requests have become others
RELAX = 1.0001  # a cycle: what was learned long ago may be tried again some day
# It never asks for more: any demand is within a share of 10^6.
_THRESHOLDS = Thresholds(up=Decimal(10) ** 6, down=Decimal("0.85"))


@dataclass(slots=True)
class Experience:
    """Of one role of one model: by variant, the lowest rate per replica (requests/s) that was too much."""

    too_much: dict[str, float] = field(default_factory=dict)
    _rates: list[tuple[float, float]] = field(default_factory=list)  # time, rate; of the last SETTLE seconds
    _last: dict[str, Decimal] = field(default_factory=dict)  # demand by analyzer
    _shape: tuple[float, float] | None = None
    _ready: int = 0  # replicas in the cycle before
    # By variant, of the shortage that goes on: what was known before it, and the highest rate in it.
    _shortage: dict[str, tuple[float, float]] = field(default_factory=dict)

    def observe(self, view: RoleView, votes: Sequence[CapacityReport], now: float) -> None:
        """Take one cycle into account; `votes` are what the analyzers say at `now` (seconds)."""
        for variant in self.too_much:
            self.too_much[variant] *= RELAX
        shape = view.shape
        if shape.input_tokens is not None and shape.output_tokens is not None:
            size = (float(shape.input_tokens), float(shape.output_tokens))
            if self._shape is None or _differs(size, self._shape):
                self.too_much.clear()
                self._shortage.clear()
                self._shape = size
        rate = request_rate(view)
        # The latest that is at least SETTLE old, and all since: the first one is what to compare with.
        while len(self._rates) > 1 and self._rates[1][0] <= now - SETTLE:
            del self._rates[0]
        settled = bool(self._rates) and self._rates[0][0] <= now - SETTLE
        before = min((known for _, known in self._rates), default=0.0)
        if rate is not None:
            self._rates.append((now, rate))
        # A shortage is that of the replicas there are when these were as many in the cycle before and the demand
        # does not fall: what piled up before they came is worked off by them, and says nothing of their rate.
        # (Counted, because what each of them holds is measured anew in every cycle.)
        last, ready_before = self._last, self._ready
        self._last = {vote.analyzer: vote.demand for vote in votes}
        self._ready = sum(variant.ready for variant in view.variants)
        lacking = [vote for vote in votes if vote.demand > vote.supply * vote.thresholds.up]
        short = [
            vote
            for vote in lacking
            if vote.analyzer in last
            and self._ready <= ready_before
            and float(vote.demand) >= FALLING * float(last[vote.analyzer])
        ]
        if not lacking or self._ready != ready_before:
            self._shortage.clear()  # it is over, or is one of other replicas
        # While requests become more, what is finished says less than what comes; a rate that falls or stays while
        # replicas are short is what they can do.
        begins = settled and rate is not None and rate <= (1 + RISING) * before
        for vote in short:
            if not vote.supply or not rate:
                continue
            for variant, each in vote.per_replica.items():
                share = rate * float(each / vote.supply)
                if variant in self._shortage:
                    known, most = self._shortage[variant]
                elif begins:
                    known, most = self.too_much.get(variant, math.inf), share
                else:
                    continue
                self._shortage[variant] = known, max(most, share)
                self.too_much[variant] = min(known, max(most, share))

    def dump(self) -> list[Any]:
        return [{name: round(rate, 6) for name, rate in self.too_much.items()}, self._shape]

    def load(self, state: list[Any]) -> None:
        too_much, shape = state
        self.too_much = {str(name): float(rate) for name, rate in too_much.items()}
        self._shape = None if shape is None else (float(shape[0]), float(shape[1]))

    def vote(self, view: RoleView, others: Sequence[CapacityReport]) -> CapacityReport | None:
        """What must stay, if anything is known that could tell. A variant that has never been short is to the
        others as the capacities are that `others` measure."""
        rate = request_rate(view)
        if not self.too_much or rate is None:
            return None
        per_replica = {name: Decimal(repr(round(value, 6))) for name, value in self.too_much.items()}
        for report in others:
            known = [name for name in sorted(self.too_much) if report.per_replica.get(name, 0) > 0]
            for name, each in report.per_replica.items() if known else ():
                per_replica.setdefault(name, per_replica[known[0]] * each / report.per_replica[known[0]])
        supply, anticipated = view.supply(per_replica)
        return CapacityReport(
            analyzer=NAME,
            unit=UNIT,
            per_replica=per_replica,
            supply=supply,
            anticipated=anticipated,
            demand=Decimal(repr(round(rate, 6))),
            thresholds=_THRESHOLDS,
            numbers={f"tooMuchPerReplica/{name}": f"{value:.3f}" for name, value in sorted(self.too_much.items())},
        )


def request_rate(view: RoleView) -> float | None:
    """Requests per second that all engines finish; None unless each says so, and where there are none."""
    return view.request_rate if view.engines else None


def _differs(new: tuple[float, float], old: tuple[float, float]) -> bool:
    return any(abs(a - b) > SHIFT * max(b, 1.0) for a, b in zip(new, old, strict=True))
