"""The lists of the external metrics API, and what is said instead of one."""

from __future__ import annotations

import pytest

from tidemill.autoscaler.external_metrics import Refusal, discovery, metric_values, quantity
from tidemill.metrics.exporter import ExportedDecision

DECIDED = [ExportedDecision("b", "ns", "L40S", 3, 2), ExportedDecision("a", "ns", "A100", 5, 5)]


def values(metric: str = "wva_desired_replicas", selector: str = "") -> list[tuple[str, str]]:
    found = metric_values(DECIDED, namespace="ns", metric=metric, selector=selector, now="2026-01-01T00:00:00Z")
    return [(item["metricLabels"]["variant_name"], item["value"]) for item in found["items"]]


@pytest.mark.parametrize(
    ("selector", "variants"),
    [
        ("", ["a", "b"]),
        ("variant_name=b", ["b"]),
        ("variant_name in (a,b),accelerator_type!=A100", ["b"]),
        # As an HPA selects that was written for what Prometheus makes of the label.
        ("variant_name=a,exported_namespace=ns", ["a"]),
        ("variant_name=a,namespace=ns", ["a"]),
    ],
)
def test_the_selector_of_the_hpa(selector: str, variants: list[str]) -> None:
    assert [name for name, _ in values(selector=selector)] == variants


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("wva_desired_replicas", "3"),
        ("wva_optimized_replicas", "3"),
        ("wva_current_replicas", "2"),
        ("wva_desired_ratio", "1500m"),
    ],
)
def test_metrics(metric: str, value: str) -> None:
    assert values(metric, "variant_name=b") == [("b", value)]


@pytest.mark.parametrize(
    ("metric", "selector", "code", "words"),
    [
        ("inferno_desired", "", 404, "must be one of wva_desired_replicas"),
        ("wva_desired_replicas", "variant_name=x", 404, "ns matches 'variant_name=x'; there are a, b"),
        ("wva_desired_replicas", "a in (b", 400, "labelSelector: unable to parse requirement"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said(metric: str, selector: str, code: int, words: str) -> None:
    with pytest.raises(Refusal) as caught:
        values(metric, selector)
    assert caught.value.code == code
    assert words in caught.value.body()["message"]


def test_nothing_decided_is_not_zero() -> None:
    with pytest.raises(Refusal, match="none is decided for there"):
        metric_values([], namespace="ns", metric="wva_desired_replicas", selector="variant_name=a", now="")


@pytest.mark.parametrize(("value", "text"), [(3.0, "3"), (0.0, "0"), (1.5, "1500m"), (2 / 3, "667m"), (1.0, "1")])
def test_quantities(value: float, text: str) -> None:
    assert quantity(value) == text


def test_discovery() -> None:
    for path in ("/apis", "/apis/external.metrics.k8s.io", "/apis/external.metrics.k8s.io/v1beta1/"):
        assert discovery(path) is not None
    resources = discovery("/apis/external.metrics.k8s.io/v1beta1")
    assert resources is not None
    assert {r["name"] for r in resources["resources"]} >= {"wva_desired_replicas", "wva_desired_ratio"}
    assert discovery("/apis/apps") is None
