"""One pool as the request path sees it: an immutable snapshot of who may be picked, replaced in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from tidemill.api.inference import InferenceModelRewrite, InferenceObjective
from tidemill.kube.resources import ObjectKey
from tidemill.picker.address import canonical
from tidemill.picker.load import IntArray, LoadTable
from tidemill.picker.pools.endpoints import Endpoint, EndpointSet
from tidemill.picker.scheduling.scheduler import Scheduler

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Endpoints of one moment with their rows in the load table. `missing` says why there can be none yet; it is
    empty once the pool is known and its pods have been listed."""

    endpoints: Sequence[Endpoint] = ()
    rows: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    select: slice | None = None  # the rows, when they follow each other
    by_address: Mapping[str, int] = field(default_factory=dict)
    missing: str = ""

    def subset(self, hint: Iterable[str]) -> tuple[Sequence[Endpoint], IntArray]:
        """Those of the hinted addresses that are endpoints. One that is named by the address of its other IP
        family is answered in that family."""
        found: dict[int, Endpoint] = {}
        for text in hint:
            address = text.strip()
            index = self.by_address.get(address)
            if index is None and "[" in address:
                # Only IPv6 has more than one way to write an address.
                address = canonical(address) or address
                index = self.by_address.get(address)
            if index is None:
                continue
            endpoint = self.endpoints[index]
            if endpoint.address == address:
                found[index] = endpoint
            elif index not in found:
                found[index] = Endpoint(
                    id=endpoint.id, address=address, pod=endpoint.pod, rank=endpoint.rank,
                    restarts=endpoint.restarts, labels=endpoint.labels,
                )  # fmt: skip
        positions = sorted(found)
        return [found[i] for i in positions], self.rows[positions]


class Pool:
    """Who is there (`snapshot`), how they are (`load`), who is picked (`scheduler`), and what requests may ask
    for (`objectives`, `rewrites`)."""

    def __init__(self, key: ObjectKey, scheduler: Scheduler, load: LoadTable, *, missing: str) -> None:
        self.key = key
        self.scheduler = scheduler
        self.load = load
        self.snapshot = Snapshot(missing=missing)
        self.objectives: Mapping[str, InferenceObjective] = {}
        self._rewrites: tuple[InferenceModelRewrite, ...] = ()
        self.configured_models: frozenset[str] = frozenset()  # that an operator has named in a rule
        self._remarks: frozenset[tuple[ObjectKey, str]] = frozenset()
        self._listeners: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return f"InferencePool {self.key}"

    @property
    def rewrites(self) -> tuple[InferenceModelRewrite, ...]:
        return self._rewrites

    @rewrites.setter
    def rewrites(self, rewrites: tuple[InferenceModelRewrite, ...]) -> None:
        self._rewrites = rewrites
        rules = [rule for rewrite in rewrites for rule in rewrite.rules]
        asked = {match.model.value for rule in rules for match in rule.matches if match.model is not None}
        self.configured_models = frozenset(asked | {t.model_rewrite for rule in rules for t in rule.targets})

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def replace(self, found: EndpointSet) -> None:
        """The pool's endpoints are now these."""
        for pod, remark in sorted(found.remarks - self._remarks):
            log.warning("pod of the pool", pool=str(self.key), pod=str(pod), problem=remark)
        self._remarks = found.remarks
        before = {endpoint.address for endpoint in self.snapshot.endpoints}
        by_address: dict[str, int] = {}
        for index, endpoint in enumerate(found.endpoints):
            by_address[endpoint.address] = index
        for index, endpoint in enumerate(found.endpoints):
            for other in endpoint.other_addresses:
                by_address.setdefault(other, index)
        rows = self.load.sync(found.endpoints)
        follow = bool(len(rows)) and bool((rows == np.arange(rows[0], rows[0] + len(rows))).all())
        select = slice(int(rows[0]), int(rows[0]) + len(rows)) if follow else None
        self.snapshot = Snapshot(found.endpoints, rows, select, by_address)
        after = {endpoint.address for endpoint in found.endpoints}
        if before != after:
            log.info(
                "endpoints", pool=str(self.key), count=len(after),
                added=sorted(after - before)[:10], removed=sorted(before - after)[:10],
            )  # fmt: skip
        self._changed()

    def clear(self, missing: str) -> None:
        """There is no pool, for the reason `missing`: no endpoints until there is one again."""
        if self.snapshot.missing == missing and not self.snapshot.endpoints:
            return
        log.info("pool has no endpoints", pool=str(self.key), reason=missing)
        self.load.sync(())
        self._remarks = frozenset()
        self.snapshot = Snapshot(missing=missing)
        self._changed()

    @property
    def models(self) -> frozenset[str]:
        """Names that requests can ask this pool for: what its engines report, and what is rewritten to them."""
        found: set[str] = set()
        for seat in self.load.seats():
            found |= seat.reading.models if seat.reading is not None else frozenset()
            lora = self.load.lora[seat.row]
            if lora is not None:
                found |= lora.running | lora.waiting
        for rewrite in self.rewrites:
            for rule in rewrite.rules:
                found |= {match.model.value for match in rule.matches if match.model is not None}
        return frozenset(found)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()


class Pools:
    """All pools of this process, and which of them a request is for."""

    def __init__(self) -> None:
        self._pools: dict[ObjectKey, Pool] = {}
        self._ports: dict[int, ObjectKey] = {}

    def add(self, pool: Pool) -> None:
        self._pools[pool.key] = pool

    def assign(self, port: int, key: ObjectKey) -> None:
        """Requests that come to `port` are for this pool."""
        self._ports[port] = key

    def get(self, key: ObjectKey) -> Pool | None:
        return self._pools.get(key)

    def all(self) -> list[Pool]:
        return [self._pools[key] for key in sorted(self._pools)]

    def resolve(self, *, named: str, port: int, model: Callable[[], str]) -> Pool | str:
        """The pool of a request, or why there is none. First what the gateway says by name (`namespace/name`, or
        a name that only one namespace has), then the port it asked at, then the only pool there is, then the
        model when exactly one pool serves it."""
        if named:
            return self._named(named)
        if (key := self._ports.get(port)) is not None:
            return self._pools.get(key) or f"InferencePool {key}, which port {port} is for, is not there"
        if len(self._pools) == 1:
            return next(iter(self._pools.values()))
        if not self._pools:
            return "no InferencePool is known to this picker"
        wanted = model()
        serving = [pool for pool in self.all() if wanted and wanted in pool.models]
        if len(serving) == 1:
            return serving[0]
        if not wanted:
            return f"this picker serves {len(self._pools)} pools, and the request names neither a pool nor a model"
        if not serving:
            return f"none of the {len(self._pools)} pools serves the model that was asked for"
        names = ", ".join(str(pool.key) for pool in serving)
        return f"the model that was asked for is served by {len(serving)} pools ({names}): name one of them"

    def _named(self, named: str) -> Pool | str:
        namespace, slash, name = named.rpartition("/")
        found = [
            pool
            for key, pool in self._pools.items()
            if key.name == name and (not slash or key.namespace == namespace)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            places = ", ".join(sorted(str(pool.key) for pool in found))
            return f"InferencePool {named!r} is ambiguous: {places}"
        return f"InferencePool {named!r} is not served by this picker"
