"""The roles of the manifests, enforced: with them everything works, cluster-wide and in one namespace."""

from __future__ import annotations

import pytest
from tests.conftest import create_namespace
from tests.definitions import define
from tests.elsewhere import kubeconfig_of, user_of
from tests.integration.fleet import NAMESPACE, SCALE, Fleet, running
from tests.integration.inference import Cluster, picking
from tests.integration.test_doctor import ROLE_BINDINGS, ROLES
from tests.integration.test_external_metrics import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES
from tests.polling import eventually

from tidemill.api.crd import variant_autoscaling_crd
from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.cli.doctor.checks import needed_rights
from tidemill.cli.doctor.fleet import granted
from tidemill.kube.client import KubeClient
from tidemill.kube.errors import ForbiddenError
from tidemill.kube.resources import CONFIG_MAPS, DEPLOYMENTS, PODS, ObjectKey
from tidemill.local.cluster import LocalCluster
from tidemill.manifests import Part, manifests

OTHER = "other"
ACCOUNT = ObjectKey(DEFAULT_NAMESPACE, "controller-manager")


@pytest.mark.parametrize("watched", ["", NAMESPACE], ids=["cluster-wide", "one namespace"])
async def test_it_does_its_work_with_its_own_rights(guarded: LocalCluster, watched: str) -> None:
    """List, watch, decide, write the status, the scale, an event and what was learned."""
    admin = guarded.client
    await define(admin, variant_autoscaling_crd())
    for name in (NAMESPACE, OTHER, DEFAULT_NAMESPACE):
        await create_namespace(admin, name)
    kinds = {r.kind: r for r in (CLUSTER_ROLES, CLUSTER_ROLE_BINDINGS, ROLES, ROLE_BINDINGS)}
    for obj in manifests(watch_namespace=watched):
        if obj["kind"] in kinds:
            await admin.create(kinds[obj["kind"]], obj, obj["metadata"].get("namespace"))
    fleet = Fleet(admin)
    await fleet.config_map("wva-saturation-scaling-config", {"default": "analyzerName: saturation"})
    pods = await fleet.deployment("dep", 2)
    await fleet.variant("va", "dep")
    path = await kubeconfig_of(guarded, ACCOUNT)
    async with await KubeClient.connect(str(path)) as client:
        options = {"watch_namespace": watched or None, **SCALE}
        async with running(client, **options) as harness:
            assert not [str(i.error) for i in harness.controller.world.informers if i.error]
            harness.source.put_all(pods, 0.95, 0, kv_tokens=10_000)
            await harness.cycle()
            harness.source.put_all(pods, 0.95, 0, kv_tokens=10_000)
            await harness.cycle()
            assert (harness.desired("va") or 0) > 2
            assert (await fleet.status("va"))["desiredOptimizedAlloc"]["numReplicas"] > 2
            # What it says about itself is said where it is.
            await fleet.client.delete(CONFIG_MAPS, "wva-saturation-scaling-config", DEFAULT_NAMESPACE)
            await eventually(lambda: fleet.events("GlobalConfigMapDeleted", DEFAULT_NAMESPACE))
        replicas = (await admin.get(DEPLOYMENTS, "dep", NAMESPACE))["spec"]["replicas"]
        assert replicas > 2
        assert await fleet.events("ScaledUp")
        missing = [
            right
            for right in needed_rights(DEFAULT_NAMESPACE, watched)
            if not await granted(admin, user_of(ACCOUNT), right)
        ]
        assert missing == []  # what doctor looks for is what is granted
        # And no more than that.
        with pytest.raises(ForbiddenError):
            await client.create(CONFIG_MAPS, {"metadata": {"name": "x"}}, OTHER)
        with pytest.raises(ForbiddenError):
            await client.delete(PODS, pods[0], NAMESPACE)
        if watched:
            with pytest.raises(ForbiddenError):
                await client.list(PODS, OTHER)
            with pytest.raises(ForbiddenError):
                await client.scale(DEPLOYMENTS, "dep", OTHER, 9)
        else:
            assert (await client.list(PODS, OTHER)).items == []


async def test_the_picker_does_its_work_with_its_own_rights(guarded: LocalCluster) -> None:
    """Watch pools, pods, objectives and rewrites of its namespace; write nothing."""
    admin = guarded.client
    pools = Cluster(admin, "llm-d")
    await pools.prepare()
    await create_namespace(admin, OTHER)
    kinds = {r.kind: r for r in (ROLES, ROLE_BINDINGS)}
    for obj in manifests(Part.PICKER):
        if obj["kind"] in kinds:
            await admin.create(kinds[obj["kind"]], obj, obj["metadata"]["namespace"])
    path = await kubeconfig_of(guarded, ObjectKey("llm-d", "endpoint-picker"))
    await pools.pool()
    await pools.pod("a", "10.0.0.11")
    async with await KubeClient.connect(str(path)) as client:
        async with picking(client, pool_name="", pool_namespace="llm-d") as picker:
            pool = ObjectKey("llm-d", "p")
            await eventually(lambda: (found := picker.pools.get(pool)) and found.snapshot.endpoints)
        with pytest.raises(ForbiddenError):
            await client.list(PODS, OTHER)
        with pytest.raises(ForbiddenError):
            await client.delete(PODS, "a", "llm-d")
