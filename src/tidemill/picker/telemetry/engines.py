"""From an engine's exposition text to a reading. Each engine has its own names, and each version leaves out some.

What is not there is None; what is NaN, negative or malformed is as if it were not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tidemill.metrics.exposition import Sample, parse
from tidemill.picker.load import Lora, Reading

# One rank of a model that is split over devices says the same as the others.
_SAME_IN_EACH = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
_VLLM_CACHE, _VLLM_LORA = "vllm:cache_config_info", "vllm:lora_requests_info"
_VLLM_SLEEP, _STARTED = "vllm:engine_sleep_state", "process_start_time_seconds"
_SGLANG_CACHE = "sglang:cache_config_info"
_TRT_REQUESTS, _TRT_BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"

Samples = Mapping[str, list[Sample]]


@dataclass(frozen=True, slots=True)
class Series:
    """A metric, or the part of one with a label of some value."""

    name: str
    label: str = ""
    value: str = ""

    def of(self, samples: Samples) -> list[Sample]:
        return [s for s in samples.get(self.name, ()) if not self.label or s.labels.get(self.label) == self.value]

    def __str__(self) -> str:
        return f'{self.name}{{{self.label}="{self.value}"}}' if self.label else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Names of one engine's metrics; of several for one quantity, the newest first. `required` are those that an
    engine of any version has, so that their absence is worth saying."""

    name: str
    waiting: tuple[Series, ...]
    running: tuple[Series, ...] = ()
    kv_usage: tuple[Series, ...] = ()
    kv_tokens: Callable[[Samples], int | None] = field(default=lambda samples: None)
    optional: tuple[str, ...] = ()
    names: tuple[str, ...] = field(init=False)  # of everything that is looked for

    def __post_init__(self) -> None:
        series = (s.name for s in (*self.waiting, *self.running, *self.kv_usage))
        object.__setattr__(self, "names", tuple(dict.fromkeys((*series, *self.optional, _STARTED))))

    @property
    def required(self) -> Mapping[str, tuple[Series, ...]]:
        wanted = {"waiting": self.waiting, "running": self.running, "KV usage": self.kv_usage}
        return {what: series for what, series in wanted.items() if series}

    def present(self, samples: Samples) -> bool:
        return any(s.name in samples for s in (*self.waiting, *self.running, *self.kv_usage))


def _cache_tokens(name: str, block: str, count: str) -> Callable[[Samples], int | None]:
    """Tokens of all caches of a process, from the labels of an info metric."""

    def tokens(samples: Samples) -> int | None:
        total = 0
        for sample in samples.get(name, ()):
            labels = sample.labels
            size = _whole(labels.get("kv_cache_size_tokens"))
            blocks, each = _whole(labels.get(count)), _whole(labels.get(block))
            if size is None and blocks is not None and each is not None:
                size = blocks * each
            total += size or 0
        return total or None

    return tokens


def _trtllm_tokens(samples: Samples) -> int | None:
    return _product(
        Series("trtllm_kv_cache_tokens_per_block").of(samples), Series("trtllm_kv_cache_max_blocks").of(samples)
    )


def _triton_tokens(samples: Samples) -> int | None:
    kind = "kv_cache_block_type"
    return _product(
        Series(_TRT_BLOCKS, kind, "tokens_per").of(samples), Series(_TRT_BLOCKS, kind, "max").of(samples)
    )


# In the order in which they are looked for where no label says which it is.
ENGINES: tuple[Engine, ...] = (
    Engine(
        name="vllm",
        waiting=(Series("vllm:num_requests_waiting"),),
        running=(Series("vllm:num_requests_running"),),
        kv_usage=(Series("vllm:kv_cache_usage_perc"), Series("vllm:gpu_cache_usage_perc")),
        kv_tokens=_cache_tokens(_VLLM_CACHE, "block_size", "num_gpu_blocks"),
        optional=(_VLLM_CACHE, _VLLM_LORA, _VLLM_SLEEP),
    ),
    Engine(
        name="sglang",
        waiting=(Series("sglang:num_queue_reqs"),),
        running=(Series("sglang:num_running_reqs"),),
        kv_usage=(Series("sglang:token_usage"),),
        kv_tokens=_cache_tokens(_SGLANG_CACHE, "page_size", "num_pages"),
        optional=(_SGLANG_CACHE,),
    ),
    Engine(
        name="trtllm-serve",
        waiting=(Series("trtllm_num_requests_waiting"),),
        running=(Series("trtllm_num_requests_running"),),
        kv_usage=(Series("trtllm_kv_cache_utilization"),),
        kv_tokens=_trtllm_tokens,
        optional=("trtllm_kv_cache_tokens_per_block", "trtllm_kv_cache_max_blocks"),
    ),
    Engine(
        name="triton-tensorrt-llm",
        waiting=(Series(_TRT_REQUESTS, "request_type", "waiting"),),
        running=(Series(_TRT_REQUESTS, "request_type", "scheduled"),),
        kv_usage=(Series(_TRT_BLOCKS, "kv_cache_block_type", "fraction"),),
        kv_tokens=_triton_tokens,
    ),
    Engine(name="triton", waiting=(Series("nv_inference_pending_request_count"),)),
    Engine(name="tgi", waiting=(Series("tgi_queue_size"),), running=(Series("tgi_batch_current_size"),)),
)
_BY_NAME = {engine.name: engine for engine in ENGINES}


def engine_named(name: str) -> Engine | None:
    return _BY_NAME.get(name)


