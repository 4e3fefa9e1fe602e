"""Which node takes a pod."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.kube.resources import Json
from tidemill.local.controllers.scheduler import MACHINE, devices_of, place


def node(name: str, gpus: int = 0, *, cordoned: bool = False, **labels: str) -> Json:
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus)} if gpus else {}},
    }


def pod(gpus: int = 0, **selector: str) -> Json:
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    return {"spec": {"containers": [{"name": "c", "resources": resources}], "nodeSelector": selector}}


@pytest.mark.parametrize(
    ("asks", "nodes", "there", "found"),
    [
        (pod(4), [], [], MACHINE),  # nothing to be counted
        (pod(2), [node("a", 4), node("b", 8)], [], "b"),
        (pod(2), [node("a", 4), node("b", 8)], [("b", pod(6))], "a"),
        (pod(2), [node("b", 4), node("a", 4)], [], "a"),
        (pod(2, gpu="h100"), [node("a", 8, gpu="l40s"), node("b", 2, gpu="h100")], [], "b"),
        (pod(), [node("a", 0)], [], "a"),
    ],
)
def test_it_fits(asks: Json, nodes: list[Json], there: list[tuple[str, Json]], found: str) -> None:
    assert place(asks, nodes, there) == (found, "")


def test_why_it_fits_nowhere() -> None:
    nodes = [node("a", 2), node("b", 8, cordoned=True), node("c", 8, gpu="l40s")]
    assert place(pod(4, gpu="h100"), [*nodes, node("d", 2, gpu="h100")], []) == (
        "",
        "0/4 nodes are available: 1 Insufficient nvidia.com/gpu, "
        "2 node(s) didn't match Pod's node affinity/selector, 1 node(s) were unschedulable.",
    )


@given(st.lists(st.integers(0, 8), max_size=5), st.lists(st.integers(0, 8), max_size=20))
def test_no_node_ever_has_more_than_it_can_take(sizes: list[int], asks: list[int]) -> None:
    nodes = [node(f"n{i}", size) for i, size in enumerate(sizes)]
    bound: list[tuple[str, Json]] = []
    for gpus in asks:
        name, why = place(pod(gpus), nodes, bound)
        assert bool(name) != bool(why)
        if name:
            bound.append((name, pod(gpus)))
    for i, size in enumerate(sizes):
        assert sum(devices_of(p)["nvidia.com/gpu"] for name, p in bound if name == f"n{i}") <= size
