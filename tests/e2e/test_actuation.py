"""How a decision reaches the replicas, with real processes: a plain HPA over our external metrics API."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.conftest import program
from tests.e2e.test_capacity import NAME, NAMESPACE, Scene, overload, scene, variant
from tests.polling import eventually

from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.cli.demo import manifests
from tidemill.cli.demo.gateway import serves
from tidemill.kube.conditions import find_condition
from tidemill.kube.resources import HORIZONTAL_POD_AUTOSCALERS
from tidemill.manifests import manifests as base

BASE = Path(__file__).parents[2] / "deploy" / "autoscaler"
SERVICE_ACCOUNT = f"system:serviceaccount:{DEFAULT_NAMESPACE}:controller-manager"
OVERLAY = """
resources: [{base}]
patches:
- patch: |-
    apiVersion: v1
    kind: ConfigMap
    metadata: {{name: wva-manager-config, namespace: workload-variant-autoscaler-system}}
    data: {{GLOBAL_OPT_INTERVAL: 1s}}
"""


async def install(there: Scene) -> None:
    """As a user does it, with kubectl and an overlay of the project's manifests."""
    overlay = there.directory / "overlay"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(OVERLAY.format(base=os.path.relpath(BASE, overlay)))
    process = await asyncio.create_subprocess_exec(
        program("kubectl"), "--kubeconfig", str(there.cluster.kubeconfig), "apply", "-k", str(overlay),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()


def granted() -> set[tuple[str, str, str]]:
    """Verb, group and resource of all that the manifests allow the autoscaler."""
    rules: list[Any] = [
        {"verbs": ["get"], "apiGroups": [""], "resources": ["configmaps"]}
    ]  # of the cluster's role
    for obj in base():
        rules += obj.get("rules") or ()
    return {
        (verb, group, resource)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


# Granted, and of no use in this scenario.
ELSEWHERE = {
    # Kinds that this cluster does not serve.
    *((verb, "keda.sh", "scaledobjects") for verb in ("list", "watch")),
    *((verb, "monitoring.coreos.com", "servicemonitors") for verb in ("list", "watch")),
    *((verb, "resource.k8s.io", "resourceclaims") for verb in ("list", "watch")),
    *((verb, "leaderworkerset.x-k8s.io", "leaderworkersets") for verb in ("list", "watch")),
    ("patch", "leaderworkerset.x-k8s.io", "leaderworkersets/scale"),
    *((verb, "inference.networking.x-k8s.io", "inferencepools") for verb in ("list", "watch")),
    # What was learned is kept when more than percentages decide.
    ("create", "", "configmaps"),
    ("patch", "", "configmaps"),
    ("patch", "", "events"),  # an event that repeats
    ("create", "authentication.k8s.io", "tokenreviews"),  # who asks the external metrics API directly
    ("patch", "apps", "deployments/scale"),  # waking from 0, and --actuation scale
}


def hpa() -> Any:
    """As docs/actuation.md has it."""
    target = {"type": "AverageValue", "averageValue": "1"}
    metric = {"name": "wva_desired_replicas", "selector": {"matchLabels": {"variant_name": NAME}}}
    body = {
        "metadata": {"name": NAME},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": NAME},
            "minReplicas": 1,
            "maxReplicas": 6,
            "metrics": [{"type": "External", "external": {"metric": metric, "target": target}}],
            "behavior": {
                "scaleUp": {"tolerance": "0"},
                "scaleDown": {"tolerance": "0", "stabilizationWindowSeconds": 0},
            },
        },
    }
    return (HORIZONTAL_POD_AUTOSCALERS, NAMESPACE, body)


@pytest.mark.timeout(180)
async def test_load_rises_and_falls_and_an_hpa_follows(tmp_path: Path) -> None:
    """Installed from deploy/autoscaler with its roles enforced, and without Prometheus or an adapter: the HPA asks
    the API server, which asks the autoscaler."""
    async with scene(tmp_path, hpa_seconds=1.0, authorize=True) as there:
        await there.create(variant(kv_blocks=512, maxReplicas=6))
        await install(there)
        await there.create([hpa()])
        await eventually(lambda: any(serves(pod) for pod in there.pods.store), within=60)

        async def active() -> bool:
            found = (await there.client.get(HORIZONTAL_POD_AUTOSCALERS, NAME, NAMESPACE)).get("status") or {}
            condition = find_condition(found.get("conditions") or (), "ScalingActive")
            return condition is not None and condition["status"] == "True"

        await eventually(active, within=60)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            (address,) = [pod.address for pod in there.pods.store if pod.key.namespace == NAMESPACE]
            finished: Counter[str] = Counter()
            clients = [
                asyncio.create_task(overload(session, address, manifests.MODEL, finished)) for _ in range(40)
            ]

            async def grown() -> bool:
                return await there.replicas(NAME) >= 2

            await eventually(grown, within=60)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

        async def shrunk() -> bool:
            return await there.replicas(NAME) == 1

        await eventually(shrunk, within=60)
        sentences = await there.sentences(NAME)
        assert any("one more of" in sentence for sentence in sentences)
        used = {(a.verb, a.group, a.resource) for name, a in there.cluster.server.used if name == SERVICE_ACCOUNT}
        assert granted() - used <= ELSEWHERE
