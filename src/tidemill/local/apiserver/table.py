"""Table answers: what `kubectl get` prints."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tidemill.kube.clock import parse_time
from tidemill.local.apiserver import jsonpath
from tidemill.local.apiserver.kinds import Kind

Json: TypeAlias = dict[str, Any]
Cell: TypeAlias = Callable[[Json, dt.datetime], Any]


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    cell: Cell
    type: str = "string"
    wide: bool = False


def age(text: str | None, now: dt.datetime) -> str:
    """A duration as kubectl shortens it: 45s, 3m20s, 25m, 7h5m, 2d."""
    if not text:
        return "<unknown>"
    seconds = max(0, int((now - parse_time(text)).total_seconds()))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    return f"{days}d"


def _path(path: str, missing: Any = "<none>") -> Cell:
    def cell(obj: Json, now: dt.datetime) -> Any:
        value = jsonpath.find(path, obj)
        return missing if value is None or value == "" else value

    return cell


def _age(path: str = ".metadata.creationTimestamp") -> Cell:
    return lambda obj, now: age(jsonpath.find(path, obj), now)


def _count(path: str) -> Cell:
    return lambda obj, now: len(jsonpath.find(path, obj) or ())


def _pod_ready(obj: Json, now: dt.datetime) -> str:
    statuses = obj.get("status", {}).get("containerStatuses") or []
    return f"{sum(bool(s.get('ready')) for s in statuses)}/{len(obj['spec'].get('containers') or ())}"


def _pod_status(obj: Json, now: dt.datetime) -> str:
    if obj["metadata"].get("deletionTimestamp"):
        return "Terminating"
    status = obj.get("status", {})
    for container in status.get("containerStatuses") or ():
        state = container.get("state", {})
        for phase in ("waiting", "terminated"):
            if reason := (state.get(phase) or {}).get("reason"):
                return reason
    return status.get("reason") or status.get("phase") or "Unknown"


def _pod_restarts(obj: Json, now: dt.datetime) -> str:
    statuses = obj.get("status", {}).get("containerStatuses") or []
    total = sum(s.get("restartCount", 0) for s in statuses)
    last = [((s.get("lastState") or {}).get("terminated") or {}).get("finishedAt") for s in statuses]
    latest = max((t for t in last if t), default=None)
    return f"{total} ({age(latest, now)} ago)" if total and latest else str(total)


def _deployment_ready(obj: Json, now: dt.datetime) -> str:
    return f"{obj.get('status', {}).get('readyReplicas', 0)}/{obj['spec'].get('replicas', 1)}"


def _event_object(obj: Json, now: dt.datetime) -> str:
    about = obj.get("involvedObject", {})
    return f"{about.get('kind', '').lower()}/{about.get('name', '')}"


def _templates(part: str) -> Cell:
    def cell(obj: Json, now: dt.datetime) -> str:
        containers = obj["spec"].get("template", {}).get("spec", {}).get("containers") or ()
        return ",".join(str(c.get(part, "")) for c in containers)

    return cell


def _selector(obj: Json, now: dt.datetime) -> str:
    labels = (obj["spec"].get("selector") or {}).get("matchLabels") or {}
    return ",".join(f"{k}={v}" for k, v in labels.items())


_NAME = Column("Name", _path(".metadata.name"))
_AGE = Column("Age", _age())
_WORKLOAD = (
    Column("Containers", _templates("name"), wide=True),
    Column("Images", _templates("image"), wide=True),
    Column("Selector", _selector, wide=True),
)

COLUMNS: dict[str, Sequence[Column]] = {
    "pods": (
        _NAME, Column("Ready", _pod_ready), Column("Status", _pod_status), Column("Restarts", _pod_restarts),
        _AGE, Column("IP", _path(".status.podIP"), wide=True), Column("Node", _path(".spec.nodeName"), wide=True),
    ),
    "deployments.apps": (
        _NAME, Column("Ready", _deployment_ready),
        Column("Up-to-date", _path(".status.updatedReplicas", 0), "integer"),
        Column("Available", _path(".status.availableReplicas", 0), "integer"), _AGE, *_WORKLOAD,
    ),
    "replicasets.apps": (
        _NAME, Column("Desired", _path(".spec.replicas", 0), "integer"),
        Column("Current", _path(".status.replicas", 0), "integer"),
        Column("Ready", _path(".status.readyReplicas", 0), "integer"), _AGE, *_WORKLOAD,
    ),
    "namespaces": (_NAME, Column("Status", _path(".status.phase")), _AGE),
    "configmaps": (_NAME, Column("Data", _count(".data"), "integer"), _AGE),
    "secrets": (_NAME, Column("Type", _path(".type")), Column("Data", _count(".data"), "integer"), _AGE),
    "nodes": (_NAME, Column("Status", lambda o, n: "Ready"), _AGE),
    "services": (
        _NAME, Column("Type", _path(".spec.type")), Column("Cluster-IP", _path(".spec.clusterIP")), _AGE,
    ),
    "leases.coordination.k8s.io": (_NAME, Column("Holder", _path(".spec.holderIdentity")), _AGE),
    "events": (
        Column("Last Seen", _age(".lastTimestamp")), Column("Type", _path(".type")),
        Column("Reason", _path(".reason")), Column("Object", _event_object),
        Column("Message", _path(".message", "")), Column("Count", _path(".count", 1), "integer", wide=True),
        Column("Name", _path(".metadata.name"), wide=True),
    ),
    "customresourcedefinitions.apiextensions.k8s.io": (
        _NAME, Column("Created At", _path(".metadata.creationTimestamp")),
    ),
}  # fmt: skip


def columns_of(kind: Kind) -> Sequence[Column]:
    if kind.columns is None:
        return COLUMNS.get(kind.collection, (_NAME, _AGE))
    return (
        _NAME,
        *(
            Column(
                spec["name"],
                _age(spec["jsonPath"]) if spec["type"] == "date" else _path(spec["jsonPath"], None),
                spec["type"],
                wide=spec.get("priority", 0) > 0,
            )
            for spec in kind.columns
        ),
    )


def table(
    kind: Kind, objects: Iterable[Json], *, now: dt.datetime, metadata: Json, include: str = "Metadata"
) -> Json:
    """A meta.k8s.io/v1 Table. `include` is None, Metadata or Object, as includeObject in the query."""
    columns = columns_of(kind)

    def row(obj: Json) -> Json:
        cells = [column.cell(obj, now) for column in columns]
        if include == "None":
            return {"cells": cells}
        if include == "Object":
            return {"cells": cells, "object": obj}
        partial = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}
        return {"cells": cells, "object": partial}

    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [
            {
                "name": c.name,
                # Dates come ready as ages, so they are strings to whoever prints them.
                "type": "string" if c.type == "date" else c.type,
                "format": "name" if c.name == "Name" else "",
                "description": c.name,
                "priority": int(c.wide),
            }
            for c in columns
        ],
        "rows": [row(obj) for obj in objects],
    }
