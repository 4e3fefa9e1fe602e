"""ReplicaSet: as many pods as asked for."""

from __future__ import annotations

import asyncio

from tidemill.kube.client import KubeClient
from tidemill.kube.conditions import find_condition
from tidemill.kube.errors import NotFoundError
from tidemill.kube.resources import PODS, REPLICA_SETS, Json, ObjectKey
from tidemill.kube.selectors import selector_query
from tidemill.local.controllers.loop import ControllerLoop, is_controlled_by, owner_reference


class ReplicaSetController:
    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._loop = ControllerLoop(client, REPLICA_SETS, PODS, self.reconcile)

    async def run(self) -> None:
        await self._loop.run()

    async def reconcile(self, key: ObjectKey) -> None:
        try:
            replica_set = await self._client.get(REPLICA_SETS, key.name, key.namespace)
        except NotFoundError:
            return
        metadata, spec = replica_set["metadata"], replica_set["spec"]
        if "deletionTimestamp" in metadata:
            return
        page = await self._client.list(PODS, key.namespace, label_selector=selector_query(spec["selector"]))
        pods = [pod for pod in page.items if is_controlled_by(pod, metadata["uid"]) and is_active(pod)]
        wanted = spec["replicas"]
        if len(pods) < wanted:
            await asyncio.gather(*(self._create(replica_set) for _ in range(wanted - len(pods))))
        elif len(pods) > wanted:
            doomed = sorted(pods, key=_deletion_rank)[: len(pods) - wanted]
            await asyncio.gather(
                *(
                    self._client.delete(PODS, pod["metadata"]["name"], key.namespace, uid=pod["metadata"]["uid"])
                    for pod in doomed
                )
            )
        await self._write_status(replica_set, pods)

    async def _create(self, replica_set: Json) -> None:
        metadata, template = replica_set["metadata"], replica_set["spec"]["template"]
        labelled = template.get("metadata") or {}
        pod: Json = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "generateName": f"{metadata['name']}-",
                "labels": labelled.get("labels") or {},
                "annotations": labelled.get("annotations") or {},
                "ownerReferences": [owner_reference(REPLICA_SETS, replica_set)],
            },
            "spec": template["spec"],
        }
        await self._client.create(PODS, pod, metadata["namespace"])

    async def _write_status(self, replica_set: Json, pods: list[Json]) -> None:
        metadata = replica_set["metadata"]
        ready = sum(is_ready(pod) for pod in pods)
        status = {
            "replicas": len(pods),
            "fullyLabeledReplicas": len(pods),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "observedGeneration": metadata["generation"],
        }
        if replica_set.get("status") != status:
            await self._client.patch(
                REPLICA_SETS, metadata["name"], {"status": status}, metadata["namespace"], sub="status"
            )


def is_active(pod: Json) -> bool:
    phase = pod.get("status", {}).get("phase")
    return "deletionTimestamp" not in pod["metadata"] and phase not in ("Succeeded", "Failed")


def is_ready(pod: Json) -> bool:
    condition = find_condition(pod.get("status", {}).get("conditions") or (), "Ready")
    return condition is not None and condition["status"] == "True"


def _deletion_rank(pod: Json) -> tuple[bool, bool, int, str]:
    """Smallest goes first: unscheduled, then not ready, then the youngest."""
    created = pod["metadata"]["creationTimestamp"]
    youth = -int("".join(filter(str.isdigit, created)))
    return (bool(pod["spec"].get("nodeName")), is_ready(pod), youth, pod["metadata"]["name"])
