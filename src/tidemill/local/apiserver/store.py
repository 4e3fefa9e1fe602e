"""Versioned objects in memory, with a bounded history that watches read.

Stored objects are never changed in place: a write brings a new object, and everyone who holds an old
one (a watch, a list that is being paged) keeps what it saw.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import orjson

from tidemill.local.apiserver.status import gone

Json: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, str]  # namespace ("" for cluster-scoped kinds), name
ChangeType: TypeAlias = Literal["ADDED", "MODIFIED", "DELETED"]


def copy(obj: Json) -> Json:
    """A deep copy, by way of JSON: objects hold nothing else."""
    return orjson.loads(orjson.dumps(obj))


@dataclass(frozen=True, slots=True)
class Change:
    version: int
    type: ChangeType
    object: Json  # for DELETED the last state, with the version of the deletion
    old: Json | None


@dataclass(slots=True)
class Subscription:
    """Changes of one collection as they happen; None in the queue ends it."""

    queue: asyncio.Queue[Change | None] = field(default_factory=asyncio.Queue)


@dataclass(slots=True)
class _Collection:
    objects: dict[Key, Json] = field(default_factory=dict)
    history: deque[Change] = field(default_factory=deque)
    compacted: int = 0  # newest version that the history no longer holds
    subscriptions: list[Subscription] = field(default_factory=list)


class Store:
    """Collections by storage name (group and plural, so that versions of a kind share one)."""

    def __init__(self, *, history: int = 1000) -> None:
        self._collections: dict[str, _Collection] = {}
        self._history = history
        self._versions = itertools.count(2)
        self.version = 1
        self.observers: list[Callable[[str, Change], None]] = []

    def get(self, collection: str, key: Key) -> Json | None:
        return self._of(collection).objects.get(key)

    def list(self, collection: str, namespace: str = "") -> list[Json]:
        """Objects in order of namespace and name; of all namespaces without one."""
        objects = self._of(collection).objects
        return [objects[key] for key in sorted(objects) if not namespace or key[0] == namespace]

    def collections(self) -> Iterable[str]:
        return list(self._collections)

    def put(self, collection: str, key: Key, obj: Json) -> Json:
        """Write `obj` (which the caller must not touch again) under a new version."""
        kept = self._of(collection)
        old = kept.objects.get(key)
        self.version = next(self._versions)
        obj["metadata"]["resourceVersion"] = str(self.version)
        kept.objects[key] = obj
        self._record(collection, Change(self.version, "MODIFIED" if old else "ADDED", obj, old))
        return obj

    def delete(self, collection: str, key: Key) -> Json:
        old = self._of(collection).objects.pop(key)
        self.version = next(self._versions)
        last = {**old, "metadata": {**old["metadata"], "resourceVersion": str(self.version)}}
        self._record(collection, Change(self.version, "DELETED", last, old))
        return last

    def subscribe(self, collection: str, since: int) -> tuple[list[Change], Subscription]:
        """Changes after version `since`, and a subscription for those to come.

        Raises StatusError 410 when the history no longer reaches back that far.
        """
        kept = self._of(collection)
        if since < kept.compacted:
            raise gone(f"too old resource version: {since} ({kept.compacted + 1})")
        past = [change for change in kept.history if change.version > since]
        subscription = Subscription()
        kept.subscriptions.append(subscription)
        return past, subscription

    def unsubscribe(self, collection: str, subscription: Subscription) -> None:
        self._of(collection).subscriptions.remove(subscription)

    def compact(self) -> None:
        """Forget all history, as etcd does every few minutes: older watches cannot be resumed."""
        for kept in self._collections.values():
            kept.history.clear()
            kept.compacted = self.version

    def drop(self, collection: str) -> None:
        """Forget a collection whose kind is no longer served, and end its watches."""
        if (kept := self._collections.pop(collection, None)) is not None:
            for subscription in kept.subscriptions:
                subscription.queue.put_nowait(None)

    def end_watches(self) -> None:
        """End every watch, as an API server does when it stops."""
        for kept in self._collections.values():
            for subscription in kept.subscriptions:
                subscription.queue.put_nowait(None)

    def dump(self) -> bytes:
        return orjson.dumps(
            {
                "version": self.version,
                "collections": {name: list(c.objects.values()) for name, c in self._collections.items()},
            }
        )

    def load(self, data: bytes) -> None:
        """Objects of an earlier `dump`. Versions go on from there; its history is gone."""
        content = orjson.loads(data)
        self.version = content["version"]
        self._versions = itertools.count(self.version + 1)
        for name, objects in content["collections"].items():
            kept = self._of(name)
            kept.compacted = self.version
            for obj in objects:
                metadata = obj["metadata"]
                kept.objects[metadata.get("namespace", ""), metadata["name"]] = obj

    def _of(self, collection: str) -> _Collection:
        if collection not in self._collections:
            self._collections[collection] = _Collection(compacted=0)
        return self._collections[collection]

    def _record(self, collection: str, change: Change) -> None:
        kept = self._of(collection)
        kept.history.append(change)
        while len(kept.history) > self._history:
            kept.compacted = kept.history.popleft().version
        for subscription in kept.subscriptions:
            subscription.queue.put_nowait(change)
        for observer in self.observers:
            observer(collection, change)
