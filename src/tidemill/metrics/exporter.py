"""The series that HPA, KEDA and dashboards read.

Series are rendered from the decisions of this moment. There is no label set to remove when a variant, its
accelerator or the leadership goes: what is not in the table is not exported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class ExportedDecision:
    """One variant's numbers. `accelerator` is what the accelerator_type label says."""

    variant: str
    namespace: str
    accelerator: str
    desired: int
    current: int

    @property
    def ratio(self) -> float:
        """desired / current; desired where there is nothing to divide by."""
        return self.desired / self.current if self.current else float(self.desired)


@dataclass(frozen=True, slots=True)
class ExportedGauge:
    help: str
    value: Callable[[ExportedDecision], float]


_DESIRED_HELP = "Replicas that the autoscaler wants for the variant."
GAUGES: Mapping[str, ExportedGauge] = {
    "wva_desired_replicas": ExportedGauge(_DESIRED_HELP, lambda d: d.desired),
    "wva_optimized_replicas": ExportedGauge(f"{_DESIRED_HELP} Older name.", lambda d: d.desired),
    "wva_current_replicas": ExportedGauge("Replicas that the scale target asks for.", lambda d: d.current),
    "wva_desired_ratio": ExportedGauge("Desired over current replicas.", lambda d: d.ratio),
}


class DecisionExporter(Collector):
    """Decisions by variant, as Prometheus series. `instance` labels all of them when it is set."""

    def __init__(self, instance: str = "") -> None:
        self._instance = instance
        self._decisions: dict[tuple[str, str], ExportedDecision] = {}
        self._scalings: Counter[tuple[str, str, str, str, str]] = Counter()
        self._observers: list[Callable[[], None]] = []

    def observe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Have `changed` called whenever a number may be another one. Gives how to end that."""
        self._observers.append(changed)
        return lambda: self._observers.remove(changed)

    def publish(self, decision: ExportedDecision) -> None:
        self._decisions[decision.namespace, decision.variant] = decision
        self._tell()

    def count_scaling(self, decision: ExportedDecision, *, direction: str, reason: str) -> None:
        key = (decision.variant, decision.namespace, direction, reason, decision.accelerator)
        self._scalings[key] += 1

    def drop(self, namespace: str, variant: str) -> None:
        """Stop exporting anything of a variant. Dropping what is not there does nothing."""
        self._decisions.pop((namespace, variant), None)
        for key in [k for k in self._scalings if (k[1], k[0]) == (namespace, variant)]:
            del self._scalings[key]
        self._tell()

    def clear(self) -> None:
        self._decisions.clear()
        self._scalings.clear()
        self._tell()

    def _tell(self) -> None:
        for changed in self._observers:
            changed()

    def exported(self, namespace: str, variant: str) -> ExportedDecision | None:
        return self._decisions.get((namespace, variant))

    def of_namespace(self, namespace: str) -> list[ExportedDecision]:
        return [decision for decision in self._decisions.values() if decision.namespace == namespace]

    def collect(self) -> Iterable[Metric]:
        instance_name = ["controller_instance"] if self._instance else []
        instance = [self._instance] if self._instance else []
        names = ["variant_name", "namespace", "accelerator_type", *instance_name]
        for name, exported in GAUGES.items():
            gauge = GaugeMetricFamily(name, exported.help, labels=names)
            for decision in self._decisions.values():
                labels = [decision.variant, decision.namespace, decision.accelerator, *instance]
                gauge.add_metric(labels, float(exported.value(decision)))
            yield gauge
        counter = CounterMetricFamily(
            "wva_replica_scaling",
            "Changes of the desired replicas.",
            labels=["variant_name", "namespace", "direction", "reason", "accelerator_type", *instance_name],
        )
        for key, count in self._scalings.items():
            counter.add_metric([*key, *instance], float(count))
        yield counter
