"""Counters and histograms that cost the request path next to nothing: plain numbers, made into samples when
somebody scrapes. (prometheus-client locks and looks up for each observation, at several times the price.)"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric


class Count:
    """A number that a counter or gauge shows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Histogram:
    """Observations by upper bound; the last count is for those above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric(list(labels), buckets, self.total)


class Counts:
    """A counter with labels."""

    def __init__(self, name: str, help_: str, labels: Sequence[str]) -> None:
        self._name = name
        self._help = help_
        self._labels = list(labels)
        self._by_labels: dict[tuple[str, ...], Count] = {}

    def of(self, *labels: str) -> Count:
        found = self._by_labels.get(labels)
        if found is None:
            found = self._by_labels[labels] = Count()
        return found

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for labels, count in self._by_labels.items():
            family.add_metric(list(labels), count.value)
        yield family


class Histograms:
    """A histogram with labels."""

    def __init__(self, name: str, help_: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        self._name = name
        self._help = help_
        self._bounds = tuple(bounds)
        self._labels = list(labels)
        self._by_labels: dict[tuple[str, ...], Histogram] = {}

    def of(self, *labels: str) -> Histogram:
        found = self._by_labels.get(labels)
        if found is None:
            found = self._by_labels[labels] = Histogram(self._bounds)
        return found

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for labels, histogram in self._by_labels.items():
            histogram.add_to(family, labels)
        yield family
