"""Step times of engines by model and accelerator, as published (data/README.md): what is known of an engine before
it has run."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePreset:
    """An engine on `gpus` accelerators of one kind. Times in seconds: a decoding step takes
    `decode_base + decode_per_sequence n + decode_per_sequence_token n c` for n sequences with c tokens of context
    each, a prompt of I tokens `prefill_base + prefill_per_token I`."""

    model: str  # short and lower case: llama-3.1-8b
    weights: str  # as its publisher names it: meta-llama/Meta-Llama-3.1-8B
    accelerator: str  # H100
    gpus: int
    decode_base: float
    decode_per_sequence: float
    decode_per_sequence_token: float
    prefill_base: float
    prefill_per_token: float


@cache
def engine_presets() -> Mapping[str, EnginePreset]:
    """By name, such as `llama-3.1-8b/l40s` (or with the GPU count where there are several)."""
    text = files("tidemill.api").joinpath("data", "aiconfigurator_0.12_fit.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    found: dict[str, EnginePreset] = {}
    for row in rows:
        weights, system, gpus = row["model"], row["system"], int(row["tp"])
        if (system, gpus) == ("l40s", 8):
            continue  # dominated by PCIe all-reduce; the fit is no prediction
        model = weights.rsplit("/", 1)[1].removeprefix("Meta-").lower()
        accelerator = system.removesuffix("_sxm").upper()
        alike = sum((r["model"], r["system"]) == (weights, system) for r in rows)
        found[f"{model}/{accelerator}".lower() + (f"x{gpus}" if alike > 1 else "")] = EnginePreset(
            model=model,
            weights=weights,
            accelerator=accelerator,
            gpus=gpus,
            decode_base=float(row["decode_alpha_ms"]) / 1e3,
            decode_per_sequence=float(row["decode_beta_ms_per_seq"]) / 1e3,
            decode_per_sequence_token=float(row["decode_gamma_ms_per_seq_token"]) / 1e3,
            prefill_base=float(row["prefill_gamma_ms"]) / 1e3,
            prefill_per_token=float(row["prefill_delta_ms_per_token"]) / 1e3,
        )
    return found


def preset_for(model: str, accelerator: str, gpus: int) -> EnginePreset | None:
    """The preset of a model on accelerators as a cluster names them (`NVIDIA-H100-80GB-HBM3`), if there is one."""
    name = accelerator.upper()
    alike = (preset for preset in engine_presets().values() if (preset.model, preset.gpus) == (model, gpus))
    return next((preset for preset in alike if preset.accelerator in name), None)
