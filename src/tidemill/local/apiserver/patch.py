"""The three ways to change part of an object: merge patch, JSON patch, strategic merge patch."""

from __future__ import annotations

from typing import Any, TypeAlias

import jsonpatch
import jsonpointer

from tidemill.local.apiserver.lists import FieldPath, ListKinds
from tidemill.local.apiserver.status import StatusError, bad_request
from tidemill.local.apiserver.store import copy

Json: TypeAlias = dict[str, Any]


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7396: null removes, objects merge, anything else replaces."""
    if not isinstance(patch, dict):
        return patch
    out: Json = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merge_patch(out.get(key), value)
    return out


def json_patch(target: Json, operations: Any) -> Json:
    """RFC 6902. Raises StatusError 422 when an operation does not fit the object."""
    try:
        patched: Json = jsonpatch.JsonPatch(operations).apply(copy(target))
    except (jsonpatch.JsonPatchTestFailed, jsonpatch.JsonPatchConflict) as error:
        message = f"the server rejected our request due to an error in our request: {error}"
        raise StatusError(422, "Invalid", message) from None
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException, TypeError, KeyError) as error:
        message = f"the server rejected our request due to an error in our request: {error}"
        raise StatusError(422, "Invalid", message) from None
    return patched


def strategic_merge_patch(target: Json, patch: Json, lists: ListKinds) -> Json:
    """Kubernetes' own: lists of keyed items merge by key; `$patch` and friends are obeyed."""
    return _merge_map(target, patch, (), lists)


def _merge_map(target: Any, patch: Json, path: FieldPath, lists: ListKinds) -> Json:
    directive = patch.get("$patch")
    if directive == "replace":
        return {k: v for k, v in patch.items() if k != "$patch"}
    if directive == "delete":
        return {}
    if directive not in (None, "merge"):
        raise bad_request(f"unrecognized patch type: {directive}")
    out: Json = dict(target) if isinstance(target, dict) else {}
    retained: list[str] | None = patch.get("$retainKeys")
    for key, value in patch.items():
        if key in ("$patch", "$retainKeys") or key.startswith("$setElementOrder/"):
            continue
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.split("/", 1)[1]
            out[name] = [item for item in out.get(name) or [] if item not in value]
            continue
        here = (*path, key)
        if value is None:
            out.pop(key, None)
        elif isinstance(value, dict):
            merged = _merge_map(out.get(key), value, here, lists)
            if value.get("$patch") == "delete":
                out.pop(key, None)
            else:
                out[key] = merged
        elif isinstance(value, list):
            out[key] = _merge_list(out.get(key), value, here, lists, patch.get(f"$setElementOrder/{key}"))
        else:
            out[key] = value
    if retained is not None:
        out = {k: v for k, v in out.items() if k in retained}
    return out


def _merge_list(
    target: Any, patch: list[Any], path: FieldPath, lists: ListKinds, order: list[Any] | None
) -> list[Any]:
    kind = lists(path)
    current: list[Any] = list(target) if isinstance(target, list) else []
    if kind is None:
        return [item for item in patch if item != {"$patch": "replace"}]
    if kind.is_set:
        return current + [item for item in patch if item not in current]
    if any(isinstance(i, dict) and i.get("$patch") == "replace" for i in patch):
        return [i for i in patch if i.get("$patch") != "replace"]
    # Strategic merge knows only the first key (containerPort, not its protocol).
    key = kind.keys[0]
    out = current
    for item in patch:
        if key not in item:
            raise bad_request(f"{'.'.join(path)}: map does not contain key {key}")
        index = next((i for i, known in enumerate(out) if known.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            if index is not None:
                del out[index]
        elif index is None:
            out.append(_merge_map({}, item, path, lists))
        else:
            out[index] = _merge_map(out[index], item, path, lists)
    if order is not None:
        wanted = [entry[key] for entry in order]
        out.sort(key=lambda item: wanted.index(item[key]) if item[key] in wanted else len(wanted))
    return out
