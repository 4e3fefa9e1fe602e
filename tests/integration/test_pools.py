"""Which endpoints a pool has: every hazard of the pod reconciler discussion, on a real API server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import create_namespace
from tests.definitions import define, plain_crd
from tests.faults import FaultyProxy
from tests.integration.inference import NAMESPACE, Cluster, addresses, picking, pool_of, stream, until
from tests.picker_rig import chat, post, response_headers
from tests.polling import eventually

from tidemill.api.inference_crd import inference_crds
from tidemill.kube.client import KubeClient
from tidemill.kube.resources import PODS, ObjectKey
from tidemill.local.cluster import LocalCluster
from tidemill.picker.load import Reading
from tidemill.picker.pools.cluster import INFERENCE_POOLS, WatchTiming
from tidemill.picker.server import Picker

A, B, C = "10.0.0.11:8000", "10.0.0.12:8000", "10.0.0.13:8000"


@pytest.fixture
async def cluster(api_only: LocalCluster) -> Cluster:
    made = Cluster(api_only.client)
    await made.prepare()
    return made


@pytest.fixture
async def fleet(cluster: Cluster) -> Cluster:
    """Pool p with pods a and b."""
    await cluster.pod("a", "10.0.0.11")
    await cluster.pod("b", "10.0.0.12")
    await cluster.pool()
    return cluster


def status_of(picker: Picker) -> tuple[int, str]:
    talk = stream(picker)
    for message in post("/v1/chat/completions", chat()):
        talk.send(message)
    return talk.status, "" if talk.refusal is None else talk.refusal.body.decode()


class TestHazards:
    async def test_pods_are_ready_before_the_pool_is_there(self, cluster: Cluster) -> None:
        await cluster.pod("a", "10.0.0.11")
        async with picking(cluster.client) as picker:
            await eventually(lambda: "there is no such pool" in status_of(picker)[1])
            await cluster.pool()
            await until(picker, {A})

    async def test_the_selector_changes_in_one_step(self, fleet: Cluster) -> None:
        await fleet.relabel("b", {"tier": "gold"})
        await fleet.pod("c", "10.0.0.13", labels={"app": "n", "tier": "gold"})
        async with picking(fleet.client) as picker:
            await until(picker, {A, B})
            seen: list[set[str]] = []
            pool_of(picker).on_change(lambda: seen.append(addresses(picker)))
            await fleet.change_pool(selector={"matchLabels": {"app": None, "tier": "gold"}})
            await until(picker, {B, C})
            assert {frozenset(s) for s in seen} == {frozenset({B, C})}

    async def test_target_ports_change(self, fleet: Cluster) -> None:
        async with picking(fleet.client) as picker:
            await until(picker, {A, B})
            await fleet.change_pool(targetPorts=[{"number": 8000}, {"number": 8001}])
            await until(picker, {A, B, "10.0.0.11:8001", "10.0.0.12:8001"})
            await fleet.change_pool(targetPorts=[{"number": 8001}])
            await until(picker, {"10.0.0.11:8001", "10.0.0.12:8001"})

    async def test_a_pod_comes_before_the_pool_is_known_and_nothing_is_asked_again(self, cluster: Cluster) -> None:
        async with picking(cluster.client) as picker:
            await eventually(lambda: "no such pool" in status_of(picker)[1])
            await cluster.pod("a", "10.0.0.11")
            assert addresses(picker) == set()
            await cluster.pool()
            await until(picker, {A})

    async def test_pods_of_other_namespaces_are_never_seen(self, fleet: Cluster) -> None:
        await create_namespace(fleet.client, "other")
        await fleet.pod("x", "10.0.0.99", namespace="other")
        await fleet.pod("unrelated", "10.0.0.98", labels={"app": "x"})
        async with picking(fleet.client) as picker:
            await until(picker, {A, B})
            informer = picker.source._watches[ObjectKey(NAMESPACE, "p")]._serving.informer  # type: ignore[union-attr]
            assert {pod.key.name for pod in informer.store} == {"a", "b"}

    async def test_the_pool_is_deleted_and_comes_back(self, fleet: Cluster) -> None:
        async with picking(fleet.client) as picker:
            await until(picker, {A, B})
            await fleet.objective("batch", -1)
            await eventually(lambda: "batch" in pool_of(picker).objectives)
            await fleet.delete_pool()
            await until(picker, set())
            assert status_of(picker) == (503, status_of(picker)[1])
            assert "the pool was deleted" in status_of(picker)[1]
            await fleet.pool()
            await until(picker, {A, B})
            assert "batch" in pool_of(picker).objectives  # the original forgets them

    async def test_a_pod_deleted_twice_or_never_ready_is_no_error(self, fleet: Cluster) -> None:
        async with picking(fleet.client) as picker:
            await until(picker, {A, B})
            await fleet.pod("never", "10.0.0.50", ready=False)
            await fleet.delete_pod("never")
            await fleet.delete_pod("a")
            await fleet.delete_pod("a")
            await until(picker, {B})

    async def test_readiness_and_termination_count(self, fleet: Cluster) -> None:
        async with picking(fleet.client) as picker:
            await until(picker, {A, B})
            await fleet.status("a", ip="10.0.0.11", ready=False)
            await until(picker, {B})
            await fleet.status("a", ip="10.0.0.11", ready=True)
            await until(picker, {A, B})

    async def test_e10_a_pod_is_replaced_under_its_name(self, fleet: Cluster) -> None:
        async with picking(fleet.client) as picker:
            await until(picker, {A, B})
            await fleet.delete_pod("a")
            await fleet.pod("a", "10.0.0.13")
            await until(picker, {B, C})

    async def test_neither_watch_nor_scrape_touches_the_others_part(self, fleet: Cluster) -> None:
        async with picking(fleet.client) as picker:
            await until(picker, {A, B})
            pool = pool_of(picker)
            seat = pool.load.seat(pool.snapshot.endpoints[0].id)
            assert seat is not None
            ticket = pool.load.take(seat, 5)
            await fleet.relabel("a", {"harmless": "yes"})
            await fleet.pod("c", "10.0.0.13")
            await until(picker, {A, B, C})
            assert pool.load.in_flight[seat.row] == 1
            await fleet.delete_pod("a")
            await until(picker, {B, C})
            pool.load.record(seat, Reading(waiting=0), mark=0, now=0.0)
            pool.load.release(ticket)
            assert addresses(picker) == {B, C}
            assert pool.load.in_flight.sum() == 0


class TestWatchFailures:
    """P19: the watch is not the only truth."""

    @pytest.fixture
    async def through(self, api_only: LocalCluster) -> AsyncIterator[tuple[KubeClient, FaultyProxy]]:
        port = api_only.server.port
        async with FaultyProxy(("127.0.0.1", port)) as proxy:
            text = api_only.kubeconfig.read_text().replace(f":{port}", f":{proxy.port}")
            path = api_only.directory / "through-proxy"
            path.write_text(text)
            async with await KubeClient.connect(str(path)) as client:
                yield client, proxy

    async def test_a_delete_is_missed_while_the_watch_is_cut(
        self, fleet: Cluster, through: tuple[KubeClient, FaultyProxy]
    ) -> None:
        client, proxy = through
        async with picking(client) as picker:
            await until(picker, {A, B})
            proxy.cut()
            await fleet.delete_pod("b")
            await until(picker, {A}, within=5)

    @pytest.mark.parametrize("first", ["list", "watch"])
    async def test_an_edit_of_the_selector_during_the_relist(
        self, first: str, fleet: Cluster, through: tuple[KubeClient, FaultyProxy], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once the new selector is known, whether the new list or the old watch is heard first, nothing that only
        the old one selects is ever served, and there never is a moment without endpoints."""
        client, proxy = through
        gates = {"list": asyncio.Event(), "watch": asyncio.Event()}
        for gate in gates.values():
            gate.set()
        list_, watch_ = client.list, client.watch

        async def gated_list(resource: Any, *args: Any, **more: Any) -> Any:
            if resource == PODS:
                await gates["list"].wait()
            return await list_(resource, *args, **more)

        async def gated_watch(resource: Any, *args: Any, **more: Any) -> AsyncIterator[Any]:
            if resource == PODS:
                await gates["watch"].wait()
            async for event in watch_(resource, *args, **more):
                yield event

        monkeypatch.setattr(client, "list", gated_list)
        monkeypatch.setattr(client, "watch", gated_watch)
        await fleet.relabel("a", {"tier": "gold"})
        async with picking(client) as picker:
            for ready, expected in ((False, {A}), (True, {A, B})):  # the watch is there
                await fleet.status("b", ip="10.0.0.12", ready=ready)
                await until(picker, expected)
            pool = pool_of(picker)
            seen: list[set[str]] = []
            pool.on_change(lambda: seen.append(addresses(picker)))
            for gate in gates.values():
                gate.clear()
            proxy.cut()
            await fleet.delete_pod("b")
            await fleet.pod("c", "10.0.0.13")
            await fleet.change_pool(selector={"matchLabels": {"app": "m", "tier": "gold"}})
            watch = picker.source._watches[ObjectKey(NAMESPACE, "p")]  # type: ignore[union-attr]
            await eventually(lambda: watch._coming is not None)
            assert addresses(picker) == {A, B}
            gates[first].set()
            await until(picker, {A})
            for gate in gates.values():
                gate.set()
            await eventually(lambda: watch._coming is None and watch._serving.spec.match_labels["tier"] == "gold")
            assert seen
            assert all(found == {A} for found in seen)

    async def test_silence_is_noticed_and_the_age_is_told(
        self, fleet: Cluster, through: tuple[KubeClient, FaultyProxy]
    ) -> None:
        client, proxy = through
        async with picking(client, timing=WatchTiming(watch_seconds=1.0, grace=1.0)) as picker:
            await until(picker, {A, B})
            assert picker._age(ObjectKey(NAMESPACE, "p")) == 0.0
            proxy.silence()
            await fleet.delete_pod("b")
            await until(picker, {A}, within=15)

    async def test_what_is_known_is_served_while_the_api_server_is_away(
        self, fleet: Cluster, api_only: LocalCluster
    ) -> None:
        async with picking(fleet.client) as picker:
            await until(picker, {A, B})
            await api_only.server.stop()
            await eventually(lambda: (picker._age(ObjectKey(NAMESPACE, "p")) or 0) > 0)
            assert status_of(picker)[0] == 200
            assert picker.ready


