"""Who owns which field: server-side apply and the managedFields that it works with.

A set of fields is a set of paths; a step of a path is written as FieldsV1 writes it: `f:name` for a
field, `k:{"name":"a"}` for an item of a list-map, `v:"a"` for an item of a set. Only leaves are in a
set (and items of list-maps, which exist in their own right); a list without keys is one leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from tidemill.local.apiserver.lists import FieldPath, ListKind, ListKinds
from tidemill.local.apiserver.status import Cause, StatusError
from tidemill.local.apiserver.store import copy

Json: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str, ...]
Fields: TypeAlias = frozenset[Path]

_OWNED_METADATA = ("labels", "annotations", "finalizers", "ownerReferences")


@dataclass(frozen=True, slots=True)
class Manager:
    """Who writes: a field manager, how (Apply or Update), to the object or a subresource."""

    name: str
    operation: str
    subresource: str = ""


def fields_of(obj: Json, lists: ListKinds) -> Fields:
    """Every field that `obj` holds and somebody can own."""
    return frozenset(_leaves(_ownable(obj), (), (), lists))


def _ownable(obj: Json) -> Json:
    out = {k: v for k, v in obj.items() if k not in ("apiVersion", "kind", "metadata")}
    metadata = {k: v for k, v in (obj.get("metadata") or {}).items() if k in _OWNED_METADATA}
    return {**out, "metadata": metadata} if metadata else out


def _step(kind: ListKind, item: Any) -> str:
    if kind.is_set:
        return "v:" + orjson.dumps(item).decode()
    return "k:" + orjson.dumps(dict(kind.key_of(item)), option=orjson.OPT_SORT_KEYS).decode()


def _leaves(value: Any, path: Path, names: FieldPath, lists: ListKinds) -> Iterator[Path]:
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from _leaves(child, (*path, f"f:{name}"), (*names, name), lists)
        return
    if isinstance(value, list) and names and (kind := lists(names)) is not None:
        for item in value:
            step = (*path, _step(kind, item))
            yield step
            if isinstance(item, dict):
                for name, child in item.items():
                    yield from _leaves(child, (*step, f"f:{name}"), (*names, name), lists)
        return
    if path:
        yield path


def _get(obj: Any, path: Path, lists: ListKinds) -> Any:
    """The value at `path`; None when it is not there."""
    node, names = obj, ()
    for step in path:
        if step.startswith("f:"):
            names = (*names, step[2:])
            node = node.get(step[2:]) if isinstance(node, dict) else None
        elif isinstance(node, list) and (kind := lists(names)) is not None:
            node = next((item for item in node if _step(kind, item) == step), None)
        else:
            return None
    return node


def _same(path: Path, left: Json, right: Json, lists: ListKinds) -> bool:
    a, b = _get(left, path, lists), _get(right, path, lists)
    if not path[-1].startswith("f:"):  # an item of a list-map: only whether it is there
        return (a is None) == (b is None)
    return a == b


def _remove(obj: Json, path: Path, lists: ListKinds) -> None:
    node: Any = obj
    names: FieldPath = ()
    for step in path[:-1]:
        if step.startswith("f:"):
            names = (*names, step[2:])
            node = node.get(step[2:]) if isinstance(node, dict) else None
        else:
            kind = lists(names)
            node = kind and next((i for i in node or () if _step(kind, i) == step), None)
        if node is None:
            return
    last = path[-1]
    if last.startswith("f:"):
        if isinstance(node, dict):
            node.pop(last[2:], None)
    elif isinstance(node, list) and (kind := lists(names)) is not None:
        node[:] = [item for item in node if _step(kind, item) != last]


def _merge(live: Any, applied: Any, names: FieldPath, lists: ListKinds) -> Any:
    if isinstance(applied, dict):
        out: Json = dict(live) if isinstance(live, dict) else {}
        for name, value in applied.items():
            out[name] = _merge(out.get(name), value, (*names, name), lists)
        return out
    if isinstance(applied, list) and names and (kind := lists(names)) is not None:
        current: list[Any] = list(live) if isinstance(live, list) else []
        for item in applied:
            step = _step(kind, item)
            index = next((n for n, known in enumerate(current) if _step(kind, known) == step), None)
            if index is None:
                current.append(item)
            elif not kind.is_set:
                current[index] = _merge(current[index], item, names, lists)
        return current
    return applied


def to_fields_v1(fields: Fields) -> Json:
    tree: Json = {}
    for path in fields:
        node = tree
        for step in path:
            node = node.setdefault(step, {})
        if not path[-1].startswith("f:"):
            node["."] = {}
    return tree


def from_fields_v1(tree: Mapping[str, Any]) -> Fields:
    def walk(node: Mapping[str, Any], path: Path) -> Iterator[Path]:
        children = {step: child for step, child in node.items() if step != "."}
        if path and (not children or "." in node):
            yield path
        for step, child in children.items():
            yield from walk(child, (*path, step))

    return frozenset(walk(tree, ()))


def _read(obj: Json | None) -> dict[Manager, tuple[Fields, str]]:
    entries = ((obj or {}).get("metadata") or {}).get("managedFields") or ()
    return {
        Manager(e.get("manager", ""), e.get("operation", "Update"), e.get("subresource", "")): (
            from_fields_v1(e.get("fieldsV1") or {}),
            e.get("time", ""),
        )
        for e in entries
    }


def _write(obj: Json, managers: Mapping[Manager, tuple[Fields, str]]) -> None:
    entries = [
        {
            "manager": manager.name,
            "operation": manager.operation,
            "apiVersion": obj["apiVersion"],
            "time": time,
            "fieldsType": "FieldsV1",
            "fieldsV1": to_fields_v1(fields),
            **({"subresource": manager.subresource} if manager.subresource else {}),
        }
        for manager, (fields, time) in managers.items()
        if fields
    ]
    if entries:
        obj["metadata"]["managedFields"] = entries
    else:
        obj["metadata"].pop("managedFields", None)


def record_update(old: Json | None, new: Json, manager: Manager, lists: ListKinds, now: str) -> None:
    """After an update: what `manager` changed is its own from now on. Changes `new` in place."""
    managers = _read(old)
    before = fields_of(old, lists) if old else frozenset[Path]()
    after = fields_of(new, lists)
    changed = frozenset(p for p in after if old is None or p not in before or not _same(p, old, new, lists))
    if not changed and before == after:
        _write(new, managers)
        return
    kept = {m: (f & after if m == manager else (f & after) - changed, t) for m, (f, t) in managers.items()}
    if changed:
        kept[manager] = (kept.get(manager, (frozenset[Path](), ""))[0] | changed, now)
    _write(new, kept)


def apply(live: Json | None, config: Json, manager: Manager, lists: ListKinds, now: str, *, force: bool) -> Json:
    """The object after `manager` applied `config`.

    Fields that it applied before and no longer does go, unless somebody else owns them too. Raises
    StatusError 409 when it would change what others own, unless `force`.
    """
    managers = _read(live)
    wanted = fields_of(config, lists)
    if live is not None:
        disputed = {
            other: frozenset(p for p in fields & wanted if not _same(p, live, config, lists))
            for other, (fields, _) in managers.items()
            if other != manager
        }
        disputed = {other: paths for other, paths in disputed.items() if paths}
        if disputed and not force:
            raise _conflicts(disputed)
        for other, paths in disputed.items():
            fields, time = managers[other]
            managers[other] = (fields - paths, time)
    merged: Json = copy(_merge(live or {}, config, (), lists))
    dropped = managers.get(manager, (frozenset[Path](), ""))[0] - wanted
    owned = [fields for other, (fields, _) in managers.items() if other != manager]
    # An item of a list goes before its fields: without its key it could not be found any more.
    for path in sorted(dropped, key=len):
        if not any(path in fields or any(f[: len(path)] == path for f in fields) for fields in owned):
            _remove(merged, path, lists)
    previous = managers.get(manager)
    time = previous[1] if previous and previous[0] == wanted else now
    managers[manager] = (wanted, time)
    merged.setdefault("metadata", {})
    _write(merged, managers)
    return merged


def _conflicts(disputed: Mapping[Manager, Fields]) -> StatusError:
    causes = [
        Cause(_dotted(path), f'conflict with "{other.name}"', "FieldManagerConflict")
        for other, paths in disputed.items()
        for path in sorted(paths)
    ]
    count = len(causes)
    names = ", ".join(sorted({f'"{other.name}"' for other in disputed}))
    listed = ", ".join(cause.field for cause in causes)
    return StatusError(
        409,
        "Conflict",
        f"Apply failed with {count} conflict{'s' if count > 1 else ''}: conflicts with {names}: {listed}",
        {"causes": [{"reason": c.reason, "message": c.message, "field": c.field} for c in causes]},
    )


def _dotted(path: Path) -> str:
    text = ""
    for step in path:
        if step.startswith("f:"):
            text += f".{step[2:]}"
        elif step.startswith("k:"):
            keys = orjson.loads(step[2:])
            text += "[" + ",".join(f"{k}={orjson.dumps(v).decode()}" for k, v in keys.items()) + "]"
        else:
            text += f"[{step[2:]}]"
    return text
