"""The informer against the local API server, through a proxy that breaks connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from tests.conftest import create_namespace
from tests.definitions import define
from tests.faults import FaultyProxy
from tests.polling import eventually

from tidemill.kube.client import KubeClient, ListPage, WatchEvent
from tidemill.kube.informer import Added, Deleted, Informer, InformerEvent, Modified, identity
from tidemill.kube.resources import CONFIG_MAPS, Json, ObjectKey, Resource
from tidemill.local.cluster import LocalCluster

NAMESPACE = "things"


class CountingClient(KubeClient):
    """Counts what an informer asks for."""

    calls: Counter[str]

    async def list(self, *args: Any, **kwargs: Any) -> ListPage:
        self.calls["list"] += 1
        return await super().list(*args, **kwargs)

    async def watch(self, *args: Any, **kwargs: Any) -> AsyncIterator[WatchEvent]:
        self.calls["watch"] += 1
        async for event in super().watch(*args, **kwargs):
            yield event


class Followed:
    """An informer that runs, and everything it told."""

    def __init__(self, client: CountingClient, **options: Any) -> None:
        options = {"watch_seconds": 60.0, "namespace": NAMESPACE, "draw": lambda: 0.0, **options}
        self.informer: Informer[Json] = Informer(client, CONFIG_MAPS, decode=identity, **options)
        self.events: list[InformerEvent[Json]] = []
        self.informer.add_handler(self.events.append)

    @property
    def told(self) -> list[str]:
        words = {Added: "+", Modified: "~", Deleted: "-"}
        return [f"{words[type(event)]}{event.key.name}" for event in self.events]

    def state(self) -> dict[str, str]:
        return {key.name: value["data"]["n"] for key, value in self.informer.store.items()}


def body(name: str, n: int, **labels: str) -> Json:
    return {"metadata": {"name": name, "labels": labels}, "data": {"n": str(n)}}


@pytest.fixture
async def proxy(api_only: LocalCluster) -> AsyncIterator[FaultyProxy]:
    await create_namespace(api_only.client, NAMESPACE)
    async with FaultyProxy((api_only.server.host, api_only.server.port)) as found:
        yield found


@pytest.fixture
async def client(api_only: LocalCluster, proxy: FaultyProxy) -> AsyncIterator[CountingClient]:
    path = api_only.directory / "proxied"
    content = yaml.safe_load(api_only.kubeconfig.read_text())
    content["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    path.write_text(yaml.safe_dump(content))
    async with await CountingClient.connect(str(path)) as found:
        found.calls = Counter()
        yield found


@pytest.fixture
def follow(client: CountingClient):
    tasks: list[asyncio.Task[None]] = []

    async def start(**options: Any) -> Followed:
        followed = Followed(client, **options)
        tasks.append(asyncio.create_task(followed.informer.run()))
        await followed.informer.wait_synced()
        return followed

    yield start
    for task in tasks:
        task.cancel()


async def write(cluster: LocalCluster, name: str, n: int) -> None:
    await cluster.client.patch(CONFIG_MAPS, name, {"data": {"n": str(n)}}, NAMESPACE)


async def make(cluster: LocalCluster, *names: str, **labels: str) -> None:
    for name in names:
        await cluster.client.create(CONFIG_MAPS, body(name, 0, **labels), NAMESPACE)


async def test_list_then_watch(api_only: LocalCluster, client: CountingClient, follow) -> None:
    await make(api_only, "a", "b")
    seen = await follow(page_size=1)
    assert seen.state() == {"a": "0", "b": "0"}
    await write(api_only, "a", 1)
    await make(api_only, "c")
    await api_only.client.delete(CONFIG_MAPS, "b", NAMESPACE)
    await eventually(lambda: seen.state() == {"a": "1", "c": "0"})
    assert seen.told == ["+a", "+b", "~a", "+c", "-b"]
    assert client.calls == {"list": 2, "watch": 1}
    assert "managedFields" not in seen.informer.store.get(ObjectKey(NAMESPACE, "a"))["metadata"]


async def test_selectors_work_on_the_servers_side(api_only: LocalCluster, follow) -> None:
    await make(api_only, "in", on="1")
    await make(api_only, "out")
    seen = await follow(label_selector="on=1")
    assert list(seen.state()) == ["in"]
    await api_only.client.patch(CONFIG_MAPS, "in", {"metadata": {"labels": {"on": "0"}}}, NAMESPACE)
    await eventually(lambda: seen.told == ["+in", "-in"])


async def test_indexes_follow_every_change(api_only: LocalCluster, follow) -> None:
    seen = await follow(indexers={"n": lambda obj: [obj["data"]["n"]]})
    await make(api_only, "a", "b")
    await eventually(lambda: len(seen.informer.store.by_index("n", "0")) == 2)
    await write(api_only, "a", 1)
    await eventually(lambda: [o["metadata"]["name"] for o in seen.informer.store.by_index("n", "1")] == ["a"])
    assert [o["metadata"]["name"] for o in seen.informer.store.by_index("n", "0")] == ["b"]


async def test_a_cut_watch_resumes_without_a_list(
    api_only: LocalCluster, client: CountingClient, proxy: FaultyProxy, follow
) -> None:
    seen = await follow()
    await make(api_only, "a")
    await eventually(lambda: seen.told == ["+a"])
    proxy.cut()
    await write(api_only, "a", 1)
    await make(api_only, "b")
    await eventually(lambda: seen.state() == {"a": "1", "b": "0"})
    assert client.calls["list"] == 1
    assert seen.informer.error is None


async def test_k1_a_silent_watch_is_noticed_and_nothing_is_missed(
    api_only: LocalCluster, client: CountingClient, proxy: FaultyProxy, follow
) -> None:
    seen = await follow(watch_seconds=1.5, grace=0.5)
    await make(api_only, "a")
    await eventually(lambda: seen.told == ["+a"])
    proxy.silence()
    await write(api_only, "a", 1)
    await make(api_only, "b")
    await api_only.client.delete(CONFIG_MAPS, "a", NAMESPACE)
    await eventually(lambda: seen.state() == {"b": "0"}, within=8)
    assert seen.told == ["+a", "~a", "+b", "-a"]
    assert client.calls["list"] == 1


async def test_410_lists_again_and_delivers_the_difference(
    api_only: LocalCluster, client: CountingClient, proxy: FaultyProxy, follow
) -> None:
    await make(api_only, "changed", "deleted", "same", "replaced")
    seen = await follow()
    await write(api_only, "same", 1)
    await eventually(lambda: "~same" in seen.told)  # the watch is established
    seen.events.clear()
    api_only.server.store.end_watches()
    await write(api_only, "changed", 1)
    await api_only.client.delete(CONFIG_MAPS, "deleted", NAMESPACE)
    await api_only.client.delete(CONFIG_MAPS, "replaced", NAMESPACE)
    await make(api_only, "created", "replaced")
    api_only.server.store.compact()
    await eventually(lambda: "created" in seen.state())
    # One that was replaced by a namesake is another object: it went, and the other came.
    assert sorted(seen.told) == sorted(["~changed", "-deleted", "+created", "-replaced", "+replaced"])
    assert client.calls["list"] == 2


async def test_the_server_may_be_away(api_only: LocalCluster, client: CountingClient, follow) -> None:
    await make(api_only, "a")
    seen = await follow()
    await api_only.server.stop()
    await eventually(lambda: seen.informer.error is not None)
    assert seen.state() == {"a": "0"}
    age = seen.informer.age(asyncio.get_running_loop().time())
    assert age is not None
    assert age >= 0
    await asyncio.sleep(1.5)
    await api_only.server.start()
    await write(api_only, "a", 1)
    await eventually(lambda: seen.state() == {"a": "1"}, within=15)


async def test_a_connection_that_shakes_hands_while_the_server_stops_does_not_outlive_it(
    api_only: LocalCluster,
) -> None:
    # Kept alive, it would answer each watch with a polite end, and the informer would believe itself current.
    server = api_only.server
    raw = socket.create_connection((server.host, server.port))
    raw.setblocking(False)
    await create_namespace(api_only.client, "any")  # by then the server has accepted the connection before it
    await server.stop()
    context = ssl.create_default_context(cafile=str(server.tls.ca))
    reader, writer = await asyncio.open_connection(sock=raw, ssl=context, server_hostname=server.host)
    watch = f"{CONFIG_MAPS.path(NAMESPACE)}?watch=true&resourceVersion=1"
    writer.write(f"GET {watch} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 10)  # to its end: the connection is closed
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"shutting down" in answer
    writer.close()


async def test_a_kind_may_come_and_go(api_only: LocalCluster, client: CountingClient) -> None:
    from tests.contract.test_api_server import CRDS, widget_crd

    widgets = Resource("test.tidemill.dev", "v1", "widgets", "Widget")
    informer: Informer[Json] = Informer(client, widgets, decode=identity, absent_retry=0.1, draw=lambda: 0.0)
    events: list[InformerEvent[Json]] = []
    informer.add_handler(events.append)
    task = asyncio.create_task(informer.run())
    await informer.wait_synced()
    assert informer.absent
    await define(api_only.client, widget_crd())
    await api_only.client.create(widgets, {"metadata": {"name": "w"}, "spec": {"size": 1}}, NAMESPACE)
    await eventually(lambda: [type(e) for e in events] == [Added])
    assert not informer.absent
    await api_only.client.delete(CRDS, "widgets.test.tidemill.dev")
    await eventually(lambda: [type(e) for e in events] == [Added, Deleted])
    task.cancel()


async def test_a_handler_that_fails_does_not_stop_the_copy(api_only: LocalCluster, follow) -> None:
    seen = await follow()
    seen.informer.add_handler(lambda event: 1 / 0)
    await make(api_only, "a", "b")
    await eventually(lambda: set(seen.state()) == {"a", "b"})
