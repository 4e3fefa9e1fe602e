"""The autoscaler behind a wire that is cut, falls silent or leads to a server that forgot its history."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import yaml
from tests.faults import FaultyProxy
from tests.integration.fleet import Fleet, Harness, running
from tests.polling import eventually

from tidemill.kube.client import KubeClient
from tidemill.local.cluster import LocalCluster


@contextlib.asynccontextmanager
async def behind_a_proxy(cluster: LocalCluster, **options: float) -> AsyncIterator[tuple[Harness, FaultyProxy]]:
    async with FaultyProxy((cluster.server.host, cluster.server.port)) as proxy:
        content = yaml.safe_load(cluster.kubeconfig.read_text())
        content["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
        path = cluster.directory / "proxied"
        path.write_text(yaml.safe_dump(content))
        async with await KubeClient.connect(str(path)) as client, running(client, **options) as harness:
            yield harness, proxy


async def serves(fleet: Fleet, harness: Harness, name: str, *, within: float) -> None:
    """A variant that appears now is served: nothing was lost, and nothing is deaf."""
    await fleet.deployment(name, 1)
    await fleet.variant(f"va-{name}", name)
    await eventually(lambda: harness.desired(f"va-{name}") == 1, within=within)


async def test_cut_mid_stream(wva: LocalCluster, fleet: Fleet) -> None:
    async with behind_a_proxy(wva) as (harness, proxy):
        await serves(fleet, harness, "before", within=5)
        proxy.cut()
        await serves(fleet, harness, "after", within=10)
        assert harness.desired("va-before") == 1


async def test_history_forgotten(wva: LocalCluster, fleet: Fleet) -> None:
    async with behind_a_proxy(wva) as (harness, proxy):
        await serves(fleet, harness, "before", within=5)
        proxy.cut()
        await fleet.deployment("meanwhile", 2)
        await fleet.variant("va-meanwhile", "meanwhile")
        wva.server.store.compact()
        await eventually(lambda: harness.desired("va-meanwhile") == 2, within=15)
        assert harness.desired("va-before") == 1
        await serves(fleet, harness, "after", within=10)


async def test_silence(wva: LocalCluster, fleet: Fleet) -> None:
    async with behind_a_proxy(wva, watch_seconds=2.0) as (harness, proxy):
        await serves(fleet, harness, "before", within=5)
        proxy.silence()
        # Two seconds of watch and ten of grace, then the streams are given up.
        await serves(fleet, harness, "after", within=20)
