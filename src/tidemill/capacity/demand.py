"""Demand as it is, not as one sample shows it: so that a constant load with its noise moves nothing.

Samples since the last change of level are taken together. Growth is judged by an upper bound of their mean (two
standard errors above it), which is wide at first and narrows: what was not too much at first seldom becomes so by
chance, and what was provided for a level after `SETTLED` seconds stays while the level does. A sample far from the
mean, or five in a row on one side of it, is a new level, and counts as it is. While a level rises, demand is
looked at for the time when a replica that is started now would be ready. (Samples that are means over a window
rise for its length after a mere step; what rises must have begun before that.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

FAR = 0.25  # share of the mean by which a sample is another level, whatever the noise
FAR_DEVIATIONS = 4.0
IN_A_ROW = 3  # samples that tell a level, or a climb
DRIFTED = 5  # in a row on one side of the mean, each by more than a deviation: another level
CLIMB = 0.10  # share by which each sample exceeds the one before while demand rises
ERRORS = 2.0  # standard errors of the upper bound
SETTLED = 240.0  # seconds after which a level is known well enough: what is still added by chance would not end
KEPT = 120  # samples of one level; older ones are forgotten
DUMPED = 12  # samples that a successor gets
MOST = 2.0  # times the present demand that a forecast may reach


@dataclass(slots=True)
class Level:
    """Samples of one quantity since it last changed its level: time in seconds, value."""

    samples: list[tuple[float, float]] = field(default_factory=list)
    # The last ones, whatever their level: of the window, and two before it.
    _recent: list[tuple[float, float]] = field(default_factory=list)
    _window: float = 0.0
    _provided: float = 0.0  # for this level; it does not fall while the level stays
    _since: float = 0.0  # when this level began
    _sum: float = 0.0  # of the samples
    _squares: float = 0.0  # of their successive differences
    _fell: bool = False  # the last sample was far below this level, which has stayed for long

    def observe(self, now: float, value: float, *, window: float) -> None:
        """A sample at `now`, the mean over the `window` before it (seconds; 0 for one of this moment)."""
        another = bool(self.samples) and self._another(value)
        if another and self.settled and value < self.mean and not self._fell:
            # What has stayed for long is not left for one low sample: a fleet that shrank for it would grow again.
            self._fell = True
            return
        self._fell = False
        if another:
            self._begin()
        self._window = window
        self._recent.append((now, value))
        while len(self._recent) > IN_A_ROW and self._recent[2][0] <= now - window:
            del self._recent[0]
        self._take(now, value)

    def dump(self) -> list[Any]:
        """The last samples: they tell the level, and what was provided stays."""
        return [
            round(self._provided, 3),
            [[round(time, 1), round(value, 3)] for time, value in self.samples[-DUMPED:]],
        ]

    def load(self, state: list[Any]) -> None:
        provided, samples = state
        self._begin()
        for time, value in samples:
            self._take(float(time), float(value))
        self._recent = self.samples[-IN_A_ROW:]
        self._provided = float(provided)

    def upper(self, lead: float) -> float:
        """Demand to provide for. `lead` is how long a replica takes to start, in seconds."""
        newest = self.samples[-1][1]
        count = len(self.samples)
        if count < IN_A_ROW and self._rises():
            (since, first), (until, last) = self._recent[-IN_A_ROW], self._recent[-1]
            slope = (last - first) / (until - since) if until > since else 0.0
            return min(last + slope * lead, MOST * last)
        if count < IN_A_ROW:
            return newest
        if not self._provided or not self.settled:
            self._provided = max(self._provided, self.mean + ERRORS * self._deviation / math.sqrt(count))
        return self._provided

    @property
    def settled(self) -> bool:
        """Whether the level has stayed for so long that what it needs is provided."""
        return bool(self.samples) and self.samples[-1][0] - self._since >= SETTLED

    @property
    def mean(self) -> float:
        return self._sum / len(self.samples)

    @property
    def _deviation(self) -> float:
        """By successive differences (von Neumann 1941), so that a climb does not pass for noise."""
        return math.sqrt(max(0.0, self._squares) / max(1, 2 * (len(self.samples) - 1)))

    def _begin(self) -> None:
        self.samples.clear()
        self._sum = self._squares = self._provided = 0.0

    def _take(self, now: float, value: float) -> None:
        # Sums go along: to add up two hours of samples in each cycle would cost more than the decision.
        if not self.samples:
            self._since = now
        else:
            self._squares += (value - self.samples[-1][1]) ** 2
        self.samples.append((now, value))
        self._sum += value
        if len(self.samples) > KEPT:
            (_, first), (_, second) = self.samples[0], self.samples[1]
            self._sum -= first
            self._squares -= (second - first) ** 2
            del self.samples[0]

    def _another(self, value: float) -> bool:
        mean, deviation = self.mean, self._deviation
        distance = abs(value - mean)
        if distance > max(FAR * mean, FAR_DEVIATIONS * deviation if len(self.samples) >= IN_A_ROW else 0.0):
            return True
        last = [earlier for _, earlier in self.samples[1 - DRIFTED :]] + [value]
        if len(self.samples) < 2 * DRIFTED:
            return False
        return all(one > mean + deviation for one in last) or all(one < mean - deviation for one in last)

    def _rises(self) -> bool:
        """Whether the last samples climb, each well above the one before, and those before the window did."""
        recent = self._recent
        if len(recent) < IN_A_ROW or recent[1][0] > recent[-1][0] - self._window:
            return False
        climbs = [later > (1 + CLIMB) * earlier for (_, earlier), (_, later) in pairwise(recent)]
        return climbs[0] and all(climbs[1 - IN_A_ROW :])
