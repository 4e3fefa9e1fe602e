"""Engines by model and accelerator, and start-up times from sim/data."""

from __future__ import annotations

import csv
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files

from tidemill.api.durations import parse_duration
from tidemill.api.engine_presets import engine_presets
from tidemill.sim.engine import BLOCK_TOKENS, EngineParameters

# Facts of the models' public configurations: bytes of weights and of KV cache per token, both 16 bit.
_WEIGHT_GB = {"llama-3.1-8b": 16.1, "llama-3.1-70b": 141.1, "qwen3-32b": 65.5}
_KV_LAYERS = {"llama-3.1-8b": 32, "llama-3.1-70b": 80, "qwen3-32b": 64}
_KV_BYTES_PER_LAYER = 2 * 8 * 128 * 2  # key and value, 8 KV heads of 128, 2 bytes
_MEMORY_GB = {"H100": 80, "A100": 80, "L40S": 48, "H200": 141}
_MEMORY_UTILIZATION = 0.9  # vLLM's default
_ACTIVATIONS_GB = 2.0  # per GPU, what profiling a step usually leaves out of the cache


@dataclass(frozen=True, slots=True)
class Preset:
    """An engine on `gpus` accelerators of one kind."""

    name: str
    model: str
    accelerator: str
    gpus: int
    parameters: EngineParameters


@cache
def presets() -> Mapping[str, Preset]:
    """By the name of its times (`api/engine_presets.py`), such as `llama-3.1-8b/l40s`."""
    return {
        name: Preset(
            name,
            times.weights,
            times.accelerator,
            times.gpus,
            EngineParameters(
                decode_base=times.decode_base,
                decode_per_sequence=times.decode_per_sequence,
                decode_per_sequence_token=times.decode_per_sequence_token,
                prefill_base=times.prefill_base,
                prefill_per_token=times.prefill_per_token,
                kv_blocks=kv_blocks(times.model, times.accelerator, times.gpus),
            ),
        )
        for name, times in engine_presets().items()
    }


def kv_blocks(model: str, accelerator: str, gpus: int) -> int:
    """Blocks of 16 tokens that fit beside the weights at vLLM's default memory utilization."""
    free_gb = gpus * (_MEMORY_GB[accelerator] * _MEMORY_UTILIZATION - _ACTIVATIONS_GB) - _WEIGHT_GB[model]
    return int(free_gb * 1e9 / (_KV_LAYERS[model] * _KV_BYTES_PER_LAYER * BLOCK_TOKENS))


class StartKind(StrEnum):
    HOT = "hot"  # woken from sleep, weights on the host
    SNAPSHOT = "snapshot"  # restored from a snapshot of a running pod
    WARM = "warm"  # launcher and image present, weights on the node
    COLD = "cold"  # everything to be fetched


_START_ROWS = {
    "FMA hot start (wake from sleep)": StartKind.HOT,
    "GKE pod snapshot restore": StartKind.SNAPSHOT,
    "FMA warm start (launcher present)": StartKind.WARM,
    "cold (weights downloaded)": StartKind.COLD,
}


@cache
def start_seconds() -> Mapping[StartKind, float]:
    """Seconds from pod to ready by kind of start."""
    return {
        _START_ROWS[row["start_type"]]: float(row["seconds"])
        for row in _rows("startup_delays.csv")
        if row["start_type"] in _START_ROWS
    }


@dataclass(frozen=True, slots=True)
class StartupMixture:
    """How often which kind of start happens; weights need not add up to 1.

    Around the time of its kind each start is spread by `spread` of it (a standard deviation; the one
    source that gives any says 30 s of 240 s).
    """

    weights: Mapping[StartKind, float]
    spread: float = 0.125

    def draw(self, rng: random.Random) -> float:
        """Seconds that one start takes."""
        kinds: Sequence[StartKind] = list(self.weights)
        (kind,) = rng.choices(kinds, weights=[self.weights[k] for k in kinds])
        mean = start_seconds()[kind]
        return max(0.1 * mean, rng.gauss(mean, self.spread * mean))


def parse_startup(text: str, rng: random.Random) -> float:
    """Seconds that one start takes: a duration such as `2s`, a kind such as `warm`, or a mixture of kinds with
    weights such as `hot=3,cold=1`, of which one start is drawn. Raises ValueError."""
    if text[:1].isdigit():
        return parse_duration(text)
    weights: dict[StartKind, float] = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        try:
            weights[StartKind(name.strip())] = float(weight or 1)
        except ValueError:
            kinds = ", ".join(StartKind)
            raise ValueError(f"{part!r} must be a duration, or one of {kinds} with an optional =WEIGHT") from None
    if any(weight < 0 for weight in weights.values()) or not any(weights.values()):
        raise ValueError(f"{text!r}: weights must not be negative, and one must be above 0")
    return StartupMixture(weights).draw(rng)


def _rows(name: str) -> list[dict[str, str]]:
    text = files("tidemill.sim").joinpath("data", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
