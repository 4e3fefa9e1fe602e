"""Whether a pool can take more: 1 is full."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidemill.picker.load import IntArray, LoadTable


@dataclass(frozen=True, slots=True)
class SaturationDetector:
    """The mean over endpoints of max(waiting / queue_limit, KV use / kv_limit); an endpoint without fresh numbers
    counts as full, as does a pool without endpoints. When no endpoint has fresh numbers, or when `by_requests`
    says so, it is the requests in flight over `max_requests` an endpoint: a scrape path that is lost must not
    stop traffic."""

    queue_limit: float = 5.0
    kv_limit: float = 0.8
    max_requests: int = 100
    by_requests: bool = False
    fresh_for: float = 0.2  # seconds

    def saturation(self, load: LoadTable, rows: IntArray, now: float) -> float:
        if not len(rows):
            return 1.0
        fresh = load.updated[rows] >= now - self.fresh_for
        if self.by_requests or not fresh.any():
            return float(load.in_flight[rows].sum()) / (len(rows) * self.max_requests)
        waiting = load.waiting[rows] / self.queue_limit
        full = np.fmax(waiting, load.kv_usage[rows] / self.kv_limit)
        full = np.where(fresh & ~np.isnan(full), full, 1.0)
        return float(full.mean())
