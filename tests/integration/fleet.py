"""A fleet written by hand into an API server without controllers, and numbers made up for it.

Pods here are objects only. That is what makes it possible to say exactly which of them is ready, reports,
or has gone, and when. The scenarios with real processes are in tests/e2e.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import itertools
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import generate_latest

from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.autoscaler.controller import ActuationMode, Controller, ControllerOptions
from tidemill.autoscaler.world import SCALED_OBJECTS, VARIANT_AUTOSCALINGS
from tidemill.kube.client import KubeClient
from tidemill.kube.clock import rfc3339, utc_now
from tidemill.kube.conditions import find_condition
from tidemill.kube.errors import NotFoundError
from tidemill.kube.informer import Informer
from tidemill.kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    EVENTS,
    HORIZONTAL_POD_AUTOSCALERS,
    PODS,
    REPLICA_SETS,
    Json,
    ObjectKey,
)
from tidemill.metrics.samples import Gauge, PickerQueue, Quantity, ScrapeTarget, SeriesId, SeriesSample, Snapshot

NAMESPACE = "serving"
MODEL = "food/llm-8b"
LONG_AGO = utc_now() - dt.timedelta(hours=1)


class ScriptedSource:
    """A fake metrics source: gives the numbers that a test has put in."""

    name = "scripted"

    def __init__(self) -> None:
        self.numbers: dict[str, SeriesSample] = {}
        self.failures: dict[str, str] = {}
        self.requests: dict[tuple[str, str], float] = {}
        self.retentions: dict[str, float | None] = {}
        self.targets: list[ScrapeTarget] = []
        self.picker_queues: list[PickerQueue] = []
        self.in_depth = False

    def put(
        self, pod: str, kv: float | None, queue: float | None, *, model: str = MODEL, age: float = 1.0,
        namespace: str = NAMESPACE, running: float | None = None, kv_tokens: int | None = None,
        rates: Mapping[Quantity, float] | None = None, engine: str = "",
    ) -> None:  # fmt: skip
        def gauge(value: float | None) -> Gauge | None:
            return None if value is None else Gauge(value, age)

        id_ = SeriesId(namespace, pod, "", model, engine)
        self.numbers[f"{namespace}/{pod}/{model}/{engine}"] = SeriesSample(
            id_, gauge(kv), gauge(queue), gauge(running), kv_tokens, rates or {}
        )

    def put_all(self, pods: Iterable[str], kv: float, queue: float, **more: Any) -> None:
        for pod in pods:
            self.put(pod, kv, queue, **more)

    def lose(self, pod: str) -> None:
        for key in [k for k in self.numbers if f"/{pod}/" in k]:
            del self.numbers[key]

    def set_targets(self, targets: Iterable[ScrapeTarget]) -> None:
        self.targets = sorted(targets)

    async def collect(
        self, models: Mapping[str, float | None], *, deadline: float, in_depth: bool = False
    ) -> Snapshot:
        self.retentions, self.in_depth = dict(models), in_depth
        return Snapshot(
            series=tuple(self.numbers.values()),
            failures=dict(self.failures),
            requests=dict(self.requests),
            picker_queues=tuple(self.picker_queues),
        )

    async def close(self) -> None:
        pass


class Fleet:
    """Objects of one namespace, made and changed as controllers and kubelets would."""

    def __init__(self, client: KubeClient, namespace: str = NAMESPACE) -> None:
        self.client = client
        self.namespace = namespace
        self._addresses = itertools.count(1)

    async def variant(self, name: str, target: str | None = None, **spec: Any) -> Json:
        labels = spec.pop("labels", {"inference.optimization/acceleratorName": "A100"})
        body: Json = {
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target or name},
                "modelID": MODEL,
                "variantCost": "10.0",
                **spec,
            },
        }
        return await self.client.create(VARIANT_AUTOSCALINGS, body, self.namespace)

    async def deployment(
        self, name: str, replicas: int | None = 1, *, ready: int | None = None,
        labels: dict[str, str] | None = None, **pod_spec: Any,
    ) -> list[str]:  # fmt: skip
        """A Deployment with its ReplicaSet and pods; the names of the pods."""
        pod_spec.setdefault("containers", [{"name": "vllm", "image": "none"}])
        spec: Json = {"selector": {"matchLabels": {"app": name}},
                      "template": {"metadata": {"labels": {"app": name, **(labels or {})}},
                                   "spec": pod_spec}}  # fmt: skip
        if replicas is not None:
            spec["replicas"] = replicas
        made = await self.client.create(DEPLOYMENTS, {"metadata": {"name": name}, "spec": spec}, self.namespace)
        owner = _owner("apps/v1", "Deployment", made)
        template = {**spec, "replicas": 0}
        body = {"metadata": {"name": f"{name}-rs", "ownerReferences": [owner]}, "spec": template}
        await self.client.create(REPLICA_SETS, body, self.namespace)
        count = 1 if replicas is None else replicas
        names = [f"{name}-{i}" for i in range(count)]
        for index, pod in enumerate(names):
            await self.pod(pod, name, ready=ready is None or index < ready)
        return names

    async def hpa(self, name: str, target: str, **more: Any) -> Json:
        return await self.scaler("HorizontalPodAutoscaler", name, target, **{"maxReplicas": 50, **more})

    async def scaler(
        self, kind: str, name: str, target: str, *, model: str = MODEL, cost: str | None = None,
        managed: bool = True, annotations: dict[str, str] | None = None, labels: dict[str, str] | None = None,
        **spec: Any,
    ) -> Json:  # fmt: skip
        """An HPA or ScaledObject, annotated as a managed one unless told otherwise."""
        resource = HORIZONTAL_POD_AUTOSCALERS if kind == "HorizontalPodAutoscaler" else SCALED_OBJECTS
        marks = {"llm-d.ai/managed": "true", "llm-d.ai/model-id": model} if managed else {}
        marks |= {"llm-d.ai/variant-cost": cost} if cost else {}
        body: Json = {
            "metadata": {"name": name, "annotations": marks | (annotations or {}), "labels": labels or {}},
            "spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target}, **spec},
        }
        return await self.client.create(resource, body, self.namespace)

    async def has_pods(self, deployment: str, count: int) -> None:
        """Make the pods of a Deployment as many as a kubelet would by now have running."""
        page = await self.client.list(PODS, self.namespace)
        names = {p["metadata"]["name"] for p in page.items if p["metadata"]["name"].startswith(f"{deployment}-")}
        wanted = {f"{deployment}-{i}" for i in range(count)}
        for name in names - wanted:
            await self.client.delete(PODS, name, self.namespace)
        for name in sorted(wanted - names):
            await self.pod(name, deployment)

    async def pod(
        self, name: str, deployment: str | None, *, ready: bool = True, ip: str | None = None,
        labels: dict[str, str] | None = None, since: dt.datetime = LONG_AGO, node: str | None = None,
        gpus: int = 0, claim: str | None = None,
    ) -> None:  # fmt: skip
        owners = []
        if deployment is not None:
            replica_set = await self.client.get(REPLICA_SETS, f"{deployment}-rs", self.namespace)
            owners = [_owner("apps/v1", "ReplicaSet", replica_set)]
        body: Json = {
            "metadata": {"name": name, "ownerReferences": owners, "labels": labels or {}},
            "spec": {"containers": [{"name": "vllm", "image": "none"}]},
        }
        if gpus:
            body["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
        if claim is not None:
            body["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": claim}]
        if node is not None:
            body["spec"]["nodeName"] = node
        await self.client.create(PODS, body, self.namespace)
        await self.set_ready(name, ready, since=since, ip=ip or f"10.0.0.{next(self._addresses)}")

    async def set_ready(
        self, name: str, ready: bool, *, since: dt.datetime = LONG_AGO, ip: str | None = None
    ) -> None:
        condition = {
            "type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": rfc3339(since),
        }  # fmt: skip
        status: Json = {"phase": "Running", "conditions": [condition], **({"podIP": ip} if ip else {})}
        await self.client.patch(PODS, name, {"status": status}, self.namespace, sub="status")

    async def scale(self, name: str, replicas: int) -> None:
        await self.client.scale(DEPLOYMENTS, name, self.namespace, replicas)

    async def config_map(self, name: str, data: dict[str, str], namespace: str = DEFAULT_NAMESPACE) -> None:
        body = {"metadata": {"name": name}, "data": data}
        try:
            current = await self.client.get(CONFIG_MAPS, name, namespace)
        except NotFoundError:
            await self.client.create(CONFIG_MAPS, body, namespace)
        else:
            await self.client.replace(CONFIG_MAPS, {**current, "data": data}, namespace)

    async def status(self, name: str) -> Json:
        return (await self.client.get(VARIANT_AUTOSCALINGS, name, self.namespace)).get("status") or {}

    async def condition(self, name: str, type_: str) -> Json:
        return dict(find_condition((await self.status(name)).get("conditions") or (), type_) or {})

    async def events(self, reason: str, namespace: str | None = None) -> list[Json]:
        page = await self.client.list(EVENTS, namespace or self.namespace)
        return [event for event in page.items if event["reason"] == reason]


def external_metric(variant: str) -> Json:
    """What an HPA says that follows a variant."""
    metric = {"name": "wva_desired_replicas", "selector": {"matchLabels": {"variant_name": variant}}}
    return {
        "type": "External",
        "external": {"metric": metric, "target": {"type": "AverageValue", "averageValue": "1"}},
    }


def _owner(api_version: str, kind: str, obj: Json) -> Json:
    metadata = obj["metadata"]
    return {
        "apiVersion": api_version, "kind": kind, "name": metadata["name"], "uid": metadata["uid"],
        "controller": True,
    }  # fmt: skip


@dataclass
class Harness:
    """A controller that runs, with everything a test wants to ask it."""

    controller: Controller
    source: Any
    patches: list[str] = field(default_factory=list)

    def desired(self, name: str, namespace: str = NAMESPACE) -> int | None:
        """wva_desired_replicas as exported; None when there is no such series."""
        found = self.controller.exporter.exported(namespace, name)
        return None if found is None else found.desired

    def series(self) -> str:
        return generate_latest(self.controller.registry).decode()

    @property
    def reconciles(self) -> int:
        counter = self.controller.instruments.reconciles
        return int(counter.labels("variantautoscaling", "success")._value.get())

    async def cycle(self) -> None:
        """One engine cycle on the cluster as it is now, and the reconciliations that it asked for."""
        assert self.controller.engine is not None
        await self.caught_up()
        await self.controller.engine.cycle()
        await self.settle()

    async def settle(self) -> None:
        """Until the work queue is empty and idle."""
        queue = self.controller.queue
        while queue._ready or queue._working or queue._again:
            await asyncio.sleep(0.005)
        await self.controller.recorder.flush()

    async def caught_up(self) -> None:
        """Until the informers hold what the API server holds."""
        async with asyncio.timeout(10):
            for informer in self.controller.world.informers:
                # Asked again each time: objects may change while this waits.
                while not informer.absent and await self._listed(informer) != _held(informer):
                    await asyncio.sleep(0.01)

    async def _listed(self, informer: Informer[Any]) -> dict[ObjectKey, str]:
        client = self.controller._client
        page = await client.list(informer.resource, informer.namespace, **informer._selectors)
        return {ObjectKey.of(obj): obj["metadata"]["resourceVersion"] for obj in page.items}


def _held(informer: Informer[Any]) -> dict[ObjectKey, str]:
    return {key: entry.resource_version for key, entry in informer.store._entries.items()}


OPTIONS = ControllerOptions(health_address="127.0.0.1:0", identity="test")


@contextlib.asynccontextmanager
async def running(
    client: KubeClient, *, source: Any = None, options: ControllerOptions = OPTIONS, **changes: Any
) -> AsyncIterator[Harness]:
    """A controller with a scripted source (unless another is given), leading and past its first cycle."""
    source = ScriptedSource() if source is None else source
    controller = Controller(client, replace(options, **changes), source=source)
    task = asyncio.create_task(controller.run())
    harness = Harness(controller, source)
    try:
        async with asyncio.timeout(10):
            while "wva_optimization_duration_seconds_count 0.0" in harness.series():
                if task.done():
                    task.result()
                await asyncio.sleep(0.005)
        await harness.settle()
        yield harness
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


SCALE = {"actuation": ActuationMode.SCALE}
