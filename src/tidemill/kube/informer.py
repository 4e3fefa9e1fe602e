"""A local copy of one kind, kept current by list and watch.

The informer is a loop around one variable, the resourceVersion it has seen. Whatever fails, the loop
goes on from there: a watch that ends, breaks or goes silent is resumed; only 410 Gone, or not knowing
a version at all, means a list, and the difference between the list and the copy is delivered as the
events that were missed. Objects are told apart by uid: one deleted and created again under the same
name while nobody looked is a deletion and an addition, never a modification.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import aiohttp
import structlog

from tidemill.kube.backoff import Backoff
from tidemill.kube.client import KubeClient, WatchEvent
from tidemill.kube.errors import ApiError, ForbiddenError, GoneError, NotFoundError
from tidemill.kube.resources import Json, ObjectKey, Resource

T = TypeVar("T")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Added(Generic[T]):
    key: ObjectKey
    new: T


@dataclass(frozen=True, slots=True)
class Modified(Generic[T]):
    key: ObjectKey
    old: T
    new: T


@dataclass(frozen=True, slots=True)
class Deleted(Generic[T]):
    key: ObjectKey
    old: T


InformerEvent: TypeAlias = Added[T] | Modified[T] | Deleted[T]
Handler: TypeAlias = Callable[[InformerEvent[T]], None]
Indexer: TypeAlias = Callable[[T], Iterable[Hashable]]


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    uid: str
    resource_version: str
    value: T


class Store(Generic[T]):
    """Objects by key, and by whatever the indexers say of them. Read by anyone, written by the informer."""

    def __init__(self, indexers: Mapping[str, Indexer[T]]) -> None:
        self._entries: dict[ObjectKey, _Entry[T]] = {}
        self._indexers = indexers
        self.changes = 0  # how often anything was written or removed
        self._indexes: dict[str, dict[Hashable, set[ObjectKey]]] = {name: {} for name in indexers}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.value for entry in self._entries.values())

    def get(self, key: ObjectKey) -> T | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def items(self) -> Iterator[tuple[ObjectKey, T]]:
        return ((key, entry.value) for key, entry in self._entries.items())

    def by_index(self, name: str, value: Hashable) -> list[T]:
        """Objects that indexer `name` filed under `value`, in order of key."""
        keys = self._indexes[name].get(value, ())
        return [self._entries[key].value for key in (sorted(keys) if len(keys) > 1 else keys)]

    def _put(self, key: ObjectKey, entry: _Entry[T]) -> _Entry[T] | None:
        old = self._remove(key)
        self.changes += 1
        self._entries[key] = entry
        for name, indexer in self._indexers.items():
            for value in indexer(entry.value):
                self._indexes[name].setdefault(value, set()).add(key)
        return old

    def _remove(self, key: ObjectKey) -> _Entry[T] | None:
        old = self._entries.pop(key, None)
        if old is not None:
            self.changes += 1
            for name, indexer in self._indexers.items():
                index = self._indexes[name]
                for value in indexer(old.value):
                    if (keys := index.get(value)) is not None:
                        keys.discard(key)
                        if not keys:
                            del index[value]
        return old


class Informer(Generic[T]):
    """List and watch one kind into a `Store` of what `decode` keeps of each object.

    `decode` must not raise: what it cannot read it should return as such. Handlers are called in the
    event loop, in order, after the store has changed. A kind that the cluster does not serve counts as
    synced and is looked for again now and then; so does an `optional` one that the role may not list.
    """

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        *,
        decode: Callable[[Json], T],
        namespace: str | None = None,
        label_selector: str = "",
        field_selector: str = "",
        indexers: Mapping[str, Indexer[T]] | None = None,
        watch_seconds: float = 290.0,
        grace: float = 10.0,
        page_size: int = 500,
        absent_retry: float = 30.0,
        longest_backoff: float = 30.0,
        optional: bool = False,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.resource = resource
        self.namespace = namespace
        self.store: Store[T] = Store(indexers or {})
        self._client = client
        self._decode = decode
        self._selectors = {"label_selector": label_selector, "field_selector": field_selector}
        self._watch_seconds = watch_seconds
        self._grace = grace
        self._page_size = page_size
        self._absent_retry = absent_retry
        self._longest_backoff = longest_backoff
        self._optional = optional
        self._draw = draw
        self._handlers: list[Handler[T]] = []
        self._version: str | None = None
        self._synced = asyncio.Event()
        self._absent = False
        self._last_contact: float | None = None
        self._error: str | None = None

    def add_handler(self, handler: Handler[T]) -> None:
        self._handlers.append(handler)

    @property
    def synced(self) -> bool:
        """Whether the first list is in (or the server said that it does not know the kind)."""
        return self._synced.is_set()

    async def wait_synced(self) -> None:
        await self._synced.wait()

    @property
    def absent(self) -> bool:
        """Whether the server does not know this kind at present."""
        return self._absent

    @property
    def error(self) -> str | None:
        """Why the copy may be out of date; None while the connection is good."""
        return self._error

    def age(self, now: float) -> float | None:
        """Seconds (of the event loop's clock) since the server was last heard; None before that."""
        return None if self._last_contact is None else now - self._last_contact

    async def run(self) -> None:
        """Keep the store current until cancelled."""
        backoff = Backoff(first=0.5, cap=self._longest_backoff, draw=self._draw)
        clock = asyncio.get_running_loop().time
        while True:
            started = clock()
            delay: float | None = None
            try:
                if self._version is None:
                    await self._list()
                await self._watch()
                self._error = None
            except GoneError as error:
                log.info("watch expired, listing again", kind=str(self.resource), reason=error.message)
                self._version = None
            except NotFoundError:
                self._error = None
                self._kind_is_absent("kind is not served by this cluster")
                delay = self._absent_retry
            except ForbiddenError as error:
                self._error = error.message
                if self._optional:
                    self._kind_is_absent(error.message)
                else:
                    log.warning("watch refused", kind=str(self.resource), error=error.message)
                delay = self._absent_retry
            except (ApiError, aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
                self._error = f"{type(error).__name__}: {error}"
                log.warning("watch interrupted", kind=str(self.resource), error=self._error)
            # A watch that lived is a success however it ended; one that ends at once, even politely,
            # must not turn into a storm of requests.
            if clock() - started >= min(5.0, self._watch_seconds):
                backoff.reset()
                delay = delay or 0.0
            await asyncio.sleep(backoff.next() if delay is None else delay)

    async def _list(self) -> None:
        try:
            fresh, version = await self._pages(self._page_size)
        except GoneError:
            # The snapshot behind the continue token is gone: one request cannot lose it.
            fresh, version = await self._pages(0)
        self._heard()
        if self._absent:
            log.info("kind is served again", kind=str(self.resource))
        self._absent = False
        for key in [key for key, _ in self.store.items() if key not in fresh]:
            self._delete(key)
        for key, entry in fresh.items():
            self._upsert(key, entry)
        self._version = version
        self._synced.set()

    async def _pages(self, size: int) -> tuple[dict[ObjectKey, _Entry[T]], str]:
        """Everything there is. Each page is decoded as it comes, so that never more than one is held raw."""
        found: dict[ObjectKey, _Entry[T]] = {}
        token = ""
        while True:
            page = await self._client.list(
                self.resource, self.namespace, limit=size, continue_token=token, **self._selectors
            )
            for item in page.items:
                found[ObjectKey.of(item)] = self._entry(item)
            token = page.continue_token
            if not token:
                return found, page.resource_version

    def _entry(self, obj: Json) -> _Entry[T]:
        metadata = obj["metadata"]
        return _Entry(metadata.get("uid", ""), metadata.get("resourceVersion", ""), self._decode(obj))

    async def _watch(self) -> None:
        assert self._version is not None
        # Spread over time, so that many informers do not come back together.
        seconds = self._watch_seconds * (0.75 + self._draw() / 4)
        async for event in self._client.watch(
            self.resource,
            self.namespace,
            resource_version=self._version,
            timeout_seconds=seconds,
            grace=self._grace,
            **self._selectors,
        ):
            self._heard()
            self._apply(event)
            self._version = event.object["metadata"]["resourceVersion"]
        self._heard()

    def _heard(self) -> None:
        self._last_contact = asyncio.get_running_loop().time()
        self._error = None

    def _apply(self, event: WatchEvent) -> None:
        if event.type == "DELETED":
            self._delete(ObjectKey.of(event.object))
        elif event.type in ("ADDED", "MODIFIED"):
            self._upsert(ObjectKey.of(event.object), self._entry(event.object))

    def _upsert(self, key: ObjectKey, entry: _Entry[T]) -> None:
        known = self.store._entries.get(key)  # pyright: ignore[reportPrivateUsage]
        if known is not None and known.uid != entry.uid:
            self._delete(key)
            known = None
        if known is not None and known.resource_version == entry.resource_version:
            return
        self.store._put(key, entry)  # pyright: ignore[reportPrivateUsage]
        if known is None:
            self._deliver(Added(key, entry.value))
        else:
            self._deliver(Modified(key, known.value, entry.value))

    def _delete(self, key: ObjectKey) -> None:
        removed = self.store._remove(key)  # pyright: ignore[reportPrivateUsage]
        if removed is not None:
            self._deliver(Deleted(key, removed.value))

    def _deliver(self, event: InformerEvent[T]) -> None:
        for handler in self._handlers:
            try:
                handler(event)
            except Exception:
                log.exception("event handler failed", kind=str(self.resource), key=str(event.key))

    def _kind_is_absent(self, why: str) -> None:
        if not self._absent:
            log.info(why, kind=str(self.resource), retry_s=self._absent_retry)
        self._absent = True
        self._version = None
        for key in [key for key, _ in self.store.items()]:
            self._delete(key)
        self._synced.set()


def identity(obj: Json) -> Json:
    """Decode nothing: keep the whole object but what only the server needs."""
    metadata: dict[str, Any] = obj["metadata"]
    metadata.pop("managedFields", None)
    return obj
