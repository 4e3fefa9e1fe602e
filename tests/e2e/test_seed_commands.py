"""The seed's prerequisites and troubleshooting, command by command, on a local cluster with the controller as
a pod, simulated model servers and a real Prometheus."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from tests.conftest import Kubectl, create_namespace, program
from tests.definitions import define, plain_crd
from tests.integration.prometheus import prometheus
from tests.polling import eventually

from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.autoscaler.world import VARIANT_AUTOSCALINGS
from tidemill.cli.demo import manifests
from tidemill.kube.conditions import find_condition
from tidemill.kube.resources import DEPLOYMENTS, NAMESPACES, PODS, Json, Resource
from tidemill.local.cluster import LocalCluster
from tidemill.local.controllers.replicaset import is_ready

pytestmark = [pytest.mark.kubectl, pytest.mark.timeout(240)]

NAMESPACE = "llm-d"
RELABELING = {
    "sourceLabels": ["__meta_kubernetes_pod_label_llm_d_ai_variant"],
    "targetLabel": "llm_d_ai_variant",
    "action": "replace",
}


@pytest.fixture
async def installed(cluster: LocalCluster) -> LocalCluster:
    """The controller as a Deployment, and the kinds of the operators that the seed mentions."""
    for crd in (
        plain_crd("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor"),
        plain_crd("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor"),
        plain_crd("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet", "lws"),
    ):
        await define(cluster.client, crd)
    for resource, namespace, body in manifests.controller():
        await cluster.client.create(resource, body, namespace)

    async def up() -> bool:
        found = await cluster.client.get(DEPLOYMENTS, "controller-manager", DEFAULT_NAMESPACE)
        return (found.get("status") or {}).get("readyReplicas") == 1

    await eventually(up, within=60)
    await create_namespace(cluster.client, NAMESPACE)
    return cluster


def model_deployment(name: str = "llama-8b") -> Json:
    found = next(body for resource, _, body in manifests.variants() if resource is DEPLOYMENTS)
    body: Json = orjson.loads(orjson.dumps(found).replace(b"llama-8b-l40s", name.encode()))
    return body


def variant(name: str, target: str) -> Json:
    return {
        "apiVersion": "llmd.ai/v1alpha1", "kind": "VariantAutoscaling",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
                 "modelID": manifests.MODEL},
    }  # fmt: skip


async def test_va_not_responding_to_deployment(installed: LocalCluster, kubectl: Kubectl) -> None:
    await kubectl("apply", "-f", "-", stdin=yaml.safe_dump(variant("llama-8b-autoscaler", "llama-8b")))

    async def ready(status: str) -> bool:
        va = await installed.client.get(VARIANT_AUTOSCALINGS, "llama-8b-autoscaler", NAMESPACE)
        found = find_condition((va.get("status") or {}).get("conditions") or (), "Ready")
        return found is not None and found["status"] == status

    await eventually(lambda: ready("False"))
    await installed.client.create(DEPLOYMENTS, model_deployment(), NAMESPACE)
    await eventually(lambda: ready("True"), within=5)

    ns = ("-n", NAMESPACE)
    target = await kubectl("get", "va", "llama-8b-autoscaler", *ns, "-o", "jsonpath={.spec.scaleTargetRef.name}")
    assert target == "llama-8b"
    assert "llama-8b" in await kubectl("get", "deployment", "llama-8b", *ns)
    logs = await kubectl("logs", "-n", DEFAULT_NAMESPACE, "deployment/controller-manager")
    (line,) = [line for line in logs.splitlines() if "Deployment created" in line]
    assert "llm-d/llama-8b" in line

    shown = await kubectl("get", "va", *ns)
    assert shown.split("\n")[0].split() == [
        "NAME",
        "TARGET",
        "MODEL",
        "MIN",
        "MAX",
        "OPTIMIZED",
        "METRICSREADY",
        "AGE",
    ]

    # explain asks the leader through the API server.
    async def explained() -> str:
        process = await asyncio.create_subprocess_exec(
            program("tidemill"), "explain", "va/llama-8b-autoscaler", *ns, "--kubeconfig", str(kubectl.kubeconfig),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await process.communicate()
        return out.decode() if b"Numbers of the latest" in out else ""

    text = await eventually(explained, within=30)
    assert "averageSpareKv" in text
    assert "Decisions, the latest last" in text


@pytest.mark.prometheus
async def test_scaling_decisions_not_made_for_a_variant(
    installed: LocalCluster, kubectl: Kubectl, tmp_path: Path
) -> None:
    ns = ("-n", NAMESPACE)
    await installed.client.create(DEPLOYMENTS, model_deployment(), NAMESPACE)
    await installed.client.create(VARIANT_AUTOSCALINGS, variant("va-name", "llama-8b"), NAMESPACE)
    await kubectl("rollout", "status", "deploy/llama-8b", *ns, "--timeout=60s")

    # The label is missing: nothing is found.
    assert "No resources found" in (await kubectl.run("get", "pods", *ns, "-l", "llm-d.ai/variant=va-name"))[2]
    template_label = ("-o", r"jsonpath={.spec.template.metadata.labels.llm-d\.ai/variant}")
    assert await kubectl("get", "deployment", "llama-8b", *ns, *template_label) == ""

    # Solution 1.
    patch = '{"spec":{"template":{"metadata":{"labels":{"llm-d.ai/variant":"va-name"}}}}}'
    await kubectl("patch", "deployment", "llama-8b", *ns, "--type=merge", "-p", patch)
    await kubectl("rollout", "status", "deploy/llama-8b", *ns, "--timeout=60s")
    assert await kubectl("get", "deployment", "llama-8b", *ns, *template_label) == "va-name"
    assert "llama-8b" in await kubectl("get", "pods", *ns, "-l", "llm-d.ai/variant=va-name")

    # The same for a LeaderWorkerSet.
    lws = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet",
        "metadata": {"name": "llama-70b", "namespace": NAMESPACE},
        "spec": {"leaderWorkerTemplate": {"workerTemplate": {
            "metadata": {"labels": {"llm-d.ai/variant": "va-70b"}}}}},
    }  # fmt: skip
    await kubectl("apply", "-f", "-", stdin=yaml.safe_dump(lws))
    path = r"jsonpath={.spec.leaderWorkerTemplate.workerTemplate.metadata.labels.llm-d\.ai/variant}"
    assert await kubectl("get", "lws", "llama-70b", *ns, "-o", path) == "va-70b"

    # Solution 2, on a ServiceMonitor and a PodMonitor.
    for kind, plural, part in (
        ("ServiceMonitor", "servicemonitors", "endpoints"),
        ("PodMonitor", "podmonitors", "podMetricsEndpoints"),
    ):
        body = {
            "apiVersion": "monitoring.coreos.com/v1", "kind": kind,
            "metadata": {"name": "vllm", "namespace": "default"},
            "spec": {part: [{"port": "http", "relabelings": [{"action": "drop", "sourceLabels": ["x"]}]}]},
        }  # fmt: skip
        resource = Resource("monitoring.coreos.com", "v1", plural, kind)
        await installed.client.create(resource, body, "default")
        shown = await kubectl("get", kind.lower(), "vllm", "-n", "default", "-o", "yaml")
        assert "relabeling" in shown
        assert "llm_d_ai_variant" not in shown
        operation = [{"op": "add", "path": f"/spec/{part}/0/relabelings/-", "value": RELABELING}]
        await kubectl(
            "patch", kind.lower(), "vllm", "-n", "default", "--type=json", "-p", orjson.dumps(operation).decode()
        )
        found = (await installed.client.get(resource, "vllm", "default"))["spec"][part][0]["relabelings"]
        assert found[1] == RELABELING

    # The label flows through a real Prometheus. Debian's build has no Kubernetes discovery, so the targets
    # are written down with the labels that discovery would give them.
    pods = (await installed.client.list(PODS, NAMESPACE, label_selector="llm-d.ai/variant=va-name")).items
    targets = [
        {
            "targets": [f"{pod['status']['podIP']}:8000"],
            "labels": {
                "__meta_kubernetes_namespace": NAMESPACE,
                "__meta_kubernetes_pod_name": pod["metadata"]["name"],
                "__meta_kubernetes_pod_label_llm_d_ai_variant": pod["metadata"]["labels"]["llm-d.ai/variant"],
            },
        }
        for pod in pods
    ]
    relabel = [
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
        {
            "source_labels": RELABELING["sourceLabels"],
            "target_label": RELABELING["targetLabel"],
            "action": RELABELING["action"],
        },
    ]
    config = {"job_name": "pods", "static_configs": targets, "relabel_configs": relabel}
    async with prometheus(tmp_path, [config]) as url:
        query = 'query=vllm:num_requests_running{llm_d_ai_variant="va-name"}'

        async def queried() -> list[Any]:
            process = await asyncio.create_subprocess_exec(
                program("curl"), "-s", "-G", f"{url}/api/v1/query", "--data-urlencode", query,
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _ = await process.communicate()
            return orjson.loads(out)["data"]["result"]

        result = await eventually(queried, within=30)
        assert {row["metric"]["llm_d_ai_variant"] for row in result} == {"va-name"}


async def test_metrics_not_available(installed: LocalCluster, kubectl: Kubectl) -> None:
    root = Path(__file__).parents[2]
    await kubectl("apply", "-f", str(root / "src/tidemill/manifests/monitoring/servicemonitor.yaml"))
    name = "wva-controller-manager-metrics-monitor"
    ns = ("-n", DEFAULT_NAMESPACE)
    assert name in await kubectl("get", "servicemonitor", *ns, name)
    events = ("get", "events", *ns, "--field-selector", "involvedObject.kind=ServiceMonitor")

    # The controller looks for the kind now and then; it is there since before the controller started.
    await asyncio.sleep(1)
    await kubectl("delete", "servicemonitor", *ns, name)

    async def told() -> str:
        text = await kubectl(*events, check=False)
        return text if "ServiceMonitorDeleted" in text else ""

    text = await eventually(told)
    assert re.search(r"Warning\s+ServiceMonitorDeleted\s+servicemonitor/" + name, text)


async def test_the_controller_may_be_killed(installed: LocalCluster, kubectl: Kubectl) -> None:
    await installed.client.create(DEPLOYMENTS, model_deployment(), NAMESPACE)
    await installed.client.create(VARIANT_AUTOSCALINGS, {**variant("va", "llama-8b")}, NAMESPACE)

    async def desired() -> int | None:
        va = await installed.client.get(VARIANT_AUTOSCALINGS, "va", NAMESPACE)
        return ((va.get("status") or {}).get("desiredOptimizedAlloc") or {}).get("numReplicas")

    async def one() -> bool:
        return await desired() == 1

    await eventually(one, within=20)
    (pod,) = (await installed.client.list(PODS, DEFAULT_NAMESPACE)).items
    await kubectl("delete", "pod", "-n", DEFAULT_NAMESPACE, pod["metadata"]["name"], "--timeout=30s")

    async def successor() -> bool:
        found = (await installed.client.list(PODS, DEFAULT_NAMESPACE)).items
        fresh = [p for p in found if p["metadata"]["uid"] != pod["metadata"]["uid"]]
        return any(is_ready(p) for p in fresh)

    await eventually(successor, within=40)
    assert await desired() == 1
    # It works: a namespace that appears now is served.
    assert (await installed.client.get(NAMESPACES, NAMESPACE))["status"]["phase"] == "Active"
    await installed.client.delete(DEPLOYMENTS, "llama-8b", NAMESPACE)

    async def noticed() -> bool:
        return await desired() is None

    await eventually(noticed, within=15)


async def test_explain_without_an_autoscaler(cluster: LocalCluster, kubectl: Kubectl) -> None:
    await create_namespace(cluster.client, NAMESPACE)
    await cluster.client.create(VARIANT_AUTOSCALINGS, variant("va", "dep"), NAMESPACE)

    async def explain(*args: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            program("tidemill"), "explain", *args, "-n", NAMESPACE, "--kubeconfig", str(kubectl.kubeconfig),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()

    code, out, _ = await explain("va/va")
    assert code == 0
    assert "No leading autoscaler could be asked" in out
    code, out, _ = await explain("va/va", "-o", "json")
    assert orjson.loads(out) == {"variant": f"{NAMESPACE}/va", "conditions": [], "decisions": None}
    code, _, err = await explain("va/nope")
    assert (code, err.strip()) == (
        1,
        f'tidemill explain: VariantAutoscaling "nope" not found in namespace "{NAMESPACE}"',
    )
    code, _, err = await explain("pod/x")
    assert code == 2
    assert "must be va/NAME" in err
