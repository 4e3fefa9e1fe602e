"""LeaderWorkerSet: groups of a leader and its workers, with owners and labels as its own controller has them.

Its StatefulSets are there to be owners; nobody acts on them, the pods are made here. A group is not replaced as a
whole when one of its pods fails, and templates are not rolled out: what exists stays until it is deleted.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.api.names import LEADER_WORKER_SET_LABEL, WORKER_INDEX_LABEL
from tidemill.kube.client import KubeClient
from tidemill.kube.errors import AlreadyExistsError, NotFoundError
from tidemill.kube.resources import LEADER_WORKER_SETS, PODS, STATEFUL_SETS, Json, ObjectKey, Resource
from tidemill.local.controllers.loop import ControllerLoop, is_controlled_by, owner_reference
from tidemill.local.controllers.replicaset import is_active, is_ready

GROUP_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
_AGAIN = 0.2  # seconds; a pod that goes keeps its name until it is gone


def leader_worker_set_crd() -> Json:
    """What the original's CRD says of replicas, size and scale; templates are taken as they come."""
    anything: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    group: Json = {
        "type": "object",
        "required": ["workerTemplate"],
        "properties": {
            "size": {"type": "integer", "format": "int32", "minimum": 1, "default": 1},
            "leaderTemplate": anything, "workerTemplate": anything, "restartPolicy": {"type": "string"},
        },
    }  # fmt: skip
    spec: Json = {
        "type": "object",
        "required": ["leaderWorkerTemplate"],
        "properties": {
            "replicas": {"type": "integer", "format": "int32", "minimum": 0, "default": 1},
            "leaderWorkerTemplate": group, "rolloutStrategy": anything, "startupPolicy": {"type": "string"},
            "networkConfig": anything,
        },
    }  # fmt: skip
    paths = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas",
             "labelSelectorPath": ".status.hpaPodSelector"}  # fmt: skip
    names = {"plural": LEADER_WORKER_SETS.plural, "kind": LEADER_WORKER_SETS.kind, "singular": "leaderworkerset",
             "shortNames": ["lws"]}  # fmt: skip
    version: Json = {
        "name": LEADER_WORKER_SETS.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": anything}}},
        "subresources": {"status": {}, "scale": paths},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{LEADER_WORKER_SETS.plural}.{LEADER_WORKER_SETS.group}"},
        "spec": {
            "group": LEADER_WORKER_SETS.group, "scope": "Namespaced", "names": names, "versions": [version],
        },
    }  # fmt: skip


class LeaderWorkerSetController:
    """Idle while the cluster does not serve the kind."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._loop = ControllerLoop(
            client, LEADER_WORKER_SETS, PODS, self.reconcile, name_of=_set_of, optional=True
        )

    async def run(self) -> None:
        await self._loop.run()

    async def reconcile(self, key: ObjectKey) -> float | None:
        try:
            found = await self._client.get(LEADER_WORKER_SETS, key.name, key.namespace)
        except NotFoundError:
            return None
        if "deletionTimestamp" in found["metadata"]:
            return None
        spec = found["spec"]
        group, groups = spec["leaderWorkerTemplate"], spec["replicas"]
        size, worker = group["size"], group["workerTemplate"]
        leader_template = group.get("leaderTemplate") or worker
        leaders_set = await self._stateful_set(key.name, (LEADER_WORKER_SETS, found), found, leader_template)
        page = await self._client.list(PODS, key.namespace, label_selector=f"{LEADER_WORKER_SET_LABEL}={key.name}")
        pods = {pod["metadata"]["name"]: pod for pod in page.items}
        leaders = {
            int(pod["metadata"]["labels"][GROUP_INDEX_LABEL]): pod
            for pod in pods.values()
            if pod["metadata"]["labels"].get(WORKER_INDEX_LABEL) == "0" and is_active(pod)
        }
        for index in sorted(leaders, reverse=True):
            if index >= groups:  # the workers go with what they belong to
                await self._delete(leaders.pop(index))
        wanted: list[tuple[str, Json, Json, int, int]] = []
        for index in range(groups):
            name = f"{key.name}-{index}"
            leader = leaders.get(index)
            if leader is None:
                wanted.append((name, leader_template, leaders_set, index, 0))
                continue
            if size == 1:
                continue
            workers_set = await self._stateful_set(name, (PODS, leader), found, worker)
            for number in range(1, size):
                pod = pods.get(f"{name}-{number}")
                if pod is None or not is_controlled_by(pod, workers_set["metadata"]["uid"]):
                    wanted.append((f"{name}-{number}", worker, workers_set, index, number))
        made = await asyncio.gather(*(self._pod(key, *one) for one in wanted))
        await self._write_status(found, leaders, list(pods.values()), size)
        return None if all(made) else _AGAIN

    async def _stateful_set(self, name: str, owner: tuple[Resource, Json], found: Json, template: Json) -> Json:
        """The StatefulSet `name` that `owner` controls. Its pods are made here, one by one: it asks for none."""
        namespace = found["metadata"]["namespace"]
        labels = {LEADER_WORKER_SET_LABEL: found["metadata"]["name"]}
        body: Json = {
            "metadata": {"name": name, "labels": labels, "ownerReferences": [owner_reference(*owner)]},
            "spec": {
                "replicas": 0,
                "serviceName": found["metadata"]["name"],
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": template["spec"]},
            },
        }
        try:
            return await self._client.create(STATEFUL_SETS, body, namespace)
        except AlreadyExistsError:
            return await self._client.get(STATEFUL_SETS, name, namespace)

    async def _pod(self, key: ObjectKey, name: str, template: Json, owner: Json, group: int, worker: int) -> bool:
        """Make one pod; False when one of its name is still there."""
        labelled = template.get("metadata") or {}
        marks = {
            LEADER_WORKER_SET_LABEL: key.name, GROUP_INDEX_LABEL: str(group), WORKER_INDEX_LABEL: str(worker)
        }  # fmt: skip
        pod: Json = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {**(labelled.get("labels") or {}), **marks},
                "annotations": labelled.get("annotations") or {},
                "ownerReferences": [owner_reference(STATEFUL_SETS, owner)],
            },
            "spec": template["spec"],
        }
        try:
            await self._client.create(PODS, pod, key.namespace)
        except AlreadyExistsError:
            return False
        return True

    async def _delete(self, pod: Json) -> None:
        metadata = pod["metadata"]
        await self._client.delete(PODS, metadata["name"], metadata["namespace"], uid=metadata["uid"])

    async def _write_status(self, found: Json, leaders: dict[int, Json], pods: list[Json], size: int) -> None:
        metadata = found["metadata"]

        def ready(index: int) -> bool:
            mine = [
                p for p in pods if p["metadata"]["labels"].get(GROUP_INDEX_LABEL) == str(index) and is_active(p)
            ]
            return len(mine) == size and all(map(is_ready, mine))

        status: dict[str, Any] = {
            "replicas": len(leaders),
            "readyReplicas": sum(ready(index) for index in leaders),
            "hpaPodSelector": f"{LEADER_WORKER_SET_LABEL}={metadata['name']},{WORKER_INDEX_LABEL}=0",
        }
        if found.get("status") != status:
            await self._client.patch(
                LEADER_WORKER_SETS, metadata["name"], {"status": status}, metadata["namespace"], sub="status"
            )


def _set_of(pod: Json) -> str | None:
    return (pod["metadata"].get("labels") or {}).get(LEADER_WORKER_SET_LABEL)
