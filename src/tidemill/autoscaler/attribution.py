"""Whose numbers are these? From a series to a pod, from a pod to a variant.

Names lead to candidates, identities decide: a pod belongs to the ReplicaSet with the uid that it names,
and that to the Deployment with the uid that it names; the leader of a group likewise through a StatefulSet to its
LeaderWorkerSet. What cannot be told belongs to nobody and is counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidemill.autoscaler.views import PodView, TargetView, ValidVariant
from tidemill.autoscaler.world import World
from tidemill.kube.resources import ObjectKey
from tidemill.metrics.samples import Gauge, Quantity, SeriesSample

_RANK = re.compile(r"-rank-\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One engine of a pod (a rank is one). `rates` are those of all that it serves together, means over
    `rate_seconds` (None: those of the snapshot)."""

    kv_usage: Gauge | None
    queue_length: Gauge | None
    running: Gauge | None
    kv_tokens: int | None
    rates: Mapping[Quantity, float]
    rate_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSample:
    """The gauges of one pod, its engines taken together.

    `kv_usage` is the mean over engines, `queue_length` their sum. A gauge that is missing for one engine
    is missing for the pod. `models` are the names under which the pod serves.
    """

    pod: PodView
    engines: int
    kv_usage: Gauge | None
    queue_length: Gauge | None
    running: Gauge | None
    models: frozenset[str]
    by_engine: tuple[EngineSample, ...] = ()


@dataclass(frozen=True, slots=True)
class Attributed:
    """Samples by pod, and how many series belong to nobody, by namespace and reason."""

    samples: Mapping[ObjectKey, PodSample]
    unattributed: Mapping[tuple[str, str], int]


NOTHING_ATTRIBUTED = Attributed({}, {})


def attribute(world: World, series: Iterable[SeriesSample]) -> Attributed:
    """Put every series to its pod."""
    by_pod: dict[ObjectKey, tuple[PodView, list[SeriesSample]]] = {}
    unattributed: Counter[tuple[str, str]] = Counter()
    for sample in series:
        pod = pod_of_series(world, sample)
        if pod is None:
            unattributed[sample.id.namespace, "no such pod"] += 1
        else:
            by_pod.setdefault(pod.key, (pod, []))[1].append(sample)
    return Attributed({key: _merge(pod, found) for key, (pod, found) in by_pod.items()}, unattributed)


def pod_of_series(world: World, sample: SeriesSample) -> PodView | None:
    """The pod behind a series: by its exact name, else by its address, else by its name without a rank."""
    id_ = sample.id
    if id_.pod:
        found = world.pods.store.get(ObjectKey(id_.namespace, id_.pod))
        if found is not None:
            return found
    address = id_.instance.rsplit(":", 1)[0].strip("[]")
    if address:
        alike = [
            pod
            for pod in world.pods.store.by_index("ip", address)
            if not pod.terminating and id_.namespace in ("", pod.key.namespace)
        ]
        if len(alike) == 1:
            return alike[0]
    if id_.pod and (shorter := _RANK.sub("", id_.pod)) != id_.pod:
        return world.pods.store.get(ObjectKey(id_.namespace, shorter))
    return None


class Ownership:
    """Which variant decides for which target, and so which pod is a replica of which variant, as the world
    is at one moment. Built once for a cycle, because every pod is asked about."""

    def __init__(self, world: World) -> None:
        self.variants: dict[ObjectKey, tuple[ValidVariant, TargetView]] = {}
        self._by_target: dict[str, ObjectKey] = {}  # uid of the target: variant
        self._sets = {"ReplicaSet": world.replica_sets, "StatefulSet": world.stateful_sets}
        for variant in world.our_variants():
            target = world.target_of(variant)
            if target is not None and _is(variant, world.decider(variant.spec.target)):
                self.variants[variant.key] = (variant, target)
                self._by_target[target.uid] = variant.key

    def variant_of(self, pod: PodView) -> ObjectKey | None:
        """The variant that `pod` is a replica of: the one its label names, else the one whose target
        controls it through a ReplicaSet or StatefulSet, all told by uid. A worker of a group is no replica,
        and what it says of itself counts for nothing: the leader stands for the group."""
        if pod.worker:
            return None
        if pod.variant_label:
            key = ObjectKey(pod.key.namespace, pod.variant_label)
            if key in self.variants:
                return key
        if pod.owner is None or (informer := self._sets.get(pod.owner.kind)) is None:
            return None
        for pod_set in informer.store.by_index("uid", pod.owner.uid):
            if pod_set.owner is not None:
                return self._by_target.get(pod_set.owner.uid)
        return None


def _is(variant: ValidVariant, other: ValidVariant | None) -> bool:
    return other is not None and (other.key, other.uid) == (variant.key, variant.uid)


def _merge(pod: PodView, series: list[SeriesSample]) -> PodSample:
    """Engines of a pod are told apart by address, rank and engine label; several series of one engine (a
    base model and its adapters) show the same gauge and count once."""
    if len(series) == 1:  # as it is for nearly every pod
        (only,) = series
        engine = _engine(series)
        return PodSample(
            pod=pod, engines=1, kv_usage=only.kv_usage, queue_length=only.queue_length, running=only.running,
            models=frozenset((only.id.model,)) if only.id.model else frozenset(), by_engine=(engine,),
        )  # fmt: skip
    engines: dict[tuple[str, str, str], list[SeriesSample]] = {}
    for sample in series:
        engines.setdefault((sample.id.pod, sample.id.instance, sample.id.engine), []).append(sample)
    merged = tuple(_engine(found) for found in engines.values())
    return PodSample(
        pod=pod,
        engines=len(engines),
        kv_usage=_combine([engine.kv_usage for engine in merged], mean=True),
        queue_length=_combine([engine.queue_length for engine in merged], mean=False),
        running=_combine([engine.running for engine in merged], mean=False),
        models=frozenset(s.id.model for s in series if s.id.model),
        by_engine=merged,
    )


def _engine(series: list[SeriesSample]) -> EngineSample:
    """Gauges are of the engine, whichever of its models shows them; counters are each model's own."""
    if len(series) == 1:
        (only,) = series
        return EngineSample(
            kv_usage=only.kv_usage, queue_length=only.queue_length, running=only.running, kv_tokens=only.kv_tokens,
            rates=only.rates, rate_seconds=only.rate_seconds,
        )  # fmt: skip
    rates: dict[Quantity, float] = {}
    for sample in series:
        for quantity, rate in sample.rates.items():
            rates[quantity] = rates.get(quantity, 0.0) + rate
    return EngineSample(
        kv_usage=_largest([s.kv_usage for s in series]),
        queue_length=_largest([s.queue_length for s in series]),
        running=_largest([s.running for s in series]),
        kv_tokens=next((s.kv_tokens for s in series if s.kv_tokens is not None), None),
        rates=rates,
        rate_seconds=max((s.rate_seconds for s in series if s.rate_seconds is not None), default=None),
    )


def _largest(gauges: list[Gauge | None]) -> Gauge | None:
    known = [gauge for gauge in gauges if gauge is not None]
    return max(known, key=lambda g: g.value, default=None)


def _combine(gauges: list[Gauge | None], *, mean: bool) -> Gauge | None:
    known = [gauge for gauge in gauges if gauge is not None]
    if not known or len(known) < len(gauges):
        return None
    total = sum(gauge.value for gauge in known)
    return Gauge(total / len(known) if mean else total, max(gauge.age for gauge in known))
