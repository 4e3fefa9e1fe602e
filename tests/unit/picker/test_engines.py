"""What each engine's exposition text says, and what it leaves out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.picker.load import Lora, Reading
from tidemill.picker.telemetry.engines import ENGINES, Extractor, engine_named, missing


def read(text: str, engine: str = "") -> Reading | None:
    return Extractor(engine_named(engine)).read(text.encode())


VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
process_start_time_seconds 1.7e9
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VLLM, {"waiting": 2, "running": 3, "kv_usage": 0.25, "kv_tokens": 16_000, "started": 1.7e9,
                "models": frozenset({"m"})}),
        ("vllm:gpu_cache_usage_perc 0.9\n", {"kv_usage": 0.9}),
        ("vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.3\n", {"kv_usage": 0.3}),
        ('vllm:kv_cache_usage_perc{engine="0"} 9.75e-06\n', {"kv_usage": 0.00000975}),
        ("vllm:num_requests_waiting 1\n", {"waiting": 1}),
        ("vllm:num_requests_waiting NaN\nvllm:num_requests_running 2\n", {"running": 2}),
        ("vllm:num_requests_waiting -1\nvllm:num_requests_running 2\n", {"running": 2}),
        # One process with data parallelism: add up, and the mean of the caches.
        ('vllm:num_requests_waiting{engine="0"} 1\nvllm:num_requests_waiting{engine="1"} 4\n'
         'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.6\n',
         {"waiting": 5, "kv_usage": 0.4}),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None",kv_cache_size_tokens="640"} 1\n'
         "vllm:num_requests_waiting 0\n", {"waiting": 0, "kv_tokens": 640}),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\nvllm:num_requests_waiting 0\n',
         {"waiting": 0}),
        # Ranks of one model repeat it; a data parallel rank is another engine.
        ('sglang:num_queue_reqs{tp_rank="0",dp_rank="0"} 3\nsglang:num_queue_reqs{tp_rank="1",dp_rank="0"} 3\n'
         'sglang:num_queue_reqs{tp_rank="0",dp_rank="1"} 2\nsglang:token_usage{tp_rank="0"} 0.5\n'
         'sglang:cache_config_info{page_size="64",num_pages="100"} 1\n',
         {"waiting": 5, "kv_usage": 0.5, "kv_tokens": 6400}),
        ('sglang:num_queue_reqs{priority=""} 3\nsglang:num_queue_reqs{priority="1"} 2\n'
         'sglang:num_queue_reqs{priority="2"} 1\n', {"waiting": 3}),
        ("trtllm_num_requests_waiting 6\ntrtllm_num_requests_running 2\ntrtllm_kv_cache_utilization 0.5\n"
         "trtllm_kv_cache_tokens_per_block 32\ntrtllm_kv_cache_max_blocks 10\n",
         {"waiting": 6, "running": 2, "kv_usage": 0.5, "kv_tokens": 320}),
        ('nv_trt_llm_request_metrics{request_type="waiting",model="tensorrt_llm",version="1"} 6\n'
         'nv_trt_llm_request_metrics{request_type="context",model="tensorrt_llm",version="1"} 2\n'
         'nv_trt_llm_request_metrics{request_type="scheduled",model="tensorrt_llm",version="1"} 3\n'
         'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm"} 0.5\n'
         'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm"} 64\n'
         'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm"} 100\n',
         {"waiting": 6, "running": 3, "kv_usage": 0.5, "kv_tokens": 6400}),
        ('nv_inference_pending_request_count{model="a",version="1"} 4\n'
         'nv_inference_pending_request_count{model="b",version="1"} 3\n', {"waiting": 7}),
        ("tgi_queue_size 12\ntgi_batch_current_size 4\n", {"waiting": 12, "running": 4}),
    ],
)  # fmt: skip
def test_p28_names(text: str, expected: dict[str, Any]) -> None:
    found = read(text)
    assert found is not None
    wanted = Reading(**expected)
    for name in ("waiting", "running", "kv_tokens", "started", "models"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.kv_usage == (None if wanted.kv_usage is None else pytest.approx(wanted.kv_usage))


@pytest.mark.parametrize(
    "text", ["[]", "", "# HELP x\n", "python_gc_objects 5\n", "vllm:num_requests_waiting_by_x 5\n"]
)
def test_p28_what_is_no_metrics_is_no_reading(text: str) -> None:
    found = read(text)
    assert found is None or not found.has_numbers


def test_p28_two_engines_in_one_text() -> None:
    both = VLLM + "sglang:num_queue_reqs 9\n"
    assert read(both).waiting == 2  # type: ignore[union-attr]
    assert read(both, "sglang").waiting == 9  # type: ignore[union-attr]


def test_p28_what_is_missing_is_named() -> None:
    engine = engine_named("vllm")
    assert engine is not None
    found = read("vllm:num_requests_waiting 1\nvllm:num_requests_running 1\n")
    assert found is not None
    assert missing(engine, found) == ["KV usage (vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc)"]
    assert missing(engine, read(VLLM)) == []  # type: ignore[arg-type]  # and adapters are not missed


class TestP30:
    SERIES = (
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="a, b",waiting_lora_adapters=""} 1.7000001e9',
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters="c"} 1.7000009e9',
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="b",waiting_lora_adapters="c"} 1.7000005e9',
    )

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_the_latest_counts(self, order: tuple[int, ...]) -> None:
        text = VLLM + "\n".join(self.SERIES[i] for i in order) + "\n"
        assert read(text).lora == Lora(frozenset(), frozenset({"c"}), 2)  # type: ignore[union-attr]

    def test_names_are_trimmed(self) -> None:
        assert read(VLLM + self.SERIES[0] + "\n").lora == Lora(frozenset({"a", "b"}), frozenset(), 2)  # type: ignore[union-attr]

    @pytest.mark.parametrize("labels", ['max_lora="0"', 'max_lora=""', 'other="1"'])
    def test_without_a_size_it_is_unknown(self, labels: str) -> None:
        assert read(VLLM + f"vllm:lora_requests_info{{{labels}}} 1\n").lora is None  # type: ignore[union-attr]


def test_ps7_sleep() -> None:
    asleep = (
        VLLM + 'vllm:engine_sleep_state{sleep_state="awake"} 0\nvllm:engine_sleep_state{sleep_state="weights"} 1\n'
    )
    assert read(asleep).awake is False  # type: ignore[union-attr]
    assert read(VLLM).awake is True  # type: ignore[union-attr]


class TestReadingAgain:
    """The extractor looks where it found things last time; it must find them wherever they are."""

    def test_lines_move_appear_and_go(self) -> None:
        extractor = Extractor()
        filler = "".join(f'other_metric{{i="{i}"}} {i}\n' for i in range(3000))
        assert extractor.read(VLLM.encode()).waiting == 2  # type: ignore[union-attr]
        assert extractor.read((filler + VLLM).encode()).waiting == 2  # type: ignore[union-attr]
        assert extractor.read(VLLM.replace("} 2.0", "} 7.0").encode()).waiting == 7  # type: ignore[union-attr]
        without = "\n".join(line for line in VLLM.splitlines() if "kv_cache_usage" not in line) + "\n"
        assert extractor.read(without.encode()).kv_usage is None  # type: ignore[union-attr]
        # What was away is looked for again now and then.
        found = [extractor.read(VLLM.encode()) for _ in range(21)]
        assert found[-1].kv_usage == 0.25  # type: ignore[union-attr]

    def test_another_engine_takes_its_place(self) -> None:
        extractor = Extractor()
        assert extractor.read(VLLM.encode()) is not None
        assert extractor.read(b"# HELP x y\ntgi_queue_size 1\n") is None
        assert extractor.read(b"# HELP x y\ntgi_queue_size 1\n").waiting == 1  # type: ignore[union-attr]

    @given(st.lists(st.sampled_from(VLLM.splitlines(keepends=True)), max_size=30))
    def test_any_arrangement_reads_like_the_first_time(self, lines: list[str]) -> None:
        text = "# start\n" + "".join(dict.fromkeys(lines))
        again = Extractor(engine_named("vllm"))
        again.read(VLLM.encode())
        again._absent.clear()
        assert again.read(text.encode()) == Extractor(engine_named("vllm")).read(text.encode())


@given(st.binary(max_size=300), st.sampled_from([engine.name for engine in ENGINES]))
def test_any_bytes(text: bytes, engine: str) -> None:
    Extractor(engine_named(engine)).read(b"vllm:num_requests_waiting" + text)
    Extractor().read(text)
