"""`wva-saturation-scaling-config`: thresholds in layers, from built-in default to one model in one namespace.

Each entry of the map is one layer: `default`, one per accelerator, one per (model_id, namespace).
Validation has two parts: a field by itself when the map is read, and the rules between fields after
merging, because only the merged result shows whether a layer breaks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from tidemill.api.layers import LayerMap, read_layers
from tidemill.api.problem import Problem


def _decimal(value: Any) -> Any:
    # YAML gives binary floats; going through their text keeps 0.8 exactly 0.8.
    return Decimal(str(value)) if isinstance(value, int | float) and not isinstance(value, bool) else value


Fraction = Annotated[Decimal, BeforeValidator(_decimal), Field(ge=0, le=1, allow_inf_nan=False)]
Level = Annotated[Decimal, BeforeValidator(_decimal), Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationSettings:
    """Thresholds in force for one model. Decimals, so that a value at its threshold compares exactly."""

    kv_cache_threshold: Decimal = Decimal("0.80")
    queue_length_threshold: Decimal = Decimal(5)
    kv_spare_trigger: Decimal = Decimal("0.10")
    queue_spare_trigger: Decimal = Decimal(3)


class SaturationLayer(BaseModel):
    """One entry of the map, as written."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore")

    kv_cache_threshold: Fraction | None = None
    queue_length_threshold: Level | None = None
    kv_spare_trigger: Fraction | None = None
    queue_spare_trigger: Level | None = None
    model_id: Annotated[str | None, Field(alias="model_id", min_length=1)] = None
    namespace: Annotated[str | None, Field(alias="namespace", min_length=1)] = None
    accelerator: Annotated[str | None, Field(alias="accelerator", min_length=1)] = None

    def over(self, base: SaturationSettings) -> SaturationSettings:
        """`base` with the fields that this layer holds."""
        names = ("kv_cache_threshold", "queue_length_threshold", "kv_spare_trigger", "queue_spare_trigger")
        return SaturationSettings(
            **{n: getattr(base, n) if getattr(self, n) is None else getattr(self, n) for n in names}
        )


SaturationMap = LayerMap[SaturationLayer]


def read_saturation_map(
    data: Mapping[str, str], *, object_name: str, last_good: SaturationMap | None = None
) -> tuple[SaturationMap, list[Problem]]:
    """See `read_layers`. An entry that is wrong whatever lies below it is refused at once."""

    def check(entry: str, layer: SaturationLayer) -> Problem | None:
        if layer.kv_cache_threshold is None or layer.kv_spare_trigger is None:
            return None
        broken = _broken_rule(layer.over(SaturationSettings()), layer)
        return _refused(object_name, entry, broken) if broken else None

    return read_layers(SaturationLayer, data, object_name=object_name, last_good=last_good, check=check)


def _applying(
    source: SaturationMap, *, model: str, namespace: str, accelerator: str
) -> Iterator[tuple[str, SaturationLayer]]:
    """Layers that apply, least specific first. Entries of one rank are taken in order of name."""
    ranks: list[list[tuple[str, SaturationLayer]]] = [[], [], []]
    for name in sorted(source.layers):
        layer = source.layers[name]
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
    for source in maps:
        for entry, layer in _applying(source, model=model, namespace=namespace, accelerator=accelerator):
            merged = layer.over(settings)
            if broken := _broken_rule(merged, layer):
                problems.append(_refused(source.object, entry, broken))
            else:
                settings = merged
    return settings, problems


def _broken_rule(merged: SaturationSettings, layer: SaturationLayer) -> tuple[str, Decimal, str] | None:
    if merged.kv_cache_threshold >= merged.kv_spare_trigger:
        return None
    if layer.kv_cache_threshold is not None:
        field, value = "kvCacheThreshold", merged.kv_cache_threshold
    else:
        field, value = "kvSpareTrigger", merged.kv_spare_trigger
    rule = (
        f"kvCacheThreshold ({merged.kv_cache_threshold}) must not be below "
        f"kvSpareTrigger ({merged.kv_spare_trigger})"
    )
    return field, value, rule


def _refused(object_name: str, entry: str, broken: tuple[str, Decimal, str]) -> Problem:
    field, value, rule = broken
    return Problem(object_name, f"{entry}.{field}", str(value), rule)
