"""Series about requests and picks. Labels that clients can fill are capped, so that no client can fill memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "llm_d_epp_"
LABEL_LIMIT = 1000
OTHER = "other"
_REQUEST = ["model_name", "target_model_name", "fairness_id", "priority"]
_LONG = (0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60, 120,
         180, 240, 300, 600, 1800, 3600)  # fmt: skip
_SHORT = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 1048576)
_RATIO = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

# Names that dashboards of earlier releases ask for, by today's.
OLDER_NAMES = {
    "request": "inference_objective_request",
    "request_error": "inference_objective_request_error",
    "request_duration_seconds": "inference_objective_request_duration_seconds",
    "request_input_tokens": "inference_objective_input_tokens",
    "request_output_tokens": "inference_objective_output_tokens",
    "request_running": "inference_objective_running_requests",
    "average_queue_size": "inference_pool_average_queue_size",
    "average_kv_cache_utilization": "inference_pool_average_kv_cache_utilization",
    "ready_endpoints": "inference_pool_ready_pods",
    "per_endpoint_queue_size": "inference_pool_per_pod_queue_size",
    "scheduler_e2e_duration_seconds": "inference_extension_scheduler_e2e_duration_seconds",
    "plugin_duration_seconds": "inference_extension_plugin_duration_seconds",
    "prefix_indexer_size": "inference_extension_prefix_indexer_size",
    "prefix_indexer_hit_ratio": "inference_extension_prefix_indexer_hit_ratio",
    "flow_control_queue_size": "inference_extension_flow_control_queue_size",
    "flow_control_pool_saturation": "inference_extension_flow_control_pool_saturation",
    "flow_control_request_queue_duration_seconds": (
        "inference_extension_flow_control_request_queue_duration_seconds"
    ),
}


class CappedLabel:
    """The first thousand values of a label as they are, the others as one. Values that the operator configured
    are always themselves."""

    def __init__(self, limit: int = LABEL_LIMIT, *, known: Callable[[str], bool] = lambda _: False) -> None:
        self._limit = limit
        self._seen: set[str] = set()
        self._known = known

    def __call__(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) < self._limit - 1 or self._known(value):
            self._seen.add(value)
            return value
        return OTHER


@dataclass(frozen=True, slots=True)
class RequestSeries:
    """The series of one combination of labels, looked up once."""

    total: Any
    running: Any
    duration: Any
    ttft: Any
    input_tokens: Any
    output_tokens: Any
    errors: Callable[[str], None]


class Instruments:
    """All series of one process. `observe` them through the fields; gauges that follow state are registered as
    functions (`follow`)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._inner = CollectorRegistry()
        registry.register(_WithOlderNames(self._inner))
        self.model_label = CappedLabel()
        self.fairness_label = CappedLabel()
        self._combinations: dict[tuple[str, str, str, int], RequestSeries] = {}

        def counter(name: str, help_: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(PREFIX + name, help_, list(labels), registry=self._inner)

        def histogram(name: str, help_: str, buckets: tuple[float, ...], labels: Iterable[str] = ()) -> Histogram:
            return Histogram(PREFIX + name, help_, list(labels), buckets=buckets, registry=self._inner)

        self._total = counter("request", "Requests that were picked for.", _REQUEST)
        self._errors = counter("request_error", "Requests that ended in an error.", [*_REQUEST, "error_code"])
        self._running = Gauge(PREFIX + "request_running", "Requests in flight.", _REQUEST, registry=self._inner)
        self._duration = histogram("request_duration_seconds", "From headers to last byte.", _LONG, _REQUEST)
        self._ttft = histogram("request_ttft_seconds", "From headers to the first token.", _LONG, _REQUEST)
        self._input = histogram("request_input_tokens", "Prompt tokens, as the server counts.", _TOKENS, _REQUEST)
        self._output = histogram(
            "request_output_tokens", "Output tokens, as the server counts.", _TOKENS, _REQUEST
        )
        self.scheduling = histogram("scheduler_e2e_duration_seconds", "Time of one scheduling cycle.", _SHORT)
        self.processing = histogram(
            "request_processing_duration_seconds",
            "From the complete request to the pick, waiting left out.",
            _SHORT,
        )
        self.attempts = counter("scheduler_attempts", "Scheduling cycles by outcome.", ["status"])
        self.plugin_duration = histogram(
            "plugin_duration_seconds", "Time of one plugin (sampled).", _SHORT,
            ["extension_point", "plugin_type", "plugin_name"],
        )  # fmt: skip
        self.hit_ratio = histogram("prefix_indexer_hit_ratio", "Share of the prompt cached where it goes.", _RATIO)
        self.dropped = counter("request_dropped", "Requests dropped, by reason.", ["reason"])
        self.queue_duration = histogram(
            "flow_control_request_queue_duration_seconds", "Time in the waiting room.", _LONG,
            ["fairness_id", "priority", "outcome"],
        )  # fmt: skip
        self.poll_errors = counter("datalayer_poll_errors", "Scrapes that failed.", ["source_type"])
        self.poll_errors.labels("metrics-data-source")

    def request(self, model: str, target: str, fairness_id: str, priority: int) -> RequestSeries:
        key = (model, target, fairness_id, priority)
        found = self._combinations.get(key)
        if found is None:
            labels = (
                self.model_label(model),
                self.model_label(target),
                self.fairness_label(fairness_id),
                str(priority),
            )

            def error(code: str) -> None:
                self._errors.labels(*labels, code).inc()

            found = RequestSeries(
                self._total.labels(*labels),
                self._running.labels(*labels),
                self._duration.labels(*labels),
                self._ttft.labels(*labels),
                self._input.labels(*labels),
                self._output.labels(*labels),
                error,
            )
            # Bounded like the labels: invented names do not get in.
            if len(self._combinations) < 4 * LABEL_LIMIT:
                self._combinations[key] = found
        return found

    def follow(self, collector: Collector) -> None:
        """Series that are computed when somebody scrapes."""
        self._inner.register(collector)


def gauge(name: str, help_: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, help_, labels=labels)


class _WithOlderNames(Collector):
    def __init__(self, inner: CollectorRegistry) -> None:
        self._inner = inner

    def collect(self) -> Iterable[Metric]:
        for family in self._inner.collect():
            # When a series began is of no use here, and doubles what is scraped.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            name = family.name.removeprefix(PREFIX)
            if (older := OLDER_NAMES.get(name)) is not None:
                copy = Metric(older, family.documentation, family.type)
                copy.samples = [_renamed(sample, family.name, older) for sample in family.samples]
                yield copy


def _renamed(sample: Any, name: str, older: str) -> Any:
    return sample._replace(name=older + sample.name.removeprefix(name))
