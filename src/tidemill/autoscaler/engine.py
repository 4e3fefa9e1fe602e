"""The engine loop: numbers in, decisions out, once each interval.

The engine writes decisions into memory, exports them and has them carried out. It never touches the status
of an object: it wakes the reconciler for the variants whose decision changed, and that one writes.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal

import structlog

from tidemill.api.manager_config import FreshnessThresholds
from tidemill.api.names import ACCELERATOR_LABEL, UNKNOWN_ACCELERATOR
from tidemill.api.variant import Reason
from tidemill.autoscaler.actuation import ActuationError, Actuator
from tidemill.autoscaler.attribution import Attributed, Ownership, PodSample, attribute
from tidemill.autoscaler.configuration import Configuration
from tidemill.autoscaler.decisions import Decision, DecisionStore, Verdict
from tidemill.autoscaler.instruments import Instruments
from tidemill.autoscaler.views import DeploymentView, PodView, ValidVariant
from tidemill.autoscaler.world import World
from tidemill.capacity import saturation, targets, zero
from tidemill.capacity.types import Cause, Direction, ReplicaLoad, Target, VariantState
from tidemill.kube.resources import ObjectKey
from tidemill.metrics.exporter import DecisionExporter, ExportedDecision
from tidemill.metrics.freshness import Freshness, freshness
from tidemill.metrics.samples import (
    KV_USAGE,
    QUEUE_LENGTH,
    Gauge,
    MetricsSource,
    ScrapeTarget,
    Snapshot,
)

log = structlog.get_logger(__name__)

COLLECT_DEADLINE = 8.0  # of the 10 s that a cycle may take
NOT_STARTED = "no replica is ready and reporting yet"
NAMED = 5  # pods named in a message; the rest is counted


@dataclass(frozen=True, slots=True)
class Replica:
    """A pod of a variant and the numbers it gave, if any."""

    pod: PodView
    sample: PodSample | None


@dataclass(frozen=True, slots=True)
class Member:
    """A variant with an existing target, and its pods."""

    variant: ValidVariant
    target: DeploymentView
    replicas: tuple[Replica, ...]
    accelerator: str

    @property
    def ready(self) -> list[Replica]:
        return [r for r in self.replicas if r.pod.ready]


class Engine:
    """Decides for all variants. `changed` is called with the key of each variant whose decision changed."""

    def __init__(
        self,
        *,
        world: World,
        configuration: Configuration,
        source: MetricsSource,
        decisions: DecisionStore,
        exporter: DecisionExporter,
        actuator: Actuator,
        instruments: Instruments,
        changed: Callable[[Decision, Decision | None], None],
        now: Callable[[], dt.datetime],
        dry_run: bool = False,
    ) -> None:
        self._world = world
        self._configuration = configuration
        self._source = source
        self._decisions = decisions
        self._exporter = exporter
        self._actuator = actuator
        self._instruments = instruments
        self._changed = changed
        self._now = now
        self._dry_run = dry_run
        self._woken = asyncio.Event()
        self._scheduled_at = self._due = 0.0  # of the event loop's clock
        self._noted: set[str] = set()

    def wake(self) -> None:
        """Run a cycle at once: something appeared that should not wait for the next one."""
        self._woken.set()

    async def run(self, after_cycle: Callable[[], None]) -> None:
        """Cycle until cancelled. `after_cycle` is called after each scheduled one (the periodic pass)."""
        clock = asyncio.get_running_loop().time
        self._due = clock()
        while True:
            self._woken.clear()
            scheduled = clock() >= self._due
            if scheduled:
                self._scheduled_at = clock()
            with self._instruments.cycle():
                try:
                    await self.cycle()
                except Exception:
                    log.exception("engine cycle failed")
                    self._instruments.error("engine", "CycleFailed")
            if scheduled:
                after_cycle()
            await self._wait()

    async def _wait(self) -> None:
        """Until somebody wakes the engine or the interval since the last scheduled cycle is over, as it is
        configured by then: a change counts at once."""
        clock = asyncio.get_running_loop().time
        changed = self._configuration.changed
        while not self._woken.is_set():
            changed.clear()
            self._due = self._scheduled_at + self._configuration.manager.interval
            left = self._due - clock()
            if left <= 0:
                return
            waits = {asyncio.ensure_future(self._woken.wait()), asyncio.ensure_future(changed.wait())}
            try:
                await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def cycle(self) -> None:
        """One pass over all variants."""
        seen, ownership, pods = self._look()
        self._source.set_targets(
            ScrapeTarget(pod.key.namespace, pod.key.name, pod.uid, pod.address)
            for found in pods.values()
            for pod in found
            if pod.ip
        )
        tracked = self._world.tracked_namespaces()
        snapshot = await self._source.collect(self._retentions(ownership, tracked), deadline=COLLECT_DEADLINE)
        self._note(snapshot.notes)
        if self._world.changes != seen:
            # While the numbers came in the cluster changed; what is decided is decided on the present.
            _, ownership, pods = self._look()
        attributed = attribute(self._world, snapshot.series)
        self._instruments.unattributed(attributed.unattributed)
        groups: dict[tuple[str, str], list[Member]] = {}
        for member in _members(ownership, pods, attributed):
            groups.setdefault((member.variant.key.namespace, member.variant.spec.spec.model_id), []).append(member)
        decided: list[tuple[Decision, Member]] = []
        for (namespace, model), group in sorted(groups.items()):
            decided += self._decide(namespace, model, group, snapshot, tracked=namespace in tracked)
        self._instruments.models.set(len(groups))
        for key in self._decisions.keep_only(decision.variant for decision, _ in decided):
            self._exporter.drop(key.namespace, key.name)
        await self._carry_out(decided)

    def _look(self) -> tuple[int, Ownership, dict[ObjectKey, list[PodView]]]:
        """Who owns what now, and the pods of each variant that has a target."""
        ownership = Ownership(self._world)
        pods: dict[ObjectKey, list[PodView]] = {key: [] for key in ownership.variants}
        for pod in self._world.pods.store:
            if not pod.terminating and (key := ownership.variant_of(pod)) in pods:
                pods[key].append(pod)
        return self._world.changes, ownership, pods

    def _retentions(self, ownership: Ownership, tracked: frozenset[str]) -> dict[str, float | None]:
        """All models, each with the period over which its use must be known, if it may sleep. Where
        namespaces differ the longest counts: to wait is safe."""
        found: dict[str, float | None] = {}
        for key, (variant, _) in ownership.variants.items():
            model = variant.spec.spec.model_id
            settings = self._configuration.scale_to_zero(
                model=model, namespace=key.namespace, tracked=key.namespace in tracked
            )
            known = found.setdefault(model, None)
            if settings.enabled:
                found[model] = max(settings.retention, known or 0.0)
        return found

    def _usage(self, namespace: str, model: str, group: list[Member], snapshot: Snapshot) -> zero.Usage:
        gauges = [r.sample and r.sample.running for member in group for r in member.replicas]
        running = [gauge.value for gauge in gauges if gauge is not None]
        since = [r.pod.ready_since for member in group for r in member.ready if r.pod.ready_since]
        return zero.Usage(
            requests=snapshot.requests.get((namespace, model)),
            running=sum(running) if len(running) == len(gauges) else None,
            ready_for=(self._now() - min(since)).total_seconds() if since else None,
        )

    def _decide(
        self, namespace: str, model: str, group: list[Member], snapshot: Snapshot, *, tracked: bool
    ) -> list[tuple[Decision, Member]]:
        thresholds = self._configuration.manager.freshness
        verdicts = {m.variant.key: self._metrics_verdict(m, snapshot, thresholds) for m in group}
        usable = {m.variant.key: _reporting(m, model, thresholds) for m in group}
        states = [self._state(member, len(usable[member.variant.key])) for member in group]
        broken = [m for m in group if not verdicts[m.variant.key].status and m.ready]
        loads: list[ReplicaLoad] = []
        if broken:
            first = broken[0]
            sentence = f"numbers are missing for {first.variant.key.name}: {verdicts[first.variant.key].message}"
            decided = targets.hold(states, Cause.METRICS_UNAVAILABLE, sentence)
        else:
            loads = [load for member in group for load in usable[member.variant.key]]
            # Thresholds differ by accelerator; for a mixed model those of its cheapest variant hold.
            lead = min(group, key=lambda m: (m.variant.spec.cost, m.variant.key.name))
            settings = self._configuration.saturation(
                model=model,
                namespace=namespace,
                accelerator=lead.accelerator,
                tracked=tracked,
            )
            decided = targets.decide(saturation.analyze(loads, settings), states)
        decided = zero.sleep(
            decided,
            states,
            loads,
            self._usage(namespace, model, group, snapshot),
            self._configuration.scale_to_zero(model=model, namespace=namespace, tracked=tracked),
        )
        by_name = {member.variant.key.name: member for member in group}
        pairs = [(target, by_name[target.variant]) for target in decided]
        return [(self._decision(m, target, verdicts[m.variant.key]), m) for target, m in pairs]

    def _state(self, member: Member, reporting: int) -> VariantState:
        spec = member.variant.spec.spec
        return VariantState(
            name=member.variant.key.name,
            cost=member.variant.spec.cost,
            current=member.target.replicas,
            desired=self._last_desired(member),
            reporting=reporting,
            ready=len(member.ready),
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            stalled=member.target.stalled,
        )

    def _last_desired(self, member: Member) -> int | None:
        """The last decision: from memory, and after a restart from the status that it was written to."""
        variant, created = member.variant, member.target.created
        known = self._decisions.get(variant.key, variant.uid)
        if known is not None:
            return known.replicas
        alloc = variant.spec.status.desired_optimized_alloc
        if alloc is None:
            return None
        if alloc.last_run_time is not None and created is not None and alloc.last_run_time < created:
            return None  # decided for an earlier target of this name
        return alloc.num_replicas

    def _metrics_verdict(self, member: Member, snapshot: Snapshot, thresholds: FreshnessThresholds) -> Verdict:
        """Whether every serving replica of a variant has numbers that can decide, and if not, which lacks
        what."""
        model = member.variant.spec.spec.model_id
        if (failure := snapshot.failures.get(model)) is not None:
            return Verdict(False, Reason.PROMETHEUS_ERROR, f"model {model!r}: {failure}")
        serving = [r for r in member.ready if r.sample is not None or not self._is_new(r.pod, thresholds)]
        if not serving:
            return Verdict(False, Reason.METRICS_MISSING, NOT_STARTED)
        names = {name for r in serving if r.sample is not None for name in r.sample.models}
        if names and model not in names:
            listed = ", ".join(repr(name) for name in sorted(names))
            message = (
                f"no series of the target's own pods carries modelID {model!r}; they carry {listed}: "
                "set spec.modelID to the name under which the model is served"
            )
            return Verdict(False, Reason.METRICS_MISSING, message)
        stale: list[str] = []
        missing: list[str] = []
        for replica in serving:
            for metric, gauge in _gauges(replica.sample):
                state = freshness(None if gauge is None else gauge.age, thresholds)
                if state is Freshness.UNAVAILABLE:
                    missing.append(f"{replica.pod.key.name} ({metric})")
                elif state is Freshness.STALE:
                    stale.append(f"{replica.pod.key.name} ({metric})")
        if missing:
            return Verdict(False, Reason.METRICS_MISSING, f"no numbers from {_listed(missing)}")
        if stale:
            message = f"numbers older than {thresholds.stale:g}s from {_listed(stale)}"
            return Verdict(False, Reason.METRICS_STALE, message)
        notes = "".join(f"; {note}" for note in snapshot.notes)
        return Verdict(True, Reason.METRICS_FOUND, f"numbers from all serving replicas{notes}")

    def _is_new(self, pod: PodView, thresholds: FreshnessThresholds) -> bool:
        """Whether `pod` became ready so lately that nobody can have scraped it yet."""
        if pod.ready_since is None:
            return True
        return (self._now() - pod.ready_since).total_seconds() < thresholds.fresh

    def _decision(self, member: Member, target: Target, metrics: Verdict) -> Decision:
        cause = target.explanation.cause
        if cause in (Cause.METRICS_UNAVAILABLE, Cause.NO_NUMBERS):
            optimization = Verdict(False, Reason.METRICS_UNAVAILABLE, target.explanation.sentence)
        else:
            optimization = Verdict(True, Reason.OPTIMIZATION_SUCCEEDED, target.explanation.sentence)
        return Decision(
            variant=member.variant.key,
            uid=member.variant.uid,
            replicas=target.replicas,
            current=member.target.replicas,
            direction=target.direction,
            accelerator=member.accelerator,
            explanation=target.explanation,
            metrics=metrics,
            optimization=optimization,
            applied=True,
            not_applied="",
            at=self._now(),
        )

    async def _carry_out(self, decided: list[tuple[Decision, Member]]) -> None:
        results = await asyncio.gather(*(self._apply(decision, member) for decision, member in decided))
        for decision in results:
            before = self._decisions.get(decision.variant, decision.uid)
            if self._decisions.record(decision):
                self._changed(decision, before)
            if decision.direction is not Direction.HOLD:
                log.info(
                    "decision",
                    variant=str(decision.variant),
                    current=decision.current,
                    desired=decision.replicas,
                    why=decision.explanation.sentence,
                )

    async def _apply(self, decision: Decision, member: Member) -> Decision:
        """Export and carry out one decision. What fails is said in the decision and tried again next time."""
        if self._dry_run:
            return replace(decision, applied=False, not_applied="dry run")
        exported = ExportedDecision(
            decision.variant.name, decision.variant.namespace, decision.accelerator, decision.replicas,
            decision.current,
        )  # fmt: skip
        try:
            self._exporter.publish(exported)
            if decision.direction is not Direction.HOLD:
                self._exporter.count_scaling(
                    exported, direction=decision.direction.value, reason=decision.explanation.cause.value
                )
            await self._actuator.apply(member.target.key, decision.current, decision.replicas)
        except ActuationError as error:
            self._instruments.error("actuation", type(error).__name__)
            log.warning("decision not applied", variant=str(decision.variant), error=str(error))
            return replace(decision, applied=False, not_applied=str(error))
        return decision

    def _note(self, notes: Iterable[str]) -> None:
        for note in set(notes) - self._noted:
            log.warning(note)
        self._noted = set(notes)


def _gauges(sample: PodSample | None) -> list[tuple[str, Gauge | None]]:
    return [
        (KV_USAGE, None if sample is None else sample.kv_usage),
        (QUEUE_LENGTH, None if sample is None else sample.queue_length),
    ]


def _reporting(member: Member, model: str, thresholds: FreshnessThresholds) -> list[ReplicaLoad]:
    """Loads of the replicas whose numbers can decide."""
    loads: list[ReplicaLoad] = []
    for replica in member.replicas:
        sample = replica.sample
        if sample is None or sample.kv_usage is None or sample.queue_length is None or model not in sample.models:
            continue
        age = max(sample.kv_usage.age, sample.queue_length.age)
        if freshness(age, thresholds) is not Freshness.FRESH:
            continue
        loads.append(
            ReplicaLoad(
                variant=member.variant.key.name,
                replica=replica.pod.key.name,
                # By way of the shortest text, so that 0.7 is exactly seven tenths.
                kv_usage=Decimal(repr(sample.kv_usage.value)),
                queue_length=Decimal(repr(sample.queue_length.value)) / sample.engines,
            )
        )
    return loads


def _members(
    ownership: Ownership, pods: Mapping[ObjectKey, list[PodView]], attributed: Attributed
) -> list[Member]:
    """Variants that decide for an existing target, each with its pods and their numbers."""
    return [
        Member(
            variant,
            target,
            tuple(Replica(pod, attributed.samples.get(pod.key)) for pod in sorted(pods[key], key=lambda p: p.key)),
            variant.spec.metadata.labels.get(ACCELERATOR_LABEL) or target.accelerator or UNKNOWN_ACCELERATOR,
        )
        for key, (variant, target) in ownership.variants.items()
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"
