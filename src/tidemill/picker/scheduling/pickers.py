"""Pickers: from scores to endpoints. Every number of endpoints is `maxNumOfEndpoints`, the best first; a gateway
that follows the list goes on to the next one when the first cannot be reached."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tidemill.picker.load import FloatArray
from tidemill.picker.scheduling.cycle import Cycle
from tidemill.picker.scheduling.plugin import Picker

_EQUAL = 1e-9  # scores this close are equal: they are sums of binary fractions


class _TakesSeveral(Picker):
    max_num_of_endpoints: int = 1

    def number(self, cycle: Cycle) -> int:
        return min(max(1, self.max_num_of_endpoints), len(cycle))


class MaxScorePicker(_TakesSeveral):
    """The highest score. Equal ones go to whoever has the fewest requests of this picker in flight, and by lot
    among those: a burst is spread before any scrape could show it."""

    def pick(self, cycle: Cycle, totals: FloatArray) -> list[int]:
        count = self.number(cycle)
        if count == 1:
            best = (totals >= totals.item(totals.argmax()) - _EQUAL).nonzero()[0]
            if len(best) > 1:
                busy = cycle.in_flight[best]
                best = best[busy == busy.item(busy.argmin())]
            return [best.item(int(cycle.rng.random() * len(best)) if len(best) > 1 else 0)]
        lots = np.array([cycle.rng.random() for _ in range(len(cycle))])
        rounded = np.round(totals / _EQUAL) if totals.any() else totals
        return np.lexsort((lots, cycle.in_flight, -rounded))[:count].tolist()


class RandomPicker(_TakesSeveral):
    def pick(self, cycle: Cycle, totals: FloatArray) -> list[int]:
        return cycle.rng.sample(range(len(cycle)), self.number(cycle))


class WeightedRandomPicker(_TakesSeveral):
    """By lot, in proportion to the score. (The key U^(1/score) of each, the largest first: Efraimidis and
    Spirakis 2006.) Endpoints of score 0 only when no other is left."""

    def pick(self, cycle: Cycle, totals: FloatArray) -> list[int]:
        def key(score: float) -> tuple[float, float]:
            lot = 1.0 - cycle.rng.random()  # never 0
            # The logarithm of the key: U^(1/score) would underflow for small scores.
            return (math.log(lot) / score, lot) if score > 0 else (-math.inf, lot)

        keys = [key(score) for score in totals.tolist()]
        return sorted(range(len(cycle)), key=lambda i: keys[i], reverse=True)[: self.number(cycle)]


PICKERS: dict[str, type[Any]] = {
    "max-score-picker": MaxScorePicker,
    "random-picker": RandomPicker,
    "weighted-random-picker": WeightedRandomPicker,
}
