"""LeaderWorkerSets as targets: a group is one replica, and its leader speaks for it."""

from __future__ import annotations

from functools import partial

import pytest
from tests.definitions import CRDS, define, scaled_object_crd
from tests.integration.fleet import NAMESPACE, SCALE, Fleet, Harness, running
from tests.polling import eventually

from tidemill.autoscaler.attribution import Ownership
from tidemill.autoscaler.world import SCALED_OBJECTS, World
from tidemill.kube.resources import LEADER_WORKER_SETS, PODS, Json, ObjectKey
from tidemill.local.cluster import LocalCluster
from tidemill.local.controllers.leaderworkerset import LeaderWorkerSetController, leader_worker_set_crd

TARGET = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "big"}
NAME = ObjectKey(NAMESPACE, "big")


@pytest.fixture
def fleet(wva: LocalCluster) -> Fleet:
    """So far without the kind."""
    return Fleet(wva.client)


async def groups(fleet: Fleet, replicas: int, size: int) -> list[str]:
    """A LeaderWorkerSet and the names of all its pods, each Ready."""
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    template: Json = {"spec": {"containers": [{"name": "vllm", "image": "none", "resources": limits}]}}
    spec = {"replicas": replicas, "leaderWorkerTemplate": {"size": size, "workerTemplate": template}}
    await define(fleet.client, leader_worker_set_crd())
    await fleet.client.create(LEADER_WORKER_SETS, {"metadata": {"name": "big"}, "spec": spec}, NAMESPACE)
    return await as_asked_for(fleet)


async def as_asked_for(fleet: Fleet) -> list[str]:
    """Let the controller of the kind do its work, and the pods become Ready."""
    controller = LeaderWorkerSetController(fleet.client)
    for _ in range(3):  # the leaders, their workers, the status
        await controller.reconcile(NAME)
        for pod in (await fleet.client.list(PODS, NAMESPACE)).items:
            if not (pod.get("status") or {}).get("podIP"):
                await fleet.set_ready(pod["metadata"]["name"], True, ip=f"10.1.0.{next(fleet._addresses)}")
    pods = (await fleet.client.list(PODS, NAMESPACE)).items
    return sorted(pod["metadata"]["name"] for pod in pods if pod["metadata"]["name"].startswith("big-"))


def decided(harness: Harness, name: str) -> bool:
    return harness.desired(name) is not None


async def test_w9_every_pod_of_a_group_exports_metrics_and_the_group_is_one_replica(fleet: Fleet) -> None:
    """Two groups of a leader and three workers, and all eight pods export."""
    names = await groups(fleet, 2, 4)
    assert len(names) == 8
    await fleet.variant("big", scaleTargetRef=TARGET)
    async with running(fleet.client) as harness:
        harness.source.put_all(names, 0.99, 50)
        harness.source.put_all(["big-0", "big-1"], 0.5, 1)
        await harness.cycle()
        assert harness.desired("big") == 2  # what the workers say would ask for more
        assert {target.pod for target in harness.source.targets} == {"big-0", "big-1"}
        world = harness.controller.world
        ((_, target),) = Ownership(world).variants.values()
        assert (target.replicas, target.gpus) == (2, 4)
        owner = Ownership(world).variant_of
        assert {pod.key.name for pod in world.pods.store if owner(pod) is not None} == {"big-0", "big-1"}


async def test_a_worker_with_the_label_of_the_variant_is_no_replica_either(fleet: Fleet) -> None:
    names = await groups(fleet, 1, 2)
    for name in names:
        await fleet.client.patch(PODS, name, {"metadata": {"labels": {"llm-d.ai/variant": "big"}}}, NAMESPACE)
    await fleet.variant("big", scaleTargetRef=TARGET)
    async with running(fleet.client) as harness:
        world = harness.controller.world
        owner = Ownership(world).variant_of
        assert [pod.key.name for pod in world.pods.store if owner(pod) is not None] == ["big-0"]


async def test_a_decision_is_written_to_its_scale_and_groups_follow(fleet: Fleet) -> None:
    names = await groups(fleet, 1, 2)
    await fleet.variant("big", scaleTargetRef=TARGET)
    async with running(fleet.client, **SCALE) as harness:
        harness.source.put_all(names, 0.95, 9)
        await harness.cycle()
        assert (await fleet.client.get(LEADER_WORKER_SETS, "big", NAMESPACE))["spec"]["replicas"] == 2
        assert await as_asked_for(fleet) == ["big-0", "big-0-1", "big-1", "big-1-1"]
        status = (await fleet.client.get(LEADER_WORKER_SETS, "big", NAMESPACE))["status"]
        assert (status["replicas"], status["readyReplicas"]) == (2, 2)
        assert (await fleet.condition("big", "TargetResolved"))["status"] == "True"
        await fleet.client.delete(LEADER_WORKER_SETS, "big", NAMESPACE)

        async def told() -> bool:
            condition = await fleet.condition("big", "Ready")
            return condition["message"] == "Target LeaderWorkerSet no longer exists"

        await eventually(told)


async def test_a33_kinds_that_come_later_and_go(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither KEDA nor LeaderWorkerSets at the start; then both; then KEDA's go. (Looked for more often here than
    every half minute.)"""
    monkeypatch.setattr("tidemill.autoscaler.controller.World", partial(World, absent_retry=0.2))
    await fleet.variant("big", scaleTargetRef=TARGET)
    async with running(fleet.client) as harness:
        condition = await fleet.condition("big", "TargetResolved")
        assert condition["status"] == "False"
        assert "the cluster serves no LeaderWorkerSets" in condition["message"]
        await define(fleet.client, scaled_object_crd())
        names = await groups(fleet, 1, 2)
        pods = await fleet.deployment("small", 1)
        await fleet.scaler("ScaledObject", "small", "small")
        harness.source.put_all([*names, *pods], 0.2, 0)
        await eventually(lambda: decided(harness, "big") and decided(harness, "small"), within=20)
        await fleet.client.delete(CRDS, f"{SCALED_OBJECTS.plural}.{SCALED_OBJECTS.group}")
        await eventually(lambda: harness.controller.world.scaled_objects.absent)
        await harness.cycle()
        assert decided(harness, "big")
        assert not decided(harness, "small")
