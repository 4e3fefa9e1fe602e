"""A TCP proxy that misbehaves on demand."""

from __future__ import annotations

import asyncio
import contextlib


class FaultyProxy:
    """Passes bytes between clients and `target` until told otherwise."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.refusing = False  # new connections end at once
        self._frozen: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def __aenter__(self) -> FaultyProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._connections):
            writer.transport.abort()

    def silence(self) -> None:
        """Every connection there is stays open and carries nothing any more; new ones work."""
        self._frozen |= self._connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, up_writer}
        self._connections |= pair
        tasks = {
            asyncio.create_task(self._pump(reader, up_writer, writer)),
            asyncio.create_task(self._pump(up_reader, writer, writer)),
        }
        self._tasks |= tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for closing in pair:
            closing.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._connections -= pair
        self._tasks -= tasks

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                if client in self._frozen:
                    await asyncio.Event().wait()
                sink.write(data)
                await sink.drain()
