"""CustomResourceDefinition of VariantAutoscaling, generated from the models so that the two cannot differ."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from tidemill.api.names import GROUP, VERSION
from tidemill.api.variant import KIND, VariantAutoscalingSpec, VariantAutoscalingStatus

_KEPT = {
    "type", "description", "pattern", "minLength", "maxLength", "minimum", "maximum", "enum", "default",
    "format", "required",
}  # fmt: skip


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI v3 structural schema of `model`: references inlined, null alternatives dropped."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    definitions: dict[str, Any] = document.get("$defs", {})

    def convert(node: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in node:
            target = definitions[node["$ref"].rsplit("/", 1)[1]]
            return convert({**target, **{k: v for k, v in node.items() if k != "$ref"}})
        if "anyOf" in node:
            (kept,) = [option for option in node["anyOf"] if option.get("type") != "null"]
            return convert({**kept, **{k: v for k, v in node.items() if k != "anyOf"}})
        out = {k: v for k, v in node.items() if k in _KEPT and v is not None}
        if "properties" in node:
            out["properties"] = {name: convert(child) for name, child in node["properties"].items()}
        if "items" in node:
            out["items"] = convert(node["items"])
        return out

    return convert(document)


def variant_autoscaling_crd() -> dict[str, Any]:
    """The CRD, ready for `kubectl apply -f -`."""
    spec = structural_schema(VariantAutoscalingSpec)
    # Defaults of nested objects are filled in field by field by the API server.
    spec["properties"]["scaleTargetRef"]["default"] = {}
    spec["x-kubernetes-validations"] = [
        {
            "rule": "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "message": "minReplicas must not be above maxReplicas",
        }
    ]
    status = structural_schema(VariantAutoscalingStatus)
    alloc = status["properties"]["desiredOptimizedAlloc"]
    # Whole or `{}`: the empty object is what a variant without a target shows.
    del alloc["required"]
    alloc["x-kubernetes-validations"] = [
        {
            "rule": "has(self.accelerator) == has(self.numReplicas)",
            "message": "accelerator and numReplicas are written together",
        }
    ]
    conditions = status["properties"]["conditions"]
    conditions.pop("default", None)
    conditions["x-kubernetes-list-type"] = "map"
    conditions["x-kubernetes-list-map-keys"] = ["type"]
    plural = f"{KIND.lower()}s"

    def column(name: str, path: str, type_: str = "string") -> dict[str, str]:
        return {"name": name, "type": type_, "jsonPath": path}

    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": plural,
                "singular": KIND.lower(),
                "shortNames": ["va"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        column("Target", ".spec.scaleTargetRef.name"),
                        column("Model", ".spec.modelID"),
                        column("Min", ".spec.minReplicas", "integer"),
                        column("Max", ".spec.maxReplicas", "integer"),
                        column("Optimized", ".status.desiredOptimizedAlloc.numReplicas", "integer"),
                        column("MetricsReady", '.status.conditions[?(@.type=="MetricsAvailable")].status'),
                        column("Age", ".metadata.creationTimestamp", "date"),
                    ],
                    "schema": {
                        "openAPIV3Schema": {
                            "description": "Decides how many replicas of one variant of a model run.",
                            "type": "object",
                            "required": ["spec"],
                            "properties": {
                                "apiVersion": {"type": "string"},
                                "kind": {"type": "string"},
                                "metadata": {"type": "object"},
                                "spec": spec,
                                "status": status,
                            },
                        }
                    },
                }
            ],
        },
    }
