"""The autoscaler with an API server, controllers and an HPA that are not its own: load rises, the decision rises,
somebody moves the Deployment; load falls, and it shrinks. On the local cluster, and on any other.

There is no node: what a kubelet would say of pods is said by `Kubelet`, and numbers are made up.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc.aio
import pytest
import yaml

from tests.conftest import create_namespace, free_port
from tests.contract.conftest import KUBECONFIG
from tests.definitions import define, scaled_object_crd
from tests.integration import test_external_metrics as ours
from tests.integration.fleet import SCALE, Fleet, Harness, running
from tests.integration.test_keda_scaler import Keda
from tests.polling import eventually
from tidemill.api.crd import variant_autoscaling_crd
from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.autoscaler.world import SCALED_OBJECTS, VARIANT_AUTOSCALINGS
from tidemill.kube.client import KubeClient
from tidemill.kube.clock import utc_now
from tidemill.kube.errors import AlreadyExistsError, NotFoundError
from tidemill.kube.resources import CONFIG_MAPS, DEPLOYMENTS, HORIZONTAL_POD_AUTOSCALERS, NAMESPACES, PODS, Json
from tidemill.local.controllers.deployment import DeploymentController
from tidemill.local.controllers.hpa import HorizontalPodAutoscalerController
from tidemill.local.controllers.replicaset import ReplicaSetController

EXACT = {"tolerance": "0", "stabilizationWindowSeconds": 0}


@pytest.fixture
async def fleet(api: KubeClient) -> AsyncIterator[Fleet]:
    keda = scaled_object_crd()
    await define(api, variant_autoscaling_crd(), keda)
    with suppress(AlreadyExistsError):
        await api.create(NAMESPACES, {"metadata": {"name": DEFAULT_NAMESPACE}})
    name = f"fleet-{uuid.uuid4().hex[:8]}"
    await create_namespace(api, name)
    fleet = Fleet(api, name)
    controllers = [] if KUBECONFIG else [
        DeploymentController(api, now=utc_now), ReplicaSetController(api),
        HorizontalPodAutoscalerController(api, now=utc_now, period=0.5),
    ]  # fmt: skip
    running = [asyncio.create_task(controller.run()) for controller in controllers]
    yield fleet
    await api.delete(NAMESPACES, name)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


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
        if await replicas(fleet, "dep") != wanted:
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


async def test_load_rises_and_falls_and_a_client_like_keda_follows(fleet: Fleet) -> None:
    """It asks over gRPC as KEDA's operator does, and sets what its HPA would."""
    kubelet = Kubelet(fleet)
    port = free_port()
    await deployment(fleet, "dep", 1)
    metadata = {"scalerAddress": f"127.0.0.1:{port}", "modelID": "food/llm-8b", "variantCost": "4.5"}
    spec = {"scaleTargetRef": {"name": "dep"}, "triggers": [{"type": "external", "metadata": metadata}]}
    await fleet.client.create(SCALED_OBJECTS, {"metadata": {"name": "so"}, "spec": spec}, fleet.namespace)
    options = {"watch_namespace": fleet.namespace, "keda_scaler_address": f"127.0.0.1:{port}"}
    async with (
        kubelet(), running(fleet.client, **options) as harness,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):  # fmt: skip
        keda = Keda(channel, harness)
        ref = keda.ref("so", **metadata)
        ref.namespace = fleet.namespace

        async def follow() -> None:
            while True:
                with suppress(grpc.aio.AioRpcError):  # nothing is decided yet: KEDA keeps what is there
                    if await keda.active(ref) and (wanted := await keda.value(ref)) != await replicas(
                        fleet, "dep"
                    ):
                        await fleet.scale("dep", wanted)
                await asyncio.sleep(0.2)

        following = asyncio.create_task(follow())
        try:
            await until(fleet, harness, kubelet, 0.95, 3)
            await until(fleet, harness, kubelet, 0.05, 1)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_load_rises_and_falls_and_an_hpa_follows_through_our_api(fleet: Fleet) -> None:
    """The API server asks us, as the aggregation layer; the HPA's own controller moves the Deployment."""
    kubelet = Kubelet(fleet)
    port = free_port()
    await deployment(fleet, "dep", 1)
    await fleet.variant("va", "dep")
    hpa: Json = ours.TestHpa().hpa(scaleUp=EXACT, scaleDown=EXACT)
    options = {"watch_namespace": fleet.namespace, "external_metrics_address": f"127.0.0.1:{port}"}
    async with kubelet(), running(fleet.client, **options) as harness, ours.registered(fleet.client, port):
        await fleet.client.create(HORIZONTAL_POD_AUTOSCALERS, hpa, fleet.namespace)
        await until(fleet, harness, kubelet, 0.95, 3)
        await until(fleet, harness, kubelet, 0.05, 1)


