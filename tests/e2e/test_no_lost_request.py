"""No request is lost while pods are replaced one by one, the pool's selector moves and comes back, and the picker
gives way to a successor. `make soak` does it for five minutes."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from tests.conftest import program
from tests.definitions import define
from tests.polling import eventually

from tidemill.api.crd import variant_autoscaling_crd
from tidemill.api.inference_crd import inference_crds
from tidemill.autoscaler.views import PodView, pod_view
from tidemill.cli.demo import manifests
from tidemill.cli.demo.gateway import gateway, serves
from tidemill.kube.client import KubeClient
from tidemill.kube.informer import Informer
from tidemill.kube.resources import DEPLOYMENTS, PODS
from tidemill.local.cluster import LocalCluster
from tidemill.picker.pools.cluster import INFERENCE_POOLS

SECONDS = float(os.environ.get("TIDEMILL_SOAK_SECONDS", "25"))
RATE = 15.0
NAMESPACE = manifests.NAMESPACE
BODY = {"model": manifests.MODEL, "max_tokens": 12}


class Clients:
    """Requests at a steady rate, a third of them streams, until told to stop."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._rng = random.Random(9)
        self.stop = asyncio.Event()
        self.served: Counter[str] = Counter()
        self.lost: list[str] = []

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as group,
        ):
            while not self.stop.is_set():
                group.create_task(self._one(session))
                await asyncio.sleep(self._rng.expovariate(RATE))

    async def _one(self, session: aiohttp.ClientSession) -> None:
        stream = self._rng.random() < 0.3
        content = "".join(self._rng.choices("abcdefgh ", k=self._rng.randrange(20, 3000)))
        body = {**BODY, "stream": stream, "messages": [{"role": "user", "content": content}]}
        try:
            async with session.post(self._url, json=body) as response:
                text = await response.read()
                whole = text.endswith(b"data: [DONE]\n\n") if stream else b'"usage"' in text
                if response.status == 200 and whole:
                    self.served[response.headers["x-inference-pod"]] += 1
                else:
                    self.lost.append(f"{response.status} {text[-200:]!r}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self.lost.append(repr(error))


class Trouble:
    """What happens to the fleet meanwhile."""

    def __init__(self, client: KubeClient, pods: Informer[PodView]) -> None:
        self._client = client
        self._pods = pods
        self.done: Counter[str] = Counter()

    def ready(self) -> list[PodView]:
        return sorted((pod for pod in self._pods.store if serves(pod)), key=lambda pod: pod.key)

    async def replace_one(self) -> None:
        victim = self.ready()[self.done["pods replaced"] % 4]
        await self._client.delete(PODS, victim.key.name, NAMESPACE)
        await eventually(lambda: victim.key not in {p.key for p in self.ready()}, within=30)
        await eventually(lambda: len(self.ready()) == 4, within=60)
        self.done["pods replaced"] += 1

    async def move_selector(self) -> None:
        for labels in ({"app": "llama-8b-l40s"}, manifests.MODEL_LABEL):
            spec = {"selector": {"matchLabels": {"app": None, "llm-d.ai/model": None, **labels}}}
            await self._client.patch(INFERENCE_POOLS[0], manifests.POOL, {"spec": spec}, NAMESPACE)
            await asyncio.sleep(1.5)  # for load to meet the changed pool
        self.done["selector moved and back"] += 1

    async def replace_picker(self) -> None:
        before = {p.uid for p in self._pods.store if p.key.name.startswith(manifests.PICKER)}
        template = {"metadata": {"annotations": {"rollout": str(self.done["picker replaced"])}}}
        await self._client.patch(DEPLOYMENTS, manifests.PICKER, {"spec": {"template": template}}, NAMESPACE)

        def replaced() -> bool:
            now = {p.uid: p for p in self._pods.store if p.key.name.startswith(manifests.PICKER)}
            return not before & now.keys() and any(p.ready for p in now.values())

        await eventually(replaced, within=60)
        self.done["picker replaced"] += 1


@pytest.mark.timeout(180 + 2 * SECONDS)
async def test_no_request_is_lost(tmp_path: Path) -> None:
    program("envoy")
    async with LocalCluster(bookmark_seconds=0.5) as cluster:
        client = cluster.client
        await define(client, variant_autoscaling_crd(), *inference_crds())
        for resource, namespace, body in [*manifests.variants(), *manifests.picker()]:
            await client.create(resource, body, namespace)
        for name in manifests.VARIANTS:
            await client.scale(DEPLOYMENTS, name, NAMESPACE, 2)
        pods: Informer[PodView] = Informer(client, PODS, decode=pod_view)
        watching = asyncio.create_task(pods.run())
        trouble = Trouble(client, pods)

        def up() -> bool:
            picker = any(p.ready for p in pods.store if p.key.name.startswith(manifests.PICKER))
            return picker and len(trouble.ready()) == 4

        await eventually(up, within=60)
        async with gateway(tmp_path / "gateway", pods) as envoy:
            clients = Clients(envoy.url)
            sending = asyncio.create_task(clients.run())
            clock = asyncio.get_running_loop().time
            begun = clock()
            while clock() - begun < SECONDS or not trouble.done["picker replaced"]:
                await trouble.replace_one()
                await trouble.move_selector()
                await trouble.replace_picker()
            clients.stop.set()
            await sending
        watching.cancel()
    served = clients.served
    print(f"{served.total()} served by {len(served)} pods; {dict(trouble.done)}; lost: {clients.lost}")
    assert not clients.lost
    assert clients.served.total() > SECONDS * RATE / 2
    assert len(clients.served) > 4
