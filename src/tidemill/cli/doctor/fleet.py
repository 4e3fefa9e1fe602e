"""What the checks look at: one reading of the cluster, through nothing but the API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson

from tidemill.api.manager_config import PrometheusConfig
from tidemill.api.names import DEFAULT_LEADER_ELECTION_ID, VARIANT_LABEL
from tidemill.api.variant import TargetRef
from tidemill.autoscaler.views import (
    InvalidVariant,
    Owner,
    ScalerView,
    TargetView,
    ValidVariant,
    VariantDecoder,
    deployment_view,
    leader_worker_set_view,
    pod_set_view,
    pod_view,
    scaler_view,
)
from tidemill.autoscaler.world import SCALED_OBJECTS, VARIANT_AUTOSCALINGS
from tidemill.cli.explain import POD_SELECTOR
from tidemill.kube.client import KubeClient
from tidemill.kube.delegated import ACCESS_REVIEWS
from tidemill.kube.errors import NotFoundError
from tidemill.kube.resources import (
    DEPLOYMENTS,
    HORIZONTAL_POD_AUTOSCALERS,
    LEADER_WORKER_SETS,
    LEASES,
    PODS,
    REPLICA_SETS,
    SERVICE_MONITORS,
    STATEFUL_SETS,
    Json,
    ObjectKey,
    Resource,
)
from tidemill.kube.selectors import matches
from tidemill.metrics.prometheus import PrometheusClient, PrometheusError
from tidemill.metrics.samples import QUEUE_LENGTH

POD_MONITORS = Resource("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor")
SERVICES = Resource("", "v1", "services", "Service")
API_SERVICES = Resource("apiregistration.k8s.io", "v1", "apiservices", "APIService", namespaced=False)
TIMEOUT = 10.0  # seconds for an answer of Prometheus
EXTERNAL_METRICS = "v1beta1.external.metrics.k8s.io"
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """What the autoscaler's service account must be allowed. An empty namespace is the whole cluster."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        where = f" in namespace {self.namespace}" if self.namespace else ""
        name = f" {self.name}" if self.name else ""
        return f"{self.verb} {self.resource}{'.' + self.group if self.group else ''}{name}{where}"


@dataclass(frozen=True, slots=True)
class Seen:
    """What Prometheus has: why it could not be asked, else labels of the series of servers and of decisions."""

    url: str
    problem: str = ""
    engines: tuple[Mapping[str, str], ...] = ()
    decisions: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Shadow:
    """A pod that serves a model and has no label of a variant. Its owners end at `owner`."""

    pod: ObjectKey
    model: str
    owner: Owner | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Objects as they are. `scalers` are HPAs and ScaledObjects, `hpas` the former as the API server gives them;
    None is a kind that the cluster does not serve. `monitored` are the labelled pods that each ServiceMonitor and
    PodMonitor has scraped; `shadows` are pods with series and without a variant's label; `missing_rights` are
    those of the account that runs the autoscaler; `seen` is None when nobody said where Prometheus is."""

    namespace: str
    variants: tuple[ValidVariant | InvalidVariant, ...] | None
    targets: dict[TargetRef, TargetView]
    appliers: dict[TargetRef, tuple[str, ...]]  # whose manifests set the replicas
    scalers: tuple[ScalerView, ...]
    hpas: tuple[Json, ...]
    controllers: tuple[Json, ...]  # pods of the autoscaler
    lease: Json | None
    external_metrics: Json | None  # the APIService
    service_monitors: tuple[Json, ...] | None
    monitored: tuple[tuple[Json, tuple[str, ...]], ...]
    shadows: tuple[Shadow, ...]
    missing_rights: tuple[Right, ...]
    seen: Seen | None

    @property
    def valid(self) -> list[ValidVariant]:
        return [v for v in self.variants or () if isinstance(v, ValidVariant)]

    @property
    def writes_replicas(self) -> bool:
        return flag(self.controllers, "--actuation") == "scale"

    @property
    def asks_prometheus(self) -> bool:
        """Whether numbers come from there."""
        return bool(self.controllers) and flag(self.controllers, "--metrics-source") != "direct"


def flag(pods: Sequence[Json], name: str) -> str:
    """What the autoscaler's containers are told by a flag; "" when they are not."""
    for pod in pods:
        for container in pod["spec"].get("containers") or ():
            words = [*(container.get("command") or ()), *(container.get("args") or ())]
            for word, following in pairwise([*words, ""]):
                given, equals, value = word.partition("=")
                if given == name:
                    return value if equals else following
    return ""


