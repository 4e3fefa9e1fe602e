"""Whose pod is it: 10,000 pods of 1,000 variants, from nothing. Prints JSON, writes build/bench/attribution.json.

`cold_s` is from the first request to every pod's variant: lists of all kinds, decoding, indexes, owners. What
follows needs no request: pods, ReplicaSets and Deployments are watched. `steady_reads_per_min` are all GET
requests of the next minute (a watch that is renewed is one), counted where they are sent. The API server has a
process of its own, on the same machine.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from benchmarks.autoscaler import REPLICAS, VARIANTS, rss_mib, servers
from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.autoscaler.attribution import Ownership
from tidemill.autoscaler.world import World
from tidemill.cli.collector import spare_the_collector
from tidemill.kube.client import KubeClient

OUTPUT = Path("build/bench/attribution.json")
COLD_RUNS = 3
LIMIT = 2.0  # seconds


class Counting(KubeClient):
    """Counts what is read."""

    reads = 0

    async def list(self, *args: Any, **options: Any) -> Any:
        self.reads += 1
        return await super().list(*args, **options)

    async def get(self, *args: Any, **options: Any) -> Any:
        self.reads += 1
        return await super().get(*args, **options)

    def watch(self, *args: Any, **options: Any) -> Any:
        self.reads += 1
        return super().watch(*args, **options)


def attributed(world: World) -> int:
    """Pods whose variant is known."""
    ownership = Ownership(world)
    return sum(ownership.variant_of(pod) is not None for pod in world.pods.store)


async def measure(kubeconfig: str, *, steady: float) -> dict[str, float]:
    async with await Counting.connect(kubeconfig) as client:
        assert isinstance(client, Counting)
        gc.collect()
        before, start, cpu = rss_mib(), time.perf_counter(), time.process_time()
        world = World(client, namespace=DEFAULT_NAMESPACE)
        task = asyncio.create_task(world.run())
        await world.wait_synced()
        synced = time.perf_counter()
        assert attributed(world) == VARIANTS * REPLICAS
        done = time.perf_counter()
        found = {
            "cold_s": done - start,
            "cold_cpu_s": time.process_time() - cpu,
            "attribution_s": done - synced,
            "cold_reads": client.reads,
            "rss_mib": rss_mib() - before,
        }
        if steady:
            client.reads = 0
            end = time.monotonic() + steady
            while time.monotonic() < end:
                await asyncio.sleep(1.0)
                assert attributed(world) == VARIANTS * REPLICAS
            found["steady_reads_per_min"] = client.reads * 60 / steady
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found


async def main() -> None:
    spare_the_collector()  # as the program does
    steady = 10.0 if "--short" in sys.argv else 60.0
    load = os.getloadavg()[0]
    async with servers(VARIANTS, REPLICAS) as addresses:
        runs = [await measure(addresses["kubeconfig"], steady=0) for _ in range(COLD_RUNS)]
        last = await measure(addresses["kubeconfig"], steady=steady)
    result: dict[str, Any] = {"pods": VARIANTS * REPLICAS, "variants": VARIANTS, "load_average": load}
    for name in runs[0]:
        result[name] = round(statistics.median(run[name] for run in (*runs, last)), 3)
    result["steady_reads_per_min"] = round(last["steady_reads_per_min"], 1)
    result["targets"] = [
        {"what": "cold, seconds", "value": result["cold_s"], "at_most": LIMIT, "met": result["cold_s"] <= LIMIT}
    ]
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    print(OUTPUT.read_text())


if __name__ == "__main__":
    asyncio.run(main())