class TestKinds:
    async def test_e4_without_the_optional_kinds(
        self, api_only: LocalCluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster = Cluster(api_only.client)
        pool_crd, objective_crd, _ = inference_crds()
        await define(cluster.client, pool_crd)
        await create_namespace(cluster.client, NAMESPACE)
        await cluster.pod("a", "10.0.0.11")
        await cluster.pool()
        async with picking(cluster.client) as picker:
            await until(picker, {A})
            assert status_of(picker)[0] == 200
            said = capsys.readouterr().out
            assert said.count("inferenceobjectives.llm-d.ai") == 1
            await define(cluster.client, objective_crd)
            await cluster.objective("batch", -5)
            await eventually(lambda: "batch" in pool_of(picker).objectives, within=15)
            assert pool_of(picker).objectives["batch"].priority == -5

    async def test_the_older_version_of_the_pool(self, api_only: LocalCluster) -> None:
        cluster = Cluster(api_only.client)
        older = INFERENCE_POOLS[1]
        await define(cluster.client, plain_crd(older.group, older.version, older.plural, older.kind))
        await create_namespace(cluster.client, NAMESPACE)
        await cluster.pod("a", "10.0.0.11")
        body = {
            "apiVersion": older.api_version,
            "kind": older.kind,
            "metadata": {"name": "p"},
            "spec": {"selector": {"app": "m"}, "targetPortNumber": 8000, "extensionRef": {"name": "epp"}},
        }
        await cluster.client.create(older, body, NAMESPACE)
        async with picking(cluster.client) as picker:
            await until(picker, {A})

    async def test_a_pool_that_breaks_its_schema_keeps_what_it_was(self, api_only: LocalCluster) -> None:
        cluster = Cluster(api_only.client)
        new = INFERENCE_POOLS[0]
        await define(cluster.client, plain_crd(new.group, new.version, new.plural, new.kind))
        await create_namespace(cluster.client, NAMESPACE)
        await cluster.pod("a", "10.0.0.11")
        await cluster.pool()
        async with picking(cluster.client) as picker:
            await until(picker, {A})
            await cluster.change_pool(targetPorts=[{"number": 0}])
            await cluster.pod("b", "10.0.0.12")
            await until(picker, {A, B})

    async def test_many_pools_from_one_process(self, cluster: Cluster) -> None:
        for i in range(20):
            await cluster.pool(f"p{i}", labels={"app": f"m{i}"})
            await cluster.pod(f"pod{i}", f"10.0.1.{i}", labels={"app": f"m{i}"})
        async with picking(cluster.client, pool_name="") as picker:
            await eventually(lambda: len(picker.pools.all()) == 20)
            await eventually(lambda: all(addresses(picker, f"p{i}") == {f"10.0.1.{i}:8000"} for i in range(20)))
            assert picker.ready
            talk = stream(picker, metadata={"x-inference-pool": "p7"})
            for message in post("/v1/chat/completions", chat()):
                talk.send(message)
            assert talk.destination == "10.0.1.7:8000"

    async def test_p22_a_restart_that_was_only_counted(self, fleet: Cluster) -> None:
        async with picking(fleet.client) as picker:
            await until(picker, {A, B})
            pool = pool_of(picker)
            talk = stream(picker)
            for message in post("/v1/completions", {"model": "m", "prompt": "x" * 1024}, subset=[A]):
                talk.send(message)
            talk.send(response_headers())
            talk.close()
            assert len(pool.scheduler.prefix) == 4
            await fleet.status("a", ip="10.0.0.11", ready=True, restarts=1)
            await eventually(lambda: len(pool.scheduler.prefix) == 0)


# Random orders of events against a plain model

NAMES = ["a", "b", "c", "d"]
LABELS = [{"app": "m"}, {"app": "m", "tier": "gold"}, {"app": "n"}]
SELECTORS = [{"app": "m"}, {"tier": "gold"}, {"app": "n"}]
PORTS = [(8000,), (8000, 8001), (8001,)]

events = st.one_of(
    st.tuples(
        st.just("pod"), st.sampled_from(NAMES), st.sampled_from([0, 1, 1, 2]), st.just(True) | st.booleans()
    ),
    st.tuples(st.just("delete"), st.sampled_from(NAMES)),
    st.tuples(st.just("ready"), st.sampled_from(NAMES), st.booleans()),
    st.tuples(st.just("relabel"), st.sampled_from(NAMES), st.integers(0, 2)),
    st.tuples(st.just("pool"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("no pool")),
    st.tuples(st.just("cut")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("settle")),
)


@dataclass
class Model:
    """What there is, as a plain picture of it."""

    pods: dict[str, tuple[str, dict[str, str], bool]] = field(default_factory=dict)
    pool: tuple[dict[str, str], tuple[int, ...]] | None = None
    created: int = 0

    @property
    def expected(self) -> set[str]:
        if self.pool is None:
            return set()
        selector, ports = self.pool
        return {
            f"{ip}:{port}"
            for ip, labels, ready in self.pods.values()
            for port in ports
            if ready and selector.items() <= labels.items()
        }


async def play(sequence: list[tuple]) -> None:
    model = Model()
    async with LocalCluster(workloads=False, bookmark_seconds=0.2, history=12) as local:
        cluster = Cluster(local.client)
        await cluster.prepare()
        for event in (("pool", 0, 0), ("pod", "a", 1, True), ("pod", "b", 0, True)):
            await act(event, model, cluster, None, None)
        async with FaultyProxy(("127.0.0.1", local.server.port)) as proxy:
            path = local.directory / "through-proxy"
            path.write_text(local.kubeconfig.read_text().replace(f":{local.server.port}", f":{proxy.port}"))
            position = 0
            while position <= len(sequence):
                # Each round is one picker; "restart" ends it and a new one finds things as they are.
                async with (
                    await KubeClient.connect(str(path)) as client,
                    picking(client) as picker,
                ):
                    while position < len(sequence) and sequence[position][0] != "restart":
                        await act(sequence[position], model, cluster, proxy, picker)
                        position += 1
                    await caught_up(picker, model, cluster)
                position += 1


async def caught_up(picker: Picker, model: Model, cluster: Cluster) -> None:
    """Until the picker has seen all that was done. A set can be right by chance while events are still on their
    way: a new pod comes behind them."""
    if model.pool is not None:
        model.created += 1
        name, ip = f"last-{model.created}", f"10.0.0.{model.created}"
        await cluster.pod(name, ip, labels=model.pool[0])
        model.pods[name] = (ip, dict(model.pool[0]), True)
    await until(picker, model.expected)


async def act(
    event: tuple, model: Model, cluster: Cluster, proxy: FaultyProxy | None, picker: Picker | None
) -> None:
    match event:
        case ("pod", name, label, ready) if name not in model.pods:
            model.created += 1
            ip = f"10.0.0.{model.created}"
            await cluster.pod(name, ip, ready=ready, labels=LABELS[label])
            model.pods[name] = (ip, LABELS[label], ready)
        case ("delete", name):
            await cluster.delete_pod(name)
            model.pods.pop(name, None)
        case ("ready", name, ready) if name in model.pods:
            ip, labels, _ = model.pods[name]
            await cluster.status(name, ip=ip, ready=ready)
            model.pods[name] = (ip, labels, ready)
        case ("relabel", name, label) if name in model.pods:
            ip, labels, ready = model.pods[name]
            await cluster.relabel(name, {**dict.fromkeys(labels), **LABELS[label]})
            model.pods[name] = (ip, LABELS[label], ready)
        case ("pool", selector, ports):
            if model.pool is None:
                await cluster.pool(labels=SELECTORS[selector], ports=PORTS[ports])
            else:
                labels = {**dict.fromkeys(model.pool[0]), **SELECTORS[selector]}
                await cluster.change_pool(
                    selector={"matchLabels": labels}, targetPorts=[{"number": p} for p in PORTS[ports]]
                )
            model.pool = (SELECTORS[selector], PORTS[ports])
        case ("no pool",) if model.pool is not None:
            await cluster.delete_pool()
            model.pool = None
        case ("cut",) if proxy is not None:
            proxy.cut()
        case ("settle",) if picker is not None:
            await caught_up(picker, model, cluster)


@pytest.mark.timeout(300)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(events, min_size=5, max_size=30))
def test_any_order_of_events_ends_in_the_same_set(sequence: list[tuple]) -> None:
    asyncio.run(play(sequence))


@pytest.mark.timeout(120)
async def test_a_watch_that_is_cut_again_and_again(api_only: LocalCluster) -> None:
    rng = random.Random(3)
    cluster = Cluster(api_only.client)
    await cluster.prepare()
    await cluster.pool()
    async with FaultyProxy(("127.0.0.1", api_only.server.port)) as proxy:
        path = api_only.directory / "through-proxy"
        path.write_text(api_only.kubeconfig.read_text().replace(f":{api_only.server.port}", f":{proxy.port}"))
        async with await KubeClient.connect(str(path)) as client, picking(client) as picker:
            present: dict[str, str] = {}
            for _ in range(5):
                proxy.cut()
                name, ip = rng.choice(NAMES), rng.randrange(1, 200)
                if name in present:
                    await cluster.delete_pod(name)
                    del present[name]
                else:
                    await cluster.pod(name, f"10.0.0.{ip}")
                    present[name] = f"10.0.0.{ip}:8000"
                await until(picker, set(present.values()), within=20)
