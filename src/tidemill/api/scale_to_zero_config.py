"""`wva-model-scale-to-zero-config`: which models may sleep, and after how long without a request.

Entries are YAML: `default`, or any name with `model_id`. As with thresholds, the most specific wins field
by field, and the local map lies over the global one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tidemill.api.durations import parse_duration
from tidemill.api.layers import LayerMap, read_layers
from tidemill.api.problem import Problem


def _duration(value: Any) -> Any:
    return parse_duration(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleToZeroSettings:
    """In force for one model; `retention` in seconds."""

    enabled: bool = False
    retention: float = 600.0


class ScaleToZeroLayer(BaseModel):
    """One entry of the map, as written."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    enable_scale_to_zero: bool | None = None
    retention_period: Annotated[float | None, BeforeValidator(_duration), Field(gt=0)] = None
    model_id: Annotated[str | None, Field(min_length=1)] = None

    def over(self, base: ScaleToZeroSettings) -> ScaleToZeroSettings:
        enabled, retention = self.enable_scale_to_zero, self.retention_period
        return ScaleToZeroSettings(
            enabled=base.enabled if enabled is None else enabled,
            retention=base.retention if retention is None else retention,
        )


ScaleToZeroMap = LayerMap[ScaleToZeroLayer]


def read_scale_to_zero_map(
    data: Mapping[str, str], *, object_name: str, last_good: ScaleToZeroMap | None = None
) -> tuple[ScaleToZeroMap, list[Problem]]:
    """See `read_layers`."""

    def check(entry: str, layer: ScaleToZeroLayer) -> Problem | None:
        if entry == "default" or layer.model_id is not None:
            return None
        return Problem(object_name, f"{entry}.model_id", "", "is required in every entry but default")

    return read_layers(ScaleToZeroLayer, data, object_name=object_name, last_good=last_good, check=check)


def resolve_scale_to_zero(maps: Iterable[ScaleToZeroMap], *, model: str, enabled: bool) -> ScaleToZeroSettings:
    """Merge the layers of `maps` (global first) for one model, over WVA_SCALE_TO_ZERO (`enabled`). Of two
    entries for one model the first by name counts."""
    settings = ScaleToZeroSettings(enabled=enabled)
    for source in maps:
        if (default := source.layers.get("default")) is not None:
            settings = default.over(settings)
        mine = [source.layers[e] for e in sorted(source.layers) if source.layers[e].model_id == model]
        if mine:
            settings = mine[0].over(settings)
    return settings
