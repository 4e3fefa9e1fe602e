"""What a model server was started with, as far as it bounds its capacity: read from its pod template.

Takes `--key=value` and `--key value`, hyphens and underscores alike, and commands inside `sh -c "..."`. What is
not there has vLLM's default.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHELLS = frozenset({"sh", "bash", "/bin/sh", "/bin/bash"})
_CHUNKED_V1 = 8192
_CHUNKED_V0 = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """Defaults are vLLM's. What is not read one by one still tells whether two variants are made alike."""

    gpu_memory_utilization: str = "0.9"
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    num_gpu_blocks_override: int = 0
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 256
    max_model_len: int = 0
    enforce_eager: bool = False
    enable_chunked_prefill: bool = True
    v1: bool = True

    @property
    def batched_tokens(self) -> int:
        """Tokens of one step: as given, else by the engine's generation; without chunks a whole prompt must
        fit."""
        if self.max_num_batched_tokens:
            return self.max_num_batched_tokens
        if self.enable_chunked_prefill:
            return _CHUNKED_V1 if self.v1 else _CHUNKED_V0
        return max(self.max_model_len, _CHUNKED_V0)


_INTEGERS = frozenset(
    {
        "block_size", "tensor_parallel_size", "num_gpu_blocks_override", "max_num_batched_tokens", "max_num_seqs",
        "max_model_len",
    }
)  # fmt: skip
_TEXTS = frozenset({"gpu_memory_utilization", "kv_cache_dtype"})
_SWITCHES = frozenset({"enforce_eager", "enable_chunked_prefill"})


def engine_flags(pod_spec: Mapping[str, Any]) -> EngineFlags:
    """Flags of the model server in a pod template. A value that is no number counts as absent: the server will
    not start with it, and says so itself."""
    found: dict[str, Any] = {}
    containers: Sequence[Mapping[str, Any]] = pod_spec.get("containers") or ()
    for container in containers:
        for entry in container.get("env") or ():
            if entry.get("name") == "VLLM_USE_V1" and entry.get("value") == "0":
                found["v1"] = False
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        for name, value in _options([str(word) for word in words]):
            if name in _INTEGERS and value is not None and value.isdigit():
                found[name] = int(value)
            elif name in _TEXTS and value is not None:
                found[name] = value
            elif name in _SWITCHES:
                found[name] = value is None or value.lower() != "false"
            elif name.removeprefix("no_") in _SWITCHES:
                found[name.removeprefix("no_")] = False
    return EngineFlags(**found)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Options of a command line with their values; None for one without."""
    if len(words) >= 3 and words[0] in _SHELLS and words[1].startswith("-") and words[1].endswith("c"):
        try:
            words = shlex.split(words[2].replace("\\\n", " "), comments=True)
        except ValueError:
            return  # no shell would run it either
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        following = words[index + 1] if index + 1 < len(words) else "--"
        if equals:
            yield _plain(name), value
        else:
            yield _plain(name), None if following.startswith("--") else following


def _plain(name: str) -> str:
    return name.replace("-", "_")
