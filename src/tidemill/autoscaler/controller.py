"""The autoscaler put together: watches, queue, reconciler, engine, election, pages."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from tidemill.api.names import DEFAULT_LEADER_ELECTION_ID, DEFAULT_NAMESPACE
from tidemill.api.variant import Reason
from tidemill.autoscaler.actuation import MetricsActuator, ScaleActuator
from tidemill.autoscaler.configuration import Configuration
from tidemill.autoscaler.decisions import Decision, DecisionStore
from tidemill.autoscaler.engine import Engine
from tidemill.autoscaler.external_metrics import external_metrics_app
from tidemill.autoscaler.instruments import Instruments
from tidemill.autoscaler.keda_scaler import KedaScaler
from tidemill.autoscaler.learned import LearnedStore
from tidemill.autoscaler.reconciler import Reconciler, ref_of
from tidemill.autoscaler.scalers import Finding, findings
from tidemill.autoscaler.verdicts import NOT_STARTED
from tidemill.autoscaler.views import ConfigMapView, usable
from tidemill.autoscaler.watches import Watches
from tidemill.autoscaler.web import health_app, listen, metrics_app
from tidemill.autoscaler.world import World
from tidemill.capacity.types import Direction
from tidemill.kube import tls
from tidemill.kube.client import KubeClient
from tidemill.kube.clock import rfc3339, utc_now
from tidemill.kube.delegated import Delegated
from tidemill.kube.events import EventRecorder, EventType
from tidemill.kube.lease import LeaderElector, LeaseConfig
from tidemill.kube.queue import WorkQueue
from tidemill.kube.resources import ObjectKey, ObjectRef
from tidemill.metrics.direct import DirectSource
from tidemill.metrics.exporter import DecisionExporter, ExportedDecision
from tidemill.metrics.pickers import PickerHere, PickerPoll
from tidemill.metrics.prometheus import PrometheusClient, PrometheusSource
from tidemill.metrics.samples import MetricsSource

log = structlog.get_logger(__name__)


class ActuationMode(StrEnum):
    METRICS = "metrics"  # export the number; an HPA or KEDA acts on it
    SCALE = "scale"  # write the scale subresource too


class SourceKind(StrEnum):
    PROMETHEUS = "prometheus"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions:
    """What flags and environment say. `overrides` are keys of the manager config."""

    namespace: str = DEFAULT_NAMESPACE
    watch_namespace: str | None = None
    instance: str = ""
    identity: str = field(default_factory=socket.gethostname)
    actuation: ActuationMode = ActuationMode.METRICS
    source: SourceKind = SourceKind.PROMETHEUS
    scrape_interval: float = 1.0
    scrape_window: float = 15.0
    overrides: Mapping[str, str] = field(default_factory=dict)
    metrics_address: str = "0"
    health_address: str = ":8081"
    external_metrics_address: str = "0"
    external_metrics_cert_dir: Path | None = None  # with tls.crt and tls.key; None signs a pair itself
    keda_scaler_address: str = "0"
    lease: LeaseConfig | None = None
    picker_metrics: tuple[str, ...] = ()  # URLs of endpoint pickers' metrics
    dry_run: bool = False
    workers: int = 4
    watch_seconds: float = 290.0


def lease_config(
    namespace: str, identity: str, *, duration: float, renew_deadline: float, retry_period: float
) -> LeaseConfig:
    """The lease of this controller, under the name that the original uses."""
    return LeaseConfig(
        name=DEFAULT_LEADER_ELECTION_ID,
        namespace=namespace,
        identity=identity,
        duration=duration,
        renew_deadline=renew_deadline,
        retry_period=retry_period,
    )


class Controller:
    """One autoscaler process. `run` serves until cancelled. `picker` is an endpoint picker in the same process:
    what waits there wakes models without any metrics between.

    Raises ValueError for options or manager keys that cannot be used.
    """

    def __init__(
        self,
        client: KubeClient,
        options: ControllerOptions,
        *,
        source: MetricsSource | None = None,
        picker: PickerHere | None = None,
        now: Callable[[], dt.datetime] = utc_now,
    ) -> None:
        self._client = client
        self._options = options
        self._given_source = source
        self._now = now
        self.registry = CollectorRegistry()
        self.exporter = DecisionExporter(options.instance)
        self.registry.register(self.exporter)
        self.instruments = Instruments(self.registry)
        self.decisions = DecisionStore()
        self.queue: WorkQueue[ObjectKey] = WorkQueue()
        self.recorder = EventRecorder(
            client, component="workload-variant-autoscaler", instance=options.identity, now=now
        )
        self.world = World(
            client,
            namespace=options.namespace,
            watch_namespace=options.watch_namespace,
            instance=options.instance,
            watch_seconds=options.watch_seconds,
        )
        self.configuration = Configuration(options.namespace, options.overrides, self._report_config)
        self.watches = Watches(
            self.world,
            self.configuration,
            reconcile=self._enqueue,
            target_appeared=self._wake_engine,
            emit=self._emit,
        )
        self.reconciler = Reconciler(
            client,
            world=self.world,
            decisions=self.decisions,
            exporter=self.exporter,
            recorder=self.recorder,
            target_appeared=self._wake_engine,
            now=now,
            dry_run=options.dry_run,
        )
        self.engine: Engine | None = None  # while this process leads
        self._picker = picker
        told = options.picker_metrics or picker is not None
        self._pickers = PickerPoll(options.picker_metrics, here=picker) if told else None
        self._leading = False
        self._found: set[Finding] = set()

    @property
    def ready(self) -> list[str]:
        """What readiness waits for; empty when the controller is ready."""
        lists = [
            f"waiting for the first list of {informer.resource}"
            + (f" ({informer.error})" if informer.error else "")
            for informer in self.world.informers
            if not informer.synced
        ]
        return lists if self._picker is None else [*lists, *self._picker.waiting_for]

    async def run(self) -> None:
        options = self._options
        runners: list[web.AppRunner] = []
        keda = KedaScaler(exporter=self.exporter, numbers=self._numbers, variant_of=self._variant_of)
        try:
            health = health_app(
                ready=lambda: self.ready, is_leader=lambda: self._leading, decisions=self.decisions
            )
            runners.append(await listen(health, options.health_address, flag="--health-probe-bind-address"))
            if options.metrics_address != "0":
                metrics = metrics_app(self.registry)
                runners.append(await listen(metrics, options.metrics_address, flag="--metrics-bind-address"))
            async with asyncio.TaskGroup() as group:
                if options.external_metrics_address != "0":
                    runners.append(await self._serve_external_metrics(group))
                if options.keda_scaler_address != "0":
                    await keda.listen(options.keda_scaler_address, flag="--keda-scaler-bind-address")
                group.create_task(self.world.run())
                group.create_task(self.recorder.run())
                await self.world.wait_synced()
                self.configuration.freeze()
                source = self._given_source or self._make_source()
                log.info("ready", source=source.name, actuation=options.actuation.value)
                try:
                    await self._compete(source)
                finally:
                    await source.close()
                    if self._pickers is not None:
                        await self._pickers.close()
        finally:
            await self.recorder.flush_quietly()
            await keda.stop()
            for runner in runners:
                await runner.cleanup()

    async def _serve_external_metrics(self, group: asyncio.TaskGroup) -> web.AppRunner:
        options = self._options
        directory = options.external_metrics_cert_dir
        name = f"wva-external-metrics.{options.namespace}.svc"
        pair = tls.self_signed(name, self._now()) if directory is None else tls.read_pair(directory)
        context = tls.server_context(pair, protocol="http/1.1")
        if directory is not None:
            group.create_task(tls.watch_pair(directory, lambda changed: tls.load(context, changed)))
        delegated = Delegated(self._client, context)
        await delegated.refresh()
        group.create_task(delegated.run())
        app = external_metrics_app(self._numbers, delegated, now=lambda: rfc3339(self._now()))
        return await listen(
            app, options.external_metrics_address, flag="--external-metrics-bind-address", tls=context
        )

    def _numbers(self, namespace: str) -> list[ExportedDecision]:
        """What is decided for a namespace: by the leader as it exports it, by others as it was written."""
        if self._leading:
            return self.exporter.of_namespace(namespace)
        found: list[ExportedDecision] = []
        for key, view in self.world.variants.store.items():
            variant = usable(view)
            alloc = None if variant is None else variant.spec.status.desired_optimized_alloc
            if key.namespace != namespace or variant is None or alloc is None:
                continue
            target = self.world.target(variant.spec.target)
            current = 0 if target is None else target.replicas
            found.append(ExportedDecision(key.name, namespace, alloc.accelerator, alloc.num_replicas, current))
        return found

    def _variant_of(self, namespace: str, scaled_object: str) -> str | None:
        """The variant that decides for the target of a ScaledObject."""
        scaler = self.world.scaled_objects.store.get(ObjectKey(namespace, scaled_object))
        decider = None if scaler is None or scaler.target is None else self.world.decider(scaler.target)
        return None if decider is None else decider.key.name

    async def _compete(self, source: MetricsSource) -> None:
        if self._options.lease is None:
            await self._lead(source)
            return
        elector = LeaderElector(self._client, self._options.lease, now=self._now)
        await elector.run(lambda: self._lead(source))

    async def _lead(self, source: MetricsSource) -> None:
        """Decide and write, as long as this process is the one to do so."""
        options = self._options
        scale = ScaleActuator(self._client)
        actuator = scale if options.actuation is ActuationMode.SCALE else MetricsActuator()
        self.engine = Engine(
            world=self.world,
            configuration=self.configuration,
            source=source,
            decisions=self.decisions,
            exporter=self.exporter,
            actuator=actuator,
            scale=scale,
            learned=LearnedStore(self._client, options.namespace),
            instruments=self.instruments,
            changed=self._on_decision,
            now=self._now,
            dry_run=options.dry_run,
        )
        # Others may have led since this process did: what they decided is in the status, and counts.
        self.decisions.keep_only(())
        self._leading = True
        self.configuration.report_again()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(options.workers):
                    group.create_task(self.queue.work(self._reconcile, self._on_error))
                group.create_task(self.engine.run(self._periodic_pass))
                if self._pickers is not None and not options.dry_run:
                    group.create_task(self.engine.waker.run(self._pickers.read))
        finally:
            # A former leader exports nothing: two answers to one question are worse than none.
            self._leading = False
            self.engine = None
            self.exporter.clear()

    def _periodic_pass(self) -> None:
        for key, _ in self.world.variants.store.items():
            self._enqueue(key)
        present = set(findings(self.world, writes=self._options.actuation is ActuationMode.SCALE))
        for finding in sorted(present - self._found, key=lambda f: (str(f.about), f.message)):
            self._emit(finding.about, "Warning", finding.reason, finding.message)
        self._found = present

    def _enqueue(self, key: ObjectKey) -> None:
        self.queue.add(key)

    def _wake_engine(self) -> None:
        if self.engine is not None:
            self.engine.wake()

    async def _reconcile(self, key: ObjectKey) -> None:
        await self.reconciler.reconcile(key)
        self.instruments.reconciles.labels("variantautoscaling", "success").inc()

    def _on_error(self, key: ObjectKey, error: Exception) -> None:
        self.instruments.reconciles.labels("variantautoscaling", "error").inc()
        log.warning("reconcile failed", variant=str(key), error=f"{type(error).__name__}: {error}")

    def _on_decision(self, decision: Decision, before: Decision | None) -> None:
        self._enqueue(decision.variant)
        view = self.world.view_of(decision.variant)
        if view is None or self._options.dry_run:
            return
        if decision.direction is not Direction.HOLD:
            word = {Direction.UP: "ScaledUp", Direction.DOWN: "ScaledDown"}[decision.direction]
            self.recorder.event(ref_of(view), "Normal", word, decision.explanation.sentence)
        for warning, text in decision.explanation.warnings.items():
            if before is None or warning not in before.explanation.warnings:
                self.recorder.event(ref_of(view), "Warning", warning.value, text)
        # A model that starts is no cause for alarm; numbers that were there and go are.
        if _lost(decision) and (before is None or _lost(before) is not decision.metrics.reason):
            self.recorder.event(ref_of(view), "Warning", "MetricsUnavailable", decision.metrics.message)

    def _report_config(self, view: ConfigMapView, type_: EventType, reason: str, message: str) -> None:
        about = ObjectRef("v1", "ConfigMap", view.key.namespace, view.key.name, view.uid)
        self._emit(about, type_, reason, message)

    def _emit(self, about: ObjectRef, type_: EventType, reason: str, message: str) -> None:
        # Every replica watches, one speaks.
        if self._leading and not self._options.dry_run:
            self.recorder.event(about, type_, reason, message)

    def _make_source(self) -> MetricsSource:
        options = self._options
        if options.source is SourceKind.DIRECT:
            return DirectSource(
                interval=options.scrape_interval, window=options.scrape_window, pickers=self._pickers
            )
        config = self.configuration.manager.prometheus
        if not config.base_url:
            raise ValueError(
                "PROMETHEUS_BASE_URL is not set, neither by environment nor in ConfigMap "
                f"{options.namespace}/wva-manager-config; set it, or start with --metrics-source direct"
            )
        return PrometheusSource(PrometheusClient(config))


def _lost(decision: Decision) -> Reason | None:
    """Why the numbers of a variant that serves cannot be used, if they cannot."""
    metrics = decision.metrics
    if metrics.status or metrics.message == NOT_STARTED or metrics.reason is Reason.SCALE_FROM_ZERO:
        return None
    return metrics.reason


async def run_controller(controller: Controller, stop: asyncio.Event) -> None:
    """Run until `stop` is set or the controller fails."""
    running = asyncio.create_task(controller.run())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not running.done():
        running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
