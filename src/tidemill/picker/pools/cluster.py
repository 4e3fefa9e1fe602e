"""Pools of a cluster: InferencePools and their pods by informers, and the objects that requests may ask for.

The informers' stores are the only copies. The endpoints of a pool are computed from them whenever one of them
changes, so there is no order of events in which they could come out different.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from tidemill.api.inference import (
    OBJECTIVE_GROUP,
    OLDER_GROUP,
    POOL_GROUP,
    InferenceModelRewrite,
    InferenceObjective,
    InferencePool,
)
from tidemill.api.problem import InvalidObjectError, Problem
from tidemill.kube.client import KubeClient
from tidemill.kube.informer import Deleted, Informer, InformerEvent
from tidemill.kube.resources import PODS, Json, ObjectKey, Resource
from tidemill.picker.pools.endpoints import EndpointSet, PodView, endpoints_of, pod_view
from tidemill.picker.pools.pool import Pool, Pools

log = structlog.get_logger(__name__)

# Today's version first: an object that is there in both counts as that.
INFERENCE_POOLS = (
    Resource(POOL_GROUP, "v1", "inferencepools", "InferencePool"),
    Resource(OLDER_GROUP, "v1alpha2", "inferencepools", "InferencePool"),
)
INFERENCE_OBJECTIVES = (
    Resource(OBJECTIVE_GROUP, "v1alpha2", "inferenceobjectives", "InferenceObjective"),
    Resource(OLDER_GROUP, "v1alpha2", "inferenceobjectives", "InferenceObjective"),
)
INFERENCE_MODEL_REWRITES = (
    Resource(OBJECTIVE_GROUP, "v1alpha2", "inferencemodelrewrites", "InferenceModelRewrite"),
    Resource(OLDER_GROUP, "v1alpha2", "inferencemodelrewrites", "InferenceModelRewrite"),
)
DELETED = "the pool was deleted"


@dataclass(frozen=True, slots=True)
class Invalid:
    """An object that breaks its schema: what was known of it before stays in force."""

    problems: tuple[Problem, ...]
    last_good: Any


class _Decoder:
    """Parses objects of a kind; says once what is wrong with one, and remembers its last good state. That belongs
    to the object's uid: a namesake does not inherit it."""

    def __init__(self, parse: Callable[[Json], Any]) -> None:
        self._parse = parse
        self._good: dict[ObjectKey, tuple[str, Any]] = {}
        self._said: dict[ObjectKey, tuple[Problem, ...]] = {}

    def __call__(self, obj: Json) -> Any:
        key, uid = ObjectKey.of(obj), obj["metadata"].get("uid") or ""
        try:
            good = self._parse(obj)
        except InvalidObjectError as error:
            if self._said.get(key) != error.problems:
                self._said[key] = error.problems
                for problem in error.problems:
                    log.warning("object cannot be used; what was known of it stays", problem=str(problem))
            known_uid, known = self._good.get(key, ("", None))
            return Invalid(error.problems, known if known_uid == uid else None)
        self._said.pop(key, None)
        self._good[key] = (uid, good)
        return good

    def forget(self, event: InformerEvent[Any]) -> None:
        if isinstance(event, Deleted):
            self._good.pop(event.key, None)
            self._said.pop(event.key, None)


def _usable(value: Any) -> Any:
    return value.last_good if isinstance(value, Invalid) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTiming:
    """Seconds: how long one watch lasts, how long it may be silent beyond that, when a kind that is not there is
    looked for again, and the longest pause after a failure. That is short: every second of it an endpoint that has
    gone may be picked."""

    watch_seconds: float = 290.0
    grace: float = 10.0
    absent_retry: float = 10.0
    longest_backoff: float = 2.0


