"""Prometheus as a source: one query for each quantity, whatever the number of variants.

A query that fails is not repeated in the same cycle. It is split by model, so that whatever is wrong with
one model (a series that breaks the query, an answer that takes too long) costs only that model its numbers.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import orjson
import structlog

from tidemill.api.manager_config import PrometheusConfig
from tidemill.metrics.promql import any_of
from tidemill.metrics.samples import (
    CACHE_CONFIG,
    COUNTERS,
    KV_USAGE,
    KV_USAGE_OLDER,
    PICKER_QUEUE,
    PICKER_QUEUE_BYTES,
    QUEUE_LENGTH,
    REQUESTS,
    RUNNING,
    Gauge,
    PickerQueue,
    Quantity,
    ScrapeTarget,
    SeriesId,
    SeriesSample,
    Snapshot,
)

log = structlog.get_logger(__name__)
Query: TypeAlias = Callable[[str], str]
"""PromQL for given label matchers, such as `{model_name="m"}`; "" asks for everything."""

WINDOW_SECONDS = 60
RATE_SECONDS = 300  # over which requests are averaged
LATENCY_SECONDS = 60
GROUP = "namespace, pod, pod_name, model_server_pod, instance, engine, model_name, llm_d_ai_variant"
SPLIT_FANOUT = 8
MAX_QUERIES = 256  # in one cycle with failures; without any it is four
GET_LIMIT = 2000  # longer queries go by POST; GET is what read-only roles allow


class PrometheusError(Exception):
    """A refusal, or no answer in time. The message is for the operator."""


class PrometheusUnreachableError(PrometheusError):
    """Whatever was reached, if anything, is no Prometheus: another query would fare no better."""


@dataclass(frozen=True, slots=True)
class Row:
    """One element of an instant vector."""

    labels: dict[str, str]
    value: float


class PrometheusClient:
    """Instant queries over HTTP, with the TLS options and tokens of the manager config.

    Raises ValueError when a certificate file cannot be used.
    """

    def __init__(self, config: PrometheusConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None
        self._ssl = _ssl_context(config)

    async def query(self, query: str, timeout: float) -> list[Row]:
        """The rows of an instant vector. Raises PrometheusError."""
        try:
            async with asyncio.timeout(timeout):
                return await self._query(query, timeout)
        except TimeoutError:
            raise PrometheusError(f"no answer from {self._config.base_url} within {timeout:g}s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise PrometheusUnreachableError(f"{self._config.base_url} cannot be reached: {error}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _query(self, query: str, timeout: float) -> list[Row]:
        status, content_type, body = await self._send(query, timeout)
        answer = self._decode(status, content_type, body)
        if answer.get("status") != "success":
            reason = f"{answer.get('errorType', 'error')}: {answer.get('error', 'no message')}"
            raise PrometheusError(f"{self._config.base_url} answered {status}: {reason}")
        data = answer.get("data") or {}
        if data.get("resultType") != "vector":
            raise PrometheusError(f"{self._config.base_url} answered a {data.get('resultType')}, not a vector")
        return [Row(item["metric"], float(item["value"][1])) for item in data["result"]]

    async def _send(self, query: str, timeout: float) -> tuple[int, str, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._ssl, limit=16))
        parameters = {"query": query, "timeout": f"{timeout:g}s"}
        long = len(query) > GET_LIMIT
        token = self._token()
        async with self._session.request(
            "POST" if long else "GET",
            f"{self._config.base_url}/api/v1/query",
            params=None if long else parameters,
            data=parameters if long else None,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            server_hostname=self._config.server_name or None,
        ) as response:
            return response.status, response.content_type, await response.read()

    def _token(self) -> str:
        """The bearer token. A file is read for every query: it is small, and rotates without notice."""
        path = self._config.token_path
        return Path(path).read_text().strip() if path else self._config.bearer_token

    def _decode(self, status: int, content_type: str, body: bytes) -> dict[str, Any]:
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            hint = ": check the token" if status in (401, 403) else ": is PROMETHEUS_BASE_URL right?"
            # A gateway answers 5xx for a query that takes too long, and another may fare better; anything
            # else comes from something that is no Prometheus.
            kind = PrometheusError if status >= 500 else PrometheusUnreachableError
            raise kind(f"{self._config.base_url} answered {status} with {content_type}, not JSON{hint}")
        return answer


class PrometheusSource:
    """Gauges of every model server that Prometheus scrapes."""

    name = "prometheus"

    def __init__(
        self, client: PrometheusClient, *, window: float = WINDOW_SECONDS, batch_timeout: float = 4.0,
        split_timeout: float = 2.0,
    ) -> None:  # fmt: skip
        self._client = client
        self._window = window
        self._batch_timeout = batch_timeout
        self._split_timeout = split_timeout
        self._intervals = _IntervalEstimate()
        self._caches: dict[_EngineId, int] = {}  # the last that was read: a cache does not change its size

    def set_targets(self, targets: Iterable[ScrapeTarget]) -> None:
        pass

    async def close(self) -> None:
        await self._client.close()

    async def collect(
        self, models: Mapping[str, float | None], *, deadline: float, in_depth: bool = False
    ) -> Snapshot:
        cycle = _Cycle(
            self._client, sorted(models), asyncio.get_running_loop().time() + deadline, self._batch_timeout,
            self._split_timeout,
        )  # fmt: skip
        window = f"{self._window:g}s"

        def value(names: Sequence[str], matchers: str) -> str:
            # The last sample stands in while the window holds none, so that a scrape interval above the
            # window does not make numbers come and go.
            parts = [f"max_over_time({n}{matchers}[{window}]) or {n}{matchers}" for n in names]
            return f"max by ({GROUP}) ({' or '.join(parts)})"

        def age(names: Sequence[str], matchers: str) -> str:
            parts = [f"timestamp({n}{matchers})" for n in names]
            return f"time() - max by ({GROUP}) ({' or '.join(parts)})"

        kv_names, queue_names = (KV_USAGE, KV_USAGE_OLDER), (QUEUE_LENGTH,)
        kv, kv_age, queue, queue_age, (running, requests), (rates, caches, picker_queues) = await asyncio.gather(
            cycle.ask(lambda matchers: value(kv_names, matchers)),
            cycle.ask(lambda matchers: age(kv_names, matchers)),
            cycle.ask(lambda matchers: value(queue_names, matchers)),
            cycle.ask(lambda matchers: age(queue_names, matchers)),
            self._usage(cycle, models, in_depth=in_depth),
            self._depth(cycle) if in_depth else _nothing(),
        )
        ages = {**kv_age, **queue_age}
        interval = self._intervals.observe({id_: -age_ for id_, age_ in ages.items()}, _now())
        notes: tuple[str, ...] = ()
        if interval is not None and interval > self._window * 1.1:
            notes = (
                f"the window of {self._window:g}s is shorter than the scrape interval of about {interval:.0f}s: "
                "the last sample is used in its place",
            )
        series = tuple(
            SeriesSample(
                id_,
                _gauge(kv, kv_age, id_),
                _gauge(queue, queue_age, id_),
                # Read at the same time as the queue, so it is as old.
                _gauge(running, queue_age, id_),
                caches.get(_engine_id(id_)),
                rates.get(id_, {}),
            )
            for id_ in sorted(kv.keys() | queue.keys())
            if id_.model not in cycle.failures
        )
        return Snapshot(
            series=series, failures=cycle.failures, requests=requests, picker_queues=picker_queues,
            queries=cycle.queries, rate_seconds=RATE_SECONDS, notes=notes,
        )  # fmt: skip

    async def _depth(
        self, cycle: _Cycle
    ) -> tuple[dict[SeriesId, dict[Quantity, float]], Mapping[_EngineId, int], tuple[PickerQueue, ...]]:
        """What requests are like, what caches hold, and what waits at endpoint pickers."""
        rates, caches, waiting = await asyncio.gather(
            cycle.ask_tagged(_rates), cycle.ask_rows(_CACHES), cycle.ask_rows(_PICKER_QUEUES)
        )
        by_series: dict[SeriesId, dict[Quantity, float]] = {}
        for (tag, id_), value in rates.items():
            if math.isfinite(value):
                by_series.setdefault(id_, {})[Quantity(tag)] = value
        for labels, _ in caches:
            blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
            if blocks.isdigit() and size.isdigit():
                self._caches[_engine_id(_series_id(labels))] = int(blocks) * int(size)
        return by_series, self._caches, _picker_queues(waiting)

    async def _usage(
        self, cycle: _Cycle, models: Mapping[str, float | None], *, in_depth: bool
    ) -> tuple[dict[SeriesId, float], dict[tuple[str, str], float]]:
        """What runs, and what was served within the retention period; asked only where a model may sleep or is
        looked at in depth."""
        retentions = sorted({seconds for seconds in models.values() if seconds is not None})
        if not retentions and not in_depth:
            return {}, {}
        running, *counts = await asyncio.gather(
            cycle.ask(lambda matchers: f"max by ({GROUP}) ({RUNNING}{matchers})"),
            *(
                cycle.ask(
                    lambda matchers, period=period: (
                        f"sum by (namespace, model_name) (increase({REQUESTS}{matchers}[{period:g}s]))"
                    )
                )
                for period in retentions
            ),
        )
        requests = {
            (id_.namespace, id_.model): value
            for period, found in zip(retentions, counts, strict=True)
            for id_, value in found.items()
            if models.get(id_.model) == period and math.isfinite(value)
        }
        return running, requests


class _Cycle:
    """The queries of one cycle: counted, bounded in time, split where they fail."""

    def __init__(
        self,
        client: PrometheusClient,
        models: list[str],
        deadline: float,
        batch_timeout: float,
        split_timeout: float,
    ) -> None:
        self._client = client
        self._models = models
        self._deadline = deadline
        self._batch_timeout = batch_timeout
        self._split_timeout = split_timeout
        self.queries = 0
        self.failures: dict[str, str] = {}

    async def ask(self, query: Query) -> dict[SeriesId, float]:
        """Values by series of `query`."""
        return {id_: value for (_, id_), value in (await self.ask_tagged(query)).items()}

    async def ask_tagged(self, query: Query) -> dict[tuple[str, SeriesId], float]:
        """The same for several queries in one, whose rows a label `quantity` tells apart."""
        try:
            return await self._run(query(""), self._batch_timeout)
        except PrometheusError as error:
            if len(self._models) < 2 or isinstance(error, PrometheusUnreachableError):
                self.failures |= dict.fromkeys(self._models, str(error))
                return {}
            log.info("batched query failed, asking by model", error=str(error))
        return await self._split(query, self._models)

    async def ask_rows(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each row, for series that name no model and so cannot be asked for by model: what
        fails is said in the log, and nobody's failure."""
        self.queries += 1
        try:
            rows = await self._client.query(query, self._batch_timeout)
        except PrometheusError as error:
            log.warning("query failed", query=query, error=str(error))
            return []
        return [(row.labels, row.value) for row in rows]

    async def _split(self, query: Query, models: list[str]) -> dict[tuple[str, SeriesId], float]:
        size = -(-len(models) // SPLIT_FANOUT)
        groups = [models[start : start + size] for start in range(0, len(models), size)]
        found: dict[tuple[str, SeriesId], float] = {}
        for part in await asyncio.gather(*(self._ask_group(query, group) for group in groups)):
            found |= part
        return found

    async def _ask_group(self, query: Query, models: list[str]) -> dict[tuple[str, SeriesId], float]:
        left = self._deadline - asyncio.get_running_loop().time()
        if left < 0.05 or self.queries >= MAX_QUERIES:
            spent = "time" if left < 0.05 else "number of queries"
            self.failures |= dict.fromkeys(models, f"not asked: the {spent} of this cycle was used up")
            return {}
        try:
            matchers = "{" + any_of("model_name", models) + "}"
            return await self._run(query(matchers), min(left, self._split_timeout))
        except PrometheusError as error:
            if len(models) == 1:
                self.failures[models[0]] = str(error)
                return {}
        return await self._split(query, models)

    async def _run(self, query: str, timeout: float) -> dict[tuple[str, SeriesId], float]:
        self.queries += 1
        rows = await self._client.query(query, timeout)
        return {(row.labels.get("quantity", ""), _series_id(row.labels)): row.value for row in rows}


class _IntervalEstimate:
    """The scrape interval, from the times at which samples were seen to change."""

    def __init__(self) -> None:
        self._last: dict[SeriesId, float] = {}
        self._interval: float | None = None

    def observe(self, offsets: dict[SeriesId, float], now: float) -> float | None:
        """Take ages of samples (negative offsets from `now`); the smallest step between two of a series.

        Cycles that come less often than samples see multiples of the interval, so the smallest counts.
        """
        times = {id_: now + offset for id_, offset in offsets.items()}
        steps = [
            step for id_, time in times.items() if (before := self._last.get(id_)) and (step := time - before) > 1
        ]
        if steps:
            smallest = min(steps)
            self._interval = smallest if self._interval is None else min(self._interval, smallest)
        self._last = times
        return self._interval


def _ssl_context(config: PrometheusConfig) -> ssl.SSLContext | bool:
    if not config.base_url.startswith("https://"):
        return True
    for name in ("ca_cert_path", "client_cert_path", "client_key_path"):
        path = getattr(config, name)
        if path and not Path(path).is_file():
            raise ValueError(f"PROMETHEUS_{name.upper()}: invalid value {path!r}: no such file")
    if bool(config.client_cert_path) != bool(config.client_key_path):
        raise ValueError(
            "PROMETHEUS_CLIENT_CERT_PATH and PROMETHEUS_CLIENT_KEY_PATH: one is set and the other is not"
        )
    context = ssl.create_default_context(cafile=config.ca_cert_path or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.client_cert_path:
        context.load_cert_chain(config.client_cert_path, config.client_key_path)
    if config.tls_insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


_EngineId: TypeAlias = tuple[str, str, str, str]


def _engine_id(id_: SeriesId) -> _EngineId:
    """An engine whatever it serves: vllm:cache_config_info names no model."""
    return (id_.namespace, id_.pod, id_.instance, id_.engine)


_CACHES = f"max by ({GROUP}, num_gpu_blocks, block_size) ({CACHE_CONFIG})"
_PICKER_QUEUES = " or ".join(
    f"label_replace(sum by (exported_namespace, inference_pool, target_model_name, model_name) ({name}), "
    f'"quantity", "{tag}", "", "")'
    for tag, names in (("requests", PICKER_QUEUE), ("bytes", PICKER_QUEUE_BYTES))
    for name in names
)


def _rates(matchers: str) -> str:
    """Rates of all counters in one query, each row tagged with its quantity."""
    parts: list[str] = []
    for quantity, names in COUNTERS.items():
        window = LATENCY_SECONDS if quantity in _LATENCIES else RATE_SECONDS
        rates = " or ".join(f"rate({name}{matchers}[{window}s])" for name in names)
        parts.append(f'label_replace(sum by ({GROUP}) ({rates}), "quantity", "{quantity.value}", "", "")')
    return " or ".join(parts)


_LATENCIES = frozenset({Quantity.TTFT, Quantity.TTFTS, Quantity.ITL, Quantity.ITLS})


def _picker_queues(rows: Sequence[tuple[dict[str, str], float]]) -> tuple[PickerQueue, ...]:
    """What waits by pool and model: the target model's name where there is one, else the model's. Series under an
    older name of the same metric say the same, and count once."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for labels, value in rows:
        model = labels.get("target_model_name") or labels.get("model_name") or ""
        if not model or not math.isfinite(value):
            continue
        # The picker's own label `namespace` is the pool's; Prometheus renames it when its target has one too.
        namespace = labels.get("exported_namespace", "")
        key = (model, labels.get("inference_pool", ""), namespace)
        kind = labels["quantity"]
        found.setdefault(key, {})
        found[key][kind] = max(found[key].get(kind, 0.0), value)
    return tuple(
        PickerQueue(model, pool, namespace, values.get("requests", 0.0), values.get("bytes", 0.0))
        for (model, pool, namespace), values in sorted(found.items())
    )


async def _nothing() -> tuple[
    dict[SeriesId, dict[Quantity, float]], Mapping[_EngineId, int], tuple[PickerQueue, ...]
]:
    return {}, {}, ()


def _series_id(labels: dict[str, str]) -> SeriesId:
    get = labels.get
    pod = get("pod") or get("pod_name") or get("model_server_pod") or ""
    return SeriesId(
        get("namespace", ""), pod, get("instance", ""), get("model_name", ""), get("engine", ""),
        get("llm_d_ai_variant", ""),
    )  # fmt: skip


def _gauge(values: dict[SeriesId, float], ages: dict[SeriesId, float], id_: SeriesId) -> Gauge | None:
    """A value whose series has no current sample (its target is gone) is no value."""
    value, age = values.get(id_), ages.get(id_)
    return None if value is None or age is None else Gauge.of(value, age)


def _now() -> float:
    return asyncio.get_running_loop().time()