class Extractor:
    """Reads one endpoint's text again and again. It looks only at the lines that it wants, and first where they
    were last time: a server's text has hundreds of lines, and its order does not change. Lines that say what they
    said last time are not parsed again: most never change."""

    def __init__(self, engine: Engine | None = None) -> None:
        self._given = engine
        self.engine = engine
        self._places: dict[str, int] = {}
        self._absent: set[str] = set()
        self._last: dict[str, tuple[bytes, list[Sample]]] = {}
        self._reads = 0

    def read(self, text: bytes) -> Reading | None:
        """A reading; None when the text holds nothing of a known engine."""
        if self.engine is None:
            self.engine = next((e for e in ENGINES if e.present(self._samples(text, e.names))), None)
            if self.engine is None:
                return None
        samples = self._samples(text, self.engine.names)
        if not self.engine.present(samples):
            # Another engine may have taken its place.
            self.engine = self._given
            return None
        return reading(self.engine, samples)

    def _samples(self, text: bytes, names: Iterable[str]) -> Samples:
        # What was absent is looked for in the whole text only now and then.
        self._reads += 1
        if self._reads % 20 == 1:
            self._absent.clear()
        found: dict[str, list[Sample]] = {}
        for name in names:
            if name in self._absent:
                continue
            block = self._block(text, name)
            last = self._last.get(name)
            if last is None or last[0] != block:
                samples = list(parse(block.decode("utf-8", "replace"), (name,)))
                last = self._last[name] = block, samples
            if last[1]:
                found[name] = last[1]
            else:
                self._absent.add(name)
        return found

    def _block(self, text: bytes, name: str) -> bytes:
        """The lines of one metric, which stand together."""
        needle = b"\n" + name.encode()
        place = self._places.get(name)
        start = -1
        if place is not None:
            start = text.find(needle, max(0, place - 2048), place + 4096)
        if start < 0:
            start = text.find(needle)
        # A longer name may begin like this one, and stand before it.
        while start >= 0 and text[start + len(needle) : start + len(needle) + 1] not in (b"{", b" "):
            start = text.find(needle, start + 1)
        if start < 0 and not text.startswith(needle[1:]):
            return b""
        # What was found may be a line in the middle of the block.
        while start >= 0:
            before = text.rfind(b"\n", 0, start)
            if not text.startswith(needle[1:], before + 1):
                break
            start = before
        self._places[name] = max(0, start)
        start += 1
        end = start
        while text.startswith(needle[1:], end):
            line_end = text.find(b"\n", end)
            if line_end < 0:
                end = len(text)
                break
            end = line_end + 1
        return text[start:end]


def reading(engine: Engine, samples: Samples) -> Reading:
    """What `samples` of `engine` say."""
    waiting = _first(engine.waiting, samples)
    running = _first(engine.running, samples)
    started = [s.value for s in samples.get(_STARTED, ()) if _sound(s.value)]
    return Reading(
        waiting=_sum(waiting),
        running=_sum(running),
        kv_usage=_mean(_first(engine.kv_usage, samples)),
        kv_tokens=engine.kv_tokens(samples),
        lora=_lora(samples.get(_VLLM_LORA, ())),
        awake=_awake(samples.get(_VLLM_SLEEP, ())),
        started=max(started, default=None),
        models=frozenset(name for s in (*waiting, *running) if (name := s.labels.get("model_name"))),
    )


def missing(engine: Engine, found: Reading) -> list[str]:
    """Quantities that every version of the engine has and this text does not, with the names looked for."""
    values = {"waiting": found.waiting, "running": found.running, "KV usage": found.kv_usage}
    return [
        f"{what} ({' or '.join(map(str, series))})"
        for what, series in engine.required.items()
        if values[what] is None
    ]


def _first(alternatives: Iterable[Series], samples: Samples) -> list[Sample]:
    """The samples of the newest name that has any, one for each engine: ranks of one engine repeat it."""
    for series in alternatives:
        found = [s for s in series.of(samples) if _sound(s.value)]
        if found:
            return _once(found)
    return []


def _once(samples: list[Sample]) -> list[Sample]:
    if len(samples) == 1:
        return samples
    # A total stands beside its parts by priority: the total counts.
    totals = [s for s in samples if not s.labels.get("priority")]
    distinct: dict[tuple[tuple[str, str], ...], Sample] = {}
    for sample in totals or samples:
        key = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in _SAME_IN_EACH))
        distinct.setdefault(key, sample)
    return list(distinct.values())


def _sound(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _sum(samples: list[Sample]) -> float | None:
    return sum(s.value for s in samples) if samples else None


def _mean(samples: list[Sample]) -> float | None:
    return min(1.0, sum(s.value for s in samples) / len(samples)) if samples else None


def _product(left: list[Sample], right: list[Sample]) -> int | None:
    if not left or not right or not _sound(left[0].value) or not _sound(right[0].value):
        return None
    return int(left[0].value * right[0].value) or None


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None


def _lora(samples: Iterable[Sample]) -> Lora | None:
    """The series that was true last: its value is a time."""
    newest = max((s for s in samples if _sound(s.value)), key=lambda s: s.value, default=None)
    if newest is None:
        return None
    most = _whole(newest.labels.get("max_lora"))
    if not most:
        return None
    return Lora(
        _names(newest.labels.get("running_lora_adapters")),
        _names(newest.labels.get("waiting_lora_adapters")),
        most,
    )


def _names(text: str | None) -> frozenset[str]:
    return frozenset(name for part in (text or "").split(",") if (name := part.strip()))


def _awake(samples: Iterable[Sample]) -> bool:
    """Whether the engine is awake, where it says so."""
    states = [s.value for s in samples if s.labels.get("sleep_state") == "awake"]
    return not states or any(value > 0 for value in states)
