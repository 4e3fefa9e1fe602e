"""A picker behind a real port, with pools in memory, and a grpcio client for it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from tests.picker_rig import Rig

from tidemill.picker.extproc.exchange import Exchange, StreamInfo
from tidemill.picker.extproc.protos import ProcessingResponse
from tidemill.picker.transport.lean import METHOD, LeanServer
from tidemill.picker.transport.reference import ReferenceServer

TRANSPORTS = ("lean", "grpc")


@asynccontextmanager
async def listening(
    rig: Rig, transport: str, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, LeanServer | ReferenceServer]]:
    """Port and server of `rig` over a transport."""

    def factory(info: StreamInfo, send: Callable[[bytes], None], finish: Callable[[], None]) -> Exchange:
        return Exchange(rig.director, info, send, finish)

    server: LeanServer | ReferenceServer
    if transport == "lean":
        server = LeanServer(factory, max_body=rig.director.max_body)
        port = await server.listen("127.0.0.1", 0, tls=tls)
    else:
        server = ReferenceServer(factory)
        port = await server.listen("127.0.0.1", 0)
    try:
        yield port, server
    finally:
        await server.drain(0.0, lambda: None)


@asynccontextmanager
async def channel(
    port: int, *, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    address = f"127.0.0.1:{port}"
    if credentials is None:
        made = grpc.aio.insecure_channel(address, options=options)
    else:
        secure = [*options, ("grpc.ssl_target_name_override", "localhost")]
        made = grpc.aio.secure_channel(address, credentials, options=secure)
    async with made:
        yield made


class WireTalk:
    """One stream of a grpcio client."""

    def __init__(self, through: grpc.aio.Channel, **metadata: str) -> None:
        method = through.stream_stream(METHOD)
        self.call = method(metadata=tuple((k.replace("_", "-"), v) for k, v in metadata.items()))

    async def send(self, message: Any) -> None:
        await self.call.write(message.SerializeToString())

    async def read(self, *, within: float = 10.0) -> Any:
        """The next answer; None at the end of the stream."""
        raw = await asyncio.wait_for(self.call.read(), within)
        return None if raw is grpc.aio.EOF else ProcessingResponse.FromString(raw)

    async def rest(self) -> list[Any]:
        """End our side; everything that still comes."""
        await self.call.done_writing()
        found = []
        while (answer := await self.read()) is not None:
            found.append(answer)
        return found

    async def code(self) -> grpc.StatusCode:
        return await self.call.code()
