"""The controller's metrics about itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Instruments:
    """Registered in `registry`, next to the decision series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.models = Gauge(
            "wva_models_processed", "Models that the last engine cycle decided for.", registry=registry
        )
        self.reconciles = Counter(
            "controller_runtime_reconcile",
            "Reconciliations by result.",
            ["controller", "result"],
            registry=registry,
        )
        self._cycle = Histogram(
            "wva_optimization_duration_seconds", "Duration of an engine cycle.", registry=registry
        )
        self._errors = Counter(
            "wva_errors", "Errors by component.", ["component", "error_type"], registry=registry
        )
        self._unattributed = Gauge(
            "wva_unattributed_series",
            "Series of the last cycle that belong to no known pod.",
            ["namespace", "reason"],
            registry=registry,
        )

    @contextlib.contextmanager
    def cycle(self) -> Generator[None]:
        start = time.perf_counter()
        yield
        self._cycle.observe(time.perf_counter() - start)

    def error(self, component: str, error_type: str) -> None:
        self._errors.labels(component, error_type).inc()

    def unattributed(self, counts: Mapping[tuple[str, str], int]) -> None:
        self._unattributed.clear()
        for (namespace, reason), count in counts.items():
            self._unattributed.labels(namespace, reason).set(count)
