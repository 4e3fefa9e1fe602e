"""VariantAutoscaling (llmd.ai/v1alpha1): one scale target that serves one model at one cost."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from tidemill.api.model import ApiModel
from tidemill.api.names import GROUP, VERSION
from tidemill.api.problem import InvalidObjectError, problems_of

TargetKind = Literal["Deployment", "LeaderWorkerSet"]


class ConditionType(StrEnum):
    READY = "Ready"
    TARGET_RESOLVED = "TargetResolved"
    METRICS_AVAILABLE = "MetricsAvailable"
    OPTIMIZATION_READY = "OptimizationReady"


class Reason(StrEnum):
    """Every reason a condition of a VariantAutoscaling can carry."""

    TARGET_READY = "TargetReady"
    DEPLOYMENT_NOT_FOUND = "DeploymentNotFound"
    TARGET_CONFLICT = "TargetConflict"
    TARGET_FOUND = "TargetFound"
    TARGET_NOT_FOUND = "TargetNotFound"
    METRICS_FOUND = "MetricsFound"
    METRICS_MISSING = "MetricsMissing"
    METRICS_STALE = "MetricsStale"
    PROMETHEUS_ERROR = "PrometheusError"
    SCALE_FROM_ZERO = "ScaleFromZero"
    OPTIMIZATION_SUCCEEDED = "OptimizationSucceeded"
    OPTIMIZATION_FAILED = "OptimizationFailed"
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    INVALID_CONFIGURATION = "InvalidConfiguration"


def target_word(kind: TargetKind) -> str:
    """What messages call a target; of a Deployment they are the original's to the letter."""
    return "deployment" if kind == "Deployment" else kind


def target_gone_message(kind: TargetKind) -> str:
    return f"Target {target_word(kind)} no longer exists"


class ScaleTargetRef(ApiModel):
    """The object whose replicas are decided. Without a name it is the VariantAutoscaling's own."""

    api_version: Annotated[str | None, Field(description="API version of the target.")] = None
    kind: Annotated[TargetKind, Field(description="Kind of the target.")] = "Deployment"
    name: Annotated[
        str | None,
        Field(description="Name of the target; the VariantAutoscaling's own name when absent.", min_length=1),
    ] = None


class VariantAutoscalingSpec(ApiModel):
    scale_target_ref: Annotated[ScaleTargetRef, Field(description="The object whose replicas are decided.")] = (
        ScaleTargetRef()
    )
    model_id: Annotated[
        str,
        Field(alias="modelID", description="Model that the target serves, as in model_name.", min_length=1),
    ]
    variant_cost: Annotated[
        str, Field(description="Cost of one replica, a decimal number.", pattern=r"^\d+(\.\d+)?$")
    ] = "10.0"
    min_replicas: Annotated[int | None, Field(description="Never fewer than this.", ge=0)] = None
    max_replicas: Annotated[int | None, Field(description="Never more than this.", ge=1)] = None

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        low, high = self.min_replicas, self.max_replicas
        if low is not None and high is not None and low > high:
            raise ValueError(f"minReplicas {low} must not be above maxReplicas {high}")
        return self


class OptimizedAlloc(ApiModel):
    """A decision as the status carries it. It is always written whole (a partial one is refused)."""

    accelerator: Annotated[str, Field(description="Accelerator of the target.", min_length=2)]
    num_replicas: Annotated[int, Field(description="Replicas decided.", ge=0)]
    last_run_time: Annotated[dt.datetime | None, Field(description="When it was decided.")] = None


class Actuation(ApiModel):
    applied: Annotated[bool, Field(description="Whether the decision was exported or written.")] = False


class Condition(ApiModel):
    type: Annotated[str, Field(min_length=1, max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Field(max_length=1024)] = ""
    message: Annotated[str, Field(max_length=32768)] = ""
    observed_generation: Annotated[int | None, Field(ge=0)] = None
    last_transition_time: dt.datetime


class VariantAutoscalingStatus(ApiModel):
    desired_optimized_alloc: Annotated[
        OptimizedAlloc | None, Field(description="The last decision; absent or empty without a target.")
    ] = None
    actuation: Annotated[Actuation | None, Field(description="What became of the decision.")] = None
    conditions: Annotated[tuple[Condition, ...], Field(description="State, by type.")] = ()

    @model_validator(mode="before")
    @classmethod
    def _empty_alloc_is_none(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("desiredOptimizedAlloc") == {}:
            return {k: v for k, v in data.items() if k != "desiredOptimizedAlloc"}
        return data


class ObjectMeta(ApiModel):
    """The part of metadata that decisions read."""

    name: str
    namespace: str
    uid: str = ""
    generation: int | None = None
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: Annotated[dict[str, str], Field(default_factory=dict)]
    annotations: Annotated[dict[str, str], Field(default_factory=dict)]


class VariantAutoscaling(ApiModel):
    metadata: ObjectMeta
    spec: VariantAutoscalingSpec
    status: VariantAutoscalingStatus = VariantAutoscalingStatus()

    @classmethod
    def parse(cls, obj: Mapping[str, Any]) -> VariantAutoscaling:
        """Read an object as the API server gives it.

        The API server validates too, but a cluster may hold an older CRD with fewer rules.
        Raises InvalidObjectError with one problem for each field that is wrong.
        """
        metadata = obj.get("metadata", {})
        try:
            return cls.model_validate(obj)
        except ValidationError as error:
            name = f"VariantAutoscaling {metadata.get('namespace')}/{metadata.get('name')}"
            raise InvalidObjectError(problems_of(name, error.errors())) from None

    @property
    def key(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def target(self) -> TargetRef:
        ref = self.spec.scale_target_ref
        return TargetRef(
            namespace=self.metadata.namespace,
            kind=ref.kind,
            name=ref.name or self.metadata.name,
        )

    @property
    def cost(self) -> Decimal:
        return Decimal(self.spec.variant_cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRef:
    """A scale target within a cluster. Versions of one kind are the same target, so none is kept."""

    namespace: str
    kind: TargetKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


API_VERSION = f"{GROUP}/{VERSION}"
KIND = "VariantAutoscaling"
