"""What every source of numbers gives: gauges of replicas, each with its age, and what could not be read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

KV_USAGE = "vllm:kv_cache_usage_perc"
KV_USAGE_OLDER = "vllm:gpu_cache_usage_perc"
QUEUE_LENGTH = "vllm:num_requests_waiting"
RUNNING = "vllm:num_requests_running"
REQUESTS = "vllm:request_success_total"
CACHE_CONFIG = "vllm:cache_config_info"
PICKER_QUEUE = ("llm_d_epp_flow_control_queue_size", "inference_extension_flow_control_queue_size")
PICKER_QUEUE_BYTES = ("llm_d_epp_flow_control_queue_bytes", "inference_extension_flow_control_queue_bytes")


class Quantity(StrEnum):
    """Counters of an engine whose rates say what requests are like. The mean of a sum is over COUNT_OF it."""

    PROMPT_TOKENS = "prompt_tokens"
    PROMPTS = "prompts"
    OUTPUT_TOKENS = "output_tokens"
    OUTPUTS = "outputs"
    PREFIX_HITS = "prefix_hits"
    PREFIX_QUERIES = "prefix_queries"
    TTFT = "ttft"
    TTFTS = "ttfts"
    ITL = "itl"
    ITLS = "itls"


COUNT_OF = {
    Quantity.PROMPT_TOKENS: Quantity.PROMPTS,
    Quantity.OUTPUT_TOKENS: Quantity.OUTPUTS,
    Quantity.PREFIX_HITS: Quantity.PREFIX_QUERIES,
    Quantity.TTFT: Quantity.TTFTS,
    Quantity.ITL: Quantity.ITLS,
}
COUNTERS: Mapping[Quantity, tuple[str, ...]] = {
    Quantity.PROMPT_TOKENS: ("vllm:request_prompt_tokens_sum",),
    Quantity.PROMPTS: ("vllm:request_prompt_tokens_count",),
    Quantity.OUTPUT_TOKENS: ("vllm:request_generation_tokens_sum",),
    Quantity.OUTPUTS: ("vllm:request_generation_tokens_count",),
    Quantity.PREFIX_HITS: ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
    Quantity.PREFIX_QUERIES: ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
    Quantity.TTFT: ("vllm:time_to_first_token_seconds_sum",),
    Quantity.TTFTS: ("vllm:time_to_first_token_seconds_count",),
    Quantity.ITL: ("vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum"),
    Quantity.ITLS: ("vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count"),
}
"""Names of each counter, today's first."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value and how many seconds ago it was measured."""

    value: float
    age: float

    @staticmethod
    def of(value: float, age: float) -> Gauge | None:
        """None for what is no number: NaN and infinities are absent, not zero."""
        return Gauge(value, max(0.0, age)) if math.isfinite(value) else None


class SeriesId(NamedTuple):
    """The labels that tell one engine of one server from another; "" where a label is absent. (A tuple,
    because every cycle files tens of thousands of them in dictionaries.)"""

    namespace: str
    pod: str
    instance: str
    model: str
    engine: str = ""
    variant: str = ""  # llm_d_ai_variant


@dataclass(frozen=True, slots=True)
class SeriesSample:
    """The gauges that saturation is judged by. None is unknown, never zero."""

    id: SeriesId
    kv_usage: Gauge | None
    queue_length: Gauge | None
    running: Gauge | None = None
    kv_tokens: int | None = None  # that its cache holds
    rates: Mapping[Quantity, float] = field(default_factory=dict)  # per second; what is absent is unknown
    rate_seconds: float | None = None  # over which they are means, where that is less than the snapshot says


@dataclass(frozen=True, slots=True)
class PickerQueue:
    """Requests, and their bytes, for one model that wait at an endpoint picker. `pool` is "" where the series does
    not say; `namespace` is that of the pool, "" likewise."""

    model: str
    pool: str
    namespace: str
    requests: float
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One reading of the whole cluster.

    `failures` says by model why its numbers could not be read. `requests` counts by namespace and model what
    succeeded within the model's retention period; a model that is not in it is unknown. `notes` are remarks
    for operators, such as a window that is shorter than the scrape interval. Rates of requests are means over
    `rate_seconds`.
    """

    series: tuple[SeriesSample, ...]
    failures: Mapping[str, str]
    requests: Mapping[tuple[str, str], float] = field(default_factory=dict)
    picker_queues: tuple[PickerQueue, ...] = ()
    queries: int = 0
    rate_seconds: float = 60.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class ScrapeTarget:
    """A port of a pod that serves metrics."""

    namespace: str
    pod: str
    uid: str
    address: str  # host:port


class MetricsSource(Protocol):
    """Where numbers come from. Both kinds give the same samples for the same servers."""

    @property
    def name(self) -> str: ...

    def set_targets(self, targets: Iterable[ScrapeTarget]) -> None:
        """The pods that matter from now on; a source that does not scrape ignores it."""
        ...

    async def collect(
        self, models: Mapping[str, float | None], *, deadline: float, in_depth: bool = False
    ) -> Snapshot:
        """A reading, within `deadline` seconds. Never raises: what failed is in `failures`.

        `models` has the retention period in seconds of each model whose use must be known, else None. `in_depth`
        asks for the size of caches, rates, and queues of endpoint pickers too.
        """
        ...

    async def close(self) -> None: ...
