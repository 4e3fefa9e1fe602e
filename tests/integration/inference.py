"""Pools and their pods on a local API server, and a picker that watches them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.conftest import create_namespace
from tests.definitions import define
from tests.picker_rig import Talk

from tidemill.api.inference_crd import inference_crds
from tidemill.kube.client import KubeClient
from tidemill.kube.resources import PODS, Json, ObjectKey
from tidemill.picker.extproc.exchange import StreamInfo
from tidemill.picker.pools.cluster import INFERENCE_OBJECTIVES, INFERENCE_POOLS, WatchTiming
from tidemill.picker.pools.pool import Pool
from tidemill.picker.server import Picker, PickerOptions

NAMESPACE = "ns"


@dataclass
class Cluster:
    """What a user does to the cluster."""

    client: KubeClient
    namespace: str = NAMESPACE

    async def prepare(self, *, pools: bool = True) -> None:
        if pools:
            await define(self.client, *inference_crds())
        await create_namespace(self.client, self.namespace)

    async def pool(
        self, name: str = "p", *, labels: Mapping[str, str] | None = None, ports: tuple[int, ...] = (8000,)
    ):
        body: Json = {
            "apiVersion": INFERENCE_POOLS[0].api_version,
            "kind": "InferencePool",
            "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": dict(labels or {"app": "m"})},
                "targetPorts": [{"number": port} for port in ports],
            },
        }
        return await self.client.create(INFERENCE_POOLS[0], body, self.namespace)

    async def change_pool(self, name: str = "p", **spec: Any) -> None:
        await self.client.patch(INFERENCE_POOLS[0], name, {"spec": spec}, self.namespace)

    async def delete_pool(self, name: str = "p") -> None:
        await self.client.delete(INFERENCE_POOLS[0], name, self.namespace)

    async def pod(
        self,
        name: str,
        ip: str,
        *,
        ready: bool = True,
        labels: Mapping[str, str] | None = None,
        namespace: str = "",
        annotations: Mapping[str, str] | None = None,
    ) -> Json:
        namespace = namespace or self.namespace
        container = {"name": "vllm", "image": "simulated"}
        metadata = {"name": name, "labels": dict(labels or {"app": "m"}), "annotations": dict(annotations or {})}
        body: Json = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
        await self.client.create(PODS, body, namespace)
        return await self.status(name, ip=ip, ready=ready, namespace=namespace)

    async def status(self, name: str, *, ip: str, ready: bool, restarts: int = 0, namespace: str = "") -> Json:
        status = {
            "podIP": ip, "podIPs": [{"ip": ip}], "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{"name": "vllm", "restartCount": restarts, "ready": ready}],
        }  # fmt: skip
        return await self.client.patch(PODS, name, {"status": status}, namespace or self.namespace, sub="status")

    async def relabel(self, name: str, labels: Mapping[str, str | None]) -> None:
        await self.client.patch(PODS, name, {"metadata": {"labels": dict(labels)}}, self.namespace)

    async def delete_pod(self, name: str) -> None:
        await self.client.delete(PODS, name, self.namespace, grace_period_seconds=0)

    async def objective(self, name: str, priority: int | None, pool: str = "p") -> None:
        spec: Json = {"poolRef": {"name": pool}, **({} if priority is None else {"priority": priority})}
        body = {
            "apiVersion": INFERENCE_OBJECTIVES[0].api_version, "kind": "InferenceObjective",
            "metadata": {"name": name}, "spec": spec,
        }  # fmt: skip
        await self.client.create(INFERENCE_OBJECTIVES[0], body, self.namespace)


@asynccontextmanager
async def picking(client: KubeClient, **options: Any) -> AsyncIterator[Picker]:
    """A picker in this process. It is there before anything has been listed."""
    given: dict[str, Any] = {
        "pool_name": "p", "pool_namespace": NAMESPACE, "host": "127.0.0.1", "grpc_port": 0, "health_port": 0,
        "metrics_port": 0, "secure": False, "drain_seconds": 0.2,
        "timing": WatchTiming(watch_seconds=60.0, grace=1.0, absent_retry=0.3),
    }  # fmt: skip
    async with Picker(PickerOptions(**{**given, **options}), client) as picker:
        yield picker


def pool_of(picker: Picker, name: str = "p", namespace: str = NAMESPACE) -> Pool:
    pool = picker.pools.get(ObjectKey(namespace, name))
    assert pool is not None
    return pool


def addresses(picker: Picker, name: str = "p") -> set[str]:
    pool = picker.pools.get(ObjectKey(NAMESPACE, name))
    return set() if pool is None else {endpoint.address for endpoint in pool.snapshot.endpoints}


def stream(picker: Picker, **info: Any) -> Talk:
    """A stream of a picker in this process, without its port."""
    return Talk(picker, StreamInfo(**info))  # type: ignore[arg-type]


async def until(picker: Picker, expected: set[str], *, within: float = 10.0) -> None:
    """Wait until the pool has exactly these endpoints; woken by changes, not by polling."""
    pool = pool_of(picker)
    changed = asyncio.Event()
    pool.on_change(changed.set)
    async with asyncio.timeout(within):
        while addresses(picker) != expected:
            changed.clear()
            await changed.wait()
