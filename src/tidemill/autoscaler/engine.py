"""The engine loop: numbers in, decisions out, once each interval.

The engine writes decisions into memory, exports them and has them carried out. It never touches the status
of an object: it wakes the reconciler for the variants whose decision changed, and that one writes.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Iterable
from dataclasses import replace

import structlog

from tidemill.api.variant import Reason
from tidemill.autoscaler.actuation import ActuationError, Actuator
from tidemill.autoscaler.attribution import NOTHING_ATTRIBUTED, Ownership, attribute
from tidemill.autoscaler.configuration import Configuration
from tidemill.autoscaler.decisions import Decision, DecisionStore, Verdict
from tidemill.autoscaler.instruments import Instruments
from tidemill.autoscaler.learned import LearnedStore
from tidemill.autoscaler.members import Member, members
from tidemill.autoscaler.planner import Planned, Planner
from tidemill.autoscaler.views import PodView
from tidemill.autoscaler.waker import Waker
from tidemill.autoscaler.world import World
from tidemill.capacity.types import Cause, Direction, Explanation
from tidemill.kube.resources import ObjectKey
from tidemill.metrics.exporter import DecisionExporter, ExportedDecision
from tidemill.metrics.samples import MetricsSource, ScrapeTarget

log = structlog.get_logger(__name__)

COLLECT_DEADLINE = 8.0  # of the 10 s that a cycle may take


class Engine:
    """Decides for all variants. `changed` is called with the key of each variant whose decision changed.

    `learned` keeps what outlives the process. `actuator` carries decisions out; `scale` writes the one that no
    number can carry: from zero.
    """

    def __init__(
        self,
        *,
        world: World,
        configuration: Configuration,
        source: MetricsSource,
        decisions: DecisionStore,
        exporter: DecisionExporter,
        actuator: Actuator,
        scale: Actuator,
        learned: LearnedStore,
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
        self._scale = scale
        self._learned = learned
        self._planner = Planner(
            world=world,
            configuration=configuration,
            decisions=decisions,
            moves_replicas=actuator is scale,
            now=now,
        )
        self.waker = Waker(world=world, configuration=configuration, scale=scale, woken=self._wake_decided)
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
        if (learned := await self._learned.read()) is not None:
            self._planner.load(learned)
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
                if not self._dry_run and (state := self._planner.dump()):
                    await self._learned.write(state)
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
        snapshot = await self._source.collect(
            self._retentions(ownership, tracked),
            deadline=COLLECT_DEADLINE,
            in_depth=self._planner.in_depth(members(self._world, ownership, {}, NOTHING_ATTRIBUTED), tracked)
            or bool(self.waker.sleeping()),
        )
        if self._world.changes != seen:
            # While the numbers came in the cluster changed; what is decided is decided on the present.
            _, ownership, pods = self._look()
        attributed = attribute(self._world, snapshot.series)
        self._instruments.unattributed(attributed.unattributed)
        groups = members(self._world, ownership, pods, attributed)
        planned, remarks = self._planner.plan(groups, snapshot, tracked)
        self._note([*snapshot.notes, *remarks])
        decided = [(self._decision(plan), plan.member) for plan in planned]
        self._instruments.models.set(len(groups))
        for key in self._decisions.keep_only(decision.variant for decision, _ in decided):
            self._exporter.drop(key.namespace, key.name)
        await self._carry_out(decided)
        if not self._dry_run:
            await self.waker.wake(snapshot.picker_queues)

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

    def _decision(self, plan: Planned) -> Decision:
        member, target, metrics = plan.member, plan.target, plan.metrics
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
            self._record(decision)
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
        try:
            self._export(decision)
            if why := self._world.paused(member.variant.spec.target):
                return replace(decision, applied=False, not_applied=f"paused: {why}")
            # An HPA rests while its target has no replicas: the first one comes from here.
            carrier = self._actuator if decision.current else self._scale
            await carrier.apply(member.target.ref, decision.current, decision.replicas)
        except ActuationError as error:
            self._instruments.error("actuation", type(error).__name__)
            log.warning("decision not applied", variant=str(decision.variant), error=str(error))
            return replace(decision, applied=False, not_applied=str(error))
        return decision

    def _wake_decided(self, member: Member, replicas: int, requests: int) -> None:
        """A variant's target was taken from 0 to `replicas` because so many requests wait: that is the decision
        now, until the next cycle decides on the present."""
        sentence = f"{requests} waiting at the endpoint picker: woken with {replicas}"
        explanation = Explanation("scale-from-zero", Cause.SCALE_FROM_ZERO, sentence)
        decision = Decision(
            variant=member.variant.key,
            uid=member.variant.uid,
            replicas=replicas,
            current=replicas,
            direction=Direction.UP,
            accelerator=member.accelerator,
            explanation=explanation,
            metrics=Verdict(False, Reason.SCALE_FROM_ZERO, "woken a moment ago: nothing serves yet"),
            optimization=Verdict(True, Reason.OPTIMIZATION_SUCCEEDED, sentence),
            applied=True,
            not_applied="",
            at=self._now(),
        )
        self._export(decision)
        self._record(decision)

    def _export(self, decision: Decision) -> None:
        key = decision.variant
        exported = ExportedDecision(
            key.name, key.namespace, decision.accelerator, decision.replicas, decision.current
        )
        self._exporter.publish(exported)
        if decision.direction is not Direction.HOLD:
            cause = decision.explanation.cause.value
            self._exporter.count_scaling(exported, direction=decision.direction.value, reason=cause)

    def _record(self, decision: Decision) -> None:
        before = self._decisions.get(decision.variant, decision.uid)
        if self._decisions.record(decision):
            self._changed(decision, before)

    def _note(self, notes: Iterable[str]) -> None:
        for note in set(notes) - self._noted:
            log.warning(note)
        self._noted = set(notes)
