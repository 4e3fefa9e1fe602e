"""The same calls over grpcio: the reference that the lean transport is compared with, in tests and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import structlog

from tidemill.picker.extproc.exchange import StreamInfo
from tidemill.picker.transport.lean import METHOD, CallFactory

log = structlog.get_logger(__name__)


class ReferenceServer:
    """Listens with grpcio. grpcio does not tell a call its port, so each port has a server of its own."""

    def __init__(self, factory: CallFactory) -> None:
        self._factory = factory
        self._servers: list[grpc.aio.Server] = []
        self._streams = 0

    async def listen(
        self, host: str | None, port: int, *, tls: grpc.ServerCredentials | None = None, reuse_port: bool = False
    ) -> int:
        server = grpc.aio.server(
            options=[
                # What is too large is refused by the exchange, as HTTP, not by gRPC as an error of the stream.
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", int(reuse_port)),
            ]
        )
        address = f"{host or '[::]'}:{port}"
        try:
            bound = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address} for ext_proc: {error}") from None
        service, _, method = METHOD[1:].rpartition("/")

        async def process(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await self._process(requests, context, bound)

        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    service, {method: grpc.stream_stream_rpc_method_handler(process)}
                ),
            )
        )
        await server.start()
        self._servers.append(server)
        return bound

    @property
    def streams(self) -> int:
        return self._streams

    async def drain(self, timeout: float, last_word: Callable[[], None]) -> None:
        """As the lean transport's."""
        timer = asyncio.get_running_loop().call_later(timeout, last_word)
        try:
            await asyncio.gather(*(server.stop(timeout + 0.1) for server in self._servers))
        finally:
            timer.cancel()

    async def _process(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any], port: int
    ) -> None:
        answers: asyncio.Queue[bytes | ValueError | None] = asyncio.Queue()
        metadata: Sequence[tuple[str, Any]] = tuple(context.invocation_metadata() or ())
        info = StreamInfo({key: value for key, value in metadata if isinstance(value, str)}, port)
        call = self._factory(info, answers.put_nowait, lambda: answers.put_nowait(None))
        self._streams += 1

        async def read() -> None:
            try:
                async for message in requests:
                    call.receive(message)
            except ValueError as error:
                answers.put_nowait(error)
            else:
                answers.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (answer := await answers.get()) is not None:
                if isinstance(answer, ValueError):
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(answer))
                await context.write(answer)
        finally:
            self._streams -= 1
            reader.cancel()
            call.closed()
