"""What the autoscaler keeps of each object: small frozen views, decoded once when an object arrives."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.api.managed_scaler import ScalerKind, is_managed, made_by_keda, paused, synthetic_variant
from tidemill.api.names import (
    ACCELERATOR_KEYS,
    CONFIG_ENABLED_LABEL,
    DUAL_LABEL,
    EXCLUDE_ANNOTATION,
    GPU_RESOURCES,
    ROLE_LABEL,
    SLEEPING_LABEL,
    SNAPSHOT_ANNOTATION,
    VARIANT_LABEL,
    WORKER_INDEX_LABEL,
)
from tidemill.api.problem import InvalidObjectError, Problem
from tidemill.api.variant import TargetKind, TargetRef, VariantAutoscaling
from tidemill.capacity.engine_flags import EngineFlags, engine_flags
from tidemill.capacity.types import Role
from tidemill.kube.clock import parse_time
from tidemill.kube.conditions import find_condition
from tidemill.kube.resources import Json, ObjectKey


@dataclass(frozen=True, slots=True)
class Owner:
    """The controller of an object; the uid is what counts, the name is for messages."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    key: ObjectKey
    uid: str
    variant_label: str
    owner: Owner | None
    ip: str
    ready: bool
    ready_since: dt.datetime | None
    created: dt.datetime | None
    terminating: bool
    terminated: bool  # its containers have ended
    metrics_port: int
    node: str  # "" until it is bound
    gpus: int
    claims: tuple[str, ...]  # ResourceClaims by name
    dual: str  # the pod that runs this one's engine, or asks for the one here, by name; "" without
    sleeping: bool  # it runs an engine that sleeps
    restored: bool  # from a snapshot
    worker: bool  # of a group that another pod leads: it serves nothing by itself

    @property
    def address(self) -> str:
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"{host}:{self.metrics_port}"


