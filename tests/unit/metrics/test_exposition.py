from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tidemill.metrics.exposition import parse

WANTED = {"vllm:kv_cache_usage_perc", "vllm:num_requests_waiting"}


def test_reads_wanted_lines_only() -> None:
    text = """# HELP vllm:kv_cache_usage_perc x
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.25
vllm:kv_cache_usage_perc_other{model_name="m"} 9
vllm:num_requests_waiting 3 1700000000000
vllm:num_requests_waiting{a="} \\"quoted\\" \\n \\\\"} NaN # {trace="x"} 1
vllm:num_requests_waiting{broken="x} 1
vllm:num_requests_waiting{ok="1",} not-a-number
"""
    found = list(parse(text, WANTED))
    assert [(s.name, dict(s.labels)) for s in found] == [
        ("vllm:kv_cache_usage_perc", {"model_name": "m", "engine": "0"}),
        ("vllm:num_requests_waiting", {}),
        ("vllm:num_requests_waiting", {"a": '} "quoted" \n \\'}),
    ]
    assert found[1].value == 3
    assert math.isnan(found[2].value)


# The text parser of prometheus_client splits lines at characters that the format does not.
LINE_BREAKS = "\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not name.startswith("__") and name != "le"
)
values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=LINE_BREAKS), max_size=12)


@given(st.dictionaries(names, values, max_size=4), st.floats(allow_nan=False))
def test_agrees_with_the_reference(labels: dict[str, str], value: float) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("g", "help", list(labels), registry=registry)
    (gauge.labels(**labels) if labels else gauge).set(value)
    text = generate_latest(registry).decode()
    (expected,) = next(iter(text_string_to_metric_families(text))).samples
    (found,) = parse(text, {"g"})
    assert dict(found.labels) == expected.labels == labels
    assert found.value == expected.value
