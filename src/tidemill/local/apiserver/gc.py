"""Garbage collection: objects whose owners are gone, and what namespaces leave behind."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import structlog

from tidemill.local.apiserver.kinds import Kind
from tidemill.local.apiserver.registry import Registry
from tidemill.local.apiserver.status import StatusError
from tidemill.local.apiserver.store import Change

Json: TypeAlias = dict[str, Any]
log = structlog.get_logger(__name__)


class GarbageCollector:
    """Follows every change of the store. Owners are found by uid: a namesake does not own anything."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._uids: set[str] = set()
        self._dependents: dict[str, set[tuple[str, str, str]]] = {}  # owner uid: collection, namespace, name
        self._dirty: asyncio.Queue[tuple[str, Change]] = asyncio.Queue()
        for collection in registry.store.collections():
            for obj in registry.store.list(collection):
                self._observe(collection, Change(0, "ADDED", obj, None))
        registry.store.observers.append(self._observe)

    def _observe(self, collection: str, change: Change) -> None:
        metadata = change.object["metadata"]
        place = (collection, metadata.get("namespace", ""), metadata["name"])
        for owner in (change.old or {}).get("metadata", {}).get("ownerReferences") or ():
            self._dependents.get(owner["uid"], set()).discard(place)
        if change.type == "DELETED":
            self._uids.discard(metadata["uid"])
        else:
            self._uids.add(metadata["uid"])
            for owner in metadata.get("ownerReferences") or ():
                self._dependents.setdefault(owner["uid"], set()).add(place)
        interesting = (
            change.type == "DELETED" or "deletionTimestamp" in metadata or metadata.get("ownerReferences")
        )
        if interesting:
            self._dirty.put_nowait((collection, change))

    async def run(self) -> None:
        while True:
            collection, change = await self._dirty.get()
            try:
                self._handle(collection, change)
            except StatusError as error:
                log.info("garbage collection put off", collection=collection, error=str(error))

    def _handle(self, collection: str, change: Change) -> None:
        metadata = change.object["metadata"]
        uid = metadata["uid"]
        if change.type == "DELETED":
            for place in list(self._dependents.pop(uid, ())):
                self._collect(*place)
            self._check_waiting_owners(metadata)
            self._check_namespace(metadata.get("namespace", ""))
            return
        finalizers = metadata.get("finalizers") or ()
        if "deletionTimestamp" in metadata:
            if collection == "namespaces":
                self._check_namespace(metadata["name"])
            elif "foregroundDeletion" in finalizers:
                self._foreground(collection, metadata)
            elif "orphan" in finalizers:
                for place in list(self._dependents.get(uid, ())):
                    self._disown(place, uid)
                self._drop_finalizer(collection, metadata, "orphan")
        elif change.type == "ADDED":
            # Somebody may have created it after its owner went.
            self._collect(collection, metadata.get("namespace", ""), metadata["name"])

    def _kind(self, collection: str) -> Kind | None:
        return self._registry.kinds.by_collection(collection)

    def _collect(self, collection: str, namespace: str, name: str) -> None:
        """Delete an object when it has owners and none of them exists any more."""
        kind, obj = self._kind(collection), self._registry.store.get(collection, (namespace, name))
        if kind is None or obj is None:
            return
        owners = obj["metadata"].get("ownerReferences") or ()
        if owners and not any(owner["uid"] in self._uids for owner in owners):
            self._registry.delete(kind, namespace, name, {"propagationPolicy": "Background"})

    def _foreground(self, collection: str, metadata: Json) -> None:
        blocking = False
        for place in list(self._dependents.get(metadata["uid"], ())):
            kind, obj = self._kind(place[0]), self._registry.store.get(place[0], place[1:])
            if kind is None or obj is None:
                continue
            references = obj["metadata"].get("ownerReferences") or ()
            blocking |= any(r["uid"] == metadata["uid"] and r.get("blockOwnerDeletion") for r in references)
            if "deletionTimestamp" not in obj["metadata"]:
                self._registry.delete(kind, place[1], place[2], {"propagationPolicy": "Foreground"})
        if not blocking:
            self._drop_finalizer(collection, metadata, "foregroundDeletion")

    def _check_waiting_owners(self, metadata: Json) -> None:
        """A dependent is gone: its owner may have waited for just that."""
        for owner in metadata.get("ownerReferences") or ():
            for kind in self._registry.kinds:
                if kind.resource.kind != owner["kind"]:
                    continue
                place = (metadata.get("namespace", "") if kind.resource.namespaced else "", owner["name"])
                obj = self._registry.store.get(kind.collection, place)
                if obj is not None and "foregroundDeletion" in (obj["metadata"].get("finalizers") or ()):
                    self._foreground(kind.collection, obj["metadata"])

    def _disown(self, place: tuple[str, str, str], uid: str) -> None:
        kind = self._kind(place[0])
        if kind is None:
            return

        def change(obj: Json) -> Json:
            owners = [o for o in obj["metadata"].get("ownerReferences") or () if o["uid"] != uid]
            obj["metadata"]["ownerReferences"] = owners
            return obj

        self._registry.update(kind, place[1], place[2], change, manager="garbage-collector")

    def _drop_finalizer(self, collection: str, metadata: Json, finalizer: str) -> None:
        kind = self._kind(collection)
        if kind is None:
            return

        def change(obj: Json) -> Json:
            kept = [f for f in obj["metadata"].get("finalizers") or () if f != finalizer]
            obj["metadata"]["finalizers"] = kept
            return obj

        namespace, name = metadata.get("namespace", ""), metadata["name"]
        self._registry.update(kind, namespace, name, change, manager="garbage-collector")

    def _check_namespace(self, name: str) -> None:
        """Empty a namespace that is being deleted, and let it go once it is empty."""
        store = self._registry.store
        namespace = store.get("namespaces", ("", name)) if name else None
        if namespace is None or "deletionTimestamp" not in namespace["metadata"]:
            return
        left = False
        for kind in list(self._registry.kinds):
            if not kind.resource.namespaced:
                continue
            for obj in store.list(kind.collection, name):
                if "deletionTimestamp" not in obj["metadata"]:
                    self._registry.delete(kind, name, obj["metadata"]["name"])
            left |= bool(store.list(kind.collection, name))
        if not left:
            kind = self._kind("namespaces")
            assert kind is not None

            def change(obj: Json) -> Json:
                obj["spec"] = {**obj["spec"], "finalizers": []}
                return obj

            self._registry.update(kind, "", name, change, manager="namespace-controller")
