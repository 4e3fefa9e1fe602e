"""The reconciler: brings the status of one VariantAutoscaling in line with what is known. Level-triggered:
it gets a key, looks at everything, and may be called at any time, any number of times."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from tidemill.api.variant import API_VERSION, KIND, ConditionType, Reason, target_gone_message, target_word
from tidemill.autoscaler.decisions import Decision, DecisionStore, Verdict
from tidemill.autoscaler.views import InvalidVariant, ValidVariant, VariantView, usable
from tidemill.autoscaler.world import VARIANT_AUTOSCALINGS, World, scaler_ref
from tidemill.kube.client import KubeClient
from tidemill.kube.clock import rfc3339
from tidemill.kube.conditions import find_condition, set_condition
from tidemill.kube.errors import ConflictError, InvalidError, NotFoundError
from tidemill.kube.events import EventRecorder
from tidemill.kube.resources import Json, ObjectKey, ObjectRef
from tidemill.metrics.exporter import DecisionExporter

log = structlog.get_logger(__name__)

# A merge patch leaves the fields that it does not name: to empty an object is to name each of them.
_EMPTY_ALLOC: Mapping[str, None] = {"accelerator": None, "numReplicas": None, "lastRunTime": None}


class Reconciler:
    def __init__(
        self,
        client: KubeClient,
        *,
        world: World,
        decisions: DecisionStore,
        exporter: DecisionExporter,
        recorder: EventRecorder,
        target_appeared: Callable[[], None],
        now: Callable[[], dt.datetime],
        dry_run: bool = False,
    ) -> None:
        self._client = client
        self._world = world
        self._decisions = decisions
        self._exporter = exporter
        self._recorder = recorder
        self._target_appeared = target_appeared
        self._now = now
        self._dry_run = dry_run
        # What was written last and to which version of the object, by uid: the informer lags behind.
        self._written: dict[str, tuple[str, Mapping[str, Any]]] = {}

    async def reconcile(self, key: ObjectKey) -> None:
        """Raises ApiError when the status could not be written; the caller tries again."""
        view = self._world.variants.store.get(key)
        if view is None:
            return  # gone, or a managed scaler, which has no status: the engine looks after both
        if not self._world.is_ours(view):
            self._forget(key)
            return
        current = self._status_of(view)
        variant = usable(view)
        if variant is None:
            self._forget(key)
            self._tell(view, current, ConditionType.READY, _unusable(view))
            wanted = self._status_without_target(current, _unusable(view))
        else:
            wanted = self._status(variant, current)
            if isinstance(view, InvalidVariant):
                self._tell(view, current, ConditionType.OPTIMIZATION_READY, _unusable(view))
                wanted = self._with(wanted, ConditionType.OPTIMIZATION_READY, _unusable(view), view)
        await self._write(view, current, wanted)

    def _tell(self, view: VariantView, current: Json, type_: ConditionType, verdict: Verdict) -> None:
        """An event for what is about to be said in a condition, unless it is said there already."""
        said = find_condition(current.get("conditions") or (), type_) or {}
        if not self._dry_run and said.get("message") != verdict.message:
            self._recorder.event(ref_of(view), "Warning", verdict.reason, verdict.message)

    def _status(self, variant: ValidVariant, current: Json) -> Json:
        target = variant.spec.target
        owner = self._world.decider(target)
        if owner is not None and owner.key != variant.key:
            self._forget(variant.key)
            message = f"{target} is already scaled by VariantAutoscaling {owner.key.name}, which is older"
            conflict = Verdict(False, Reason.TARGET_CONFLICT, message)
            self._tell(variant, current, ConditionType.READY, conflict)
            status = self._status_without_target(current, conflict)
            found = Verdict(True, Reason.TARGET_FOUND, f"Scale target {target.kind} {target.name} found")
            return self._with(status, ConditionType.TARGET_RESOLVED, found, variant)
        if self._world.target_of(variant) is None:
            self._forget(variant.key)
            gone = Verdict(False, Reason.DEPLOYMENT_NOT_FOUND, target_gone_message(target.kind))
            status = self._status_without_target(current, gone)
            hint = ""
            if target.kind == "LeaderWorkerSet" and self._world.leader_worker_sets.absent:
                hint = ": the cluster serves no LeaderWorkerSets, or does not let this autoscaler list them"
            missing = Verdict(
                False, Reason.TARGET_NOT_FOUND, f"Scale target {target.kind} {target.name} not found{hint}"
            )
            return self._with(status, ConditionType.TARGET_RESOLVED, missing, variant)
        found = Verdict(True, Reason.TARGET_FOUND, f"Scale target {target.kind} {target.name} found")
        ready = Verdict(True, Reason.TARGET_READY, f"Target {target_word(target.kind)} exists")
        status = self._with(current, ConditionType.TARGET_RESOLVED, found, variant)
        status = self._with(status, ConditionType.READY, ready, variant)
        decision = self._decisions.get(variant.key, variant.uid)
        if decision is None:
            # A new target must not wait for the next cycle to be served.
            self._target_appeared()
            return status
        return self._with_decision(status, decision, variant)

    def _with_decision(self, status: Json, decision: Decision, variant: ValidVariant) -> Json:
        status = self._with(status, ConditionType.METRICS_AVAILABLE, decision.metrics, variant)
        optimization = decision.optimization
        if not decision.applied:
            message = f"{optimization.message}; decided {decision.replicas}, not applied: {decision.not_applied}"
            optimization = Verdict(False, Reason.OPTIMIZATION_FAILED, message)
        status = self._with(status, ConditionType.OPTIMIZATION_READY, optimization, variant)
        return {
            **status,
            "desiredOptimizedAlloc": {
                "accelerator": decision.accelerator,
                "numReplicas": decision.replicas,
                "lastRunTime": rfc3339(decision.at),
            },
            "actuation": {"applied": decision.applied},
        }

    def _status_without_target(self, current: Json, ready: Verdict) -> Json:
        """Nothing is decided for a variant without a target, and nothing that was may be shown any more."""
        conditions = set_condition(
            [
                c
                for c in current.get("conditions") or ()
                if c["type"] not in (ConditionType.METRICS_AVAILABLE, ConditionType.OPTIMIZATION_READY)
            ],
            type=ConditionType.READY,
            status=ready.status,
            reason=ready.reason,
            message=ready.message,
            generation=None,
            now=rfc3339(self._now()),
        )
        return {"desiredOptimizedAlloc": {}, "actuation": {"applied": False}, "conditions": conditions}

    def _with(self, status: Json, type_: ConditionType, verdict: Verdict, view: VariantView) -> Json:
        generation = view.spec.metadata.generation if isinstance(view, ValidVariant) else view.generation
        conditions = set_condition(
            status.get("conditions") or (),
            type=type_,
            status=verdict.status,
            reason=verdict.reason,
            message=verdict.message,
            generation=generation,
            now=rfc3339(self._now()),
        )
        return {**status, "conditions": conditions}

    def _status_of(self, view: VariantView) -> Json:
        """The status as the server has it, as far as this process can know."""
        written = self._written.get(view.uid)
        if written is not None and written[0] == _version(view):
            return dict(written[1])
        self._written.pop(view.uid, None)
        return dict(view.status)

    async def _write(self, view: VariantView, current: Json, wanted: Json) -> None:
        if self._dry_run or _without_time(current) == _without_time(wanted):
            return
        patch: Json = dict(wanted)
        if not wanted.get("desiredOptimizedAlloc"):
            patch["desiredOptimizedAlloc"] = _EMPTY_ALLOC
        body: Json = {"metadata": {"uid": view.uid}, "status": patch}
        try:
            await self._patch(view.key, body)
        except InvalidError:
            # A CRD of the original's: there an empty allocation breaks the schema, an absent one does not.
            if wanted.get("desiredOptimizedAlloc"):
                raise
            await self._patch(view.key, {**body, "status": {**patch, "desiredOptimizedAlloc": None}})
        except (NotFoundError, ConflictError):
            # Gone, or another object by the same name: its own event will come.
            log.info("variant changed while its status was written", variant=str(view.key))
            return
        self._written[view.uid] = (_version(view), wanted)

    async def _patch(self, key: ObjectKey, body: Json) -> None:
        await self._client.patch(VARIANT_AUTOSCALINGS, key.name, body, key.namespace, sub="status")

    def _forget(self, key: ObjectKey) -> None:
        self._decisions.drop(key)
        self._exporter.drop(key.namespace, key.name)


def ref_of(view: VariantView) -> ObjectRef:
    """The object to tell about: the variant, or the scaler that it stands for."""
    if isinstance(view, ValidVariant) and view.scaler is not None:
        return scaler_ref(view.scaler, view.key, view.uid)
    return ObjectRef(API_VERSION, KIND, view.key.namespace, view.key.name, view.uid)


def _version(view: VariantView) -> str:
    return view.spec.metadata.resource_version if isinstance(view, ValidVariant) else view.resource_version


def _unusable(view: VariantView) -> Verdict:
    assert isinstance(view, InvalidVariant)
    kept = "; the last good spec stays in force" if view.last_good is not None else ""
    message = "; ".join(str(problem) for problem in view.problems) + kept
    return Verdict(False, Reason.INVALID_CONFIGURATION, message)


def _without_time(status: Json) -> Json:
    alloc = {k: v for k, v in (status.get("desiredOptimizedAlloc") or {}).items() if k != "lastRunTime"}
    return {**status, "desiredOptimizedAlloc": alloc}
