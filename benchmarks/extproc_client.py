"""A process that opens ext_proc streams at a steady rate, whatever the answers do, and reports their latency.

Own frames instead of a library: the client must cost less than what it measures.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time

import orjson
import uvloop

from benchmarks.messages import answered, asked
from tidemill.picker.transport.http2 import PREFACE, Frame, Setting, literal
from tidemill.picker.transport.lean import METHOD

_HEADER = struct.Struct(">BHBBI")
HEADER_BLOCK = (
    b"\x20\x83\x86"  # no table; :method POST, :scheme http by the static table
    + literal(":path", METHOD)
    + literal(":authority", "picker")
    + literal("content-type", "application/grpc")
    + literal("te", "trailers")
)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return _HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def data_frames(stream: int, messages: list[bytes], *, end: bool) -> bytes:
    payload = b"".join(b"\x00" + struct.pack(">I", len(m)) + m for m in messages)
    parts = [payload[i : i + 16_384] for i in range(0, len(payload), 16_384)]
    return b"".join(
        frame(Frame.DATA, int(end and i == len(parts) - 1), stream, part) for i, part in enumerate(parts)
    )


class Client(asyncio.Protocol):
    def __init__(self, body: bytes) -> None:
        self.request = asked(body)
        self.response = answered()
        self.started: dict[int, float] = {}
        self.latencies: list[float] = []
        self.done = 0
        self.next = 1
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        window = struct.pack(">HI", Setting.INITIAL_WINDOW_SIZE, 2**24)
        self.transport.write(
            PREFACE + frame(Frame.SETTINGS, 0, 0, window)
            + frame(Frame.WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**30))
        )  # fmt: skip

    def open(self) -> None:
        stream, self.next = self.next, self.next + 2
        self.started[stream] = time.perf_counter()
        self.transport.write(
            frame(Frame.HEADERS, 4, stream, HEADER_BLOCK) + data_frames(stream, self.request, end=False)
        )

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data
        position = 0
        while len(data) - position >= 9:
            high, low, kind, flags, stream = _HEADER.unpack_from(data, position)
            end = position + 9 + (high << 16 | low)
            if end > len(data):
                break
            position = end
            if kind == Frame.DATA:
                started = self.started.pop(stream, None)
                if started is not None:
                    self.latencies.append(time.perf_counter() - started)
                    self.transport.write(data_frames(stream, self.response, end=True))
            elif kind == Frame.HEADERS and flags & 1:
                self.done += 1
            elif kind == Frame.SETTINGS and not flags & 1:
                self.transport.write(frame(Frame.SETTINGS, 1, 0, b""))
            elif kind == Frame.GOAWAY:
                raise SystemExit(f"the picker ended the connection: {data!r}")
        self.buffer = data[position:]


async def main(port: int, rate: float, seconds: float, size: int) -> None:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: Client(b"x" * size), "127.0.0.1", port)
    await asyncio.sleep(0.2)
    begun = loop.time()
    sent = 0
    while (now := loop.time() - begun) < seconds:
        while sent < now * rate:
            client.open()
            sent += 1
        await asyncio.sleep(max(0.0, (sent + 1) / rate - (loop.time() - begun)))
    await asyncio.sleep(1.0)
    found = sorted(client.latencies)
    print(
        orjson.dumps(
            {
                "sent": sent,
                "answered": len(found),
                "complete": client.done,
                "p50_ms": round(found[len(found) // 2] * 1000, 3),
                "p95_ms": round(found[int(len(found) * 0.95)] * 1000, 3),
                "p99_ms": round(found[int(len(found) * 0.99)] * 1000, 3),
            }
        ).decode()
    )


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
