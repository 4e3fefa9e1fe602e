"""Container logs on disk: one line a record, each with its time, as container runtimes keep them."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from tidemill.kube.clock import parse_time, rfc3339_micro


class ContainerLog:
    """The log of one container; `rotate` keeps that of the run before as the previous one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._previous = path.with_suffix(".previous")
        self._grown = asyncio.Condition()
        self._closed = False

    def rotate(self) -> None:
        self._closed = False
        if self._path.exists():
            self._path.replace(self._previous)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()

    async def copy_from(self, stream: asyncio.StreamReader, now: Callable[[], dt.datetime]) -> None:
        """Take lines until the stream ends."""
        with self._path.open("ab", buffering=0) as file:
            while True:
                try:
                    line = await stream.readuntil(b"\n")
                except asyncio.IncompleteReadError as error:
                    line = error.partial
                except asyncio.LimitOverrunError as error:
                    line = await stream.read(error.consumed or 1)
                if not line:
                    return
                file.write(f"{rfc3339_micro(now())} ".encode() + line.rstrip(b"\n") + b"\n")
                async with self._grown:
                    self._grown.notify_all()

    async def close(self) -> None:
        self._closed = True
        async with self._grown:
            self._grown.notify_all()

    async def read(self, query: Mapping[str, str], now: dt.datetime) -> AsyncIterator[bytes]:
        """Chunks for a log request: previous, tailLines, sinceSeconds, timestamps, follow."""
        path = self._previous if query.get("previous") == "true" else self._path
        since = query.get("sinceSeconds")
        start = now - dt.timedelta(seconds=int(since)) if since else None
        tail = query.get("tailLines")
        content = path.read_bytes() if path.exists() else b""
        position = len(content)
        lines = content.splitlines(keepends=True)
        if start is not None:
            lines = [line for line in lines if _time_of(line) >= start]
        if tail is not None and tail.isdigit():
            lines = lines[-int(tail) :] if int(tail) else []
        stamped = query.get("timestamps") == "true"
        yield b"".join(line if stamped else line.split(b" ", 1)[1] for line in lines)
        while query.get("follow") == "true" and path == self._path:
            with path.open("rb") as file:
                file.seek(position)
                fresh = file.read()
            fresh = fresh[: fresh.rfind(b"\n") + 1]
            if fresh:
                position += len(fresh)
                yield b"".join(
                    line if stamped else line.split(b" ", 1)[1] for line in fresh.splitlines(keepends=True)
                )
            elif self._closed:
                return
            else:
                async with self._grown:
                    await self._grown.wait()


def _time_of(line: bytes) -> dt.datetime:
    return parse_time(line.split(b" ", 1)[0].decode())
