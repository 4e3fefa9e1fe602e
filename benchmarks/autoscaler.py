"""Benchmarks of the autoscaler; prints JSON and writes build/bench/autoscaler.json.

Servers run in a process of their own, so CPU and memory here are the autoscaler's alone. Quote medians and
ratios: machines differ, and the load average is part of the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import structlog
from aiohttp import web

from benchmarks.server import NAMESPACE
from benchmarks.single import one_variant, variant
from tidemill.api.manager_config import PrometheusConfig
from tidemill.autoscaler.controller import Controller, ControllerOptions, SourceKind
from tidemill.autoscaler.views import PodView, pod_view
from tidemill.autoscaler.world import VARIANT_AUTOSCALINGS
from tidemill.cli.collector import spare_the_collector
from tidemill.kube.client import KubeClient
from tidemill.kube.informer import Informer, InformerEvent
from tidemill.kube.resources import PODS
from tidemill.local.cluster import LocalCluster
from tidemill.metrics.prometheus import PrometheusClient, PrometheusSource

VARIANTS, REPLICAS = 1000, 10
CYCLES = 7
REACTIONS = 9
OUTPUT = Path("build/bench/autoscaler.json")


@contextlib.asynccontextmanager
async def servers(variants: int, replicas: int) -> AsyncIterator[dict[str, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.server", str(variants), str(replicas),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield orjson.loads(await process.stdout.readline())
    finally:
        process.stdin.close()
        await process.wait()


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def informer(addresses: dict[str, str]) -> dict[str, float]:
    """An informer over 10,000 pods, with the autoscaler's own view of a pod."""
    async with await KubeClient.connect(addresses["kubeconfig"]) as client, aiohttp.ClientSession() as session:
        gc.collect()
        before = rss_mib()
        pods: Informer[PodView] = Informer(client, PODS, decode=pod_view)
        start = time.perf_counter()
        task = asyncio.create_task(pods.run())
        await pods.wait_synced()
        sync = time.perf_counter() - start
        gc.collect()
        memory = rss_mib() - before
        total = len(pods.store)
        assert total == VARIANTS * REPLICAS
        done, seen = asyncio.Event(), 0

        def count(event: InformerEvent[PodView]) -> None:
            nonlocal seen
            seen += 1
            if seen % total == 0:
                done.set()

        pods.add_handler(count)
        rates: list[float] = []
        for mark in range(3):
            done.clear()
            start = time.perf_counter()
            async with session.post(f"{addresses['prometheus']}/touch", params={"mark": str(mark)}) as response:
                response.raise_for_status()
            await done.wait()
            rates.append(total / (time.perf_counter() - start))
        task.cancel()
        return {
            "informer_sync_s": round(sync, 3),
            "informer_rss_mib": round(memory, 1),
            "informer_events_per_s": round(statistics.median(rates)),
        }


async def cycle(addresses: dict[str, str]) -> dict[str, Any]:
    """Engine cycles over 1,000 variants of 10 replicas, through a Prometheus source."""
    source = PrometheusSource(PrometheusClient(PrometheusConfig(base_url=addresses["prometheus"])))
    async with await KubeClient.connect(addresses["kubeconfig"]) as client:
        # A dry run: writing a thousand first statuses is no part of a cycle.
        options = ControllerOptions(health_address="127.0.0.1:0", identity="bench", dry_run=True)
        controller = Controller(client, options, source=source)
        task = asyncio.create_task(controller.run())
        while controller.engine is None or len(controller.decisions.all()) < VARIANTS:
            await asyncio.sleep(0.05)
        cpu: list[float] = []
        wall: list[float] = []
        for _ in range(CYCLES):
            gc.collect()
            begun, start = time.process_time(), time.perf_counter()
            await controller.engine.cycle()
            cpu.append(time.process_time() - begun)
            wall.append(time.perf_counter() - start)
        queries = (await source.collect({f"m{n:04}": None for n in range(VARIANTS)}, deadline=8)).queries
        decisions = controller.decisions.all()
        assert all(d.metrics.status for d in decisions), decisions[0].metrics
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return {
            "cycle_cpu_s": round(statistics.median(cpu), 3),
            "cycle_cpu_s_max": round(max(cpu), 3),
            "cycle_wall_s": round(statistics.median(wall), 3),
            "cycle_queries": queries,
        }