class ClusterPools:
    """Watches the pools of `namespace` (None: of all namespaces), or the one called `name` in it."""

    def __init__(
        self,
        client: KubeClient,
        pools: Pools,
        make: Callable[[ObjectKey, str], Pool],
        *,
        namespace: str | None,
        name: str = "",
        timing: WatchTiming,
    ) -> None:
        self._client = client
        self._pools = pools
        self._make = make
        self._namespace = namespace
        self._name = name
        self._timing = timing
        self._watches: dict[ObjectKey, _PodWatch] = {}
        self._group: asyncio.TaskGroup | None = None
        self._dirty = False
        self._informers = [
            self._informer(resource, InferencePool.parse, name=name) for resource in INFERENCE_POOLS
        ]
        self._objectives = [self._informer(r, InferenceObjective.parse) for r in INFERENCE_OBJECTIVES]
        self._rewrites = [self._informer(r, InferenceModelRewrite.parse) for r in INFERENCE_MODEL_REWRITES]
        if name:
            key = ObjectKey(namespace or "", name)
            pools.add(make(key, "the pool is not known yet: the API server has not been heard"))

    def _informer(self, resource: Resource, parse: Callable[[Json], Any], *, name: str = "") -> Informer[Any]:
        decode = _Decoder(parse)
        informer: Informer[Any] = Informer(
            self._client,
            resource,
            decode=decode,
            namespace=self._namespace,
            optional=True,
            field_selector=f"metadata.name={name}" if name else "",
            absent_retry=self._timing.absent_retry,
            watch_seconds=self._timing.watch_seconds,
            grace=self._timing.grace,
            longest_backoff=self._timing.longest_backoff,
        )
        informer.add_handler(self._changed)
        informer.add_handler(decode.forget)
        return informer

    @property
    def waiting_for(self) -> list[str]:
        """What readiness waits for; empty when all that is needed has been listed."""
        found = [
            f"waiting for the first list of {i.resource}" + (f" ({i.error})" if i.error else "")
            for i in self._informers
            if not i.synced
        ]
        if not found and self._name and not self._watches:
            found.append(f"waiting for InferencePool {self._namespace}/{self._name}")
        return found + [why for watch in self._watches.values() if (why := watch.waiting_for)]

    def age(self, key: ObjectKey, now: float) -> float | None:
        """Seconds since the pods of a pool were last known to be current: 0 while the watch is good, None when
        there is no such pool. `now` is of the event loop's clock."""
        watch = self._watches.get(key)
        return None if watch is None else watch.age(now)

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for informer in (*self._informers, *self._objectives, *self._rewrites):
                group.create_task(informer.run())
            await asyncio.gather(*(informer.wait_synced() for informer in self._informers))
            self._reconcile()

    # What the cluster says -> what is watched

    def _changed(self, event: InformerEvent[Any]) -> None:
        if not self._dirty:
            self._dirty = True
            asyncio.get_running_loop().call_soon(self._reconcile)

    def _reconcile(self) -> None:
        """Look at everything that is known of pools, and watch the pods of those that there are."""
        self._dirty = False
        if self._group is None or not all(informer.synced for informer in self._informers):
            return
        known = self._known(self._informers)
        for key in [key for key in self._watches if key not in known]:
            self._watches.pop(key).stop()
            if (pool := self._pools.get(key)) is not None:
                pool.clear(DELETED)
        for key, spec in known.items():
            watch = self._watches.get(key)
            pool = self._pools.get(key)
            if pool is None:
                pool = self._make(key, "its pods have not been listed yet")
                self._pools.add(pool)
            if watch is None:
                pool.clear("its pods have not been listed yet")
                watch = self._watches[key] = _PodWatch(pool, self._pods_of, self._group.create_task)
            watch.follow(spec)
        if self._name and not known:
            pool = self._pools.get(ObjectKey(self._namespace or "", self._name))
            if pool is not None and pool.snapshot.missing != DELETED:
                pool.clear("there is no such pool in the cluster")
        self._attach()

    def _attach(self) -> None:
        """Give each pool its objectives and rewrites. They are kept by the informers, so a pool that comes back
        has them again."""
        objectives = self._known(self._objectives).values()
        rewrites = self._known(self._rewrites).values()
        for pool in self._pools.all():

            def belongs(obj: Any, key: ObjectKey = pool.key) -> bool:
                return (
                    obj.namespace == key.namespace
                    and obj.pool_ref.name == key.name
                    and obj.pool_ref.group in (POOL_GROUP, OLDER_GROUP)
                )

            pool.objectives = {o.name: o for o in objectives if belongs(o)}
            pool.rewrites = tuple(r for r in rewrites if belongs(r))

    def _known(self, informers: list[Informer[Any]]) -> dict[ObjectKey, Any]:
        found: dict[ObjectKey, Any] = {}
        for informer in reversed(informers):
            for key, value in informer.store.items():
                if (good := _usable(value)) is not None:
                    found[key] = good
        return found

    def _pods_of(self, spec: InferencePool) -> Informer[PodView]:
        return Informer(
            self._client,
            PODS,
            decode=pod_view,
            namespace=spec.namespace,
            label_selector=spec.selector,
            watch_seconds=self._timing.watch_seconds,
            grace=self._timing.grace,
            longest_backoff=self._timing.longest_backoff,
        )


