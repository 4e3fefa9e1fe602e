"""What is read of objects, where the wire has more than one form of it."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.autoscaler.views import deployment_view, pod_view

SNAPSHOT = {"podsnapshot.gke.io/ps-name": "llama-after-warm-up"}


def pod(**metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "ns", "uid": "u", **metadata}, "spec": {}, "status": {}}


@pytest.mark.parametrize(
    ("metadata", "dual", "sleeping", "restored"),
    [
        ({}, "", False, False),
        ({"labels": {"dual-pods.llm-d.ai/dual": "p-dual-x"}}, "p-dual-x", False, False),
        ({"labels": {"dual-pods.llm-d.ai/sleeping": "true"}}, "", True, False),
        ({"labels": {"dual-pods.llm-d.ai/dual": "q", "dual-pods.llm-d.ai/sleeping": "false"}}, "q", False, False),
        ({"annotations": SNAPSHOT}, "", False, True),
    ],
)
def test_how_a_pod_starts(metadata: dict[str, Any], dual: str, sleeping: bool, restored: bool) -> None:
    found = pod_view(pod(**metadata))
    assert (found.dual, found.sleeping, found.restored) == (dual, sleeping, restored)


def test_a_template_names_the_snapshot_of_its_pods() -> None:
    def deployment(annotations: dict[str, str]) -> dict[str, Any]:
        template = {"metadata": {"annotations": annotations}, "spec": {}}
        return {"metadata": {"name": "d", "namespace": "ns"}, "spec": {"template": template}}

    assert deployment_view(deployment(SNAPSHOT)).restored
    assert not deployment_view(deployment({})).restored
