"""What the picker shows of its pools: gauges for Prometheus, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tidemill.kube.resources import ObjectKey
from tidemill.metrics.samples import PickerQueue
from tidemill.picker.director import PickerDirector
from tidemill.picker.instruments import CappedLabel, gauge
from tidemill.picker.pools.pool import Pool, Pools
from tidemill.picker.scheduling.cycle import SchedulingRequest


class PoolCollector(Collector):
    """Gauges of the pools, computed when somebody scrapes. `age` gives the age of a pool's view of its pods."""

    def __init__(
        self,
        pools: Pools,
        director: PickerDirector,
        *,
        now: Callable[[], float],
        age: Callable[[ObjectKey], float | None],
        fairness_label: CappedLabel,
    ) -> None:
        self._pools = pools
        self._director = director
        self._now = now
        self._age = age
        self._fairness = fairness_label

    def collect(self) -> Iterable[Metric]:
        queue = gauge(
            "average_queue_size", "Mean of the requests waiting at the endpoints.", ["namespace", "name"]
        )
        kv = gauge("average_kv_cache_utilization", "Mean KV cache usage, 0 to 1.", ["namespace", "name"])
        running = gauge("average_running_requests", "Mean of the requests running.", ["namespace", "name"])
        ready = gauge("ready_endpoints", "Endpoints that may be picked.", ["namespace", "name"])
        each = gauge(
            "per_endpoint_queue_size", "Requests waiting.", ["namespace", "name", "model_server_endpoint"]
        )
        flight = gauge(
            "inflight_requests", "This picker's requests in flight.", ["namespace", "name", "endpoint_name"]
        )
        tokens = gauge(
            "inflight_tokens", "Their prompt tokens not computed yet.", ["namespace", "name", "endpoint_name"]
        )
        index = gauge("prefix_indexer_size", "Prefix blocks known.", ["namespace", "name"])
        age = gauge(
            "datastore_age_seconds",
            "Age of the view of the pods; 0 while it is kept current.",
            ["namespace", "name"],
        )
        full = gauge("flow_control_pool_saturation", "1 is full.", ["namespace", "inference_pool"])
        of_flow = [
            "fairness_id", "priority", "model_name", "target_model_name", "namespace", "inference_pool",
        ]  # fmt: skip
        waiting = gauge("flow_control_queue_size", "Requests held.", of_flow)
        held = gauge("flow_control_queue_bytes", "Bytes held.", of_flow)
        now = self._now()
        for pool in self._pools.all():
            name = [pool.key.namespace, pool.key.name]
            snapshot, load = pool.snapshot, pool.load
            rows = snapshot.rows
            known = load.known(rows, now)
            ready.add_metric(name, len(rows))
            seats = [load.seat(endpoint.id) for endpoint in snapshot.endpoints]
            readings = [
                s.reading if s is not None and k else None for s, k in zip(seats, known.tolist(), strict=True)
            ]
            for family, values in (
                (queue, [r.waiting for r in readings if r is not None and r.waiting is not None]),
                (kv, [r.kv_usage for r in readings if r is not None and r.kv_usage is not None]),
                (running, [r.running for r in readings if r is not None and r.running is not None]),
            ):
                if values:
                    family.add_metric(name, sum(values) / len(values))
            for endpoint, row, reading in zip(snapshot.endpoints, rows.tolist(), readings, strict=True):
                if reading is not None and reading.waiting is not None:
                    each.add_metric([*name, endpoint.address], reading.waiting)
                flight.add_metric([*name, endpoint.address], float(load.in_flight[row]))
                tokens.add_metric([*name, endpoint.address], float(load.in_flight_tokens[row]))
            index.add_metric(name, len(pool.scheduler.prefix))
            seconds = self._age(pool.key)
            if seconds is not None:
                age.add_metric(name, seconds)
            full.add_metric(name, self._director.saturation(pool, now))
            flow = self._director.flow(pool)
            sums: dict[tuple[str, str, str, str], tuple[int, int]] = {}
            model = self._director.instruments.model_label
            for item in () if flow is None else flow.waiting():
                fairness = self._fairness(item.fairness_id)
                key = (fairness, str(item.priority), model(item.model), model(item.target_model))
                count, size = sums.get(key, (0, 0))
                sums[key] = (count + 1, size + item.size)
            for labels, (count, size) in sums.items():
                waiting.add_metric([*labels, *name], count)
                held.add_metric([*labels, *name], size)
        yield from (queue, kv, running, ready, each, flight, tokens, index, age, full, waiting, held)


def waiting(pools: Pools, director: PickerDirector) -> tuple[PickerQueue, ...]:
    """What each pool holds, by the model that is asked for in the end."""
    found: list[PickerQueue] = []
    for pool in pools.all():
        flow = director.flow(pool)
        sums: dict[str, tuple[int, int]] = {}
        for item in () if flow is None else flow.waiting():
            model = item.target_model or item.model
            count, size = sums.get(model, (0, 0))
            sums[model] = (count + 1, size + item.size)
        found += [PickerQueue(model, pool.key.name, pool.key.namespace, *sums[model]) for model in sorted(sums)]
    return tuple(found)


def pool_state(pool: Pool, director: PickerDirector, now: float) -> dict[str, Any]:
    """Everything that a decision about a request without a prompt would rest on."""
    snapshot, load = pool.snapshot, pool.load
    cycle = pool.scheduler.cycle(SchedulingRequest(model=""), snapshot.endpoints, snapshot.rows, now)
    profiles = (
        {name: profile.explain(cycle) for name, profile in pool.scheduler.profiles.items()} if len(cycle) else {}
    )
    flow = director.flow(pool)
    return {
        "pool": str(pool.key),
        "missing": snapshot.missing or None,
        "models": sorted(pool.models),
        "saturation": round(director.saturation(pool, now), 4),
        "waiting": 0 if flow is None else flow.requests,
        "prefixBlocks": len(pool.scheduler.prefix),
        "endpoints": [
            {
                "address": endpoint.address,
                "pod": str(endpoint.pod),
                "rank": endpoint.rank,
                "waiting": _number(load.waiting[row]),
                "running": _number(load.running[row]),
                "kvUsage": _number(load.kv_usage[row]),
                "ageSeconds": _number(now - load.updated[row]),
                "inFlight": int(load.in_flight[row]),
                "inFlightTokens": int(load.in_flight_tokens[row]),
                "awake": bool(load.awake[row]),
            }
            for endpoint, row in zip(snapshot.endpoints, snapshot.rows.tolist(), strict=True)
        ],
        "profiles": profiles,
    }


def _number(value: Any) -> float | None:
    return None if not np.isfinite(value) else round(float(value), 4)
