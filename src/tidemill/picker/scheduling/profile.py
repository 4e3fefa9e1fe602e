"""A profile: filters, scorers and a picker, run for one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.picker.load import FloatArray
from tidemill.picker.scheduling.cycle import Cycle
from tidemill.picker.scheduling.plugin import Chosen, Emptied, Filter, Picker, Scorer


@dataclass(frozen=True, slots=True)
class Profile:
    """Filters in order, then the weighted sum of scores, then a pick."""

    name: str
    filters: Sequence[tuple[str, Filter]]
    scorers: Sequence[tuple[str, Scorer, float]]
    picker: Picker
    remembering: Sequence[Scorer]  # those that want to be told of the pick

    def run(self, cycle: Cycle) -> Chosen | Emptied:
        for name, plugin in self.filters:
            cycle = cycle.narrowed(plugin.keep(cycle))
            if not len(cycle):
                return Emptied(name)
        totals: FloatArray | None = None
        for _, scorer, weight in self.scorers:
            scores = scorer.score(cycle)
            if weight != 1.0:
                scores *= weight
            totals = scores if totals is None else np.add(totals, scores, out=totals)
        if totals is None:
            totals = np.zeros(len(cycle))
        positions = self.picker.pick(cycle, totals)
        endpoints, rows = cycle.endpoints, cycle.rows
        chosen = Chosen(
            tuple([endpoints[i] for i in positions]),
            tuple([rows.item(i) for i in positions]),
            tuple([totals.item(i) for i in positions]),
        )
        for scorer in self.remembering:
            scorer.picked(cycle, chosen.endpoints[0])
        return chosen

    def timed(self, cycle: Cycle, now: Callable[[], float]) -> Iterator[tuple[str, str, str, float]]:
        """Extension point, type and name of each plugin, and how many seconds of `now` it takes for this cycle."""
        for point, plugins in (("Filter", self.filters), ("Scorer", [(n, s) for n, s, _ in self.scorers])):
            for name, plugin in plugins:
                begun = now()
                plugin.keep(cycle) if isinstance(plugin, Filter) else plugin.score(cycle)
                yield point, type(plugin).__name__, name, now() - begun

    def explain(self, cycle: Cycle) -> list[dict[str, Any]]:
        """Each candidate with what every filter and scorer makes of it."""
        rows: list[dict[str, Any]] = [{"endpoint": endpoint.address} for endpoint in cycle.endpoints]
        for name, plugin in self.filters:
            kept = plugin.keep(cycle)
            for row, stays in zip(rows, kept.tolist(), strict=True):
                row.setdefault("filters", {})[name] = stays
        for name, scorer, weight in self.scorers:
            for row, score in zip(rows, scorer.score(cycle).tolist(), strict=True):
                row.setdefault("scores", {})[name] = round(score, 6)
                row["total"] = round(row.get("total", 0.0) + weight * score, 6)
        return rows