OF_A_WVA_USER = """
apiVersion: v1
kind: ConfigMap
metadata:
  name: wva-saturation-scaling-config
  labels: {app.kubernetes.io/name: workload-variant-autoscaler}
data:
  default: |
    kvCacheThreshold: 0.50
    queueLengthThreshold: 5
    kvSpareTrigger: 0.1
    queueSpareTrigger: 3
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: dep
  labels: {llm-d.ai/model: llm-8b}
spec:
  replicas: 1
  selector:
    matchLabels: {app: vllm}
  template:
    metadata:
      labels: {app: vllm, llm-d.ai/model: llm-8b, llm-d.ai/inference-serving: "true"}
    spec:
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
      containers:
      - name: vllm
        image: vllm/vllm-openai:latest
        args: [--model, food/llm-8b, --max-num-seqs, "256"]
        ports:
        - {name: http, containerPort: 8000}
        resources:
          limits: {nvidia.com/gpu: "1"}
---
apiVersion: llmd.ai/v1alpha1
kind: VariantAutoscaling
metadata:
  name: va
  labels:
    inference.optimization/acceleratorName: H100
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: dep
  modelID: food/llm-8b
  variantCost: "40.0"
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: vllm-hpa
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: dep
  minReplicas: 1
  maxReplicas: 10
  behavior:
    scaleUp:
      stabilizationWindowSeconds: 0
      policies:
      - {type: Pods, value: 10, periodSeconds: 15}
    scaleDown:
      stabilizationWindowSeconds: 0
      policies:
      - {type: Pods, value: 10, periodSeconds: 15}
  metrics:
  - type: External
    external:
      metric:
        name: wva_desired_replicas
        selector:
          matchLabels:
            variant_name: va
            exported_namespace: NAMESPACE
      target:
        type: AverageValue
        averageValue: "1"
"""


async def test_what_a_user_of_wva_has_works_as_it_is(fleet: Fleet) -> None:
    """A VariantAutoscaling, an HPA on wva_desired_replicas, a ConfigMap of the namespace and vLLM's Deployment,
    none of them changed: the map's threshold counts, and the HPA follows."""
    kubelet = Kubelet(fleet)
    port = free_port()
    kinds = {
        r.kind: r for r in (CONFIG_MAPS, DEPLOYMENTS, VARIANT_AUTOSCALINGS, HORIZONTAL_POD_AUTOSCALERS)
    }  # fmt: skip
    options = {"watch_namespace": fleet.namespace, "external_metrics_address": f"127.0.0.1:{port}"}
    async with kubelet(), running(fleet.client, **options) as harness, ours.registered(fleet.client, port):
        for obj in yaml.safe_load_all(OF_A_WVA_USER.replace("NAMESPACE", fleet.namespace)):
            await fleet.client.create(kinds[obj["kind"]], obj, fleet.namespace)
        await until(fleet, harness, kubelet, 0.55, 3)  # full by the map, with room by the default
        await until(fleet, harness, kubelet, 0.05, 1)
        series = (
            f'wva_desired_replicas{{accelerator_type="H100",namespace="{fleet.namespace}",variant_name="va"}} 1.0'
        )
        assert series in harness.series()