@dataclass(frozen=True, slots=True)
class PodSetView:
    """What stands between a target and its pods: a ReplicaSet or a StatefulSet."""

    key: ObjectKey
    uid: str
    owner: Owner | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetView:
    """A scale target. One replica of a LeaderWorkerSet is a group of pods: its accelerators are those of all of
    them; what it runs, and who it is to others, is its leader's."""

    kind: TargetKind
    key: ObjectKey
    uid: str
    replicas: int  # spec.replicas; absent means 1
    ready: int
    stalled: bool  # the rollout passed its progress deadline
    accelerator: str | None
    role: Role
    gpus: int | None  # of one replica; None when no container asks for any
    flags: EngineFlags
    node_selector: Mapping[str, str]
    pod_labels: Mapping[str, str]
    restored: bool  # its pods are, from a snapshot
    created: dt.datetime | None
    deleting: bool

    @property
    def ref(self) -> TargetRef:
        return TargetRef(namespace=self.key.namespace, kind=self.kind, name=self.key.name)


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node with accelerators. `product` is None when no label names it."""

    name: str
    labels: Mapping[str, str]
    product: str | None
    devices: int
    schedulable: bool


@dataclass(frozen=True, slots=True)
class ResourceClaimView:
    """Devices that a claim asks for."""

    key: ObjectKey
    devices: int


@dataclass(frozen=True, slots=True)
class NamespaceView:
    name: str
    excluded: bool
    config_enabled: bool


@dataclass(frozen=True, slots=True)
class ConfigMapView:
    key: ObjectKey
    uid: str
    data: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ServiceMonitorView:
    key: ObjectKey
    uid: str
    deleting: bool


@dataclass(frozen=True, slots=True)
class ValidVariant:
    """A VariantAutoscaling, with the raw status that a patch must build upon.

    A synthetic one stands for the managed scaler `scaler`: it is nowhere in the cluster and has no status.
    """

    key: ObjectKey
    uid: str
    spec: VariantAutoscaling
    status: Mapping[str, Any]
    scaler: ScalerKind | None = None


@dataclass(frozen=True, slots=True)
class InvalidVariant:
    """A VariantAutoscaling that breaks its schema, and why. `last_good` is what it was before, if anything:
    that stays in force."""

    key: ObjectKey
    uid: str
    generation: int | None
    resource_version: str
    labels: Mapping[str, str]
    status: Mapping[str, Any]
    problems: tuple[Problem, ...]
    last_good: ValidVariant | None


VariantView = ValidVariant | InvalidVariant


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerView:
    """An HPA or ScaledObject. `variant` is what it stands for when it is managed; `problems` why it cannot.

    `follows` are the variants whose number its metrics select, and `target` is what it moves.
    """

    key: ObjectKey
    uid: str
    kind: ScalerKind
    variant: ValidVariant | None
    problems: tuple[Problem, ...]
    follows: tuple[str, ...]
    target: TargetRef | None
    paused: str = ""  # by which annotation
    made: bool = False  # by KEDA, for a ScaledObject


class VariantDecoder:
    """Decodes VariantAutoscalings and remembers the last good state of each, by uid."""

    def __init__(self) -> None:
        self._good: dict[str, ValidVariant] = {}

    def __call__(self, obj: Json) -> VariantView:
        metadata = obj["metadata"]
        key, uid = ObjectKey.of(obj), metadata.get("uid", "")
        status: Mapping[str, Any] = obj.get("status") or {}
        try:
            variant = ValidVariant(key, uid, VariantAutoscaling.parse(obj), status)
        except InvalidObjectError as error:
            return InvalidVariant(
                key,
                uid,
                metadata.get("generation"),
                metadata.get("resourceVersion", ""),
                metadata.get("labels") or {},
                status,
                error.problems,
                self._good.get(uid),
            )
        self._good[uid] = variant
        return variant

    def forget(self, uid: str) -> None:
        self._good.pop(uid, None)


def usable(view: VariantView) -> ValidVariant | None:
    """The variant to work with: itself, or its last good state."""
    return view if isinstance(view, ValidVariant) else view.last_good


def scaler_view(kind: ScalerKind, obj: Json) -> ScalerView:
    metadata, spec = obj["metadata"], obj.get("spec") or {}
    key, uid = ObjectKey.of(obj), metadata.get("uid", "")
    variant: ValidVariant | None = None
    problems: tuple[Problem, ...] = ()
    if is_managed(obj) and "deletionTimestamp" not in metadata:
        try:
            variant = ValidVariant(key, uid, synthetic_variant(kind, obj), {}, kind)
        except InvalidObjectError as error:
            problems = error.problems
    return ScalerView(
        key=key,
        uid=uid,
        kind=kind,
        variant=variant,
        problems=problems,
        follows=tuple(_followed(spec)),
        target=_scale_target(key.namespace, spec),
        paused=paused(obj) if kind == "ScaledObject" else "",
        made=made_by_keda(obj),
    )


def _followed(spec: Mapping[str, Any]) -> Iterator[str]:
    """Values of the label variant_name that an HPA's external metrics select."""
    for metric in spec.get("metrics") or ():
        selector = ((metric.get("external") or {}).get("metric") or {}).get("selector") or {}
        name = (selector.get("matchLabels") or {}).get("variant_name")
        if name:
            yield name


def _scale_target(namespace: str, spec: Mapping[str, Any]) -> TargetRef | None:
    target = spec.get("scaleTargetRef") or {}
    kind = target.get("kind") or "Deployment"
    if kind not in ("Deployment", "LeaderWorkerSet") or not target.get("name"):
        return None
    return TargetRef(namespace=namespace, kind=kind, name=target["name"])


