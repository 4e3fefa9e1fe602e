"""What all controllers share: keys from events, one worker, live reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from tidemill.kube.client import KubeClient
from tidemill.kube.errors import ConflictError
from tidemill.kube.informer import Added, Informer, InformerEvent, Modified, identity
from tidemill.kube.queue import WorkQueue
from tidemill.kube.resources import Json, ObjectKey, Resource

log = structlog.get_logger(__name__)


class ControllerLoop:
    """Reconciles objects of `resource` whenever they, or objects of `owned` that they control, change. `name_of`
    gives whose an object of `owned` is, where no owner reference says so; `optional` kinds may come later.

    Reconcilers read the API server, not the informers: a cluster on one machine can afford it, and what
    was just created is always seen.
    """

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        owned: Resource,
        reconcile: Callable[[ObjectKey], Awaitable[float | None]],
        *,
        name_of: Callable[[Json], str | None] | None = None,
        optional: bool = False,
    ) -> None:
        self._resource = resource
        self._reconcile = reconcile
        self._queue: WorkQueue[ObjectKey] = WorkQueue(first_delay=0.02, max_delay=5.0)
        self._name_of = name_of or self._controlled
        self._primary = Informer(client, resource, decode=identity, optional=optional, absent_retry=1.0)
        self._secondary = Informer(client, owned, decode=identity)
        self._primary.add_handler(lambda event: self._queue.add(event.key))
        self._secondary.add_handler(self._on_owned)

    def _on_owned(self, event: InformerEvent[Json]) -> None:
        obj = event.new if isinstance(event, Added | Modified) else event.old
        if (name := self._name_of(obj)) is not None:
            self._queue.add(ObjectKey(event.key.namespace, name))

    def _controlled(self, obj: Json) -> str | None:
        owner = controller_of(obj)
        return owner["name"] if owner is not None and owner["kind"] == self._resource.kind else None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._primary.run())
            group.create_task(self._secondary.run())
            group.create_task(self._queue.work(self._work, self._on_error))

    async def _work(self, key: ObjectKey) -> None:
        again = await self._reconcile(key)
        if again is not None:
            self._queue.add_after(key, again)

    def _on_error(self, key: ObjectKey, error: Exception) -> None:
        if not isinstance(error, ConflictError):  # somebody else wrote first: read again, say nothing
            log.warning("reconcile failed", kind=self._resource.kind, key=str(key), error=str(error))


def controller_of(obj: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The owner reference that controls `obj`."""
    return next((o for o in obj["metadata"].get("ownerReferences") or () if o.get("controller")), None)


def is_controlled_by(obj: Mapping[str, Any], uid: str) -> bool:
    owner = controller_of(obj)
    return owner is not None and owner["uid"] == uid


def owner_reference(resource: Resource, owner: Json) -> Json:
    """What makes `owner`, an object of `resource`, the controller of another. (Lists do not say what it is.)"""
    metadata = owner["metadata"]
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
