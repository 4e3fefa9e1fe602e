"""Kubernetes' protobuf bodies, for the few kinds that `kubectl create KIND` sends in no other form.

kubectl does not fall back to JSON, so a server without this could not even take `kubectl create
namespace`. Field numbers are those of the public .proto files of k8s.io/api and k8s.io/apimachinery.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tidemill.api.wire import BYTES, NUMBER, field
from tidemill.local.apiserver.status import StatusError, bad_request

Json: TypeAlias = dict[str, Any]
MAGIC = b"k8s\x00"


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    type: Literal["string", "bytes", "int", "bool", "map", "bytes-map", "message"] = "string"
    message: Mapping[int, _Field] | None = None
    repeated: bool = False


_META: Mapping[int, _Field] = {
    1: _Field("name"),
    2: _Field("generateName"),
    3: _Field("namespace"),
    5: _Field("uid"),
    6: _Field("resourceVersion"),
    11: _Field("labels", "map"),
    12: _Field("annotations", "map"),
    14: _Field("finalizers", repeated=True),
}
_METADATA = _Field("metadata", "message", _META)
_KINDS: Mapping[tuple[str, str], Mapping[int, _Field]] = {
    ("v1", "Namespace"): {1: _METADATA},
    ("v1", "ServiceAccount"): {1: _METADATA},
    ("v1", "ConfigMap"): {
        1: _METADATA,
        2: _Field("data", "map"),
        3: _Field("binaryData", "bytes-map"),
        4: _Field("immutable", "bool"),
    },
    ("v1", "Secret"): {
        1: _METADATA,
        2: _Field("data", "bytes-map"),
        3: _Field("type"),
        4: _Field("stringData", "map"),
        5: _Field("immutable", "bool"),
    },
    ("v1", "DeleteOptions"): {
        1: _Field("gracePeriodSeconds", "int"),
        2: _Field("preconditions", "message", {1: _Field("uid"), 2: _Field("resourceVersion")}),
        3: _Field("orphanDependents", "bool"),
        4: _Field("propagationPolicy"),
        5: _Field("dryRun", repeated=True),
    },
}


def decode(body: bytes) -> Json:
    """The JSON form of a protobuf body. Raises StatusError 415 for a kind that is not known here."""
    if not body.startswith(MAGIC):
        raise bad_request("the body is not Kubernetes protobuf: it does not start with its magic number")
    try:
        unknown = dict(_fields(body[len(MAGIC) :]))
        type_meta = {number: _text(value) for number, value in _fields(unknown.get(1, b""))}
        api_version, kind = type_meta.get(1, ""), type_meta.get(2, "")
        # Every group has DeleteOptions of its own, and they are all alike.
        known = _KINDS.get(("v1" if kind == "DeleteOptions" else api_version, kind))
        if known is None:
            raise StatusError(
                415,
                "UnsupportedMediaType",
                f"{kind} ({api_version}) is taken as JSON or YAML only: "
                "add --dry-run=client -o yaml and pipe it into kubectl apply -f -",
            )
        return {"apiVersion": api_version, "kind": kind, **_message(unknown.get(2, b""), known)}
    except (IndexError, TypeError, ValueError) as error:
        raise bad_request(f"the protobuf body is broken: {error}") from None


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and raw values: integers for numbers, bytes for everything with a length."""
    position = 0
    while position < len(data):
        tag, start, position = field(data, position, len(data))
        if tag & 7 == NUMBER:
            yield tag >> 3, start
        elif tag & 7 == BYTES:
            yield tag >> 3, data[start:position]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _message(data: bytes, known: Mapping[int, _Field]) -> Json:
    out: Json = {}
    for number, raw in _fields(data):
        found = known.get(number)
        if found is None:
            continue
        if found.type in ("map", "bytes-map"):
            entry = dict(_fields(raw))
            value = entry.get(2, b"")
            text = _text(value) if found.type == "map" else base64.b64encode(value).decode()
            out.setdefault(found.name, {})[_text(entry.get(1, b""))] = text
            continue
        value: Any
        if found.type == "message":
            value = _message(raw, found.message or {})
        elif found.type == "bool":
            value = bool(raw)
        elif found.type == "int":
            value = raw if raw < 2**63 else raw - 2**64
        else:
            value = _text(raw)
        if found.repeated:
            out.setdefault(found.name, []).append(value)
        elif value != "":
            out[found.name] = value
    return out
