"""Published step times, found by model and by what a cluster calls its accelerators."""

from __future__ import annotations

import pytest

from tidemill.api.engine_presets import engine_presets, preset_for
from tidemill.api.saturation_config import read_saturation_map


@pytest.mark.parametrize(
    ("model", "accelerator", "gpus", "name"),
    [
        ("llama-3.1-8b", "L40S", 1, "llama-3.1-8b/l40s"),
        ("llama-3.1-8b", "NVIDIA-H100-80GB-HBM3", 1, "llama-3.1-8b/h100"),
        ("llama-3.1-70b", "NVIDIA-H100-80GB-HBM3", 8, "llama-3.1-70b/h100x8"),
        ("llama-3.1-70b", "NVIDIA-H100-80GB-HBM3", 2, None),
        ("qwen3-32b", "nvidia-h200", 2, "qwen3-32b/h200"),
        ("qwen3-32b", "Gaudi-3", 2, None),
        ("qwen3-32b", "", 2, None),
    ],
)
def test_by_accelerator(model: str, accelerator: str, gpus: int, name: str | None) -> None:
    assert preset_for(model, accelerator, gpus) == (None if name is None else engine_presets()[name])


def test_a_configuration_names_what_there_is() -> None:
    read, problems = read_saturation_map(
        {"default": "ttftTarget: 500\npreset: llama-3.1-8b", "x": "model_id: m\npreset: gpt-2"}, object_name="cm"
    )
    assert read.layers["default"].preset == "llama-3.1-8b"
    (problem,) = problems
    assert problem.field == "x.preset"
    assert "must be one of llama-3.1-70b, llama-3.1-8b, qwen3-32b" in problem.rule