def pod_view(obj: Json) -> PodView:
    metadata, status = obj["metadata"], obj.get("status") or {}
    labels = metadata.get("labels") or {}
    ready = find_condition(status.get("conditions") or (), "Ready") or {}
    since = ready.get("lastTransitionTime")
    return PodView(
        key=ObjectKey.of(obj),
        uid=metadata.get("uid", ""),
        variant_label=labels.get(VARIANT_LABEL, ""),
        owner=_owner(metadata),
        ip=status.get("podIP") or "",
        ready=ready.get("status") == "True",
        ready_since=parse_time(since) if since else None,
        created=parse_time(metadata["creationTimestamp"]) if metadata.get("creationTimestamp") else None,
        terminating="deletionTimestamp" in metadata or status.get("phase") in ("Succeeded", "Failed"),
        terminated=status.get("phase") in ("Succeeded", "Failed"),
        metrics_port=_metrics_port(obj),
        node=(obj.get("spec") or {}).get("nodeName") or "",
        gpus=gpus_of(obj.get("spec") or {}) or 0,
        claims=_claims(obj),
        dual=labels.get(DUAL_LABEL, ""),
        sleeping=labels.get(SLEEPING_LABEL) == "true",
        restored=SNAPSHOT_ANNOTATION in (metadata.get("annotations") or {}),
        worker=labels.get(WORKER_INDEX_LABEL, "0") != "0",
    )


def pod_set_view(obj: Json) -> PodSetView:
    return PodSetView(ObjectKey.of(obj), obj["metadata"].get("uid", ""), _owner(obj["metadata"]))


def deployment_view(obj: Json) -> TargetView:
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    progress = find_condition(status.get("conditions") or (), "Progressing") or {}
    template: Json = spec.get("template") or {}
    return _target(
        "Deployment",
        obj,
        template,
        gpus=gpus_of(template.get("spec") or {}),
        stalled=progress.get("status") == "False" and progress.get("reason") == "ProgressDeadlineExceeded",
    )


def leader_worker_set_view(obj: Json) -> TargetView:
    """A group is a leader and size - 1 workers; without a template of its own the leader is as they are."""
    group: Json = (obj.get("spec") or {}).get("leaderWorkerTemplate") or {}
    worker: Json = group.get("workerTemplate") or {}
    leader: Json = group.get("leaderTemplate") or worker
    size = group.get("size") or 1
    gpus = (gpus_of(leader.get("spec") or {}) or 0) + (size - 1) * (gpus_of(worker.get("spec") or {}) or 0)
    # It knows no deadline of its progress, so none of its pods is ever given up.
    return _target("LeaderWorkerSet", obj, leader, gpus=gpus or None, stalled=False)


