"""Saturation by percentage (upstream's V1): one step up when spare runs out, one down when one can be missed.

All comparisons are made on sums of decimals, without division, so a value that equals its threshold is
not below it whatever binary fractions would say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from tidemill.api.saturation_config import SaturationSettings
from tidemill.capacity.types import Cause, ReplicaLoad

ANALYZER = "saturation"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationReport:
    """What the replicas of one model show, all variants together."""

    replicas: int
    saturated: tuple[str, ...]  # names of saturated replicas, sorted
    average_spare_kv: Decimal  # over non-saturated replicas; 0 when there are none
    average_spare_queue: Decimal
    up: Cause | None  # why to grow; None when there is spare enough
    down_safe: bool  # one replica less would still leave spare enough
    settings: SaturationSettings

    @property
    def numbers(self) -> Mapping[str, str]:
        settings = self.settings
        return {
            "replicas": str(self.replicas),
            "saturatedReplicas": str(len(self.saturated)),
            "averageSpareKv": show(self.average_spare_kv),
            "averageSpareQueue": show(self.average_spare_queue),
            "kvCacheThreshold": str(settings.kv_cache_threshold),
            "queueLengthThreshold": str(settings.queue_length_threshold),
            "kvSpareTrigger": str(settings.kv_spare_trigger),
            "queueSpareTrigger": str(settings.queue_spare_trigger),
        }


def analyze(loads: Sequence[ReplicaLoad], settings: SaturationSettings) -> SaturationReport | None:
    """The report for one model; None when no replica reports, because then nothing is known.

    A replica is saturated when its KV use or its queue has reached the threshold. Spare is the distance
    of the others to their thresholds. Formulas: docs/autoscaler.md, "Saturation by percentage".
    """
    if not loads:
        return None
    kv_limit, queue_limit = settings.kv_cache_threshold, settings.queue_length_threshold
    saturated = sorted(
        load.replica for load in loads if load.kv_usage >= kv_limit or load.queue_length >= queue_limit
    )
    others = [load for load in loads if load.kv_usage < kv_limit and load.queue_length < queue_limit]
    count = len(others)
    kv_load = sum((load.kv_usage for load in others), Decimal())
    queue_load = sum((load.queue_length for load in others), Decimal())
    kv_spare, queue_spare = count * kv_limit - kv_load, count * queue_limit - queue_load
    up: Cause | None = None
    if not count:
        up = Cause.ALL_SATURATED
    elif kv_spare < settings.kv_spare_trigger * count:
        up = Cause.KV_SPARE
    elif queue_spare < settings.queue_spare_trigger * count:
        up = Cause.QUEUE_SPARE
    # With one replica less, its load spread over the others: limit - load / (count - 1) >= trigger.
    down_safe = (
        count >= 2
        and kv_load <= (kv_limit - settings.kv_spare_trigger) * (count - 1)
        and queue_load <= (queue_limit - settings.queue_spare_trigger) * (count - 1)
    )
    return SaturationReport(
        replicas=len(loads),
        saturated=tuple(saturated),
        average_spare_kv=kv_spare / count if count else Decimal(),
        average_spare_queue=queue_spare / count if count else Decimal(),
        up=up,
        down_safe=down_safe,
        settings=settings,
    )


def show(value: Decimal) -> str:
    """A number for people: at most four decimals."""
    return f"{value:.4f}".rstrip("0").rstrip(".") if value else "0"
