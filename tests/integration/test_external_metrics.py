"""From a decision to replicas through our external metrics API: a real aggregation layer, TLS, an HPA."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import orjson
import pytest
from tests.conftest import free_port
from tests.elsewhere import kubeconfig_of
from tests.integration.fleet import NAMESPACE, Fleet, Harness, external_metric, running
from tests.polling import eventually

from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.cli.doctor.fleet import API_SERVICES, EXTERNAL_METRICS, SERVICES
from tidemill.kube.client import KubeClient
from tidemill.kube.clock import utc_now
from tidemill.kube.conditions import find_condition
from tidemill.kube.errors import ApiError, ForbiddenError, NotFoundError
from tidemill.kube.resources import DEPLOYMENTS, HORIZONTAL_POD_AUTOSCALERS, PODS, Json, ObjectKey, Resource
from tidemill.local.cluster import LocalCluster
from tidemill.local.controllers.hpa import HorizontalPodAutoscalerController

CLUSTER_ROLES = Resource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False)
CLUSTER_ROLE_BINDINGS = Resource(
    "rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False
)
PATH = f"/apis/external.metrics.k8s.io/v1beta1/namespaces/{NAMESPACE}/wva_desired_replicas"


@dataclass
class Served:
    """An autoscaler whose external metrics API is registered with the API server."""

    harness: Harness
    port: int


@asynccontextmanager
async def registered(client: KubeClient, port: int, name: str = "wva-external") -> AsyncIterator[None]:
    """The test's process as the server of external.metrics.k8s.io: outside of the cluster, by a host's name."""
    spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    await client.create(SERVICES, {"metadata": {"name": name}, "spec": spec}, DEFAULT_NAMESPACE)
    await client.create(API_SERVICES, api_service(name, port))

    async def available() -> bool:
        try:
            await client.get_raw("/apis/external.metrics.k8s.io/v1beta1")
        except ApiError:
            return False
        return True

    await eventually(available, within=30)
    try:
        yield
    finally:
        await client.delete(API_SERVICES, EXTERNAL_METRICS)
        await client.delete(SERVICES, name, DEFAULT_NAMESPACE)


def api_service(name: str, port: int) -> Json:
    service = {"namespace": DEFAULT_NAMESPACE, "name": name, "port": port}
    return {
        "metadata": {"name": EXTERNAL_METRICS},
        "spec": {
            "group": "external.metrics.k8s.io", "version": "v1beta1", "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100, "versionPriority": 100, "service": service,
        },
    }  # fmt: skip


@pytest.fixture
async def served(wva: LocalCluster) -> AsyncIterator[Served]:
    port = free_port()
    async with running(wva.client, external_metrics_address=f"127.0.0.1:{port}") as harness:
        async with registered(wva.client, port):
            yield Served(harness, port)


async def decided(fleet: Fleet, harness: Harness, replicas: int) -> None:
    """A variant for which so many replicas are decided and there."""
    pods = await fleet.deployment("dep", replicas)
    await fleet.variant("va", "dep", maxReplicas=60)
    harness.source.put_all(pods, 0.69, 0)  # neither to spare nor short
    await harness.cycle()
    assert harness.desired("va") == replicas


async def value(client: KubeClient, selector: str = "variant_name=va") -> str:
    found = orjson.loads(await client.get_raw(PATH, {"labelSelector": selector}))
    (item,) = found["items"]
    return item["value"]


async def test_through_the_aggregation_layer(fleet: Fleet, served: Served) -> None:
    await decided(fleet, served.harness, 2)
    assert await value(fleet.client) == "2"
    with pytest.raises(NotFoundError, match="matches 'variant_name=nobody'; there are va"):
        await value(fleet.client, "variant_name=nobody")
    groups = orjson.loads(await fleet.client.get_raw("/apis"))["groups"]
    assert "external.metrics.k8s.io" in {group["name"] for group in groups}
    resources = orjson.loads(await fleet.client.get_raw("/apis/external.metrics.k8s.io/v1beta1"))
    assert "wva_desired_replicas" in {r["name"] for r in resources["resources"]}


async def test_who_may_ask(wva: LocalCluster, fleet: Fleet, served: Served) -> None:
    """Rights are those of the API server: what the standard role of HPAs grants, and nothing without it."""
    await decided(fleet, served.harness, 2)
    rules = [{"apiGroups": ["external.metrics.k8s.io"], "resources": ["*"], "verbs": ["list"]}]
    await fleet.client.create(CLUSTER_ROLES, {"metadata": {"name": "metrics"}, "rules": rules})
    binding = {
        "metadata": {"name": "metrics"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "metrics"},
        "subjects": [{"kind": "ServiceAccount", "name": "hpa", "namespace": NAMESPACE}],
    }
    await fleet.client.create(CLUSTER_ROLE_BINDINGS, binding)

    async def asked_by(name: str) -> str:
        kubeconfig = await kubeconfig_of(wva, ObjectKey(NAMESPACE, name))
        async with await KubeClient.connect(str(kubeconfig)) as client:
            return await value(client)

    assert await asked_by("hpa") == "2"
    with pytest.raises(ForbiddenError, match=r'User "system:serviceaccount:serving:curious" cannot list'):
        await asked_by("curious")


async def test_nobody_comes_in_beside_the_api_server(wva: LocalCluster, fleet: Fleet, served: Served) -> None:
    await decided(fleet, served.harness, 2)
    url = f"https://127.0.0.1:{served.port}{PATH}"
    forged = {"X-Remote-User": "system:admin", "X-Remote-Group": "system:masters"}

    async def status(headers: dict[str, str], context: ssl.SSLContext) -> int:
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers, ssl=context) as response:
            return response.status

    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    assert await status({}, anyone) == 401
    assert await status(forged, anyone) == 401  # without the certificate, headers say nothing
    assert await status({"Authorization": "Bearer nonsense"}, anyone) == 401
    assert await status({"Authorization": f"Bearer {wva.token}"}, anyone) == 200
    # The serving certificate of the API server is from the same authority, and is not the aggregation layer's.
    other = ssl.create_default_context()
    other.check_hostname, other.verify_mode = False, ssl.CERT_NONE
    other.load_cert_chain(wva.server.tls.certificate, wva.server.tls.key)
    with contextlib.suppress(aiohttp.ClientError):  # refused in the handshake: it is not for clients
        assert await status(forged, other) == 401


async def test_a_replica_that_does_not_lead_answers_from_what_was_written(fleet: Fleet, served: Served) -> None:
    await decided(fleet, served.harness, 3)
    harness = served.harness
    await harness.caught_up()
    harness.controller._leading = False
    assert await value(fleet.client) == "3"


async def test_a_service_leads_to_a_ready_pod(wva: LocalCluster, fleet: Fleet) -> None:
    """On the local server only: a real one does not go to 127.0.0.1."""
    assert wva.server.store
    port = free_port()
    labels = {"app": "wva"}
    pod = {"metadata": {"name": "wva", "labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    spec = {"selector": labels, "ports": [{"port": 443, "targetPort": port}]}
    await fleet.client.create(SERVICES, {"metadata": {"name": "wva-external"}, "spec": spec}, DEFAULT_NAMESPACE)
    await fleet.client.create(API_SERVICES, api_service("wva-external", 443))
    with pytest.raises(ApiError, match="service workload-variant-autoscaler-system/wva-external has no ready pod"):
        await value(fleet.client)
    await fleet.client.create(PODS, pod, DEFAULT_NAMESPACE)
    status = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    await fleet.client.patch(PODS, "wva", {"status": status}, DEFAULT_NAMESPACE, sub="status")
    async with running(wva.client, external_metrics_address=f"127.0.0.1:{port}") as found:
        await decided(fleet, found, 2)
        assert await value(fleet.client) == "2"


class TestHpa:
    """An HPA as the manifests of the project have it."""

    def hpa(self, **behavior: object) -> Json:
        return {
            "metadata": {"name": "hpa"},
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "dep"},
                "minReplicas": 1,
                "maxReplicas": 60,
                "metrics": [external_metric("va")],
                "behavior": behavior,
            },
        }

    async def look(self, client: KubeClient) -> tuple[int, Json]:
        """One look of the HPA's controller; the replicas after it, and its condition ScalingActive."""
        controller = HorizontalPodAutoscalerController(client, now=utc_now)
        for hpa in (await client.list(HORIZONTAL_POD_AUTOSCALERS, NAMESPACE)).items:
            await controller.reconcile(ObjectKey.of(hpa))
        status = (await client.get(HORIZONTAL_POD_AUTOSCALERS, "hpa", NAMESPACE))["status"]
        active = find_condition(status["conditions"], "ScalingActive")
        assert active is not None
        return (await client.get(DEPLOYMENTS, "dep", NAMESPACE))["spec"]["replicas"], active

    @pytest.mark.parametrize("current", [20, 50])
    @pytest.mark.parametrize(("kv", "step"), [(0.75, 1), (0.1, -1)], ids=["one more", "one less"])
    async def test_a28_single_steps_reach_the_replicas(
        self, fleet: Fleet, served: Served, current: int, kv: float, step: int
    ) -> None:
        """With the tolerance that our manifests set to 0; with the usual one the same step is lost."""
        await decided(fleet, served.harness, current)
        served.harness.source.put_all([f"dep-{i}" for i in range(current)], kv, 0)
        await served.harness.cycle()
        assert served.harness.desired("va") == current + step
        await fleet.client.create(HORIZONTAL_POD_AUTOSCALERS, self.hpa(), NAMESPACE)
        assert (await self.look(fleet.client))[0] == current
        exact = {
            "scaleUp": {"tolerance": "0"},
            "scaleDown": {"tolerance": "0", "stabilizationWindowSeconds": 0},
        }
        await fleet.client.patch(HORIZONTAL_POD_AUTOSCALERS, "hpa", {"spec": {"behavior": exact}}, NAMESPACE)
        replicas, active = await self.look(fleet.client)
        assert (replicas, active["status"]) == (current + step, "True")

    async def test_without_an_answer_nothing_moves_and_the_condition_says_why(
        self, fleet: Fleet, served: Served
    ) -> None:
        await decided(fleet, served.harness, 2)
        await fleet.client.create(HORIZONTAL_POD_AUTOSCALERS, self.hpa(), NAMESPACE)
        wrong = [external_metric("typo")]
        await fleet.client.patch(HORIZONTAL_POD_AUTOSCALERS, "hpa", {"spec": {"metrics": wrong}}, NAMESPACE)
        replicas, active = await self.look(fleet.client)
        assert replicas == 2
        assert (active["status"], active["reason"]) == ("False", "FailedGetExternalMetric")
        assert "matches 'variant_name=typo'; there are va" in active["message"]

    async def test_the_controller_looks_by_itself(self, fleet: Fleet, served: Served) -> None:
        await decided(fleet, served.harness, 2)
        await fleet.scale("dep", 1)
        await fleet.client.create(HORIZONTAL_POD_AUTOSCALERS, self.hpa(), NAMESPACE)
        controller = HorizontalPodAutoscalerController(fleet.client, now=utc_now, period=0.1)
        task = asyncio.create_task(controller.run())

        async def grown() -> bool:
            return (await fleet.client.get(DEPLOYMENTS, "dep", NAMESPACE))["spec"]["replicas"] == 2

        try:
            await eventually(grown)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
