"""The autoscaler's picture of the cluster: informers, their indexes, and questions put to them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any

from tidemill.api.names import (
    CONTROLLER_INSTANCE_LABEL,
    GROUP,
    SERVICE_MONITOR,
    VERSION,
    WELL_KNOWN_CONFIG_MAPS,
)
from tidemill.api.variant import KIND, TargetRef
from tidemill.autoscaler.views import (
    ConfigMapView,
    DeploymentView,
    NamespaceView,
    PodView,
    ReplicaSetView,
    ServiceMonitorView,
    ValidVariant,
    VariantDecoder,
    VariantView,
    config_map_view,
    deployment_view,
    namespace_view,
    pod_view,
    replica_set_view,
    service_monitor_view,
    usable,
)
from tidemill.kube.client import KubeClient
from tidemill.kube.informer import Deleted, Informer, InformerEvent
from tidemill.kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    NAMESPACES,
    PODS,
    REPLICA_SETS,
    SERVICE_MONITORS,
    ObjectKey,
    Resource,
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
        self.namespace = namespace
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
        self.deployments: Informer[DeploymentView] = watched(
            DEPLOYMENTS, decode=deployment_view, namespace=watch_namespace
        )
        self.replica_sets: Informer[ReplicaSetView] = watched(
            REPLICA_SETS,
            decode=replica_set_view,
            namespace=watch_namespace,
            indexers={"uid": lambda replica_set: [replica_set.uid]},
        )
        self.pods: Informer[PodView] = watched(
            PODS,
            decode=pod_view,
            namespace=watch_namespace,
            indexers={"ip": lambda pod: [pod.ip] if pod.ip else []},
        )
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
            self.replica_sets,
            self.pods,
            *([self.namespaces] if self._cluster_wide else []),
            *self.config_maps,
            self.service_monitors,
        ]

    @property
    def changes(self) -> int:
        """A number that moves whenever an object that attribution looks at has changed."""
        informers = (self.variants, self.deployments, self.replica_sets, self.pods, self.namespaces)
        return sum(informer.store.changes for informer in informers)

    @property
    def synced(self) -> bool:
        return all(informer.synced for informer in self.informers)

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
        """Variants that are ours and can be worked with, in order of key, with or without a target."""
        return [
            variant
            for _, view in sorted(self.variants.store.items(), key=lambda item: item[0])
            if self.is_ours(view)
            and (variant := usable(view)) is not None
            and variant.spec.metadata.deletion_timestamp is None
        ]

    def tracked_namespaces(self) -> frozenset[str]:
        """Namespaces whose ConfigMaps count: they have a variant of ours or are labelled, and are not
        excluded."""
        labelled = {found.name for found in self.namespaces.store if found.config_enabled}
        used = {variant.key.namespace for variant in self.our_variants()}
        return frozenset(name for name in labelled | used if not self.is_excluded(name))

    def variants_of(self, target: TargetRef) -> list[ValidVariant]:
        """Variants of ours that name `target`, the one that decides first (the oldest, then by name)."""
        found = [
            variant
            for view in self.variants.store.by_index("target", target)
            if self.is_ours(view) and (variant := usable(view)) is not None
        ]
        return sorted(found, key=lambda v: (v.spec.metadata.creation_timestamp, v.key.name))

    def owner_of_target(self, variant: ValidVariant) -> ValidVariant:
        """The variant that decides for the target of `variant`: itself, or an older one."""
        others = self.variants_of(variant.spec.target)
        return others[0] if others else variant

    def target_of(self, variant: ValidVariant) -> DeploymentView | None:
        """The scale target, if it exists and is not on its way out."""
        target = variant.spec.target
        if target.kind != "Deployment":
            return None
        found = self.deployments.store.get(ObjectKey(target.namespace, target.name))
        return None if found is None or found.deleting else found


def _by_target(view: VariantView) -> Iterable[Hashable]:
    variant = usable(view)
    return [] if variant is None else [variant.spec.target]
