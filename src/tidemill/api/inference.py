"""The kinds of the Gateway API Inference Extension that the picker reads: InferencePool, InferenceObjective,
InferenceModelRewrite, in today's groups and the older ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator

from tidemill.api.model import ApiModel
from tidemill.api.problem import InvalidObjectError, problems_of

POOL_GROUP = "inference.networking.k8s.io"
OLDER_GROUP = "inference.networking.x-k8s.io"
OBJECTIVE_GROUP = "llm-d.ai"
MAX_TARGET_PORTS = 8

ACTIVE_PORTS_ANNOTATION = "llm-d.ai/active-ports"
ACTIVE_PORTS_ANNOTATION_OLDER = "inference.networking.k8s.io/active-ports"
ENGINE_TYPE_LABEL = "llm-d.ai/engine-type"
ROLE_LABEL = "llm-d.ai/role"

M = TypeVar("M", bound=BaseModel)
PortNumber = Annotated[int, Field(ge=1, le=65535)]


class InferencePool(ApiModel):
    """A pool in one shape, whichever version it was written in."""

    namespace: str
    name: str
    uid: str = ""
    match_labels: Annotated[Mapping[str, str], Field(min_length=1, max_length=64)]
    target_ports: Annotated[tuple[PortNumber, ...], Field(min_length=1, max_length=MAX_TARGET_PORTS)]
    app_protocol: Literal["http", "kubernetes.io/h2c"] = "http"

    @field_validator("target_ports")
    @classmethod
    def _unique(cls, ports: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(ports)) != len(ports):
            raise ValueError("port number must be unique")
        return ports

    @property
    def selector(self) -> str:
        """The selector as the API server takes it, in one canonical order."""
        return ",".join(f"{key}={value}" for key, value in sorted(self.match_labels.items()))

    def __str__(self) -> str:
        return f"InferencePool {self.namespace}/{self.name}"

    @classmethod
    def parse(cls, obj: Mapping[str, Any]) -> InferencePool:
        """Read v1 or v1alpha2. Raises InvalidObjectError with one problem for each field that is wrong."""
        metadata = obj["metadata"]
        where = f"InferencePool {metadata.get('namespace')}/{metadata.get('name')}"
        try:
            if str(obj.get("apiVersion", "")).startswith(f"{OLDER_GROUP}/"):
                old = _PoolV1Alpha2.model_validate(obj)
                labels, ports, protocol = old.spec.selector, (old.spec.target_port_number,), "http"
            else:
                new = _PoolV1.model_validate(obj)
                labels = new.spec.selector.match_labels
                ports = tuple(port.number for port in new.spec.target_ports)
                protocol = new.spec.app_protocol
            return cls.model_validate(
                {
                    "namespace": metadata.get("namespace") or "",
                    "name": metadata["name"],
                    "uid": metadata.get("uid") or "",
                    "matchLabels": labels,
                    "targetPorts": ports,
                    "appProtocol": protocol,
                }
            )
        except ValidationError as error:
            raise InvalidObjectError(problems_of(where, error.errors())) from None


class _Selector(ApiModel):
    match_labels: dict[str, str]


class _Port(ApiModel):
    number: int


class _SpecV1(ApiModel):
    selector: _Selector
    target_ports: tuple[_Port, ...]
    app_protocol: str = "http"


class _PoolV1(ApiModel):
    spec: _SpecV1


class _SpecV1Alpha2(ApiModel):
    selector: dict[str, str]
    target_port_number: int


class _PoolV1Alpha2(ApiModel):
    spec: _SpecV1Alpha2


class PoolRef(ApiModel):
    name: Annotated[str, Field(min_length=1)]
    group: str = POOL_GROUP


class InferenceObjective(ApiModel):
    """A class of requests. Negative priority may be shed."""

    namespace: str
    name: str
    pool_ref: PoolRef
    priority: int = 0

    @classmethod
    def parse(cls, obj: Mapping[str, Any]) -> InferenceObjective:
        """Raises InvalidObjectError."""
        spec = dict(obj.get("spec") or {})
        if spec.get("priority") is None:
            spec.pop("priority", None)
        return _parse(cls, "InferenceObjective", obj, spec)


class ModelMatch(ApiModel):
    type: Literal["Exact"] = "Exact"
    value: str


class RewriteMatch(ApiModel):
    model: ModelMatch | None = None


class RewriteTarget(ApiModel):
    model_rewrite: Annotated[str, Field(min_length=1)]
    weight: Annotated[int | None, Field(ge=0, le=1_000_000)] = None


class RewriteRule(ApiModel):
    """Without matches it applies to every model."""

    matches: tuple[RewriteMatch, ...] = ()
    targets: Annotated[tuple[RewriteTarget, ...], Field(min_length=1)]

    def exactly(self, model: str) -> bool:
        return any(match.model is not None and match.model.value == model for match in self.matches)

    @property
    def generic(self) -> bool:
        return not self.matches or any(match.model is None for match in self.matches)

    def choose(self, draw: float) -> str:
        """The target for `draw` in [0, 1). Weights all absent or zero: each alike; else in proportion, and
        a target without a weight is never chosen."""
        weights = [target.weight or 0 for target in self.targets]
        if not any(weights):
            weights = [1] * len(weights)
        point = draw * sum(weights)
        for target, weight in zip(self.targets, weights, strict=True):
            point -= weight
            if point < 0:
                return target.model_rewrite
        return self.targets[-1].model_rewrite


class InferenceModelRewrite(ApiModel):
    """Rules that put another model in the place of the one a request names."""

    namespace: str
    name: str
    created: str = ""
    pool_ref: PoolRef
    rules: tuple[RewriteRule, ...] = ()

    @classmethod
    def parse(cls, obj: Mapping[str, Any]) -> InferenceModelRewrite:
        """Raises InvalidObjectError."""
        created = obj["metadata"].get("creationTimestamp") or ""
        return _parse(cls, "InferenceModelRewrite", obj, {**(obj.get("spec") or {}), "created": created})


def rule_for(rewrites: tuple[InferenceModelRewrite, ...], model: str) -> tuple[str, RewriteRule] | None:
    """The rule that applies to `model` and the name of its object: an exact one before a generic one, then
    the oldest object, then the order of the list."""
    ordered = sorted(rewrites, key=lambda rewrite: (rewrite.created, rewrite.name))
    generic: tuple[str, RewriteRule] | None = None
    for rewrite in ordered:
        for rule in rewrite.rules:
            if rule.exactly(model):
                return rewrite.name, rule
            if generic is None and rule.generic:
                generic = rewrite.name, rule
    return generic


def _parse(cls: type[M], kind: str, obj: Mapping[str, Any], spec: Mapping[str, Any]) -> M:
    metadata = obj["metadata"]
    namespace, name = metadata.get("namespace") or "", metadata["name"]
    try:
        return cls.model_validate({**spec, "namespace": namespace, "name": name})
    except ValidationError as error:
        raise InvalidObjectError(
            problems_of(f"{kind} {namespace}/{name}", error.errors(), prefix="spec")
        ) from None
