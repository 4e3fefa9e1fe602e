"""CustomResourceDefinitions of the kinds that the picker reads, for clusters that have none. A gateway that brings
its own keeps its own: they hold the same objects."""

from __future__ import annotations

from typing import Any

from tidemill.api.inference import MAX_TARGET_PORTS, OBJECTIVE_GROUP, POOL_GROUP

Schema = dict[str, Any]


def inference_crds() -> list[Schema]:
    """InferencePool (v1), InferenceObjective and InferenceModelRewrite (v1alpha2)."""
    return [
        _crd(POOL_GROUP, "v1", "InferencePool", "inferencepools", "infpool", _pool_spec(), status=True),
        _crd(
            OBJECTIVE_GROUP, "v1alpha2", "InferenceObjective", "inferenceobjectives", "infobj", _objective_spec(),
        ),
        _crd(
            OBJECTIVE_GROUP, "v1alpha2", "InferenceModelRewrite", "inferencemodelrewrites", "infrewrite",
            _rewrite_spec(),
        ),
    ]  # fmt: skip


def _pool_spec() -> Schema:
    number: Schema = {"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535}
    port = _object({"number": number}, ["number"])
    reference = _object(
        {
            "group": {"type": "string", "default": "", "maxLength": 253},
            "kind": {"type": "string", "default": "Service", "minLength": 1, "maxLength": 63},
            "name": {"type": "string", "minLength": 1, "maxLength": 253},
            "port": port,
            "failureMode": {"type": "string", "enum": ["FailOpen", "FailClose"], "default": "FailClose"},
        },
        ["name"],
    )
    reference["x-kubernetes-validations"] = [
        {"rule": "self.kind != 'Service' || has(self.port)", "message": "port is required when kind is Service"}
    ]
    labels: Schema = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 64,
        "additionalProperties": {"type": "string", "maxLength": 63},
    }
    ports: Schema = {"type": "array", "minItems": 1, "maxItems": MAX_TARGET_PORTS, "items": port}
    ports["x-kubernetes-validations"] = [
        {
            "rule": "self.all(p1, self.exists_one(p2, p1.number == p2.number))",
            "message": "port number must be unique",
        }
    ]
    return _object(
        {
            "selector": _object({"matchLabels": labels}, ["matchLabels"]),
            "targetPorts": ports,
            "appProtocol": {"type": "string", "enum": ["http", "kubernetes.io/h2c"], "default": "http"},
            "endpointPickerRef": reference,
        },
        ["selector", "targetPorts"],
    )


def _pool_ref() -> Schema:
    return _object(
        {
            "group": {"type": "string", "default": POOL_GROUP},
            "kind": {"type": "string", "default": "InferencePool"},
            "name": {"type": "string", "minLength": 1, "maxLength": 253},
        },
        ["name"],
    )


def _objective_spec() -> Schema:
    return _object({"poolRef": _pool_ref(), "priority": {"type": "integer", "format": "int32"}}, ["poolRef"])


def _rewrite_spec() -> Schema:
    text: Schema = {"type": "string", "minLength": 1}
    model = _object({"type": {"type": "string", "enum": ["Exact"], "default": "Exact"}, "value": text}, ["value"])
    target = _object(
        {
            "modelRewrite": text,
            "weight": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 1_000_000},
        },
        ["modelRewrite"],
    )
    rule = _object(
        {
            "matches": {"type": "array", "items": _object({"model": model}, [])},
            "targets": {"type": "array", "minItems": 1, "items": target},
        },
        ["targets"],
    )
    return _object({"poolRef": _pool_ref(), "rules": {"type": "array", "items": rule}}, ["poolRef"])


def _object(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _crd(
    group: str, version: str, kind: str, plural: str, short: str, spec: Schema, *, status: bool = False
) -> Schema:
    kept: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    properties = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": spec,
        # Gateways write it, each in its own way.
        **({"status": kept} if status else {}),
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # Groups under k8s.io are refused without the annotation. Not this text was approved, only its objects are
        # those of the one that was.
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for clusters without a gateway's own"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
            },
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    **({"subresources": {"status": {}}} if status else {}),
                    "schema": {
                        "openAPIV3Schema": {"type": "object", "required": ["spec"], "properties": properties}
                    },
                }
            ],
        },
    }
