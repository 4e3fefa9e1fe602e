"""What every source of numbers gives: gauges of replicas, each with its age, and what could not be read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

KV_USAGE = "vllm:kv_cache_usage_perc"
KV_USAGE_OLDER = "vllm:gpu_cache_usage_perc"
QUEUE_LENGTH = "vllm:num_requests_waiting"
RUNNING = "vllm:num_requests_running"
REQUESTS = "vllm:request_success_total"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One reading of the whole cluster.

    `failures` says by model why its numbers could not be read. `requests` counts by namespace and model what
    succeeded within the model's retention period; a model that is not in it is unknown. `notes` are remarks
    for operators, such as a window that is shorter than the scrape interval.
    """

    series: tuple[SeriesSample, ...]
    failures: Mapping[str, str]
    requests: Mapping[tuple[str, str], float] = field(default_factory=dict)
    queries: int = 0
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

    async def collect(self, models: Mapping[str, float | None], *, deadline: float) -> Snapshot:
        """A reading, within `deadline` seconds. Never raises: what failed is in `failures`.

        `models` has the retention period in seconds of each model whose use must be known, else None.
        """
        ...

    async def close(self) -> None: ...
