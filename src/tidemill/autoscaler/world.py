"""The autoscaler's picture of the cluster: informers, their indexes, and questions put to them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from tidemill.api.inference import OLDER_GROUP as OLDER_POOL_GROUP
from tidemill.api.inference import POOL_GROUP, InferencePool
from tidemill.api.managed_scaler import ScalerKind
from tidemill.api.names import (
    CONTROLLER_INSTANCE_LABEL,
    GROUP,
    LEADER_WORKER_SET_LABEL,
    SERVICE_MONITOR,
    VERSION,
    WELL_KNOWN_CONFIG_MAPS,
)
from tidemill.api.problem import InvalidObjectError
from tidemill.api.variant import KIND, TargetRef
from tidemill.autoscaler.views import (
    ConfigMapView,
    NamespaceView,
    NodeView,
    PodSetView,
    PodView,
    ResourceClaimView,
    ScalerView,
    ServiceMonitorView,
    TargetView,
    ValidVariant,
    VariantDecoder,
    VariantView,
    config_map_view,
    deployment_view,
    leader_worker_set_view,
    namespace_view,
    node_view,
    pod_set_view,
    pod_view,
    resource_claim_view,
    scaler_view,
    service_monitor_view,
    usable,
)
from tidemill.kube.client import KubeClient
from tidemill.kube.informer import Deleted, Informer, InformerEvent
from tidemill.kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    HORIZONTAL_POD_AUTOSCALERS,
    LEADER_WORKER_SETS,
    NAMESPACES,
    NODES,
    PODS,
    REPLICA_SETS,
    SERVICE_MONITORS,
    STATEFUL_SETS,
    Json,
    ObjectKey,
    ObjectRef,
    Resource,
)

SCALED_OBJECTS = Resource("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject")
SCALERS: Mapping[ScalerKind, Resource] = {
    "HorizontalPodAutoscaler": HORIZONTAL_POD_AUTOSCALERS,
    "ScaledObject": SCALED_OBJECTS,
}
INFERENCE_POOLS = (
    Resource(OLDER_POOL_GROUP, "v1alpha2", "inferencepools", "InferencePool"),
    Resource(POOL_GROUP, "v1", "inferencepools", "InferencePool"),
)
RESOURCE_CLAIMS = tuple(
    Resource("resource.k8s.io", version, "resourceclaims", "ResourceClaim") for version in ("v1beta1", "v1")
)
VARIANT_AUTOSCALINGS = Resource(GROUP, VERSION, f"{KIND.lower()}s", KIND)


class World:
    """Everything that is watched. Only the informers write here.

    ConfigMaps are watched by name on the server's side, one informer for each well-known name, so that a
    cluster's other ConfigMaps never reach this process.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        watch_namespace: str | None = None,
        instance: str = "",
        watch_seconds: float = 290.0,
        absent_retry: float = 30.0,
    ) -> None:
        self._instance = instance
        timing: Any = {"watch_seconds": watch_seconds, "absent_retry": absent_retry}
        watched = partial(Informer, client, **timing)
        self._cluster_wide = watch_namespace is None
        self._decoder = VariantDecoder()
        self.variants: Informer[VariantView] = watched(
            VARIANT_AUTOSCALINGS,
            decode=self._decoder,
            namespace=watch_namespace,
            indexers={"target": _by_target},
        )
        self.variants.add_handler(self._forget)
        self.deployments: Informer[TargetView] = watched(
            DEPLOYMENTS, decode=deployment_view, namespace=watch_namespace
        )
        self.leader_worker_sets: Informer[TargetView] = watched(
            LEADER_WORKER_SETS, decode=leader_worker_set_view, optional=True, namespace=watch_namespace
        )
        self.replica_sets: Informer[PodSetView] = watched(
            REPLICA_SETS, decode=pod_set_view, namespace=watch_namespace, indexers={"uid": _by_uid}
        )
        self.stateful_sets: Informer[PodSetView] = watched(
            STATEFUL_SETS,
            decode=pod_set_view,
            optional=True,
            namespace=watch_namespace,
            label_selector=LEADER_WORKER_SET_LABEL,
            indexers={"uid": _by_uid},
        )
        self.pods: Informer[PodView] = watched(
            PODS,
            decode=pod_view,
            namespace=watch_namespace,
            indexers={
                "ip": lambda pod: [pod.ip] if pod.ip else [],
                "sleeping": lambda pod: [True] if pod.sleeping else [],
            },
        )
        # The original's role lists no scalers: a cluster that was set up for it is served all the same.
        self.hpas: Informer[ScalerView] = watched(
            HORIZONTAL_POD_AUTOSCALERS,
            decode=partial(scaler_view, "HorizontalPodAutoscaler"),
            optional=True,
            namespace=watch_namespace,
            indexers={"target": _by_scaled},
        )
        self.scaled_objects: Informer[ScalerView] = watched(
            SCALED_OBJECTS,
            decode=partial(scaler_view, "ScaledObject"),
            optional=True,
            namespace=watch_namespace,
            indexers={"target": _by_scaled},
        )
        self.pools: list[Informer[InferencePool | None]] = [
            watched(resource, decode=_pool, optional=True, namespace=watch_namespace)
            for resource in INFERENCE_POOLS
        ]
        self.nodes: Informer[NodeView] = watched(NODES, decode=node_view, optional=True)
        self.claims: list[Informer[ResourceClaimView]] = [
            watched(resource, decode=resource_claim_view, optional=True, namespace=watch_namespace)
            for resource in RESOURCE_CLAIMS
        ]
        self.namespaces: Informer[NamespaceView] = watched(NAMESPACES, decode=namespace_view)
        # With one namespace to watch, the role may see no other: only that one and the controller's own.
        places = [None] if watch_namespace is None else sorted({namespace, watch_namespace})
        self.config_maps: list[Informer[ConfigMapView]] = [
            watched(
                CONFIG_MAPS,
                decode=config_map_view,
                namespace=place,
                field_selector=f"metadata.name={name}",
            )
            for name in sorted(WELL_KNOWN_CONFIG_MAPS)
            for place in places
        ]
        self.service_monitors: Informer[ServiceMonitorView] = watched(
            SERVICE_MONITORS,
            decode=service_monitor_view,
            optional=True,
            namespace=namespace,
            field_selector=f"metadata.name={SERVICE_MONITOR}",
        )

    def _forget(self, event: InformerEvent[VariantView]) -> None:
        if isinstance(event, Deleted):
            self._decoder.forget(event.old.uid)

    @property
    def informers(self) -> list[Informer[Any]]:
        return [
            self.variants,
            self.deployments,
            self.leader_worker_sets,
            self.replica_sets,
            self.stateful_sets,
            self.pods,
            self.hpas,
            self.scaled_objects,
            *self.pools,
            self.nodes,
            *self.claims,
            *([self.namespaces] if self._cluster_wide else []),
            *self.config_maps,
            self.service_monitors,
        ]

    @property
    def changes(self) -> int:
        """A number that moves whenever anything that is watched has changed."""
        return sum(informer.store.changes for informer in self.informers)

    async def wait_synced(self) -> None:
        await asyncio.gather(*(informer.wait_synced() for informer in self.informers))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for informer in self.informers:
                group.create_task(informer.run())

    def is_excluded(self, namespace: str) -> bool:
        found = self.namespaces.store.get(ObjectKey("", namespace))
        return found is not None and found.excluded

    def is_ours(self, variant: VariantView) -> bool:
        """Whether this controller is the one to look after `variant`: its namespace is not excluded, and
        its instance label is ours (with no instance set, everything is)."""
        if self.is_excluded(variant.key.namespace):
            return False
        labels = variant.spec.metadata.labels if isinstance(variant, ValidVariant) else variant.labels
        return not self._instance or labels.get(CONTROLLER_INSTANCE_LABEL) == self._instance

    def our_variants(self) -> list[ValidVariant]:
        """Variants that are ours and can be worked with, in order of key, with or without a target: objects,
        and managed scalers. Where both have one name the object is meant."""
        found = {
            variant.key: variant
            for variant in (self._usable(view) for view in self.variants.store)
            if variant is not None
        }
        for informer in (self.scaled_objects, self.hpas):
            for scaler in informer.store:
                if (variant := self._of_scaler(scaler)) is not None:
                    found.setdefault(variant.key, variant)
        return [found[key] for key in sorted(found)]

    def view_of(self, key: ObjectKey) -> VariantView | None:
        """The object by this name, or the stand-in for a managed scaler."""
        if (view := self.variants.store.get(key)) is not None:
            return view
        for informer in (self.scaled_objects, self.hpas):
            scaler = informer.store.get(key)
            if scaler is not None and scaler.variant is not None:
                return scaler.variant
        return None

    def _usable(self, view: VariantView) -> ValidVariant | None:
        variant = usable(view) if self.is_ours(view) else None
        return None if variant is None or variant.spec.metadata.deletion_timestamp else variant

    def _of_scaler(self, scaler: ScalerView) -> ValidVariant | None:
        """The variant that a scaler stands for, unless an object of its name exists."""
        variant = scaler.variant
        if variant is None or not self.is_ours(variant):
            return None
        return None if self.variants.store.get(variant.key) is not None else variant

    def tracked_namespaces(self) -> frozenset[str]:
        """Namespaces whose ConfigMaps count: they have a variant of ours or are labelled, and are not
        excluded."""
        labelled = {found.name for found in self.namespaces.store if found.config_enabled}
        used = {variant.key.namespace for variant in self.our_variants()}
        return frozenset(name for name in labelled | used if not self.is_excluded(name))

    def variants_of(self, target: TargetRef) -> list[ValidVariant]:
        """VariantAutoscalings of ours that name `target`, the oldest first, then by name."""
        found = [
            variant
            for view in self.variants.store.by_index("target", target)
            if (variant := self._usable(view)) is not None
        ]
        return sorted(found, key=lambda v: (v.spec.metadata.creation_timestamp, v.key.name))

    def scalers_of(self, target: TargetRef) -> tuple[list[ValidVariant], list[ValidVariant]]:
        """What managed ScaledObjects, and managed HPAs, of ours that move `target` stand for."""

        def of(informer: Informer[ScalerView]) -> list[ValidVariant]:
            found = (self._of_scaler(scaler) for scaler in informer.store.by_index("target", target))
            return [variant for variant in found if variant is not None]

        return of(self.scaled_objects), of(self.hpas)

    def decider(self, target: TargetRef) -> ValidVariant | None:
        """The one variant that decides for `target`: the oldest object, else the ScaledObject, else the HPA.
        Two scalers of one kind are an error, and then neither decides."""
        if variants := self.variants_of(target):
            return variants[0]
        for scalers in self.scalers_of(target):
            if scalers:
                return scalers[0] if len(scalers) == 1 else None
        return None

    def paused(self, target: TargetRef) -> str:
        """Who has paused the scaling of `target`, and by what; "" when nobody has."""
        for scaler in self.scaled_objects.store.by_index("target", target):
            if scaler.paused:
                return f"ScaledObject {scaler.key.name} is annotated {scaler.paused}"
        return ""

    def inference_pools(self) -> list[InferencePool]:
        """Every pool once, in order of name, whatever versions of its kind the cluster has."""
        found = {(pool.namespace, pool.name): pool for store in self.pools for pool in store.store if pool}
        return [found[key] for key in sorted(found)]

    def claims_by_key(self) -> dict[ObjectKey, ResourceClaimView]:
        """Every ResourceClaim once, whatever versions of its kind the cluster has."""
        return {claim.key: claim for informer in self.claims for claim in informer.store}

    def target(self, ref: TargetRef) -> TargetView | None:
        """A scale target, on its way out or not."""
        informer = self.deployments if ref.kind == "Deployment" else self.leader_worker_sets
        return informer.store.get(ObjectKey(ref.namespace, ref.name))

    def target_of(self, variant: ValidVariant) -> TargetView | None:
        """The scale target, if it exists and is not on its way out."""
        found = self.target(variant.spec.target)
        return None if found is None or found.deleting else found

    def targets(self) -> Iterator[TargetView]:
        """Everything that may be one, whoever scales it."""
        yield from self.deployments.store
        yield from self.leader_worker_sets.store


def _pool(obj: Json) -> InferencePool | None:
    """A pool; None for one that cannot be read, which is the endpoint picker's to complain of."""
    try:
        return InferencePool.parse(obj)
    except InvalidObjectError:
        return None


def scaler_ref(kind: ScalerKind, key: ObjectKey, uid: str) -> ObjectRef:
    """A scaler, for events about it."""
    resource = SCALERS[kind]
    return ObjectRef(resource.api_version, resource.kind, key.namespace, key.name, uid)


def _by_uid(found: PodSetView) -> Iterable[Hashable]:
    return [found.uid]


def _by_target(view: VariantView) -> Iterable[Hashable]:
    variant = usable(view)
    return [] if variant is None else [variant.spec.target]


def _by_scaled(scaler: ScalerView) -> Iterable[Hashable]:
    return [] if scaler.target is None else [scaler.target]
