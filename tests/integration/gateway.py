"""A real Envoy in front of echo servers, with a picker in this process."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import h11
import orjson
from tests.conftest import free_port, program

from tidemill.kube.resources import ObjectKey
from tidemill.local.envoy import Envoy, PoolRoute
from tidemill.picker.pools.pool import Pool
from tidemill.picker.server import Picker, PickerOptions

SSE_TAIL = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":9}}\n\ndata: [DONE]\n\n'


@dataclass
class Echo:
    """A server that says what it got. Paths choose how it answers; `held` keeps answers back until it is set.
    `waiting` is the queue that its metrics tell of; None tells of nothing."""

    host: str = "127.0.0.1"
    port: int = 0
    waiting: int | None = 0
    requests: int = 0
    cancelled: int = 0
    held: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def __aenter__(self) -> Echo:
        self.held.set()
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        connection = h11.Connection(h11.SERVER)
        try:
            while await self._one(connection, reader, writer):
                connection.start_next_cycle()
        except (h11.RemoteProtocolError, ConnectionError):
            self.cancelled += 1
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, connection: h11.Connection, reader: Any, writer: Any) -> bool:
        request: h11.Request | None = None
        body = hashlib.sha256()
        size = 0
        trailers: list[tuple[str, str]] = []
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                if connection.they_are_waiting_for_100_continue:
                    writer.write(connection.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                connection.receive_data(await reader.read(65_536))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body.update(event.data)
                size += len(event.data)
            elif isinstance(event, h11.EndOfMessage):
                trailers = [(k.decode(), v.decode()) for k, v in event.headers]
                break
            else:
                return False
        assert request is not None
        path = request.target.decode()
        if path == "/metrics":
            text = f"vllm:num_requests_waiting {self.waiting}\nvllm:kv_cache_usage_perc 0\n"
            return await self._answer(connection, writer, b"" if self.waiting is None else text.encode())
        self.requests += 1
        await self.held.wait()
        if path.startswith("/sse/"):
            return await self._events(connection, writer, int(path.rpartition("/")[2]))
        told = {
            "served": self.address, "sha256": body.hexdigest(), "size": size, "path": path,
            "headers": [(k.decode(), v.decode()) for k, v in request.headers], "trailers": trailers,
        }  # fmt: skip
        ends = [("x-answer-checksum", "xyz")] if path == "/trailers" else []
        return await self._answer(connection, writer, orjson.dumps(told), trailers=ends)

    async def _answer(self, connection: h11.Connection, writer: Any, body: bytes, *, trailers: Any = ()) -> bool:
        headers = [("content-type", "application/json")]
        headers += [("transfer-encoding", "chunked")] if trailers else [("content-length", str(len(body)))]
        for event in (
            h11.Response(status_code=200, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(headers=trailers),
        ):
            writer.write(connection.send(event) or b"")
        await writer.drain()
        return connection.our_state is h11.DONE

    async def _events(self, connection: h11.Connection, writer: Any, count: int) -> bool:
        headers = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]
        writer.write(connection.send(h11.Response(status_code=200, headers=headers)) or b"")
        for number in range(count):
            writer.write(connection.send(h11.Data(data=b"data: %d\n\n" % number)) or b"")
            if number % 50 == 0:
                await writer.drain()
                await asyncio.sleep(0)
        for event in (h11.Data(data=SSE_TAIL), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        await writer.drain()
        return connection.our_state is h11.DONE


@dataclass
class Gateway:
    """Envoy, the picker behind it and a client in front of it."""

    envoy: Envoy
    picker: Picker
    client: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.envoy.url

    async def post(self, path: str = "/v1/chat/completions", **more: Any) -> tuple[int, Any]:
        async with self.client.post(self.url + path, **more) as response:
            text = await response.read()
            try:
                return response.status, orjson.loads(text)
            except orjson.JSONDecodeError:
                return response.status, text.decode()

    def pool(self, name: str = "p") -> Pool:
        pool = self.picker.pools.get(ObjectKey("ns", name))
        assert pool is not None
        return pool

    def in_flight(self, name: str = "p") -> tuple[int, int]:
        load = self.pool(name).load
        return int(load.in_flight.sum()), int(load.in_flight_tokens.sum())


def write_endpoints(path: Path, pools: dict[str, Sequence[str]]) -> None:
    """An endpoints file: addresses by pool."""
    lines = ["endpoints:"]
    for pool, addresses in pools.items():
        for address in addresses:
            host, _, port = address.rpartition(":")
            lines.append(f"- {{name: '{address}', namespace: ns, pool: {pool}, address: '{host}', port: {port}}}")
    temporary = path.with_suffix(".new")
    temporary.write_text("\n".join(lines) if len(lines) > 1 else "endpoints: []")
    temporary.rename(path)


@asynccontextmanager
async def static_picker(directory: Path, pools: dict[str, Sequence[str]], **options: Any) -> AsyncIterator[Picker]:
    path = directory / "endpoints.yaml"
    write_endpoints(path, pools)
    given: dict[str, Any] = {
        "endpoints_file": path, "host": "127.0.0.1", "grpc_port": 0, "health_port": 0, "metrics_port": 0,
        "secure": False, "drain_seconds": 0.5,
    }  # fmt: skip
    async with Picker(PickerOptions(**{**given, **options})) as picker:
        for name in pools:
            if picker.pools.get(ObjectKey("ns", name)) is None:
                picker.pools.add(picker._make_pool(ObjectKey("ns", name), "it has no endpoint in the file"))
        yield picker


@asynccontextmanager
async def gateway(
    directory: Path, picker: Picker, routes: Sequence[PoolRoute] | None = None, **envoy: Any
) -> AsyncIterator[Gateway]:
    program("envoy")
    if routes is None:
        routes = [PoolRoute(name="p", pickers=[f"127.0.0.1:{picker.grpc_port}"])]
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            Envoy(directory / "envoy", routes, port=free_port(), admin_port=free_port(), **envoy)
        )
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60))
        )
        yield Gateway(running, picker, client)
