"""Who is decided about: variants with a target, their pods, and the numbers these gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from tidemill.api.manager_config import FreshnessThresholds
from tidemill.autoscaler.accelerators import accelerator_of
from tidemill.autoscaler.attribution import Attributed, EngineSample, Ownership, PodSample
from tidemill.autoscaler.views import PodView, TargetView, ValidVariant
from tidemill.autoscaler.world import World
from tidemill.capacity.types import ReplicaLoad
from tidemill.capacity.view import EngineLoad, RequestShape
from tidemill.kube.resources import ObjectKey
from tidemill.metrics.freshness import Freshness, freshness
from tidemill.metrics.samples import COUNT_OF, Quantity


@dataclass(frozen=True, slots=True)
class Replica:
    """A pod of a variant and the numbers it gave, if any."""

    pod: PodView
    sample: PodSample | None


@dataclass(frozen=True, slots=True)
class Member:
    """A variant with an existing target, and its pods."""

    variant: ValidVariant
    target: TargetView
    replicas: tuple[Replica, ...]
    accelerator: str

    @property
    def model(self) -> str:
        return self.variant.spec.spec.model_id

    @property
    def ready(self) -> list[Replica]:
        return [r for r in self.replicas if r.pod.ready]


def members(
    world: World, ownership: Ownership, pods: Mapping[ObjectKey, list[PodView]], attributed: Attributed
) -> dict[tuple[str, str], list[Member]]:
    """Variants that decide for an existing target, by namespace and model."""
    found: dict[tuple[str, str], list[Member]] = {}
    for key, (variant, target) in ownership.variants.items():
        member = Member(
            variant,
            target,
            tuple(
                Replica(pod, attributed.samples.get(pod.key))
                for pod in sorted(pods.get(key, ()), key=lambda p: p.key)
            ),
            accelerator_of(world, variant, target),
        )
        found.setdefault((key.namespace, member.model), []).append(member)
    return found


def reporting(member: Member, thresholds: FreshnessThresholds) -> list[Replica]:
    """Replicas whose numbers can decide: both gauges, fresh, under the model's name."""
    found: list[Replica] = []
    for replica in member.replicas:
        sample = replica.sample
        if sample is None or sample.kv_usage is None or sample.queue_length is None:
            continue
        age = max(sample.kv_usage.age, sample.queue_length.age)
        if member.model in sample.models and freshness(age, thresholds) is Freshness.FRESH:
            found.append(replica)
    return found


def replica_load(member: Member, replica: Replica) -> ReplicaLoad:
    """The load of a replica that is `reporting`."""
    sample = replica.sample
    assert sample is not None
    assert sample.kv_usage is not None
    assert sample.queue_length is not None
    return ReplicaLoad(
        variant=member.variant.key.name,
        replica=replica.pod.key.name,
        kv_usage=exactly(sample.kv_usage.value),
        queue_length=exactly(sample.queue_length.value) / sample.engines,
    )


def engine_loads(member: Member, replica: Replica) -> list[EngineLoad]:
    """The engines of a replica that is `reporting`, each by itself."""
    assert replica.sample is not None
    return [
        EngineLoad(
            variant=member.variant.key.name,
            replica=replica.pod.key.name,
            kv_usage=exactly(engine.kv_usage.value),
            queue_length=exactly(engine.queue_length.value),
            kv_tokens=engine.kv_tokens,
            running=None if engine.running is None else engine.running.value,
            rate_seconds=engine.rate_seconds,
            request_rate=engine.rates.get(Quantity.OUTPUTS),
            output_rate=engine.rates.get(Quantity.OUTPUT_TOKENS),
            ttft=mean([engine], Quantity.TTFT),
            itl=mean([engine], Quantity.ITL),
        )
        for engine in replica.sample.by_engine
        if engine.kv_usage is not None and engine.queue_length is not None
    ]


def request_shape(group: Sequence[Member]) -> RequestShape:
    """Means over all requests that the group has finished lately."""
    engines = [e for m in group for r in m.ready if r.sample is not None for e in r.sample.by_engine]

    def exact(quantity: Quantity) -> Decimal | None:
        found = mean(engines, quantity)
        return None if found is None else exactly(found)

    return RequestShape(
        input_tokens=exact(Quantity.PROMPT_TOKENS),
        output_tokens=exact(Quantity.OUTPUT_TOKENS),
        hit_rate=exact(Quantity.PREFIX_HITS),
    )


def mean(engines: Sequence[EngineSample], quantity: Quantity) -> float | None:
    """The mean of what a counter counts, over all of these engines; None over nothing."""
    counter = COUNT_OF[quantity]
    known = [engine.rates for engine in engines if quantity in engine.rates and counter in engine.rates]
    count = sum(rates[counter] for rates in known)
    return sum(rates[quantity] for rates in known) / count if count > 0 else None


def exactly(value: float) -> Decimal:
    """By way of the shortest text, so that 0.7 is exactly seven tenths."""
    return Decimal(repr(float(value)))