async def reaction() -> dict[str, float]:
    """From a saturated sample on a pod's /metrics to the exported decision, with direct scraping and the
    demo's intervals (scrapes of 500 ms, cycles of 1 s), at random phases."""
    kv = 0.1

    async def metrics(request: web.Request) -> web.Response:
        labels = '{model_name="m",engine="0"}'
        return web.Response(text=f"vllm:kv_cache_usage_perc{labels} {kv}\nvllm:num_requests_waiting{labels} 0\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    times: list[float] = []
    async with LocalCluster(workloads=False) as cluster:
        await one_variant(cluster.client, NAMESPACE, port)
        options = ControllerOptions(
            health_address="127.0.0.1:0", identity="bench", source=SourceKind.DIRECT, scrape_interval=0.5,
            scrape_window=1.0, overrides={"GLOBAL_OPT_INTERVAL": "1s"},
        )  # fmt: skip
        controller = Controller(cluster.client, options)
        task = asyncio.create_task(controller.run())

        async def until(desired: int) -> None:
            while (d := controller.exporter.exported(NAMESPACE, "v")) is None or d.desired != desired:
                await asyncio.sleep(0.002)

        def settled() -> bool:
            found = controller.decisions.all()
            return bool(found) and found[0].metrics.status

        while not settled():
            await asyncio.sleep(0.05)
        for number in range(REACTIONS):
            await asyncio.sleep(1.0 + (number * 0.37) % 1.0)
            start = time.perf_counter()
            kv = 0.95
            await until(2)
            times.append(time.perf_counter() - start)
            kv = 0.1
            # Nothing moves the replicas here. A variant by the same name is another one: it begins anew.
            await asyncio.sleep(2.0)
            await cluster.client.delete(VARIANT_AUTOSCALINGS, "v", NAMESPACE)
            while controller.exporter.exported(NAMESPACE, "v") is not None:
                await asyncio.sleep(0.01)
            await cluster.client.create(VARIANT_AUTOSCALINGS, variant("v"), NAMESPACE)
            await until(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await runner.cleanup()
    return {"reaction_s": round(statistics.median(times), 3), "reaction_s_max": round(max(times), 3)}


HOW = {
    "cycle_cpu_s": f"median CPU seconds of this process over {CYCLES} engine cycles, {VARIANTS} variants of "
    f"{REPLICAS} replicas, each its own model; Prometheus is a fake in another process; dry run",
    "cycle_queries": "queries that one reading of all models sent",
    "informer_sync_s": f"wall seconds from start to synced, {VARIANTS * REPLICAS} pods in pages of 500, server "
    "in another process",
    "informer_rss_mib": "growth of the resident memory by that informer, transform applied",
    "informer_events_per_s": "median of 3 rounds in which the server changes every pod once; the slower of the "
    "two sides decides",
    "reaction_s": f"median of {REACTIONS} from a saturated value on /metrics to wva_desired_replicas, direct "
    "scraping each 500 ms, cycles of 1 s",
}


async def main() -> None:
    spare_the_collector()  # as the program does
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    result: dict[str, Any] = {}
    async with servers(VARIANTS, REPLICAS) as addresses:
        result |= await informer(addresses)
        result |= await cycle(addresses)
    result |= await reaction()
    result["measured"] = HOW
    result["machine"] = {"cpus": os.cpu_count(), "load_average": os.getloadavg()}
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    text = orjson.dumps(result, option=orjson.OPT_INDENT_2).decode()
    OUTPUT.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())
