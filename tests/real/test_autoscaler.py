"""The autoscaler on a cluster that CONTRACT_KUBECONFIG names: a real API server, real controllers, a real HPA.

There is no node: what a kubelet would say of pods is said by `Kubelet`, and numbers are made up.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.conftest import CRDS, create_namespace, eventually, free_port
from tests.integration import test_external_metrics as ours
from tests.integration.fleet import SCALE, Fleet, Harness, running
from tidemill.api.crd import variant_autoscaling_crd
from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.autoscaler.controller import ActuationMode
from tidemill.cli.doctor.fleet import API_SERVICES, SERVICES
from tidemill.kube.client import KubeClient
from tidemill.kube.errors import AlreadyExistsError, NotFoundError
from tidemill.kube.resources import DEPLOYMENTS, HORIZONTAL_POD_AUTOSCALERS, NAMESPACES, PODS, Json

KUBECONFIG = os.environ.get("CONTRACT_KUBECONFIG")
pytestmark = pytest.mark.skipif(
    KUBECONFIG is None, reason="no cluster is given by CONTRACT_KUBECONFIG: make test-real"
)
EXACT = {"tolerance": "0", "stabilizationWindowSeconds": 0}


@pytest.fixture
async def client() -> AsyncIterator[KubeClient]:
    async with await KubeClient.connect(KUBECONFIG) as found:
        for make in (
            found.create(CRDS, variant_autoscaling_crd()), create_namespace(found, DEFAULT_NAMESPACE)
        ):  # fmt: skip
            with suppress(AlreadyExistsError):
                await make
        yield found


@pytest.fixture
async def fleet(client: KubeClient) -> AsyncIterator[Fleet]:
    name = f"fleet-{uuid.uuid4().hex[:8]}"
    await create_namespace(client, name)
    fleet = Fleet(client, name)
    # The CRD is served a moment after it was made.
    await eventually(lambda: _served(fleet))
    yield fleet
    await client.delete(NAMESPACES, name)


async def _served(fleet: Fleet) -> bool:
    with suppress(NotFoundError):
        await fleet.status("nobody")
    try:
        await fleet.variant("probe")
    except NotFoundError:
        return False
    return True


class Kubelet:
    """In place of nodes: every pod of a namespace becomes Ready as soon as it is seen."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def pods(self) -> list[str]:
        page = await self._fleet.client.list(PODS, self._fleet.namespace)
        return [pod["metadata"]["name"] for pod in page.items if "deletionTimestamp" not in pod["metadata"]]

    async def _run(self) -> None:
        while True:
            for pod in (await self._fleet.client.list(PODS, self._fleet.namespace)).items:
                if not (pod.get("status") or {}).get("podIP"):
                    with suppress(NotFoundError):
                        address = f"10.9.0.{next(self._fleet._addresses) % 250 + 1}"
                        await self._fleet.set_ready(pod["metadata"]["name"], True, ip=address)
            await asyncio.sleep(0.1)


async def deployment(fleet: Fleet, name: str, replicas: int) -> None:
    """Without pods: the cluster's controllers make them."""
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "vllm", "image": "none"}]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    await fleet.client.create(DEPLOYMENTS, {"metadata": {"name": name}, "spec": spec}, fleet.namespace)


async def replicas(fleet: Fleet, name: str) -> int:
    return (await fleet.client.get(DEPLOYMENTS, name, fleet.namespace))["spec"]["replicas"]


async def loaded(fleet: Fleet, harness: Harness, kubelet: Kubelet, kv: float, queue: float) -> None:
    """A cycle in which every replica says this."""
    for pod in await kubelet.pods():
        harness.source.put(pod, kv, queue, namespace=fleet.namespace)
    await harness.cycle()


async def until(fleet: Fleet, harness: Harness, kubelet: Kubelet, kv: float, wanted: int) -> None:
    """Cycles under this load until the Deployment has `wanted` replicas, all of them pods."""

    async def there() -> bool:
        await loaded(fleet, harness, kubelet, kv, 0)
        return (await replicas(fleet, "dep"), len(await kubelet.pods())) == (wanted, wanted)

    await eventually(there, within=60)


async def test_load_rises_and_falls_and_direct_writes_follow(fleet: Fleet) -> None:
    kubelet = Kubelet(fleet)
    await deployment(fleet, "dep", 1)
    await fleet.variant("va", "dep")
    async with kubelet(), running(fleet.client, watch_namespace=fleet.namespace, **SCALE) as harness:
        await until(fleet, harness, kubelet, 0.95, 3)
        await until(fleet, harness, kubelet, 0.05, 1)
        await eventually(lambda: fleet.events("ScaledDown"))
        status = await fleet.status("va")
        assert status["desiredOptimizedAlloc"]["numReplicas"] == 1
        assert (await fleet.condition("va", "OptimizationReady"))["status"] == "True"


async def test_load_rises_and_falls_and_a_real_hpa_follows_through_our_api(fleet: Fleet) -> None:
    """The API server asks us, as the aggregation layer; the HPA's own controller moves the Deployment."""
    kubelet = Kubelet(fleet)
    port = free_port()
    await deployment(fleet, "dep", 1)
    await fleet.variant("va", "dep")
    hpa: Json = ours.TestHpa().hpa(scaleUp=EXACT, scaleDown=EXACT)
    options = {
        "watch_namespace": fleet.namespace, "actuation": ActuationMode.METRICS,
        "external_metrics_address": f"127.0.0.1:{port}",
    }  # fmt: skip
    async with kubelet(), running(fleet.client, **options) as harness, registered(fleet.client, port):
        await fleet.client.create(HORIZONTAL_POD_AUTOSCALERS, hpa, fleet.namespace)
        await until(fleet, harness, kubelet, 0.95, 3)
        await until(fleet, harness, kubelet, 0.05, 1)


@asynccontextmanager
async def registered(client: KubeClient, port: int) -> AsyncIterator[None]:
    """The test's process as the server of external.metrics.k8s.io: outside of the cluster, by a host's name."""
    spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    await client.create(SERVICES, {"metadata": {"name": "wva-external"}, "spec": spec}, DEFAULT_NAMESPACE)
    service = {"namespace": DEFAULT_NAMESPACE, "name": "wva-external", "port": port}
    api_service = {
        "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
        "spec": {
            "group": "external.metrics.k8s.io", "version": "v1beta1", "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100, "versionPriority": 100, "service": service,
        },
    }  # fmt: skip
    await client.create(API_SERVICES, api_service)
    try:
        yield
    finally:
        await client.delete(API_SERVICES, "v1beta1.external.metrics.k8s.io")
        await client.delete(SERVICES, "wva-external", DEFAULT_NAMESPACE)
