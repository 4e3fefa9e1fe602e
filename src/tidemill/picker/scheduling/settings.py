"""Plugins of the original that choose or tune what is built in here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tidemill.api.inference import ENGINE_TYPE_LABEL
from tidemill.api.picker_config import Seconds
from tidemill.picker.scheduling.plugin import Plugin, Setting


class ApproxPrefixCacheProducer(Setting):
    """The approximate prefix index. Block sizes under 64 tokens are taken as given (the original raises them to
    64) with a warning, because they cost memory."""

    block_size_tokens: Annotated[int | None, Field(ge=1)] = None
    max_prefix_tokens_to_match: Annotated[int | None, Field(ge=1)] = None
    max_prefix_blocks_to_match: Annotated[int | None, Field(ge=1)] = None
    lru_capacity_per_server: Annotated[int | None, Field(ge=1)] = None
    auto_tune: bool | None = None
    without_effect = frozenset({"auto_tune"})  # what an engine says of its cache is always heeded


class InflightLoadProducer(Setting):
    pass


class MetricsDataSource(Setting):
    """Where engines export their metrics, when not at the endpoint itself."""

    scheme: Literal["http", "https"] = "http"
    path: Annotated[str, Field(pattern=r"^/")] = "/metrics"
    port: Annotated[int | None, Field(ge=1, le=65535)] = None
    insecure_skip_verify: bool = True


class CoreMetricsExtractor(Setting):
    """Which label of a pod names its engine, and the engine of those without."""

    engine_label_key: Annotated[str, Field(min_length=1)] = ENGINE_TYPE_LABEL
    default_engine: str = ""


class UtilizationDetector(Setting):
    """Saturation of an endpoint: max(waiting / queueDepthThreshold, kv / kvCacheUtilThreshold); of the pool,
    their mean. Numbers older than `metricsStalenessThreshold` count as full."""

    queue_depth_threshold: Annotated[float, Field(gt=0)] = 5
    kv_cache_util_threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    metrics_staleness_threshold: Annotated[Seconds, Field(gt=0)] = 0.2


class ConcurrencyDetector(Setting):
    """Saturation by requests in flight: all of them over `maxConcurrency` a endpoint."""

    max_concurrency: Annotated[int, Field(ge=1)] = 100


class Parser(Setting):
    pass


class FairnessPolicy(Setting):
    pass


class OrderingPolicy(Setting):
    pass


SETTINGS: dict[str, type[Plugin]] = {
    "approx-prefix-cache-producer": ApproxPrefixCacheProducer,
    "inflight-load-producer": InflightLoadProducer,
    "metrics-data-source": MetricsDataSource,
    "core-metrics-extractor": CoreMetricsExtractor,
    "model-server-protocol-metrics": CoreMetricsExtractor,
    "utilization-detector": UtilizationDetector,
    "concurrency-detector": ConcurrencyDetector,
    "openai-parser": Parser,
    "anthropic-parser": Parser,
    "passthrough-parser": Parser,
    "global-strict-fairness-policy": FairnessPolicy,
    "round-robin-fairness-policy": FairnessPolicy,
    "fcfs-ordering-policy": OrderingPolicy,
    "edf-ordering-policy": OrderingPolicy,
}


def one_of(plugins: dict[str, Any], kind: type[Any]) -> Any:
    """The configured plugin of a kind, or one with its defaults."""
    return next((plugin for plugin in plugins.values() if isinstance(plugin, kind)), None) or kind()
