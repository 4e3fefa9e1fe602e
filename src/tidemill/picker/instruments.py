"""Series about requests and picks. Labels that clients can fill are capped, so that no client can fill memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tidemill.picker.series import Count, Counts, Histogram, Histograms

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

    def __init__(self, limit: int = LABEL_LIMIT) -> None:
        self._limit = limit
        self._seen: set[str] = set()
        self.configured: Callable[[str], bool] = lambda value: False

    def __call__(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) < self._limit - 1 or self.configured(value):
            self._seen.add(value)
            return value
        return OTHER


class RequestSeries(NamedTuple):
    """The series of one combination of labels, looked up once."""

    total: Count
    running: Count
    duration: Histogram
    ttft: Histogram
    input_tokens: Histogram
    output_tokens: Histogram
    errors: Callable[[str], None]


class Instruments(Collector):
    """All series of one process. `observe` them through the fields; gauges that follow state are registered as
    functions (`follow`)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.model_label = CappedLabel()
        self.fairness_label = CappedLabel()
        self._combinations: dict[tuple[str, str, str, int], RequestSeries] = {}
        self._followed: list[Collector] = []
        self._families: list[Counts | Histograms] = []
        self._total = self._counts("request", "Requests that were picked for.", _REQUEST)
        self._errors = self._counts("request_error", "Requests that ended in an error.", [*_REQUEST, "error_code"])
        self._running: dict[tuple[str, ...], Count] = {}
        self._duration = self._histograms(
            "request_duration_seconds", "From headers to last byte.", _LONG, _REQUEST
        )
        self._ttft = self._histograms("request_ttft_seconds", "From headers to the first token.", _LONG, _REQUEST)
        self._input = self._histograms(
            "request_input_tokens", "Prompt tokens, as the server counts.", _TOKENS, _REQUEST
        )
        self._output = self._histograms(
            "request_output_tokens", "Output tokens, as the server counts.", _TOKENS, _REQUEST
        )
        self.scheduling = self._histograms(
            "scheduler_e2e_duration_seconds", "Time of one scheduling cycle.", _SHORT
        ).of()
        self.processing = self._histograms(
            "request_processing_duration_seconds",
            "From the complete request to the pick, waiting left out.",
            _SHORT,
        ).of()
        self.hit_ratio = self._histograms(
            "prefix_indexer_hit_ratio", "Share of the prompt cached where it goes.", _RATIO
        ).of()
        attempts = self._counts("scheduler_attempts", "Scheduling cycles by outcome.", ["status"])
        self.successes, self.failures = attempts.of("success"), attempts.of("failure")
        self.dropped = self._counts("request_dropped", "Requests dropped, by reason.", ["reason"])
        self.plugin_duration = self._histograms(
            "plugin_duration_seconds", "Time of one plugin, one cycle in a thousand.", _SHORT,
            ["extension_point", "plugin_type", "plugin_name"],
        )  # fmt: skip
        self.queue_duration = self._histograms(
            "flow_control_request_queue_duration_seconds", "Time in the waiting room.", _LONG,
            ["fairness_id", "priority", "outcome"],
        )  # fmt: skip
        self.poll_errors = self._counts("datalayer_poll_errors", "Scrapes that failed.", ["source_type"]).of(
            "metrics-data-source"
        )
        registry.register(self)

    def request(self, model: str, target: str, fairness_id: str, priority: int) -> RequestSeries:
        key = (model, target, fairness_id, priority)
        found = self._combinations.get(key)
        if found is None:
            labels = (
                self.model_label(model), self.model_label(target), self.fairness_label(fairness_id), str(priority)
            )  # fmt: skip

            def error(code: str) -> None:
                self._errors.of(*labels, code).value += 1

            found = RequestSeries(
                self._total.of(*labels),
                self._running.setdefault(labels, Count()),
                self._duration.of(*labels),
                self._ttft.of(*labels),
                self._input.of(*labels),
                self._output.of(*labels),
                error,
            )
            # Bounded like the labels: invented names do not get in.
            if len(self._combinations) < 4 * LABEL_LIMIT:
                self._combinations[key] = found
        return found

    def follow(self, collector: Collector) -> None:
        """Series that are computed when somebody scrapes."""
        self._followed.append(collector)

    def collect(self) -> Iterable[Metric]:
        """Every family, and once more under the name that older dashboards know."""
        for family in self._all():
            yield family
            if (older := OLDER_NAMES.get(family.name.removeprefix(PREFIX))) is not None:
                copy = Metric(older, family.documentation, family.type)
                copy.samples = [s._replace(name=older + s.name.removeprefix(family.name)) for s in family.samples]
                yield copy

    def _all(self) -> Iterable[Metric]:
        for series in self._families:
            yield from series.collect()
        running = gauge("request_running", "Requests in flight.", _REQUEST)
        for labels, count in self._running.items():
            running.add_metric(list(labels), count.value)
        yield running
        for collector in self._followed:
            yield from collector.collect()

    def _counts(self, name: str, help_: str, labels: Sequence[str]) -> Counts:
        made = Counts(PREFIX + name, help_, labels)
        self._families.append(made)
        return made

    def _histograms(
        self, name: str, help_: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> Histograms:
        made = Histograms(PREFIX + name, help_, bounds, labels)
        self._families.append(made)
        return made


def gauge(name: str, help_: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, help_, labels=labels)
