"""Leader election and events against the local API server."""

from __future__ import annotations

import asyncio

import pytest
from tests.conftest import create_namespace
from tests.polling import eventually

from tidemill.kube.clock import utc_now
from tidemill.kube.events import EventRecorder
from tidemill.kube.lease import LeaderElector, LeaseConfig
from tidemill.kube.resources import EVENTS, LEASES, ObjectRef
from tidemill.local.cluster import LocalCluster


def elector(cluster: LocalCluster, identity: str) -> LeaderElector:
    config = LeaseConfig(
        name="lock", namespace="default", identity=identity, duration=1.5, renew_deadline=1.0, retry_period=0.1
    )
    return LeaderElector(cluster.client, config, now=utc_now)


async def lead_for_ever() -> None:
    await asyncio.Event().wait()


async def test_one_leads_and_hands_over_on_the_way_out(api_only: LocalCluster) -> None:
    first, second = elector(api_only, "one"), elector(api_only, "two")
    leading = asyncio.create_task(first.run(lead_for_ever))
    await eventually(lambda: first.is_leader)
    waiting = asyncio.create_task(second.run(lead_for_ever))
    await asyncio.sleep(0.5)
    assert not second.is_leader
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)
    # Released, not left to expire: nobody's, or the other's already.
    lease = await api_only.client.get(LEASES, "lock", "default")
    assert lease["spec"]["holderIdentity"] in ("", "two")
    await eventually(lambda: second.is_leader)
    lease = await api_only.client.get(LEASES, "lock", "default")
    assert lease["spec"]["holderIdentity"] == "two"
    assert lease["spec"]["leaseTransitions"] == 1
    waiting.cancel()


async def test_a_leader_that_cannot_renew_stops_before_others_start(api_only: LocalCluster) -> None:
    only = elector(api_only, "one")
    stopped = asyncio.Event()

    async def lead() -> None:
        try:
            await lead_for_ever()
        finally:
            stopped.set()

    task = asyncio.create_task(only.run(lead))
    await eventually(lambda: only.is_leader)
    await api_only.server.stop()
    await asyncio.wait_for(stopped.wait(), 5)
    assert not only.is_leader
    await api_only.server.start()
    await eventually(lambda: only.is_leader, within=15)
    task.cancel()


def test_durations_must_fit() -> None:
    with pytest.raises(ValueError, match="renew deadline 70s, and that below lease duration 60s"):
        LeaseConfig(name="l", namespace="n", identity="i", duration=60, renew_deadline=70, retry_period=10)


ABOUT = ObjectRef("v1", "ConfigMap", "things", "a", "uid-1")


async def recorded(cluster: LocalCluster) -> list[tuple[str, int, str]]:
    page = await cluster.client.list(EVENTS, "things")
    return sorted((e["reason"], e["count"], e["message"]) for e in page.items)


async def test_repeats_become_a_count(api_only: LocalCluster) -> None:
    await create_namespace(api_only.client, "things")
    recorder = EventRecorder(api_only.client, component="test", instance="x", now=utc_now)
    for _ in range(3):
        recorder.event(ABOUT, "Warning", "Bad", "broken")
        await recorder.flush()
    recorder.event(ABOUT, "Normal", "Good", "mended")
    await recorder.flush()
    assert await recorded(api_only) == [("Bad", 3, "broken"), ("Good", 1, "mended")]


async def test_a_flood_of_alike_events_is_combined(api_only: LocalCluster) -> None:
    await create_namespace(api_only.client, "things")
    recorder = EventRecorder(api_only.client, component="test", instance="x", now=utc_now)
    for number in range(30):
        recorder.event(ABOUT, "Warning", "Bad", f"broken {number}")
    await recorder.flush()
    found = await recorded(api_only)
    assert len(found) == 11
    assert ("Bad", 20, "(combined from similar events): Bad") in found


async def test_an_event_that_was_deleted_starts_anew(api_only: LocalCluster) -> None:
    await create_namespace(api_only.client, "things")
    recorder = EventRecorder(api_only.client, component="test", instance="x", now=utc_now)
    recorder.event(ABOUT, "Warning", "Bad", "broken")
    await recorder.flush()
    (event,) = (await api_only.client.list(EVENTS, "things")).items
    await api_only.client.delete(EVENTS, event["metadata"]["name"], "things")
    recorder.event(ABOUT, "Warning", "Bad", "broken")
    await recorder.flush()
    assert await recorded(api_only) == [("Bad", 1, "broken")]
