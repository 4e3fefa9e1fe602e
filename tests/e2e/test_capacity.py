"""The capacity engine as a user meets it: simulated servers on a local cluster, the autoscaler as a pod.

Sleep and waking, and the competition for accelerators, are in the suite. The step of load takes half an hour and
has a target of its own: `make step`.
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
import shlex
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from tests.conftest import program
from tests.definitions import define
from tests.polling import eventually

from tidemill.api.crd import variant_autoscaling_crd
from tidemill.api.inference_crd import inference_crds
from tidemill.api.names import DEFAULT_NAMESPACE, SATURATION_CONFIG, SCALE_TO_ZERO_CONFIG
from tidemill.autoscaler.views import PodView, pod_view
from tidemill.cli.demo import manifests
from tidemill.cli.demo.gateway import gateway, serves
from tidemill.cli.explain import history
from tidemill.kube.client import KubeClient
from tidemill.kube.informer import Informer
from tidemill.kube.resources import CONFIG_MAPS, DEPLOYMENTS, NODES, PODS, Json
from tidemill.local.cluster import LocalCluster
from tidemill.local.controllers.scheduler import MACHINE
from tidemill.local.envoy import Following

NAMESPACE = manifests.NAMESPACE
NAME = "llama-8b-l40s"


@dataclass
class Scene:
    """A cluster with what was put into it."""

    client: KubeClient
    pods: Informer[PodView]
    directory: Path
    cluster: LocalCluster

    async def create(self, objects: Iterable[manifests.Manifest]) -> None:
        for resource, namespace, body in objects:
            await self.client.create(resource, body, namespace)

    async def replicas(self, name: str) -> int:
        return (await self.client.get(DEPLOYMENTS, name, NAMESPACE))["spec"]["replicas"]

    async def picker_metrics(self) -> str:
        """URL of the picker's metrics, once it serves."""
        found: list[PodView] = []

        def there() -> bool:
            found[:] = [p for p in self.pods.store if p.key.name.startswith(manifests.PICKER) and p.ready]
            return bool(found)

        await eventually(there, within=60)
        return f"http://{found[0].ip}:9090/metrics"

    async def sentences(self, name: str) -> list[str]:
        """Why the variant is as it is, the latest last."""
        found = await history(self.client, NAMESPACE, name, DEFAULT_NAMESPACE)
        return [decision["explanation"]["sentence"] for decision in found or ()]


@asynccontextmanager
async def scene(directory: Path, *, hpa_seconds: float = 15.0, authorize: bool = False) -> AsyncIterator[Scene]:
    program("envoy")
    async with LocalCluster(hpa_seconds=hpa_seconds, authorize=authorize) as cluster:
        await define(cluster.client, variant_autoscaling_crd(), *inference_crds())
        pods: Informer[PodView] = Informer(cluster.client, PODS, decode=pod_view)
        watching = asyncio.create_task(pods.run())
        try:
            yield Scene(cluster.client, pods, directory, cluster)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def controller(*flags: str, saturation: dict[str, str], sleep: dict[str, str] | None = None) -> list[Any]:
    """The demo's controller with other flags and ConfigMaps."""
    found: list[Any] = []
    for resource, namespace, body in copy.deepcopy(manifests.controller()):
        if resource == CONFIG_MAPS and body["metadata"]["name"] == SATURATION_CONFIG:
            body["data"] = saturation
        if resource == DEPLOYMENTS:
            body["spec"]["template"]["spec"]["containers"][0]["args"] += flags
        found.append((resource, namespace, body))
    if sleep is not None:
        name = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": SCALE_TO_ZERO_CONFIG}}
        found.insert(1, (CONFIG_MAPS, DEFAULT_NAMESPACE, {**name, "data": sleep}))
    return found


def variant(
    name: str = NAME, *, startup: str = "2s", model: str = manifests.MODEL, gpus: int = 0,
    kv_blocks: int | None = None, **spec: Any,
) -> list[Any]:  # fmt: skip
    """One variant of the demo on an L40S, changed."""
    found: list[Any] = []
    for resource, namespace, body in copy.deepcopy(manifests.variants()):
        if body["metadata"]["name"] not in (NAME, NAMESPACE):
            continue
        text = orjson.dumps(body).replace(NAME.encode(), name.encode())
        changed: Json = orjson.loads(text.replace(manifests.MODEL.encode(), model.encode()))
        if resource == DEPLOYMENTS:
            container = changed["spec"]["template"]["spec"]["containers"][0]
            args = container["args"]
            args[args.index("--startup") + 1] = startup
            at = args.index("--kv-blocks")
            args[at : at + 2] = [] if kv_blocks is None else ["--kv-blocks", str(kv_blocks)]
            if gpus:
                container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
        elif namespace is not None:
            changed["spec"] |= spec
        found.append((resource, namespace, changed))
    return found


