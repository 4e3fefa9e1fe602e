"""Which node takes a pod: labels, cordons and accelerators are looked at, processors and memory are not.

All nodes are this machine: they are there to be counted. Without any, every pod goes to the machine itself.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from tidemill.api.names import GPU_RESOURCES
from tidemill.kube.client import KubeClient
from tidemill.kube.conditions import find_condition
from tidemill.kube.errors import ApiError, NotFoundError
from tidemill.kube.events import EventRecorder
from tidemill.kube.informer import Informer, identity
from tidemill.kube.queue import WorkQueue
from tidemill.kube.resources import NODES, PODS, Json, ObjectKey, ObjectRef
from tidemill.local.controllers.replicaset import is_active

log = structlog.get_logger(__name__)

MACHINE = "local"
PASS = "all pods that wait"  # the one key: each pass looks at all of them


def place(pod: Json, nodes: Sequence[Json], bound: Iterable[tuple[str, Json]]) -> tuple[str, str]:
    """The node for `pod`, or "" and why there is none; `bound` are nodes with the pods that are on them. Of those
    that fit the one with the most free devices is taken, the first by name of several."""
    if not nodes:
        return MACHINE, ""
    wanted = devices_of(pod)
    taken: dict[str, Counter[str]] = {}
    for name, other in bound:
        taken.setdefault(name, Counter()).update(devices_of(other))
    reasons: Counter[str] = Counter()
    fitting: list[tuple[int, str]] = []
    for node in nodes:
        name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        free = {
            resource: _count(allocatable.get(resource)) - taken.get(name, Counter())[resource]
            for resource in GPU_RESOURCES
        }
        short = [resource for resource, count in wanted.items() if free[resource] < count]
        if (node.get("spec") or {}).get("unschedulable"):
            reasons["node(s) were unschedulable"] += 1
        elif not (pod["spec"].get("nodeSelector") or {}).items() <= labels.items():
            reasons["node(s) didn't match Pod's node affinity/selector"] += 1
        elif short:
            reasons.update(f"Insufficient {resource}" for resource in short)
        else:
            fitting.append((-sum(free.values()), name))
    if fitting:
        return min(fitting)[1], ""
    listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return "", f"0/{len(nodes)} nodes are available: {listed}."


def devices_of(pod: Mapping[str, Json]) -> Counter[str]:
    """Accelerators that a pod asks for, by resource."""
    found: Counter[str] = Counter()
    for container in pod["spec"].get("containers") or ():
        resources = container.get("resources") or {}
        asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        found.update({resource: _count(asked[resource]) for resource in GPU_RESOURCES if resource in asked})
    return found


def _count(quantity: object) -> int:
    return int(str(quantity)) if str(quantity).isdigit() else 0


class Scheduler:
    """Binds pods, the oldest first; those that fit nowhere wait, and say why in a condition and an event."""

    def __init__(self, client: KubeClient, *, now: Callable[[], dt.datetime]) -> None:
        self._client = client
        self._recorder = EventRecorder(client, component="scheduler", instance=MACHINE, now=now)
        self._pods = Informer(client, PODS, decode=identity)
        self._nodes = Informer(client, NODES, decode=identity)
        self._queue: WorkQueue[str] = WorkQueue(first_delay=0.02, max_delay=5.0)
        self._bound: dict[str, str] = {}  # by uid; the cache shows it later
        for informer in (self._pods, self._nodes):
            informer.add_handler(lambda event: self._queue.add(PASS))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._recorder.run())
            group.create_task(self._nodes.run())
            await self._nodes.wait_synced()
            group.create_task(self._pods.run())
            await self._pods.wait_synced()
            group.create_task(self._queue.work(self._pass, self._on_error))

    def _on_error(self, key: str, error: Exception) -> None:
        log.warning("pods could not be bound, and will be tried again", error=str(error))

    async def _pass(self, key: str) -> None:
        nodes = [node for _, node in sorted(self._nodes.store.items())]
        pods = [pod for _, pod in self._pods.store.items() if is_active(pod)]
        bound = {pod["metadata"]["uid"]: (self._node_of(pod), pod) for pod in pods if self._node_of(pod)}
        self._bound = {uid: node for uid, node in self._bound.items() if uid in bound}
        refused: list[ApiError] = []
        waiting = [pod for pod in pods if pod["metadata"]["uid"] not in bound]
        for pod in sorted(waiting, key=lambda p: (p["metadata"]["creationTimestamp"], p["metadata"]["name"])):
            node, why = place(pod, nodes, bound.values())
            try:
                if node:
                    await self._bind(pod, node)
                    bound[pod["metadata"]["uid"]] = (node, pod)
                else:
                    await self._tell(pod, why)
            except NotFoundError:
                continue  # it has gone meanwhile
            except ApiError as error:
                refused.append(error)  # the others need not wait for it
        if refused:
            raise refused[0]

    def _node_of(self, pod: Json) -> str:
        return pod["spec"].get("nodeName") or self._bound.get(pod["metadata"]["uid"], "")

    async def _bind(self, pod: Json, node: str) -> None:
        key = ObjectKey.of(pod)
        await self._client.patch(PODS, key.name, {"spec": {"nodeName": node}}, key.namespace)
        self._bound[pod["metadata"]["uid"]] = node

    async def _tell(self, pod: Json, why: str) -> None:
        known = find_condition((pod.get("status") or {}).get("conditions") or (), "PodScheduled") or {}
        if known.get("message") == why:
            return
        key = ObjectKey.of(pod)
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
        others = [c for c in (pod.get("status") or {}).get("conditions") or () if c["type"] != "PodScheduled"]
        status = {"phase": "Pending", "conditions": [*others, condition]}
        await self._client.patch(PODS, key.name, {"status": status}, key.namespace, sub="status")
        about = ObjectRef(PODS.api_version, PODS.kind, key.namespace, key.name, pod["metadata"]["uid"])
        self._recorder.event(about, "Warning", "FailedScheduling", why)
