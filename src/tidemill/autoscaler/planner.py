"""From numbers to targets, for all models at once: which analyzers look, who allocates, who sleeps.

What it remembers between cycles is what the analyzers learned, the last known means of requests, and how long
replicas take to start. None of it decides whether a fleet may shrink on missing numbers: that is never done.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import structlog

from tidemill.api.engine_presets import preset_for
from tidemill.api.saturation_config import SaturationSettings
from tidemill.autoscaler import picker_queues
from tidemill.autoscaler.accelerators import claimed, inventory, placement
from tidemill.autoscaler.configuration import Configuration
from tidemill.autoscaler.decisions import DecisionStore, Verdict
from tidemill.autoscaler.members import Member, engine_loads, replica_load, reporting, request_shape
from tidemill.autoscaler.picker_queues import Group
from tidemill.autoscaler.startup import DualPods, StartupTimes
from tidemill.autoscaler.verdicts import metrics_verdict
from tidemill.autoscaler.views import ResourceClaimView
from tidemill.autoscaler.world import World
from tidemill.capacity import allocation, exact, ratio, saturation, targets, zero
from tidemill.capacity.inventory import UNLIMITED
from tidemill.capacity.judgement import Judge
from tidemill.capacity.needs import Need, by_role
from tidemill.capacity.pace import Pace
from tidemill.capacity.queueing import LatencyTarget, ServiceTimes
from tidemill.capacity.report import Json
from tidemill.capacity.types import Cause, ReplicaLoad, Role, Target, VariantState
from tidemill.capacity.view import EngineLoad, RequestShape, RoleView, UpstreamQueue
from tidemill.kube.resources import ObjectKey
from tidemill.metrics.samples import Snapshot

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Planned:
    """What is to be done with one variant, and whether its numbers could decide."""

    member: Member
    target: Target
    metrics: Verdict


class Planner:
    """Decides on targets. `moves_replicas` says that nobody else paces what is decided; `now` gives the time of
    day."""

    def __init__(
        self, *, world: World, configuration: Configuration, decisions: DecisionStore,
        moves_replicas: bool, now: Callable[[], dt.datetime],
    ) -> None:  # fmt: skip
        self._world = world
        self._configuration = configuration
        self._decisions = decisions
        self._now = now
        self._judge = Judge()
        self._pace = Pace() if moves_replicas else None
        self._startup = StartupTimes()
        self._claims: dict[ObjectKey, ResourceClaimView] = {}
        self._taken_to_zero: set[str] = set()  # uids of variants
        self._resolved: dict[tuple[str, str, str], SaturationSettings] = {}  # in this cycle
        self._shapes: dict[tuple[str, Role], RequestShape] = {}

    def dump(self) -> Json:
        """All that was learned, for a successor; empty while percentages decide everything."""
        if not self._shapes:
            return {}
        shapes = [
            [*slot, *(None if v is None else str(v) for v in (s.input_tokens, s.output_tokens, s.hit_rate))]
            for slot, s in self._shapes.items()
        ]
        return {
            "judge": self._judge.dump(),
            "shapes": shapes,
            "zero": sorted(self._taken_to_zero),
            "startup": self._startup.dump(),
        }

    def load(self, state: Json) -> None:
        """Go on from what a predecessor learned. What cannot be read is left out, and said."""
        try:
            self._taken_to_zero.update(str(uid) for uid in state["zero"])
            self._startup.load(state["startup"])
            self._judge.load(state["judge"])
            for model, role, *means in state["shapes"]:
                size_in, size_out, hits = (None if mean is None else Decimal(mean) for mean in means)
                self._shapes[model, Role(role)] = RequestShape(
                    input_tokens=size_in, output_tokens=size_out, hit_rate=hits
                )
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            log.warning("what was learned before is not understood", error=repr(error))

    def in_depth(self, groups: Mapping[Group, Sequence[Member]], tracked: frozenset[str]) -> bool:
        """Whether any model is judged by more than percentages. Called first in each cycle."""
        self._resolved.clear()
        return any(
            not self._settings(key, [member], tracked).by_percentage
            for key, group in groups.items()
            for member in group
        )

    def plan(
        self, groups: Mapping[Group, Sequence[Member]], snapshot: Snapshot, tracked: frozenset[str]
    ) -> tuple[list[Planned], list[str]]:
        """Targets for all variants, and remarks for operators."""
        self._claims = self._world.claims_by_key()
        waiting, remarks = picker_queues.assign(snapshot.picker_queues, groups, self._world.inference_pools())
        models = [
            self._look(key, groups[key], snapshot, tracked, waiting.get(key, UpstreamQueue()))
            for key in sorted(groups)
        ]
        fleet = self._configuration.fleet()
        selector = self._configuration.manager.node_selector
        free = inventory(self._world, selector) if fleet.limited else UNLIMITED
        unlimited = free.unknown if fleet.limited else ""
        steps: dict[Group, Sequence[Target]] = {}
        for model in models:
            steps[model.key], free = targets.limited(model.decided, model.states, free, unlimited)
        needs = [need for model in models for need in model.needs]
        if fleet.optimizer == "greedy":
            allocated = allocation.allocate(needs, free)
        else:
            allocated = exact.allocate(needs, free, time_limit=fleet.time_limit)
        for model in models:
            if model.needs and (asked := self._settings(model.key, model.members, tracked).role_ratio):
                allocated = ratio.held(allocated, model.needs, dict(asked), free)
        planned: list[Planned] = []
        for model in models:
            decided = [*steps[model.key]]
            for need in model.needs:
                decided += targets.allocated(need, allocated, unlimited)
            decided = zero.sleep(
                decided, model.states, model.loads, self._usage(model, snapshot),
                self._configuration.scale_to_zero(
                    model=model.key[1], namespace=model.key[0], tracked=model.key[0] in tracked
                ),
            )  # fmt: skip
            by_name = {member.variant.key.name: member for member in model.members}
            planned += [
                Planned(
                    by_name[target.variant],
                    self._slowed(model, by_name[target.variant], target, tracked),
                    model.verdicts[target.variant],
                )
                for target in sorted(decided, key=lambda t: t.variant)
            ]
        for plan in planned:
            self._note_zero(plan)
        self._judge.forget({f"{namespace}/{model}" for namespace, model in groups})
        if self._pace is not None:
            self._pace.forget({plan.member.variant.uid for plan in planned})
        return planned, remarks

    def _look(
        self, key: Group, members: Sequence[Member], snapshot: Snapshot, tracked: frozenset[str],
        waiting: UpstreamQueue,
    ) -> _Model:  # fmt: skip
        """One model: what its percentages decide, or what its roles need."""
        thresholds = self._configuration.manager.freshness
        usable = {m.variant.key.name: reporting(m, thresholds) for m in members}
        states = [self._state(member, len(usable[member.variant.key.name])) for member in members]
        verdicts = {m.variant.key.name: metrics_verdict(m, snapshot, thresholds, self._now()) for m in members}
        found = _Model(key, members, states, verdicts, loads=[], decided=[], needs=[])
        for role, variants in by_role(states).items():
            names = {variant.name for variant in variants}
            mine = [member for member in members if member.variant.key.name in names]
            broken = [m for m in mine if not verdicts[m.variant.key.name].status and m.ready]
            if broken:
                first = broken[0].variant.key.name
                sentence = f"numbers are missing for {first}: {verdicts[first].message}"
                found.decided.extend(targets.hold(variants, Cause.METRICS_UNAVAILABLE, sentence))
                continue
            loads = [replica_load(m, r) for m in mine for r in usable[m.variant.key.name]]
            found.loads.extend(loads)
            settings = self._settings(key, mine, tracked)
            if settings.by_percentage:
                found.decided.extend(targets.decide(saturation.analyze(loads, settings), variants))
            else:
                engines = tuple(e for m in mine for r in usable[m.variant.key.name] for e in engine_loads(m, r))
                view = self._view(key, role, mine, variants, settings, waiting, engines, snapshot.rate_seconds)
                lead = self._startup.lead(mine, self._dual_pods())
                need = self._judge.need(view, settings, now=self._now().timestamp(), lead=lead)
                found.needs.append(need)
        return found

    def _dual_pods(self) -> DualPods:
        pods = self._world.pods.store
        return DualPods(
            engine_of=lambda pod: pods.get(ObjectKey(pod.key.namespace, pod.dual)) if pod.dual else None,
            asleep=frozenset(pod.uid for pod in pods.by_index("sleeping", True)),
        )

    def _settings(self, key: Group, members: Sequence[Member], tracked: frozenset[str]) -> SaturationSettings:
        """Thresholds differ by accelerator; for mixed ones those of the cheapest variant hold."""
        namespace, model = key
        lead = members[0]
        if len(members) > 1:
            lead = min(members, key=lambda m: (m.variant.spec.cost, m.variant.key.name))
        slot = (namespace, model, lead.accelerator)
        found = self._resolved.get(slot)
        if found is None:
            found = self._resolved[slot] = self._configuration.saturation(
                model=model, namespace=namespace, accelerator=lead.accelerator, tracked=namespace in tracked
            )
        return found

    def _view(
        self, key: Group, role: Role, members: Sequence[Member], variants: tuple[VariantState, ...],
        settings: SaturationSettings, waiting: UpstreamQueue, engines: tuple[EngineLoad, ...], rate_seconds: float,
    ) -> RoleView:  # fmt: skip
        model = f"{key[0]}/{key[1]}"
        shape = request_shape(members).or_last(self._shapes.get((model, role), RequestShape()))
        self._shapes[model, role] = shape
        target = LatencyTarget(settings.ttft_target, settings.itl_target, settings.target_percentile)
        return RoleView(
            model=model,
            role=role,
            variants=variants,
            engines=engines,
            shape=shape,
            upstream=waiting,
            rate_seconds=rate_seconds,
            flags={m.variant.key.name: m.target.flags for m in members},
            presets=_presets(settings.preset, variants),
            kv_cache_threshold=settings.kv_cache_threshold,
            queue_length_threshold=settings.queue_length_threshold,
            target=target if settings.has_latency_target else None,
        )

    def _note_zero(self, plan: Planned) -> None:
        """Who is at 0 by our decision. A target that somebody else set to 0 was never decided down to it."""
        uid = plan.member.variant.uid
        if plan.target.replicas == 0 and plan.member.target.replicas:
            self._taken_to_zero.add(uid)
        elif plan.member.target.replicas:
            self._taken_to_zero.discard(uid)

    def _slowed(self, model: _Model, member: Member, target: Target, tracked: frozenset[str]) -> Target:
        if self._pace is None:
            return target
        state = next(s for s in model.states if s.name == target.variant)
        settings = self._settings(model.key, [member], tracked)
        return self._pace.slowed(member.variant.uid, target, state, settings, self._now().timestamp())

    def _usage(self, model: _Model, snapshot: Snapshot) -> zero.Usage:
        gauges = [r.sample and r.sample.running for member in model.members for r in member.replicas]
        running = [gauge.value for gauge in gauges if gauge is not None]
        since = [r.pod.ready_since for member in model.members for r in member.ready if r.pod.ready_since]
        return zero.Usage(
            requests=snapshot.requests.get(model.key),
            running=sum(running) if len(running) == len(gauges) else None,
            ready_for=(self._now() - min(since)).total_seconds() if since else None,
        )

    def _state(self, member: Member, reporting: int) -> VariantState:
        spec, target = member.variant.spec.spec, member.target
        return VariantState(
            name=member.variant.key.name,
            cost=member.variant.spec.cost,
            current=target.replicas,
            desired=self._last_desired(member),
            reporting=reporting,
            ready=len(member.ready),
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            stalled=target.stalled,
            role=target.role,
            may_return=spec.min_replicas == 0 or member.variant.uid in self._taken_to_zero,
            accelerator=member.accelerator,
            gpus=target.gpus or max((claimed(r.pod, self._claims) for r in member.replicas), default=0) or None,
            placement=placement(target.accelerator, target.node_selector),
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


@dataclass(frozen=True, slots=True)
class _Model:
    """One model in one cycle. `decided` are targets that need no allocation."""

    key: Group
    members: Sequence[Member]
    states: Sequence[VariantState]
    verdicts: Mapping[str, Verdict]
    loads: list[ReplicaLoad]
    decided: list[Target]
    needs: list[Need]


def _presets(model: str | None, variants: Iterable[VariantState]) -> dict[str, ServiceTimes]:
    """Published step times by variant, of those that run on what they were published for."""
    found: dict[str, ServiceTimes] = {}
    if model is None:
        return found
    for variant in variants:
        if (preset := preset_for(model, variant.accelerator, variant.gpus or 1)) is not None:
            found[variant.name] = ServiceTimes(
                base=preset.decode_base,
                per_sequence=preset.decode_per_sequence,
                per_context_token=preset.decode_per_sequence_token,
                per_prompt_token=preset.prefill_per_token,
            )
    return found