def container_of(objects: list[Any]) -> Json:
    """The container of the Deployment among these objects."""
    (found,) = [body for resource, _, body in objects if resource == DEPLOYMENTS]
    return found["spec"]["template"]["spec"]["containers"][0]


def holding_picker() -> list[Any]:
    """The demo's picker, which holds requests for a pool that sleeps."""
    found = copy.deepcopy(manifests.picker())
    args = container_of(found)["args"]
    args[args.index("--config-text") + 1] = "featureGates: [flowControl]\n" + manifests.PICKER_CONFIG
    return found


def both_in_one(picker: list[Any], autoscaler: list[Any]) -> list[Any]:
    """The picker in the autoscaler's pod: one process, and no metrics between."""
    container_of(autoscaler)["args"] += ["--picker", shlex.join(container_of(picker)["args"])]
    autoscaler[-1][2]["metadata"]["name"] = manifests.PICKER  # where the gateway looks for it
    return [*(o for o in picker if o[0] != DEPLOYMENTS), *autoscaler]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("together", [False, True], ids=["through the picker's metrics", "in one process"])
async def test_an_idle_model_sleeps_and_answers_its_next_request(tmp_path: Path, together: bool) -> None:
    async with scene(tmp_path) as there:
        await there.create(variant(minReplicas=0, startup="3s"))
        saturation = {"default": "analyzerName: saturation"}
        sleep = {"default": "enable_scale_to_zero: true\nretention_period: 6s"}
        if together:
            await there.create(both_in_one(holding_picker(), controller(saturation=saturation, sleep=sleep)))
            await there.picker_metrics()
        else:
            await there.create(holding_picker())
            url = await there.picker_metrics()
            await there.create(controller("--picker-metrics", url, saturation=saturation, sleep=sleep))
        # The address is followed as it is: a gateway that must know it may hear of the pod after the picker has.
        async with (
            gateway(tmp_path / "gateway", there.pods, following=Following.ONE) as envoy,
            aiohttp.ClientSession() as session,
        ):

            async def asleep() -> bool:
                return await there.replicas(NAME) == 0

            await eventually(asleep, within=90)
            await eventually(lambda: not any(serves(pod) for pod in there.pods.store), within=30)
            body = {
                "model": manifests.MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "wake up"}],
            }  # fmt: skip
            request = asyncio.create_task(session.post(f"{envoy.url}/v1/chat/completions", json=body))

            async def awake() -> bool:
                return await there.replicas(NAME) == 1

            await eventually(awake)  # under a second on a machine that does nothing else
            await eventually(lambda: any(serves(pod) for pod in there.pods.store), within=60)
            response = await asyncio.wait_for(request, 10)
            assert response.status == 200, await response.text()
            assert b'"usage"' in await response.read()
        found = await history(there.client, NAMESPACE, NAME, DEFAULT_NAMESPACE)
        causes = [decision["explanation"]["cause"] for decision in found or ()]
        assert "Idle" in causes
        assert "ScaleFromZero" in causes[causes.index("Idle") :]


@pytest.mark.timeout(180)
async def test_two_models_that_compete_share_by_priority(tmp_path: Path) -> None:
    """Eight GPUs, two a replica, one replica each to begin with: both want more than the two that are left."""
    async with scene(tmp_path) as there:
        node = {"metadata": {"name": MACHINE, "labels": {"nvidia.com/gpu.product": "L40S"}}}
        await there.client.create(NODES, node)
        await there.client.patch(
            NODES, MACHINE, {"status": {"allocatable": {"nvidia.com/gpu": "8"}}}, sub="status"
        )
        await there.create(variant("high", model="high", gpus=2, kv_blocks=512, maxReplicas=9))
        await there.create(variant("low", model="low", gpus=2, kv_blocks=512, maxReplicas=9)[1:])
        await eventually(lambda: sum(pod.ready for pod in there.pods.store) == 2, within=60)
        finished: Counter[str] = Counter()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            clients = [
                asyncio.create_task(overload(session, pod.address, pod.key.name.partition("-")[0], finished))
                for pod in there.pods.store
                for _ in range(60)
                if pod.key.namespace == NAMESPACE
            ]
            # Only what has finished tells how long requests are; so both are known of from the first cycle on.
            await eventually(lambda: min(finished["high"], finished["low"]) >= 5, within=90)
            # Whoever is scraped first must not have taken everything before the other is known of.
            shared = "analyzerName: saturation\nenableLimiter: true\nscaleUpWindow: 5s"
            await there.create(controller(saturation={"default": shared, "high": "model_id: high\npriority: 3"}))
            try:

                async def shared_out() -> bool:
                    return (await there.replicas("high"), await there.replicas("low")) == (3, 1)

                await eventually(shared_out, within=90)
                for _ in range(5):
                    await asyncio.sleep(1)  # nothing more is granted, cycle after cycle
                    assert await shared_out()
                (*_, low) = await there.sentences("low")
                assert "0 granted" in low
                assert "0 of 8 free" in low
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)


