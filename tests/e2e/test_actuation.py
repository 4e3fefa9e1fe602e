"""How a decision reaches the replicas, with real processes: a plain HPA over our external metrics API."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.conftest import eventually
from tests.e2e.test_capacity import NAME, NAMESPACE, container_of, controller, overload, scene, variant
from tests.integration.test_external_metrics import API_SERVICES, SERVICES

from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.cli.demo import manifests
from tidemill.cli.demo.gateway import serves
from tidemill.kube.conditions import find_condition
from tidemill.kube.resources import HORIZONTAL_POD_AUTOSCALERS

PORT = 6443
PERCENTAGES = {"default": "kvCacheThreshold: 0.80\nqueueLengthThreshold: 5"}


def external_metrics() -> list[Any]:
    """What registers the autoscaler's API with the cluster."""
    service = {
        "metadata": {"name": "wva-external-metrics"},
        "spec": {
            "selector": {"control-plane": "controller-manager"},
            "ports": [{"name": "https", "port": 443, "targetPort": "external"}],
        },
    }
    registered = {
        "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
        "spec": {
            "group": "external.metrics.k8s.io", "version": "v1beta1", "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100, "versionPriority": 100,
            "service": {"namespace": DEFAULT_NAMESPACE, "name": "wva-external-metrics", "port": 443},
        },
    }  # fmt: skip
    return [(SERVICES, DEFAULT_NAMESPACE, service), (API_SERVICES, None, registered)]


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
    """No Prometheus, no adapter: the HPA asks the API server, which asks the autoscaler."""
    async with scene(tmp_path, hpa_seconds=1.0) as there:
        await there.create(variant(kv_blocks=512, maxReplicas=6))
        flags = ["--actuation", "metrics", "--external-metrics-bind-address", f"$(POD_IP):{PORT}"]
        objects = controller(*flags, saturation=PERCENTAGES)
        container_of(objects)["ports"].append({"name": "external", "containerPort": PORT})
        await there.create([*objects, *external_metrics(), hpa()])
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