async def read(
    client: KubeClient, namespace: str, rights: Callable[[str, str], list[Right]], *, prometheus: str = ""
) -> Fleet:
    """A reading; `namespace` is the autoscaler's, `rights` what its account needs there and in the namespace that
    it watches, `prometheus` a URL. Raises ApiError."""
    pods = (await client.list(PODS, namespace, label_selector=POD_SELECTOR)).items
    account = next((p["spec"].get("serviceAccountName") or "default" for p in pods), "")
    user = f"system:serviceaccount:{namespace}:{account}"
    wanted = rights(namespace, flag(pods, "--watch-namespace")) if account else []
    allowed = await asyncio.gather(*(granted(client, user, right) for right in wanted))
    hpas = await _all(client, HORIZONTAL_POD_AUTOSCALERS) or []
    scaled = await _all(client, SCALED_OBJECTS) or []
    variants = await _all(client, VARIANT_AUTOSCALINGS)
    service_monitors = await _all(client, SERVICE_MONITORS)
    monitors = [*(service_monitors or ()), *(await _all(client, POD_MONITORS) or ())]
    decode = VariantDecoder()
    seen = await _seen(prometheus) if prometheus else None
    scalable = [
        (view_of(obj), obj)
        for view_of, resource in ((deployment_view, DEPLOYMENTS), (leader_worker_set_view, LEADER_WORKER_SETS))
        for obj in await _all(client, resource) or ()
    ]
    return Fleet(
        namespace=namespace,
        variants=None if variants is None else tuple(decode(obj) for obj in variants),
        targets={view.ref: view for view, _ in scalable},
        appliers={view.ref: found for view, obj in scalable if (found := _appliers(obj))},
        scalers=(
            *(scaler_view("HorizontalPodAutoscaler", obj) for obj in hpas),
            *(scaler_view("ScaledObject", obj) for obj in scaled),
        ),
        hpas=tuple(hpas),
        controllers=tuple(pods),
        lease=await _one(client, LEASES, DEFAULT_LEADER_ELECTION_ID, namespace),
        external_metrics=await _one(client, API_SERVICES, EXTERNAL_METRICS, None),
        service_monitors=None if service_monitors is None else tuple(service_monitors),
        monitored=await _monitored(client, monitors) if monitors else (),
        shadows=tuple([shadow async for shadow in _shadows(client, seen)]) if seen is not None else (),
        missing_rights=tuple(right for right, ok in zip(wanted, allowed, strict=True) if not ok),
        seen=seen,
    )


def _appliers(obj: Json) -> tuple[str, ...]:
    """Who applies a manifest that sets the replicas, again and again."""
    metadata: Json = obj["metadata"]
    found = {
        entry["manager"]
        for entry in metadata.get("managedFields") or ()
        if entry.get("operation") == "Apply"
        and not entry.get("subresource")
        and "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    }
    applied = (metadata.get("annotations") or {}).get(LAST_APPLIED, "")
    if "replicas" in ((orjson.loads(applied) if applied else {}).get("spec") or {}):
        found.add("kubectl apply")
    return tuple(sorted(found))


async def _shadows(client: KubeClient, seen: Seen) -> AsyncIterator[Shadow]:
    """Pods that Prometheus has series of, without a label of a variant, and to whom their owners lead."""
    models = {
        ObjectKey(labels["namespace"], labels["pod"]): labels.get("model_name", "")
        for labels in seen.engines
        if labels.get("namespace") and labels.get("pod")
    }
    if not models:
        return
    pods = {pod.key: pod for pod in map(pod_view, (await client.list(PODS)).items)}
    sets = {
        pod_set.uid: pod_set
        for resource in (REPLICA_SETS, STATEFUL_SETS)
        for pod_set in map(pod_set_view, await _all(client, resource) or ())
    }
    for key in sorted(models.keys() & pods.keys()):
        pod = pods[key]
        if pod.variant_label or pod.worker:
            continue  # a worker of a group is its leader's
        owner = pod.owner
        while owner is not None and (found := sets.get(owner.uid)) is not None and found.owner is not None:
            owner = found.owner
        yield Shadow(key, models[key], owner)


async def _seen(url: str) -> Seen:
    client = PrometheusClient(PrometheusConfig(base_url=url))
    try:
        engines = await client.query(QUEUE_LENGTH, TIMEOUT)
        decisions = await client.query("wva_desired_replicas", TIMEOUT)
    except PrometheusError as error:
        return Seen(url, problem=str(error))
    finally:
        await client.close()
    return Seen(url, "", tuple(row.labels for row in engines), tuple(row.labels for row in decisions))


async def _monitored(client: KubeClient, monitors: list[Json]) -> tuple[tuple[Json, tuple[str, ...]], ...]:
    """The pods with the variant's label that each monitor has scraped, by name."""
    pods = (await client.list(PODS, label_selector=VARIANT_LABEL)).items
    services = await _all(client, SERVICES) or []

    def takes(monitor: Json, pod: Json) -> bool:
        metadata, spec = pod["metadata"], monitor["spec"]
        chosen = spec.get("namespaceSelector") or {}
        places = chosen.get("matchNames") or [monitor["metadata"]["namespace"]]
        if not chosen.get("any") and metadata["namespace"] not in places:
            return False
        selector, labels = spec.get("selector") or {}, metadata.get("labels") or {}
        if monitor["kind"] == "PodMonitor":
            return matches(selector, labels)
        return any(
            matches(selector, service["metadata"].get("labels") or {})
            and (wanted := service["spec"].get("selector"))
            and wanted.items() <= labels.items()
            for service in services
            if service["metadata"]["namespace"] == metadata["namespace"]
        )

    return tuple(
        (monitor, tuple(pod["metadata"]["name"] for pod in pods if takes(monitor, pod))) for monitor in monitors
    )


async def _all(client: KubeClient, resource: Resource) -> list[Json] | None:
    try:
        return list((await client.list(resource)).items)
    except NotFoundError:
        return None


async def _one(client: KubeClient, resource: Resource, name: str, namespace: str | None) -> Json | None:
    try:
        return await client.get(resource, name, namespace)
    except NotFoundError:
        return None


async def granted(client: KubeClient, user: str, right: Right) -> bool:
    """Whether a service account (by its full name) has a right."""
    namespace = user.split(":")[2]
    groups = ["system:authenticated", "system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
    resource, _, sub = right.resource.partition("/")
    attributes: dict[str, Any] = {
        "verb": right.verb, "group": right.group, "resource": resource, "subresource": sub,
        "namespace": right.namespace, "name": right.name,
    }  # fmt: skip
    body = {
        "apiVersion": ACCESS_REVIEWS.api_version,
        "kind": ACCESS_REVIEWS.kind,
        "metadata": {},
        "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
    }
    review = await client.create(ACCESS_REVIEWS, body)
    return bool((review.get("status") or {}).get("allowed"))