@dataclass(frozen=True, slots=True)
class _Running:
    """An informer of the pods that `spec` selects, and the tasks that it needs."""

    spec: InferencePool
    informer: Informer[PodView]
    tasks: tuple[asyncio.Task[None], ...]


class _PodWatch:
    """The pods of one pool. A new selector means a new watch; the old one serves until the new one has listed, so
    the set of endpoints changes in one step."""

    def __init__(
        self,
        pool: Pool,
        informer: Callable[[InferencePool], Informer[PodView]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._pool = pool
        self._make_informer = informer
        self._spawn = spawn
        self._serving: _Running | None = None
        self._coming: _Running | None = None
        self._dirty = False

    @property
    def waiting_for(self) -> str:
        if self._serving is not None:
            return ""
        error = self._coming.informer.error if self._coming is not None else None
        return f"waiting for the first list of the pods of {self._pool}" + (f" ({error})" if error else "")

    def age(self, now: float) -> float | None:
        if self._serving is None:
            return None
        informer = self._serving.informer
        return 0.0 if informer.error is None else informer.age(now)

    def follow(self, spec: InferencePool) -> None:
        """The pool is now this."""
        latest = self._coming or self._serving
        if latest is not None and latest.spec == spec:
            return
        if latest is not None and latest.spec.selector == spec.selector:
            # The same pods; only what is made of them differs.
            if self._coming is not None:
                self._coming = replace(self._coming, spec=spec)
            elif self._serving is not None:
                self._serving = replace(self._serving, spec=spec)
                self._recompute()
            return
        self._end(self._coming)
        informer = self._make_informer(spec)
        informer.add_handler(partial(self._changed, informer))
        tasks = self._spawn(informer.run()), self._spawn(self._take_over(informer))
        self._coming = _Running(spec, informer, tasks)

    def stop(self) -> None:
        self._end(self._coming)
        self._end(self._serving)
        self._coming = self._serving = None

    async def _take_over(self, informer: Informer[PodView]) -> None:
        await informer.wait_synced()
        if self._coming is not None and self._coming.informer is informer:
            self._end(self._serving)
            self._serving, self._coming = self._coming, None
            self._recompute()

    def _changed(self, informer: Informer[PodView], event: InformerEvent[PodView]) -> None:
        if self._serving is not None and self._serving.informer is informer and not self._dirty:
            self._dirty = True
            asyncio.get_running_loop().call_soon(self._recompute)

    def _recompute(self) -> None:
        self._dirty = False
        if self._serving is None:
            return
        found = endpoints_of(self._serving.spec, self._serving.informer.store)
        if self._coming is not None:
            # The selector has changed: what only the old one would add is not wanted any more.
            present = {endpoint.id for endpoint in self._pool.snapshot.endpoints}
            found = EndpointSet(tuple(e for e in found.endpoints if e.id in present), found.remarks)
        self._pool.replace(found)

    def _end(self, watch: _Running | None) -> None:
        for task in () if watch is None else watch.tasks:
            if task is not asyncio.current_task():
                task.cancel()
