"""Which events act. One function a kind, to the letter of the table in docs/autoscaler.md; all that is not
acted on here is left to the periodic pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import structlog

from tidemill.autoscaler.configuration import Configuration
from tidemill.autoscaler.views import ConfigMapView, ScalerView, ServiceMonitorView, TargetView, VariantView
from tidemill.autoscaler.world import World
from tidemill.kube.informer import Added, Deleted, InformerEvent, Modified
from tidemill.kube.resources import SERVICE_MONITORS, ObjectKey, ObjectRef

log = structlog.get_logger(__name__)

Emit = Callable[[ObjectRef, Literal["Normal", "Warning"], str, str], None]


class Watches:
    """Connects the informers with the queue, the configuration and the event recorder."""

    def __init__(
        self,
        world: World,
        configuration: Configuration,
        *,
        reconcile: Callable[[ObjectKey], None],
        target_appeared: Callable[[], None],
        emit: Emit,
    ) -> None:
        self._world = world
        self._configuration = configuration
        self._reconcile = reconcile
        self._target_appeared = target_appeared
        self._emit = emit
        world.variants.add_handler(self.on_variant)
        world.deployments.add_handler(self.on_target)
        world.leader_worker_sets.add_handler(self.on_target)
        for informer in (world.hpas, world.scaled_objects):
            informer.add_handler(self.on_scaler)
        for informer in world.config_maps:
            informer.add_handler(self.on_config_map)
        world.service_monitors.add_handler(self.on_service_monitor)

    def on_variant(self, event: InformerEvent[VariantView]) -> None:
        """Create acts. Updates are seen by the next pass; deleted variants are not in it any more."""
        if isinstance(event, Added) and self._world.is_ours(event.new):
            self._reconcile(event.key)

    def on_target(self, event: InformerEvent[TargetView]) -> None:
        """Create and Delete act on the variants that reference the Deployment or LeaderWorkerSet: a target that
        appears is served at once, one that goes is not trusted a moment longer."""
        if isinstance(event, Modified):
            return
        target = (event.new if isinstance(event, Added) else event.old).ref
        decider = self._world.decider(target)
        variants = self._world.variants_of(target) or ([] if decider is None else [decider])
        if not variants:
            return
        happened = f"{target.kind} {'created' if isinstance(event, Added) else 'deleted'}"
        if isinstance(event, Added) and variants[0].scaler is not None:
            self._target_appeared()
        log.info(happened, target=str(event.key), variants=[v.key.name for v in variants])
        for variant in variants:
            self._reconcile(variant.key)

    def on_scaler(self, event: InformerEvent[ScalerView]) -> None:
        """A managed scaler that appears is decided for at once; it has no status to reconcile."""
        if isinstance(event, Added) and event.new.variant is not None:
            self._target_appeared()

    def on_config_map(self, event: InformerEvent[ConfigMapView]) -> None:
        """Create and Update change what the next cycle reads; no variant is reconciled for it. (Which names
        are watched is decided on the server's side, see World.)"""
        if isinstance(event, Deleted):
            self._configuration.remove(event.old)
        else:
            self._configuration.apply(event.new)

    def on_service_monitor(self, event: InformerEvent[ServiceMonitorView]) -> None:
        """Only its deletion matters, also when finalizers make an Update of it; nothing is reconciled."""
        match event:
            case Deleted(old=monitor) if not monitor.deleting:
                pass
            case Modified(old=old, new=monitor) if monitor.deleting and not old.deleting:
                pass
            case _:
                return
        message = (
            f"ServiceMonitor {event.key} was deleted: Prometheus stops scraping the controller, and HPA or "
            "KEDA will no longer see wva_desired_replicas. Create it again."
        )
        log.warning(message)
        resource = SERVICE_MONITORS
        about = ObjectRef(resource.api_version, resource.kind, event.key.namespace, event.key.name, monitor.uid)
        self._emit(about, "Warning", "ServiceMonitorDeleted", message)
