"""Scalers that stand for a variant: an HPA or a KEDA ScaledObject annotated `llm-d.ai/managed: "true"`, or a
ScaledObject whose external trigger names a model.

Such a scaler says everything that a VariantAutoscaling would, so no object of that kind is needed. KServe's
LLMInferenceService writes these annotations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from tidemill.api.names import MANAGED_ANNOTATION, MODEL_ID_ANNOTATION, VARIANT_COST_ANNOTATION
from tidemill.api.problem import InvalidObjectError, Problem, problems_of
from tidemill.api.variant import VariantAutoscaling

ScalerKind = Literal["HorizontalPodAutoscaler", "ScaledObject"]

# Which annotation or field of the scaler a field of the variant came from, for messages.
_ORIGIN = {
    "spec.modelID": f"metadata.annotations[{MODEL_ID_ANNOTATION}]",
    "spec.variantCost": f"metadata.annotations[{VARIANT_COST_ANNOTATION}]",
    "spec.scaleTargetRef.kind": "spec.scaleTargetRef.kind",
}


# Of an external trigger's metadata.
TRIGGER_MODEL, TRIGGER_COST, TRIGGER_VARIANT = "modelID", "variantCost", "variantName"
PAUSED_REPLICAS, PAUSED = "autoscaling.keda.sh/paused-replicas", "autoscaling.keda.sh/paused"


def paused(obj: Mapping[str, Any]) -> str:
    """The annotation by which somebody has stopped KEDA from scaling, as written; "" when nobody has."""
    annotations = obj["metadata"].get("annotations") or {}
    for name in (PAUSED_REPLICAS, PAUSED):
        value = annotations.get(name)
        if value is not None and (name == PAUSED_REPLICAS or value.lower() == "true"):
            return f"{name}={value}"
    return ""


def is_managed(obj: Mapping[str, Any]) -> bool:
    """Whether a scaler asks to be a variant."""
    annotated = (obj["metadata"].get("annotations") or {}).get(MANAGED_ANNOTATION) == "true"
    return not made_by_keda(obj) and (annotated or bool(_trigger(obj)))


def made_by_keda(obj: Mapping[str, Any]) -> bool:
    """Whether it is the HPA of a ScaledObject, and none of its own."""
    return any(owner.get("kind") == "ScaledObject" for owner in obj["metadata"].get("ownerReferences") or ())


def _trigger(obj: Mapping[str, Any]) -> Mapping[str, str]:
    """Metadata of the trigger of a ScaledObject that asks an external scaler about a model; empty without one."""
    for trigger in (obj.get("spec") or {}).get("triggers") or ():
        metadata = trigger.get("metadata") or {}
        if trigger.get("type") in ("external", "external-push") and metadata.get(TRIGGER_MODEL):
            return metadata
    return {}


def bounds(kind: ScalerKind, spec: Mapping[str, Any]) -> tuple[int, int | None]:
    """Minimum and maximum of a scaler. What is absent has the default of its kind: an HPA's minimum is 1,
    KEDA's is 0; an HPA must have a maximum, KEDA's is 100. A minimum of 0 is 0."""
    if kind == "HorizontalPodAutoscaler":
        low, high = spec.get("minReplicas"), spec.get("maxReplicas")
        return (1 if low is None else low), high
    low, high = spec.get("minReplicaCount"), spec.get("maxReplicaCount")
    return (0 if low is None else low), (100 if high is None else high)


def synthetic_variant(kind: ScalerKind, obj: Mapping[str, Any]) -> VariantAutoscaling:
    """The variant that a managed scaler stands for: its name, namespace, labels, target and bounds.

    Raises InvalidObjectError; the problems name the scaler and its annotations.
    """
    metadata, spec = obj["metadata"], obj.get("spec") or {}
    trigger = _trigger(obj)
    said = {MODEL_ID_ANNOTATION: trigger.get(TRIGGER_MODEL), VARIANT_COST_ANNOTATION: trigger.get(TRIGGER_COST)}
    annotations = {
        **{key: value for key, value in said.items() if value is not None},
        **(metadata.get("annotations") or {}),
    }
    name = f"{kind} {metadata.get('namespace')}/{metadata.get('name')}"
    target = spec.get("scaleTargetRef") or {}
    low, high = bounds(kind, spec)
    if not annotations.get(MODEL_ID_ANNOTATION):
        field = _ORIGIN["spec.modelID"]
        rule = "is required: the name under which the model is served"
        raise InvalidObjectError([Problem(name, field, "", rule)])
    body: dict[str, Any] = {
        "metadata": {k: v for k, v in metadata.items() if k != "annotations"},
        "spec": {
            "scaleTargetRef": {"kind": target.get("kind") or "Deployment", "name": target.get("name")},
            "modelID": annotations[MODEL_ID_ANNOTATION],
            "minReplicas": low,
            "maxReplicas": high,
        },
    }
    if VARIANT_COST_ANNOTATION in annotations:
        body["spec"]["variantCost"] = annotations[VARIANT_COST_ANNOTATION]
    try:
        return VariantAutoscaling.model_validate(body)
    except ValidationError as error:
        found = problems_of(name, error.errors())
        raise InvalidObjectError(
            [Problem(p.object, _ORIGIN.get(p.field, p.field), p.value, p.rule) for p in found]
        ) from None
