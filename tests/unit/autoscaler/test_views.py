"""What is read of objects, where the wire has more than one form of it."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.autoscaler.views import deployment_view, leader_worker_set_view, pod_view

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


class TestLeaderWorkerSet:
    """One replica is a group of pods."""

    def group(self, **template: Any) -> dict[str, Any]:
        def pod(gpus: int, **labels: str) -> dict[str, Any]:
            limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
            return {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "vllm", "resources": {"limits": limits}}]},
            }

        group = {"size": 4, "workerTemplate": pod(2, **{"llm-d.ai/role": "decode"}), **template}
        if "leader" in template:
            group["leaderTemplate"] = pod(template["leader"], **{"llm-d.ai/role": "prefill"})
        return {
            "metadata": {"name": "x", "namespace": "n", "uid": "u"},
            "spec": {"replicas": 3, "leaderWorkerTemplate": group},
        }

    @pytest.mark.parametrize(
        ("template", "gpus", "role"),
        [
            ({}, 8, "decode"),  # the leader is as the workers are
            ({"leader": 1}, 7, "prefill"),
            ({"leader": 1, "size": None}, 1, "prefill"),
            ({"leader": 0}, 6, "prefill"),
            ({"leader": 0, "size": 1}, None, "prefill"),
        ],
    )
    def test_it_has_the_devices_of_all_and_the_role_of_its_leader(
        self, template: dict[str, Any], gpus: int | None, role: str
    ) -> None:
        view = leader_worker_set_view(self.group(**template))
        assert (view.replicas, view.gpus, view.role.value) == (3, gpus, role)
        assert str(view.ref) == "LeaderWorkerSet n/x"
