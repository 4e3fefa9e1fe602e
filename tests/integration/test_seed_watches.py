"""The seed's watch table and its four examples, named after them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog
from tests.conftest import create_namespace
from tests.definitions import define, plain_crd
from tests.integration.fleet import NAMESPACE, Fleet, Harness, running
from tests.polling import eventually

from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.autoscaler.world import VARIANT_AUTOSCALINGS
from tidemill.kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    NAMESPACES,
    PODS,
    REPLICA_SETS,
    SERVICE_MONITORS,
    Json,
)
from tidemill.local.cluster import LocalCluster

SOON = 5.0  # "within 1 s of the event", on a machine that may be busy: not by the next pass, which is 60 s away


async def ready(fleet: Fleet, name: str, status: str) -> Json | None:
    found = await fleet.condition(name, "Ready")
    return found if found.get("status") == status else None


async def test_example_1_deployment_created_before_va(fleet: Fleet, harness: Harness) -> None:
    await fleet.deployment("llama-8b", 2)
    assert harness.reconciles == 0
    await fleet.variant("llama-8b-autoscaler", "llama-8b")
    await eventually(lambda: ready(fleet, "llama-8b-autoscaler", "True"), within=SOON)
    await eventually(lambda: harness.desired("llama-8b-autoscaler") == 2, within=SOON)


async def test_example_2_va_created_before_deployment(fleet: Fleet, harness: Harness) -> None:
    await fleet.variant("llama-8b-autoscaler", "llama-8b")
    found = await eventually(lambda: ready(fleet, "llama-8b-autoscaler", "False"), within=SOON)
    assert found["reason"] == "DeploymentNotFound"
    assert harness.desired("llama-8b-autoscaler") is None
    with structlog.testing.capture_logs() as logs:
        await fleet.deployment("llama-8b", 1)
        await eventually(lambda: ready(fleet, "llama-8b-autoscaler", "True"), within=SOON)
    assert any("Deployment created" in entry["event"] for entry in logs)
    await eventually(lambda: harness.desired("llama-8b-autoscaler") == 1, within=SOON)
    resolved = await fleet.condition("llama-8b-autoscaler", "TargetResolved")
    assert (resolved["status"], resolved["reason"]) == ("True", "TargetFound")


async def test_example_2_with_the_target_name_inferred(fleet: Fleet, harness: Harness) -> None:
    body = {"metadata": {"name": "llama-8b"}, "spec": {"modelID": "m"}}
    await fleet.client.create(VARIANT_AUTOSCALINGS, body, NAMESPACE)
    await eventually(lambda: ready(fleet, "llama-8b", "False"), within=SOON)
    await fleet.deployment("llama-8b", 1)
    await eventually(lambda: ready(fleet, "llama-8b", "True"), within=SOON)


async def test_example_3_deployment_deleted_and_recreated(fleet: Fleet, harness: Harness) -> None:
    pods = await fleet.deployment("llama-8b", 3)
    await fleet.variant("va", "llama-8b")
    harness.source.put_all(pods, 0.5, 0)
    await harness.cycle()
    before = await fleet.status("va")
    assert before["desiredOptimizedAlloc"]["numReplicas"] == 3
    assert before["desiredOptimizedAlloc"]["accelerator"] == "A100"

    await fleet.client.delete(DEPLOYMENTS, "llama-8b", NAMESPACE)
    found = await eventually(lambda: ready(fleet, "va", "False"), within=SOON)
    assert (found["reason"], found["message"]) == ("DeploymentNotFound", "Target deployment no longer exists")
    after = await fleet.status("va")
    assert after["desiredOptimizedAlloc"] == {}
    assert 'variant_name="va"' not in harness.series()

    await eventually(lambda: _replica_set_gone(fleet))
    await fleet.deployment("llama-8b", 2)
    await eventually(lambda: ready(fleet, "va", "True"), within=SOON)
    # It is another Deployment: what was decided for the old one is not carried over.
    await eventually(lambda: harness.desired("va") == 2, within=SOON)


async def _replica_set_gone(fleet: Fleet) -> bool:
    sets = (await fleet.client.list(REPLICA_SETS, NAMESPACE)).items
    pods = (await fleet.client.list(PODS, NAMESPACE)).items
    return not sets and not pods


async def test_example_4_config_map_updated(fleet: Fleet, harness: Harness) -> None:
    pods = await fleet.deployment("dep", 1)
    await fleet.variant("va", "dep")
    harness.source.put_all(pods, 0.65, 0)
    await harness.cycle()
    assert harness.desired("va") == 1
    count = harness.reconciles
    await fleet.config_map("wva-saturation-scaling-config", {"default": "kvCacheThreshold: 0.60"})
    await harness.caught_up()
    await asyncio.sleep(0.2)
    assert harness.reconciles == count
    assert harness.desired("va") == 1
    await harness.cycle()
    assert harness.desired("va") == 2


async def test_k2_an_object_created_before_its_target_is_served_within_a_second(
    fleet: Fleet, harness: Harness
) -> None:
    await fleet.variant("va", "dep-a")
    await eventually(lambda: ready(fleet, "va", "False"), within=SOON)
    await fleet.deployment("dep-a", 1)
    await eventually(lambda: ready(fleet, "va", "True"), within=SOON)
    await eventually(lambda: harness.desired("va") == 1, within=SOON)


class TestWhatIsBlocked:
    """Each of these is an event that the table blocks: it must cause no reconciliation."""

    @pytest.fixture
    async def quiet(self, fleet: Fleet, harness: Harness) -> int:
        await fleet.deployment("dep", 1)
        await fleet.variant("va", "dep")
        await eventually(lambda: harness.desired("va") == 1)
        await harness.settle()
        await asyncio.sleep(0.2)
        return harness.reconciles

    async def stays(self, harness: Harness, count: int) -> None:
        await asyncio.sleep(0.3)
        assert harness.reconciles == count

    async def test_variant_updates(self, fleet: Fleet, harness: Harness, quiet: int) -> None:
        await fleet.client.patch(VARIANT_AUTOSCALINGS, "va", {"spec": {"variantCost": "3"}}, NAMESPACE)
        await self.stays(harness, quiet)

    async def test_variant_deletes_are_found_by_the_next_cycle(
        self, fleet: Fleet, harness: Harness, quiet: int
    ) -> None:
        await fleet.client.delete(VARIANT_AUTOSCALINGS, "va", NAMESPACE)
        await self.stays(harness, quiet)
        await harness.cycle()
        assert harness.desired("va") is None
        assert 'variant_name="va"' not in harness.series()

    async def test_deployment_updates(self, fleet: Fleet, harness: Harness, quiet: int) -> None:
        await fleet.client.patch(DEPLOYMENTS, "dep", {"metadata": {"labels": {"x": "y"}}}, NAMESPACE)
        await fleet.scale("dep", 1)
        await self.stays(harness, quiet)

    async def test_deployments_that_nobody_references(self, fleet: Fleet, harness: Harness, quiet: int) -> None:
        await fleet.deployment("stranger", 1)
        await fleet.client.delete(DEPLOYMENTS, "stranger", NAMESPACE)
        await self.stays(harness, quiet)

    async def test_config_maps(self, fleet: Fleet, harness: Harness, quiet: int) -> None:
        for name in ("wva-manager-config", "wva-saturation-scaling-config", "unknown"):
            await fleet.config_map(name, {"default": "{}"})
            await fleet.client.delete(CONFIG_MAPS, name, DEFAULT_NAMESPACE)
        await self.stays(harness, quiet)


class TestServiceMonitor:
    CRD = plain_crd("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor")
    NAME = "wva-controller-manager-metrics-monitor"

    async def create(self, wva: LocalCluster, name: str, **metadata: Any) -> None:
        body = {"metadata": {"name": name, **metadata}, "spec": {}}
        await wva.client.create(SERVICE_MONITORS, body, DEFAULT_NAMESPACE)

    async def deleted_events(self, fleet: Fleet, harness: Harness) -> list[Json]:
        await harness.settle()
        return await fleet.events("ServiceMonitorDeleted", DEFAULT_NAMESPACE)

    async def test_deletion_is_said_and_nothing_reconciled(self, wva: LocalCluster, fleet: Fleet) -> None:
        await define(wva.client, self.CRD)
        await self.create(wva, self.NAME)
        await self.create(wva, "another")
        async with running(wva.client) as harness:
            await wva.client.delete(SERVICE_MONITORS, "another", DEFAULT_NAMESPACE)
            await wva.client.delete(SERVICE_MONITORS, self.NAME, DEFAULT_NAMESPACE)
            (event,) = await eventually(lambda: self.deleted_events(fleet, harness), within=SOON)
            assert event["type"] == "Warning"
            assert event["involvedObject"]["kind"] == "ServiceMonitor"
            assert event["involvedObject"]["name"] == self.NAME
            assert harness.reconciles == 0

    async def test_a_finalizer_makes_it_an_update(self, wva: LocalCluster, fleet: Fleet) -> None:
        await define(wva.client, self.CRD)
        await self.create(wva, self.NAME, finalizers=["test/hold"])
        async with running(wva.client) as harness:
            await wva.client.patch(SERVICE_MONITORS, self.NAME, {"spec": {"x": 1}}, DEFAULT_NAMESPACE)
            await asyncio.sleep(0.2)
            assert not await self.deleted_events(fleet, harness)
            await wva.client.delete(SERVICE_MONITORS, self.NAME, DEFAULT_NAMESPACE)
            await eventually(lambda: self.deleted_events(fleet, harness), within=SOON)
            release = {"metadata": {"finalizers": None}}
            await wva.client.patch(SERVICE_MONITORS, self.NAME, release, DEFAULT_NAMESPACE)
            await asyncio.sleep(0.2)
            (event,) = await self.deleted_events(fleet, harness)
            assert event["count"] == 1

    async def test_a_cluster_without_the_kind_is_served(self, fleet: Fleet, harness: Harness) -> None:
        await fleet.deployment("dep", 1)
        await fleet.variant("va", "dep")
        await eventually(lambda: harness.desired("va") == 1, within=SOON)


class TestWhoIsLookedAfter:
    async def test_an_excluded_namespace_is_left_alone(self, fleet: Fleet, harness: Harness) -> None:
        exclude = {"metadata": {"annotations": {"wva.llmd.ai/exclude": "true"}}}
        await fleet.client.patch(NAMESPACES, NAMESPACE, exclude)
        await harness.caught_up()
        await fleet.deployment("dep", 1)
        await fleet.variant("va", "dep")
        await harness.caught_up()
        await harness.cycle()
        assert (harness.reconciles, harness.desired("va"), await fleet.status("va")) == (0, None, {})

    async def test_a_controller_instance_keeps_to_its_own(self, wva: LocalCluster, fleet: Fleet) -> None:
        label = "wva.llmd.ai/controller-instance"
        await fleet.deployment("dep-a", 1)
        await fleet.deployment("dep-b", 1)
        await fleet.variant("va-a", "dep-a", labels={label: "blue"})
        await fleet.variant("va-b", "dep-b", labels={label: "green"})
        async with running(wva.client, instance="blue") as harness:
            await harness.cycle()
            assert (harness.desired("va-a"), harness.desired("va-b")) == (1, None)
            assert 'controller_instance="blue"' in harness.series()
            assert await fleet.status("va-b") == {}

    async def test_one_namespace_only(self, wva: LocalCluster, fleet: Fleet) -> None:
        await create_namespace(fleet.client, "other")
        other = Fleet(wva.client, "other")
        for each in (fleet, other):
            await each.deployment("dep", 1)
            await each.variant("va", "dep")
        async with running(wva.client, watch_namespace=NAMESPACE) as harness:
            await harness.cycle()
            assert harness.desired("va") == 1
            assert harness.desired("va", "other") is None
