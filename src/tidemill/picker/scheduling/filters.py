"""Filters: which candidates stay in a profile."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from tidemill.api.inference import ROLE_LABEL
from tidemill.api.model import StrictModel
from tidemill.picker.scheduling.cycle import Cycle
from tidemill.picker.scheduling.plugin import Filter

_DECODE = frozenset({"decode", "prefill-decode", "both", "encode-prefill-decode"})
_PREFILL = frozenset({"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"})
_ENCODE = frozenset({"encode", "encode-prefill", "encode-prefill-decode"})


def _by_label(cycle: Cycle, key: str, allowed: frozenset[str], *, unlabelled: bool) -> NDArray[np.bool_]:
    def fits(labels: Any) -> bool:
        value = labels.get(key)
        return unlabelled if value is None else value in allowed

    return np.fromiter((fits(e.labels) for e in cycle.endpoints), dtype=np.bool_, count=len(cycle))


class DecodeFilter(Filter):
    """Endpoints whose role includes decode; those without a role do."""

    def keep(self, cycle: Cycle) -> NDArray[np.bool_]:
        return _by_label(cycle, ROLE_LABEL, _DECODE, unlabelled=True)


class PrefillFilter(Filter):
    def keep(self, cycle: Cycle) -> NDArray[np.bool_]:
        return _by_label(cycle, ROLE_LABEL, _PREFILL, unlabelled=False)


class EncodeFilter(Filter):
    def keep(self, cycle: Cycle) -> NDArray[np.bool_]:
        return _by_label(cycle, ROLE_LABEL, _ENCODE, unlabelled=False)


class ByLabel(Filter):
    """Endpoints whose label has one of the values."""

    label: Annotated[str, Field(min_length=1)]
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False

    def keep(self, cycle: Cycle) -> NDArray[np.bool_]:
        return _by_label(cycle, self.label, frozenset(self.valid_values), unlabelled=self.allows_no_label)


class Requirement(StrictModel):
    key: Annotated[str, Field(min_length=1)]
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _values_fit(self) -> Requirement:
        if (self.operator in ("In", "NotIn")) != bool(self.values):
            raise ValueError(
                f"values must be given for In and NotIn, and only for those (operator {self.operator})"
            )
        return self

    def matches(self, value: str | None) -> bool:
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None


class LabelSelectorFilter(Filter):
    """Endpoints whose labels match a Kubernetes label selector; an empty one matches all."""

    match_labels: Annotated[dict[str, str], Field(default_factory=dict)]
    match_expressions: tuple[Requirement, ...] = ()

    def keep(self, cycle: Cycle) -> NDArray[np.bool_]:
        def fits(labels: Any) -> bool:
            return all(labels.get(k) == v for k, v in self.match_labels.items()) and all(
                requirement.matches(labels.get(requirement.key)) for requirement in self.match_expressions
            )

        return np.fromiter((fits(e.labels) for e in cycle.endpoints), dtype=np.bool_, count=len(cycle))


class LoraAffinityFilter(Filter):
    """Endpoints that have the adapter, else those with room for it, else all. With probability 1 - `threshold`
    those with room are preferred, so that a hot adapter spreads."""

    threshold: Annotated[float, Field(ge=0, le=1)] = 0.999

    def keep(self, cycle: Cycle) -> NDArray[np.bool_]:
        adapter = cycle.request.model
        has, room = np.zeros(len(cycle), dtype=np.bool_), np.zeros(len(cycle), dtype=np.bool_)
        for position, row in enumerate(cycle.rows.tolist()):
            lora = cycle.load.lora[row]
            if lora is not None:
                loaded = lora.running | lora.waiting
                has[position] = adapter in loaded
                room[position] = adapter not in loaded and len(loaded) < lora.max
        first, second = (has, room) if cycle.rng.random() < self.threshold else (room, has)
        for wanted in (first, second):
            if wanted.any():
                return wanted
        return np.ones(len(cycle), dtype=np.bool_)


class UtilizationFilter(Filter):
    """Endpoints under both limits; all when none is, because a full fleet must still serve."""

    queue_depth_threshold: Annotated[float, Field(ge=0)] = 5
    kv_cache_util_threshold: Annotated[float, Field(gt=0, le=1)] = 0.8

    def keep(self, cycle: Cycle) -> NDArray[np.bool_]:
        # A comparison with NaN is false: what is not known is not under a limit.
        under = (cycle.waiting < self.queue_depth_threshold) & (cycle.kv_usage < self.kv_cache_util_threshold)
        return under if under.any() else np.ones(len(cycle), dtype=np.bool_)


class PrefixCacheAffinityFilter(Filter):
    """Endpoints that have cached most of the prompt, unless the best of them would begin to answer later than
    the best other by more than `maxTTFTPenaltyMs`. The time to first token is estimated as the tokens in
    flight divided by `prefillTokensPerSecond`."""

    affinity_threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    max_ttft_penalty_ms: Annotated[float, Field(ge=0, alias="maxTTFTPenaltyMs")] = 18_000.0
    prefill_tokens_per_second: Annotated[float, Field(gt=0)] = 15_928.0
    exploration_probability: Annotated[float, Field(ge=0, le=1)] = 0.0

    def keep(self, cycle: Cycle) -> NDArray[np.bool_]:
        everyone = np.ones(len(cycle), dtype=np.bool_)
        total = cycle.blocks.total
        if not total or (self.exploration_probability and cycle.rng.random() < self.exploration_probability):
            return everyone
        sticky = cycle.matched / total >= self.affinity_threshold
        if not sticky.any() or sticky.all():
            return everyone
        ttft_ms = cycle.in_flight_tokens / self.prefill_tokens_per_second * 1000
        penalty = ttft_ms[sticky].min() - ttft_ms[~sticky].min()
        return everyone if penalty > self.max_ttft_penalty_ms else sticky


FILTERS: dict[str, type[Any]] = {
    "decode-filter": DecodeFilter,
    "prefill-filter": PrefillFilter,
    "encode-filter": EncodeFilter,
    "by-label": ByLabel,
    "by-label-selector": LabelSelectorFilter,
    "label-selector-filter": LabelSelectorFilter,
    "lora-affinity-filter": LoraAffinityFilter,
    "utilization-filter": UtilizationFilter,
    "prefix-cache-affinity-filter": PrefixCacheAffinityFilter,
}
