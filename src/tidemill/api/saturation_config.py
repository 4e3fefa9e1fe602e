"""`wva-saturation-scaling-config`: how one model is scaled, in layers from built-in default to one model in one
namespace.

Each entry of the map is one layer: `default`, one per accelerator, one per (model_id, namespace), and one for each
latency class, named as the class. Validation has two parts: a field by itself when the map is read, and the rules
between fields after merging, because only the merged result shows whether a layer breaks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from tidemill.api.durations import parse_duration
from tidemill.api.engine_presets import engine_presets
from tidemill.api.layers import LayerMap, read_layers
from tidemill.api.problem import Problem

TOKENS, THROUGHPUT, QUEUEING_MODEL = "saturation", "throughput", "queueing-model"
AnalyzerName = Literal["saturation", "throughput", "queueing-model"]
LATENCY_CLASSES = ("interactive", "standard", "batch")


def _decimal(value: Any) -> Any:
    # YAML gives binary floats; going through their text keeps 0.8 exactly 0.8.
    return Decimal(str(value)) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _seconds(value: Any) -> Any:
    return parse_duration(value) if isinstance(value, str) else value


def _known_preset(value: str) -> str:
    known = sorted({preset.model for preset in engine_presets().values()})
    if value not in known:
        raise ValueError(f"must be one of {', '.join(known)}")
    return value


Fraction = Annotated[Decimal, BeforeValidator(_decimal), Field(ge=0, le=1, allow_inf_nan=False)]
Level = Annotated[Decimal, BeforeValidator(_decimal), Field(ge=0, allow_inf_nan=False)]
Threshold = Annotated[Decimal, BeforeValidator(_decimal), Field(gt=0, le=1, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
RoleRatio = Annotated[
    tuple[tuple[Literal["prefill", "decode", "encode"], Count], ...],
    BeforeValidator(lambda value: tuple(value.items()) if isinstance(value, dict) else value),
    Field(min_length=2),
]


class AnalyzerEntry(BaseModel):
    """One of `analyzers`: it votes when `enabled`. `score` is taken because upstream's configurations have it, and
    decides nothing: votes are not weighed against each other, the largest need binds."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore")

    name: Annotated[AnalyzerName, Field(alias="name")]
    enabled: bool = True
    score: Level = Decimal(1)
    scale_up_threshold: Threshold | None = None
    scale_down_boundary: Threshold | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationSettings:
    """In force for one model. Decimals, so that a value at its threshold compares exactly.

    `analyzer_name` is empty for percentages (V1), "saturation" for tokens (V2). Targets are in seconds, for
    `target_percentile` per cent of requests (0 is the mean). Steps and windows (seconds) bound how fast a decision
    moves where this autoscaler moves the replicas itself.
    """

    kv_cache_threshold: Decimal = Decimal("0.80")
    queue_length_threshold: Decimal = Decimal(5)
    kv_spare_trigger: Decimal = Decimal("0.10")
    queue_spare_trigger: Decimal = Decimal(3)
    analyzer_name: str = ""
    scale_up_threshold: Decimal = Decimal("0.85")
    scale_down_boundary: Decimal = Decimal("0.70")
    priority: Decimal = Decimal(1)
    analyzers: tuple[AnalyzerEntry, ...] | None = None
    latency_class: str | None = None
    ttft_target: float | None = None
    itl_target: float | None = None
    target_percentile: float = 0.0
    preset: str | None = None  # published step times that the queueing model begins with, by model
    role_ratio: tuple[tuple[str, int], ...] | None = None  # replicas by role
    scale_up_step: int | None = None
    scale_down_step: int | None = None
    scale_up_window: float = 0.0
    scale_down_window: float = 0.0

    @property
    def has_latency_target(self) -> bool:
        return self.ttft_target is not None or self.itl_target is not None

    @property
    def by_percentage(self) -> bool:
        """Whether percentages decide (V1): nothing else was asked for."""
        return not self.analyzer_name and self.analyzers is None and not self.has_latency_target

    def voting(self) -> dict[str, tuple[Decimal, Decimal]]:
        """Analyzers that are asked, each with its thresholds for up and down. Without a list it is tokens; a
        latency target asks the queueing model too."""
        own = (self.scale_up_threshold, self.scale_down_boundary)
        if self.analyzers is None:
            found = {TOKENS: own}
        else:
            found = {
                entry.name: (
                    entry.scale_up_threshold or self.scale_up_threshold,
                    entry.scale_down_boundary or self.scale_down_boundary,
                )
                for entry in self.analyzers
                if entry.enabled
            }
        if self.has_latency_target:
            found.setdefault(QUEUEING_MODEL, own)
        return found

    @property
    def stand_ins(self) -> frozenset[str]:
        """Analyzers that nobody named, of those that are asked: they count while no other says anything."""
        return frozenset({TOKENS}) if self.analyzers is None and self.has_latency_target else frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """What holds for all models at once, from the entry `default` of the global map. `time_limit` in seconds."""

    limited: bool = False
    optimizer: Literal["exact", "greedy"] = "exact"
    time_limit: float = 2.0