def _target(kind: TargetKind, obj: Json, template: Json, *, gpus: int | None, stalled: bool) -> TargetView:
    """`template` is that of the pods that serve."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    replicas = (obj.get("spec") or {}).get("replicas")
    pod_spec, pod_metadata = template.get("spec") or {}, template.get("metadata") or {}
    labels = pod_metadata.get("labels") or {}
    return TargetView(
        kind=kind,
        key=ObjectKey.of(obj),
        uid=metadata.get("uid", ""),
        replicas=1 if replicas is None else replicas,
        ready=status.get("readyReplicas") or 0,
        stalled=stalled,
        accelerator=accelerator_of(pod_spec),
        role=_role(labels),
        gpus=gpus,
        flags=engine_flags(pod_spec),
        node_selector=pod_spec.get("nodeSelector") or {},
        pod_labels=labels,
        restored=SNAPSHOT_ANNOTATION in (pod_metadata.get("annotations") or {}),
        created=parse_time(metadata["creationTimestamp"]) if metadata.get("creationTimestamp") else None,
        deleting="deletionTimestamp" in metadata,
    )


def node_view(obj: Json) -> NodeView:
    metadata = obj["metadata"]
    labels: Mapping[str, str] = metadata.get("labels") or {}
    allocatable = (obj.get("status") or {}).get("allocatable") or {}
    ready = find_condition((obj.get("status") or {}).get("conditions") or (), "Ready")
    return NodeView(
        name=metadata["name"],
        labels=labels,
        product=next((labels[key] for key in ACCELERATOR_KEYS if key in labels), None),
        devices=sum(int(allocatable[n]) for n in GPU_RESOURCES if str(allocatable.get(n, "")).isdigit()),
        schedulable=not (obj.get("spec") or {}).get("unschedulable")
        and (ready is None or ready.get("status") == "True"),
    )


def resource_claim_view(obj: Json) -> ResourceClaimView:
    """Reads v1 (`exactly`) and the betas before it. A request without a count is for one device."""
    requests = ((obj.get("spec") or {}).get("devices") or {}).get("requests") or ()
    counts = [(request.get("exactly") or request).get("count") or 1 for request in requests]
    return ResourceClaimView(ObjectKey.of(obj), sum(counts))


def namespace_view(obj: Json) -> NamespaceView:
    metadata = obj["metadata"]
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    return NamespaceView(
        metadata["name"],
        # An annotation upstream; a label is what the contract's table suggests. Both are heeded.
        excluded="true" in (annotations.get(EXCLUDE_ANNOTATION), labels.get(EXCLUDE_ANNOTATION)),
        config_enabled=labels.get(CONFIG_ENABLED_LABEL) == "true",
    )


def config_map_view(obj: Json) -> ConfigMapView:
    return ConfigMapView(ObjectKey.of(obj), obj["metadata"].get("uid", ""), obj.get("data") or {})


def service_monitor_view(obj: Json) -> ServiceMonitorView:
    metadata = obj["metadata"]
    return ServiceMonitorView(ObjectKey.of(obj), metadata.get("uid", ""), "deletionTimestamp" in metadata)


def accelerator_of(pod_spec: Mapping[str, Any]) -> str | None:
    """The accelerator that a pod template asks for by nodeSelector, else by node affinity."""
    selector: Mapping[str, str] = pod_spec.get("nodeSelector") or {}
    for key in ACCELERATOR_KEYS:
        if key in selector:
            return selector[key]
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    terms = [*(required.get("nodeSelectorTerms") or ()), *(term.get("preference") or {} for term in preferred)]
    for term in terms:
        for expression in term.get("matchExpressions") or ():
            if expression.get("key") in ACCELERATOR_KEYS and expression.get("operator") == "In":
                values = expression.get("values") or ()
                if values:
                    return values[0]
    return None


def gpus_of(pod_spec: Mapping[str, Any]) -> int | None:
    """Devices that one pod asks for; None when it asks for none by count."""
    found: list[int] = []
    for container in pod_spec.get("containers") or ():
        resources = container.get("resources") or {}
        limits = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        found += [int(limits[name]) for name in GPU_RESOURCES if str(limits.get(name, "")).isdigit()]
    return sum(found) or None


def _claims(obj: Json) -> tuple[str, ...]:
    """Names of the ResourceClaims of a pod: its own by name, those made from a template as the status has them."""
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    named = [c["resourceClaimName"] for c in spec.get("resourceClaims") or () if c.get("resourceClaimName")]
    made = [
        c["resourceClaimName"] for c in status.get("resourceClaimStatuses") or () if c.get("resourceClaimName")
    ]
    return tuple(dict.fromkeys([*named, *made]))


_ROLES = frozenset(Role)


def _role(labels: Mapping[str, str]) -> Role:
    text = labels.get(ROLE_LABEL, "")
    return Role(text) if text in _ROLES else Role.BOTH


def _owner(metadata: Mapping[str, Any]) -> Owner | None:
    for reference in metadata.get("ownerReferences") or ():
        if reference.get("controller"):
            return Owner(reference["kind"], reference["name"], reference["uid"])
    return None


def _metrics_port(obj: Json) -> int:
    """Where a pod serves /metrics: the annotation prometheus.io/port, else the port named metrics, else
    http, else the first one, else vLLM's default."""
    annotation = (obj["metadata"].get("annotations") or {}).get("prometheus.io/port", "")
    if annotation.isdigit():
        return int(annotation)
    containers = (obj.get("spec") or {}).get("containers") or ()
    ports = [p for c in containers for p in c.get("ports") or () if p.get("protocol", "TCP") == "TCP"]
    named = {p.get("name"): p["containerPort"] for p in reversed(ports)}
    first = ports[0]["containerPort"] if ports else 8000
    return named.get("metrics") or named.get("http") or first