async def overload(session: aiohttp.ClientSession, address: str, model: str, finished: Counter[str]) -> None:
    """One request after the other, each of 500 tokens in and out."""
    rng = random.Random(address)
    while True:
        prompt = "".join(rng.choices("abcdefgh ", k=2000))
        body = {"model": model, "prompt": prompt, "max_tokens": 500, "stream": False}
        async with session.post(f"http://{address}/v1/completions", json=body) as response:
            await response.read()
        finished[model] += 1


# The step of load, by its own target

STEP = os.environ.get("TIDEMILL_STEP")
LOW = 0.45  # of what one replica keeps up with
QUIET, LOUD = 240.0, 540.0  # seconds before the step, and after it
RATE = 4.4  # requests/s that a replica keeps up with: prompts of 2,048 tokens, answers of 128
TTFT_TARGET = 0.5
WITHIN = 180.0


@dataclass
class Met:
    """What requests met: seconds since the step, TTFT; and what it cost."""

    ttft: list[tuple[float, float]] = field(default_factory=list)
    failed: int = 0
    replica_seconds: float = 0.0


@pytest.mark.skipif(STEP is None, reason="takes half an hour: make step")
@pytest.mark.timeout(3600)
async def test_a_latency_target_is_held_through_a_step_of_load(tmp_path: Path) -> None:
    """Four times the load with a start-up of 60 s: the mean TTFT of each half minute is back within its target
    three minutes after the step, for fewer replica-hours than percentages take for the same. (Those that hold it
    were found by trying: the trigger's default, 0.1, ends in a TTFT of 14 s.)"""
    found: dict[str, Met] = {}
    target = f"ttftTarget: {TTFT_TARGET * 1000:g}"
    for name, config in (("latency", target), ("percentages", "kvSpareTrigger: 0.5")):
        async with scene(tmp_path / name) as there:
            found[name] = await step(there, config)
    held: dict[str, bool] = {}
    for name, met in found.items():
        windows = [
            [ttft for at, ttft in met.ttft if begin <= at < begin + 30]
            for begin in range(int(WITHIN), int(LOUD), 30)
        ]
        means = [sum(window) / len(window) for window in windows]
        held[name] = max(means) <= TTFT_TARGET
        late = [ttft for at, ttft in met.ttft if at > WITHIN]
        print(
            f"{name}: {met.replica_seconds / 3600:.2f} replica-hours, {len(met.ttft)} served, "
            f"{met.failed} failed, mean TTFT after {WITHIN:g}s {sum(late) / len(late) * 1e3:.0f} ms, "
            f"worst half minute {max(means) * 1e3:.0f} ms"
        )
    assert [met.failed for met in found.values()] == [0, 0]
    assert held == {"latency": True, "percentages": True}
    assert found["latency"].replica_seconds < found["percentages"].replica_seconds


async def step(there: Scene, config: str) -> Met:
    await there.create(variant(startup="60s", maxReplicas=12))
    await there.create(manifests.picker())
    await there.create(controller(saturation={"default": config}))
    await eventually(lambda: any(serves(pod) for pod in there.pods.store), within=120)
    met = Met()
    async with (
        gateway(there.directory / "gateway", there.pods) as envoy,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        clock = time.monotonic
        begun = clock()
        counting = group.create_task(count(there, met))
        rng = random.Random(3)
        due = begun
        while due < begun + QUIET + LOUD:
            share = LOW if due < begun + QUIET else 4 * LOW
            due += rng.expovariate(share * RATE)
            await asyncio.sleep(max(0.0, due - clock()))
            group.create_task(ask(session, envoy.url, met, begun + QUIET, rng.randrange(10**9)))
        counting.cancel()
    return met


async def count(there: Scene, met: Met) -> None:
    """Replicas that there are, ready or not: what a user pays for."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(1)
        now = time.monotonic()
        mine = [pod for pod in there.pods.store if pod.key.name.startswith(NAME) and not pod.terminating]
        met.replica_seconds += len(mine) * (now - last)
        last = now


async def ask(session: aiohttp.ClientSession, url: str, met: Met, stepped: float, seed: int) -> None:
    prompt = "".join(random.Random(seed).choices("abcdefgh ", k=8192))
    body = {"model": manifests.MODEL, "prompt": prompt, "max_tokens": 128, "stream": True}
    begun = time.monotonic()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            await response.content.readany()
            met.ttft.append((begun - stepped, time.monotonic() - begun))
            async for _ in response.content.iter_any():
                pass
            met.failed += response.status != 200
    except (aiohttp.ClientError, TimeoutError):
        met.failed += 1
