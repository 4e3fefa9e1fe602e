"""Deployment: one ReplicaSet for each pod template, and the rollout from one to the next."""

from __future__ import annotations

import datetime as dt
import hashlib
import math
from collections.abc import Callable

import orjson

from tidemill.kube.client import KubeClient
from tidemill.kube.clock import parse_time, rfc3339
from tidemill.kube.conditions import find_condition, set_condition
from tidemill.kube.errors import AlreadyExistsError, NotFoundError
from tidemill.kube.resources import DEPLOYMENTS, REPLICA_SETS, Json, ObjectKey
from tidemill.kube.selectors import selector_query
from tidemill.local.controllers.loop import ControllerLoop, is_controlled_by, owner_reference

HASH_LABEL = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"


class DeploymentController:
    def __init__(self, client: KubeClient, *, now: Callable[[], dt.datetime]) -> None:
        self._client = client
        self._now = now
        self._loop = ControllerLoop(client, DEPLOYMENTS, REPLICA_SETS, self.reconcile)

    async def run(self) -> None:
        await self._loop.run()

    async def reconcile(self, key: ObjectKey) -> float | None:
        try:
            deployment = await self._client.get(DEPLOYMENTS, key.name, key.namespace)
        except NotFoundError:
            return None
        metadata, spec = deployment["metadata"], deployment["spec"]
        if "deletionTimestamp" in metadata:
            return None
        page = await self._client.list(
            REPLICA_SETS, key.namespace, label_selector=selector_query(spec["selector"])
        )
        owned = [rs for rs in page.items if is_controlled_by(rs, metadata["uid"])]
        digest = template_hash(spec["template"])
        new = next((rs for rs in owned if rs["metadata"]["labels"].get(HASH_LABEL) == digest), None)
        old = [rs for rs in owned if rs is not new]
        if not spec.get("paused"):
            if new is None:
                new = await self._create(deployment, digest, owned)
                if new is None:
                    return 0.1
            await self._roll(deployment, new, old)
            await self._forget_old(deployment, old)
        return await self._write_status(deployment, new, old)

    async def _create(self, deployment: Json, digest: str, owned: list[Json]) -> Json | None:
        """The ReplicaSet of the present template; None when another round must look again."""
        metadata, spec = deployment["metadata"], deployment["spec"]
        revision = str(1 + max((_revision(rs) for rs in owned), default=0))
        template = orjson.loads(orjson.dumps(spec["template"]))
        labels = {**((template.get("metadata") or {}).get("labels") or {}), HASH_LABEL: digest}
        template["metadata"] = {**(template.get("metadata") or {}), "labels": labels}
        selector = {**spec["selector"]}
        selector["matchLabels"] = {**(selector.get("matchLabels") or {}), HASH_LABEL: digest}
        body: Json = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {
                "name": f"{metadata['name']}-{digest}",
                "labels": labels,
                "annotations": {REVISION: revision},
                "ownerReferences": [owner_reference(DEPLOYMENTS, deployment)],
            },
            "spec": {"replicas": 0, "selector": selector, "template": template},
        }
        try:
            created = await self._client.create(REPLICA_SETS, body, metadata["namespace"])
        except AlreadyExistsError:
            return None
        await self._client.patch(
            DEPLOYMENTS,
            metadata["name"],
            {"metadata": {"annotations": {REVISION: revision}}},
            metadata["namespace"],
        )
        return created

    async def _roll(self, deployment: Json, new: Json, old: list[Json]) -> None:
        spec = deployment["spec"]
        wanted = spec["replicas"]
        current = new["spec"]["replicas"]
        others = sum(rs["spec"]["replicas"] for rs in old)
        if spec["strategy"]["type"] == "Recreate":
            for rs in old:
                await self._scale(rs, 0)
            if not any(_status(rs, "replicas") for rs in old):
                await self._scale(new, wanted)
            return
        if current > wanted:
            await self._scale(new, wanted)
            current = wanted
        surge, unavailable = _bounds(spec["strategy"]["rollingUpdate"], wanted)
        if current < wanted:
            room = wanted + surge - current - others
            if others == 0:
                room = wanted - current
            if room > 0:
                current = min(wanted, current + room)
                await self._scale(new, current)
        # Old pods that do not serve go first: they hold nothing up.
        spare = others + current - (wanted - unavailable)
        spare -= max(0, current - _status(new, "availableReplicas"))
        for rs in sorted(old, key=_revision):
            size = rs["spec"]["replicas"]
            broken = size - min(size, _status(rs, "availableReplicas"))
            keep = size - broken
            remove = min(keep, max(0, spare - broken))
            if broken or remove:
                await self._scale(rs, keep - remove)
                spare -= broken + remove

    async def _scale(self, replica_set: Json, replicas: int) -> None:
        if replica_set["spec"]["replicas"] != replicas:
            metadata = replica_set["metadata"]
            await self._client.scale(REPLICA_SETS, metadata["name"], metadata["namespace"], replicas)
            replica_set["spec"]["replicas"] = replicas

    async def _forget_old(self, deployment: Json, old: list[Json]) -> None:
        empty = [rs for rs in old if not rs["spec"]["replicas"] and not _status(rs, "replicas")]
        limit = deployment["spec"]["revisionHistoryLimit"]
        for rs in sorted(empty, key=_revision)[: max(0, len(empty) - limit)]:
            metadata = rs["metadata"]
            await self._client.delete(REPLICA_SETS, metadata["name"], metadata["namespace"], uid=metadata["uid"])

    async def _write_status(self, deployment: Json, new: Json | None, old: list[Json]) -> float | None:
        """Write what is known of the ReplicaSets; seconds until the progress deadline needs a look."""
        metadata, spec = deployment["metadata"], deployment["spec"]
        sets = [rs for rs in (new, *old) if rs is not None]
        wanted = spec["replicas"]
        available = sum(_status(rs, "availableReplicas") for rs in sets)
        total = sum(_status(rs, "replicas") for rs in sets)
        status: Json = {
            "observedGeneration": metadata["generation"],
            "replicas": total,
            "updatedReplicas": _status(new, "replicas") if new else 0,
            "readyReplicas": sum(_status(rs, "readyReplicas") for rs in sets),
            "availableReplicas": available,
            "unavailableReplicas": max(0, wanted - available),
        }
        before = deployment.get("status") or {}
        now = self._now()
        _, unavailable = _bounds(spec["strategy"].get("rollingUpdate") or {}, wanted)
        enough = available >= wanted - unavailable
        conditions = set_condition(
            before.get("conditions") or (),
            type="Available",
            status=enough,
            reason="MinimumReplicasAvailable" if enough else "MinimumReplicasUnavailable",
            message="Deployment has minimum availability."
            if enough
            else "Deployment does not have minimum availability.",
            generation=None,
            now=rfc3339(now),
        )
        done = status["updatedReplicas"] == wanted == available == total
        progress = find_condition(conditions, "Progressing") or {}
        keys = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas", "observedGeneration")
        moved = any(before.get(k) != status[k] for k in keys)
        since = progress.get("lastUpdateTime") or rfc3339(now)
        left = spec["progressDeadlineSeconds"] - (now - parse_time(since)).total_seconds()
        if done:
            verdict = (True, "NewReplicaSetAvailable", "ReplicaSet has successfully progressed.")
        elif moved or not progress:
            verdict, since = (True, "ReplicaSetUpdated", "ReplicaSet is progressing."), rfc3339(now)
            left = spec["progressDeadlineSeconds"]
        elif left <= 0:
            verdict = (False, "ProgressDeadlineExceeded", "ReplicaSet has timed out progressing.")
        elif progress.get("status") == "False":
            verdict = (False, progress["reason"], progress["message"])
        else:
            verdict = (True, "ReplicaSetUpdated", "ReplicaSet is progressing.")
        conditions = set_condition(
            conditions, type="Progressing", status=verdict[0], reason=verdict[1], message=verdict[2],
            generation=None, now=rfc3339(now),
        )  # fmt: skip
        for condition in conditions:
            if condition["type"] == "Progressing":
                condition["lastUpdateTime"] = since
        status["conditions"] = conditions
        if before != status:
            await self._client.patch(
                DEPLOYMENTS, metadata["name"], {"status": status}, metadata["namespace"], sub="status"
            )
        return None if done or left <= 0 else left + 1


def template_hash(template: Json) -> str:
    """A short name of a pod template, safe in labels and object names."""
    canonical = orjson.dumps(template, option=orjson.OPT_SORT_KEYS)
    digest = hashlib.sha256(canonical).hexdigest()[:10]
    return digest.translate(str.maketrans("aeiou013", "bcdfghjk"))


def _revision(replica_set: Json) -> int:
    return int((replica_set["metadata"].get("annotations") or {}).get(REVISION, 0))


def _status(replica_set: Json, field: str) -> int:
    return int((replica_set.get("status") or {}).get(field) or 0)


def _bounds(rolling: Json, replicas: int) -> tuple[int, int]:
    """maxSurge (rounded up) and maxUnavailable (rounded down) as counts; never both 0."""

    def count(value: int | str, rounding: Callable[[float], int]) -> int:
        if isinstance(value, str) and value.endswith("%"):
            return rounding(replicas * int(value[:-1]) / 100)
        return int(value)

    surge = count(rolling.get("maxSurge", "25%"), math.ceil)
    unavailable = count(rolling.get("maxUnavailable", "25%"), math.floor)
    return surge, unavailable if surge or unavailable else 1