class SaturationLayer(BaseModel):
    """One entry of the map, as written. Targets are in milliseconds."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore")

    kv_cache_threshold: Fraction | None = None
    queue_length_threshold: Level | None = None
    kv_spare_trigger: Fraction | None = None
    queue_spare_trigger: Level | None = None
    analyzer_name: Literal["", "saturation"] | None = None
    scale_up_threshold: Threshold | None = None
    scale_down_boundary: Threshold | None = None
    priority: Level | None = None
    analyzers: tuple[AnalyzerEntry, ...] | None = None
    latency_class: Literal["interactive", "standard", "batch"] | None = None
    ttft_target: Milliseconds | None = None
    itl_target: Milliseconds | None = None
    target_percentile: Annotated[float, Field(ge=0, lt=100, allow_inf_nan=False)] | None = None
    preset: Annotated[str, AfterValidator(_known_preset)] | None = None
    role_ratio: RoleRatio | None = None
    scale_up_step: Count | None = None
    scale_down_step: Count | None = None
    scale_up_window: Seconds | None = None
    scale_down_window: Seconds | None = None
    enable_limiter: bool | None = None
    optimizer: Literal["exact", "greedy"] | None = None
    optimizer_time_limit: Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=8)] | None = None
    model_id: Annotated[str | None, Field(alias="model_id", min_length=1)] = None
    namespace: Annotated[str | None, Field(alias="namespace", min_length=1)] = None
    accelerator: Annotated[str | None, Field(alias="accelerator", min_length=1)] = None

    def over(self, base: SaturationSettings) -> SaturationSettings:
        """`base` with the fields that this layer holds."""
        changes: dict[str, Any] = {}
        for name in _LAYERED:
            if (value := getattr(self, name)) is not None:
                changes[name] = value / 1000 if name in _TARGETS else value
        return replace(base, **changes)


_TARGETS = frozenset({"ttft_target", "itl_target"})
_LAYERED = tuple(field.name for field in fields(SaturationSettings))

SaturationMap = LayerMap[SaturationLayer]


def read_saturation_map(
    data: Mapping[str, str], *, object_name: str, last_good: SaturationMap | None = None
) -> tuple[SaturationMap, list[Problem]]:
    """See `read_layers`. An entry that is wrong whatever lies below it is refused at once."""

    def check(entry: str, layer: SaturationLayer) -> Problem | None:
        if entry in LATENCY_CLASSES:
            if layer.ttft_target is None and layer.itl_target is None:
                return Problem(object_name, entry, "", "a latency class must have ttftTarget or itlTarget")
            return None
        for rule in _RULES:
            if getattr(layer, rule.low) is not None and getattr(layer, rule.high) is not None:
                broken = rule.broken(layer.over(SaturationSettings()), layer)
                if broken:
                    return _refused(object_name, entry, broken)
        return None

    return read_layers(SaturationLayer, data, object_name=object_name, last_good=last_good, check=check)


def _applying(
    source: SaturationMap, *, model: str, namespace: str, accelerator: str
) -> Iterator[tuple[str, SaturationLayer]]:
    """Layers that apply, least specific first. Entries of one rank are taken in order of name."""
    ranks: list[list[tuple[str, SaturationLayer]]] = [[], [], []]
    for name in sorted(source.layers):
        layer = source.layers[name]
        if name in LATENCY_CLASSES:
            continue
        if layer.model_id is not None or layer.namespace is not None:
            if layer.model_id in (None, model) and layer.namespace in (None, namespace):
                ranks[2].append((name, layer))
        elif name == "default":
            ranks[0].append((name, layer))
        elif (layer.accelerator or name) == accelerator:
            ranks[1].append((name, layer))
    # An override for model and namespace is more specific than one for either alone.
    ranks[2].sort(key=lambda item: (item[1].model_id is not None, item[1].namespace is not None))
    for rank in ranks:
        yield from rank


def resolve_saturation(
    maps: Iterable[SaturationMap], *, model: str, namespace: str, accelerator: str
) -> tuple[SaturationSettings, list[Problem]]:
    """Merge the layers of `maps` (global first, namespace-local after it) for one model.

    A layer that breaks a rule of the merged result is left out and reported; what was tuned below
    it stays in force.
    """
    settings, problems = SaturationSettings(), []
    maps = list(maps)
    chosen: tuple[SaturationMap, str] | None = None
    for source in maps:
        for entry, layer in _applying(source, model=model, namespace=namespace, accelerator=accelerator):
            merged = layer.over(settings)
            if broken := next((b for rule in _RULES if (b := rule.broken(merged, layer))), None):
                problems.append(_refused(source.object, entry, broken))
            else:
                settings = merged
                chosen = (source, entry) if layer.latency_class is not None else chosen
    if chosen is not None:
        settings, unknown = _with_class(settings, maps)
        if unknown:
            field = f"{chosen[1]}.latencyClass"
            problems.append(Problem(chosen[0].object, field, settings.latency_class or "", unknown))
    return settings, problems


def resolve_fleet(source: SaturationMap | None, *, limited: bool) -> FleetSettings:
    """From the global map; `limited` is WVA_LIMITED_MODE."""
    layer = None if source is None else source.layers.get("default")
    if layer is None:
        return FleetSettings(limited=limited)
    default = FleetSettings()
    return FleetSettings(
        limited=limited or bool(layer.enable_limiter),
        optimizer=layer.optimizer or default.optimizer,
        time_limit=layer.optimizer_time_limit or default.time_limit,
    )


def _with_class(settings: SaturationSettings, maps: Iterable[SaturationMap]) -> tuple[SaturationSettings, str]:
    """The targets of the latency class where the model has none of its own, and what is wrong with the class."""
    assert settings.latency_class is not None
    targets = SaturationSettings()
    found = [source.layers[settings.latency_class] for source in maps if settings.latency_class in source.layers]
    for layer in found:
        targets = layer.over(targets)
    if not found:
        return settings, f"there is no entry {settings.latency_class!r} with the targets of this class"
    own = settings.has_latency_target
    return replace(
        settings,
        ttft_target=settings.ttft_target or targets.ttft_target,
        itl_target=settings.itl_target or targets.itl_target,
        target_percentile=settings.target_percentile if own else targets.target_percentile,
    ), ""


@dataclass(frozen=True, slots=True)
class _Rule:
    """`low` must not be above `high`, or, when `strictly`, must be below it."""

    low: str
    high: str
    strictly: bool

    def broken(self, merged: SaturationSettings, layer: SaturationLayer) -> tuple[str, Decimal, str] | None:
        low, high = getattr(merged, self.low), getattr(merged, self.high)
        if low < high or (low == high and not self.strictly):
            return None
        field, value = (self.high, high) if getattr(layer, self.high) is not None else (self.low, low)
        lower = f"{to_camel(self.low)} ({low})"
        if self.strictly:
            return to_camel(field), value, f"{lower} must be below {to_camel(self.high)} ({high})"
        return to_camel(field), value, f"{to_camel(self.high)} ({high}) must not be below {lower}"


_RULES = (
    _Rule("kv_spare_trigger", "kv_cache_threshold", strictly=False),
    _Rule("scale_down_boundary", "scale_up_threshold", strictly=True),
)


def _refused(object_name: str, entry: str, broken: tuple[str, Decimal, str]) -> Problem:
    field, value, rule = broken
    return Problem(object_name, f"{entry}.{field}", str(value), rule)
