"""gRPC's framing over the lean HTTP/2, for the one method that Envoy calls, and the server around it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import quote

import structlog

from tidemill.picker.extproc.exchange import StreamInfo
from tidemill.picker.transport.http2 import Connection, Headers, Stream, literal

log = structlog.get_logger(__name__)

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
MESSAGE_OVERHEAD = 2**20  # what a message may hold beside a body: headers, metadata, attributes

_KNOWN_LIMIT = 256
_OK_HEADERS = b"\x88" + literal("content-type", "application/grpc")  # 0x88 is :status 200
_OK_TRAILERS = literal("grpc-status", "0")


class Call(Protocol):
    """One call of the method: whatever stands behind the transport."""

    def receive(self, data: bytes) -> None:
        """A message. Raises ValueError when it cannot be read."""

    def too_large(self) -> bool:
        """A message begins that is larger than any request may be. True when it has been refused."""
        ...

    def closed(self) -> None: ...


CallFactory = Callable[[StreamInfo, Callable[[bytes], None], Callable[[], None]], Call]


class _GrpcStream:
    """Messages out of data frames, and into them."""

    __slots__ = ("_buffer", "_call", "_needed", "_out", "_reading", "_size", "_started", "_stream", "max_message")

    def __init__(self, stream: Stream, max_message: int) -> None:
        self._stream = stream
        self._call: Call | None = None
        self._buffer: list[bytes] = []
        self._size = 0
        self._needed = 5
        self._started = False
        self._reading = False
        self._out: list[bytes] = []
        self.max_message = max_message

    def serve(self, call: Call) -> None:
        self._call = call

    def data(self, chunk: bytes) -> None:
        if self._size:
            self._buffer.append(chunk)
            self._size += len(chunk)
            if self._size < self._needed:
                return
            chunk = b"".join(self._buffer)
            self._buffer.clear()
            self._size = 0
        self._reading = True
        try:
            self._messages(chunk)
        finally:
            self._reading = False
        self._flush()

    def _messages(self, chunk: bytes) -> None:
        position, available = 0, len(chunk)
        self._needed = 5
        while available - position >= 5:
            length = int.from_bytes(chunk[position + 1 : position + 5], "big")
            if chunk[position]:
                self.fail(12, "compressed messages are not accepted")
                return
            if length > self.max_message and (self._call is None or self._call.too_large()):
                return
            end = position + 5 + length
            if end > available:
                self._needed = end - position
                break
            if not self._message(chunk[position + 5 : end]):
                return
            position = end
        if position < available:
            rest = chunk[position:] if position else chunk
            self._buffer.append(rest)
            self._size = len(rest)

    def _message(self, message: bytes) -> bool:
        call = self._call
        if call is None:
            return False
        try:
            call.receive(message)
        except ValueError as error:
            self.fail(3, str(error))
            return False
        return self._call is call

    def end(self) -> None:
        """Envoy is done with the request. So are we."""
        if self._size:
            self.fail(13, "the stream ended inside a message")
            return
        self.finish()

    def closed(self) -> None:
        call, self._call = self._call, None
        self._buffer.clear()
        self._size = 0
        if call is not None:
            call.closed()

    def send(self, message: bytes) -> None:
        """What answers one frame goes out as one."""
        self._out.append(b"\x00" + len(message).to_bytes(4, "big"))
        self._out.append(message)
        if not self._reading:
            self._flush()

    def _flush(self) -> None:
        if not self._out:
            return
        self._start()
        self._stream.send_data(b"".join(self._out))
        self._out.clear()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._stream.send_headers(_OK_HEADERS)

    def finish(self) -> None:
        self._flush()
        self._start()
        self._stream.send_trailers(_OK_TRAILERS)

    def fail(self, status: int, message: str) -> None:
        """End the call with a gRPC status other than OK."""
        block = literal("grpc-status", str(status)) + literal("grpc-message", quote(message, safe=" "))
        self._flush()
        if self._started:
            self._stream.send_trailers(block)
        else:
            self._started = True
            self._stream.send_headers(_OK_HEADERS + block, end=True)


class LeanProtocol(asyncio.Protocol):
    """One connection of the lean transport."""

    def __init__(self, server: LeanServer) -> None:
        self._server = server
        self._connection = Connection(self._accept)
        self._transport: asyncio.Transport | None = None
        self._port = 0
        self._receiving = False
        self._known: dict[Headers, tuple[StreamInfo, int]] = {}  # by header block, which repeats

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape, not by class
        self._port = transport.get_extra_info("sockname")[1]
        self._server.connections.add(self)
        if self._server.draining:
            self._connection.go_away()
        self.flush()

    def data_received(self, data: bytes) -> None:
        self._receiving = True
        try:
            self._connection.receive(data)
        except Exception:
            # Our own fault; other connections live on.
            log.exception("connection failed")
            self.abort()
            return
        finally:
            self._receiving = False
        self.flush()
        if self._connection.closed:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._connection.lost()
        self._server.closed_one()

    def pause_writing(self) -> None:
        # A peer that does not read is not read from: what it may make us hold is bounded.
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    @property
    def streams(self) -> int:
        return len(self._connection.streams)

    def flush(self) -> None:
        out = self._connection.take()
        if out and self._transport is not None:
            self._transport.write(out)

    def go_away(self) -> None:
        self._connection.go_away()
        self.flush()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _accept(self, stream: Stream, headers: Headers) -> None:
        grpc = _GrpcStream(stream, self._server.max_message)
        known = self._known.get(headers)
        if known is None:
            known = _understand(headers, self._port)
            if len(self._known) < _KNOWN_LIMIT:
                self._known[headers] = known
        info, refusal = known
        if refusal == 415:
            stream.send_headers(b"\x08\x03415", end=True)  # :status 415, by the static table's name
            return
        stream.handler = grpc
        if refusal:
            grpc.fail(refusal, f"unknown method; this server has {METHOD}")
            return

        def send(message: bytes) -> None:
            grpc.send(message)
            self._written()

        def finish() -> None:
            grpc.finish()
            self._written()

        grpc.serve(self._server.factory(info, send, finish))

    def _written(self) -> None:
        """What is written while bytes are being read goes out together afterwards, the rest by itself."""
        if not self._receiving:
            self.flush()


def _understand(headers: Headers, port: int) -> tuple[StreamInfo, int]:
    """What a stream's headers say; and 415 when it is no gRPC, or gRPC's UNIMPLEMENTED for another method."""
    fields = dict(headers)
    info = StreamInfo({name: value for name, value in headers if name[0] != ":"}, port)
    if fields.get(":method") != "POST" or not fields.get("content-type", "").startswith("application/grpc"):
        return info, 415
    return info, 0 if fields.get(":path") == METHOD else 12


class LeanServer:
    """Listens on one or several ports with the lean transport."""

    def __init__(self, factory: CallFactory, *, max_body: int) -> None:
        self.factory = factory
        self.max_message = max_body + MESSAGE_OVERHEAD
        self.connections: set[LeanProtocol] = set()
        self.draining = False
        self.loop = asyncio.get_running_loop()
        self._servers: list[asyncio.Server] = []
        self._changed = asyncio.Event()

    async def listen(
        self, host: str | None, port: int, *, tls: ssl.SSLContext | None = None, reuse_port: bool = False
    ) -> int:
        """Serve on a port (0 takes a free one); gives the port."""
        # Of no declared type: uvloop's is a server by its shape, not by its class.
        server: Any = await self.loop.create_server(
            lambda: LeanProtocol(self), host, port, ssl=tls, reuse_port=reuse_port or None, backlog=1024
        )
        self._servers.append(server)
        return server.sockets[0].getsockname()[1]

    @property
    def streams(self) -> int:
        return sum(connection.streams for connection in self.connections)

    def closed_one(self) -> None:
        self._changed.set()

    async def drain(self, timeout: float, last_word: Callable[[], None]) -> None:
        """Listen no more, ask peers to go elsewhere, wait for the streams that there are. Then give those that are
        left their `last_word` and close."""
        self.draining = True
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.go_away()
        deadline = self.loop.time() + timeout
        # A peer that has not heard GOAWAY yet may still open a stream: an idle moment is not the end.
        quiet = 0
        while self.loop.time() < deadline and quiet < 3 and self.connections:
            quiet = quiet + 1 if not self.streams else 0
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(0.1, max(0.0, deadline - self.loop.time())))
            except TimeoutError:
                continue
        last_word()
        for connection in list(self.connections):
            connection.close()
        await asyncio.sleep(0)
