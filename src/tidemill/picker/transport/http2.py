"""The server's side of HTTP/2 (RFC 9113), as much as gRPC needs, without I/O.

Own code because it is the request path: a general library costs more than the decision it carries. Bytes go in
by `receive`, what is to be written comes out of `take`; streams are told what happens to them through the
callbacks of their `StreamHandler`. Nothing is pushed, prioritised or compressed on the way out; header blocks on
the way in are decoded by hpack, once for each distinct block, since the peer is told to keep no table.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import hpack
from hpack.exceptions import HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME = 16_384  # what we accept; the smallest the standard allows
MAX_STREAM_ID = 2**31 - 1
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
STREAM_WINDOW = 2**20  # bytes of one stream that may be on their way to us
CONNECTION_WINDOW = 16 * 2**20
MAX_STREAMS = 4096
MAX_HEADER_BLOCK = 64 * 2**10
PENDING_LIMIT = 256 * 2**10  # bytes of a stream that wait for the peer's window before it may send no more
# Frames that cost us and not the peer: so many without any request in between are an attack.
MAX_IDLE_FRAMES = 10_000
_CACHED_BLOCKS = 256

_HEADER = struct.Struct(">BHBBI")
_SETTING = struct.Struct(">HI")
_U32 = struct.Struct(">I")

Headers: TypeAlias = tuple[tuple[str, str], ...]


class Frame(IntEnum):
    DATA = 0x0
    HEADERS = 0x1
    PRIORITY = 0x2
    RST_STREAM = 0x3
    SETTINGS = 0x4
    PUSH_PROMISE = 0x5
    PING = 0x6
    GOAWAY = 0x7
    WINDOW_UPDATE = 0x8
    CONTINUATION = 0x9


class Flag(IntEnum):
    END_STREAM = 0x1
    ACK = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


class ErrorCode(IntEnum):
    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


# The same as plain numbers: every frame passes here, and to look up a member of an enumeration costs as much as
# the work itself.
(
    _DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE,
    _CONTINUATION,
) = map(int, Frame)  # fmt: skip
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20


class ProtocolError(Exception):
    """The peer broke a rule that concerns the whole connection."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamError(Exception):
    """The peer broke a rule that concerns one stream."""

    def __init__(self, stream_id: int, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.stream_id = stream_id
        self.code = code


class StreamHandler(Protocol):
    def data(self, chunk: bytes) -> None: ...

    def end(self) -> None:
        """The peer sends no more on this stream."""

    def closed(self) -> None:
        """The stream is over, from either side and for any reason; said once."""


class Stream:
    """One stream. `handler` is set by whoever accepts it."""

    __slots__ = (
        "_connection", "_ended_by_us", "_pending", "_pending_bytes", "_recv_consumed", "_recv_window",
        "_send_window", "_trailers", "handler", "id", "peer_ended",
    )  # fmt: skip

    def __init__(self, connection: Connection, id: int, send_window: int) -> None:
        self._connection = connection
        self.id = id
        self.handler: StreamHandler | None = None
        self.peer_ended = False
        self._ended_by_us = False
        self._send_window = send_window
        self._recv_window = STREAM_WINDOW
        self._recv_consumed = 0
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._trailers: bytes | None = None

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        """An encoded header block of at most one frame."""
        if self._ended_by_us:
            return
        flags = _END_HEADERS | (_END_STREAM if end else 0)
        self._connection.header_block(flags, self.id, block)
        if end:
            self._finished()

    def send_data(self, data: bytes) -> None:
        """Send what the peer's windows allow, keep the rest until they open."""
        if self._ended_by_us or not data:
            return
        connection = self._connection
        size = len(data)
        if (
            not self._pending
            and size <= self._send_window
            and size <= connection.send_window
            and size <= connection.peer_max_frame
        ):
            self._send_window -= size
            connection.send_window -= size
            connection.frame(_DATA, 0, self.id, data)
            return
        self._pending.append(data)
        self._pending_bytes += size
        self.flush()

    def send_trailers(self, block: bytes) -> None:
        """End our side, after everything that still waits."""
        if self._ended_by_us or self._trailers is not None:
            return
        self._trailers = block
        self.flush()

    def reset(self, code: ErrorCode) -> None:
        self._connection.reset_stream(self.id, code)

    def flush(self) -> None:
        connection = self._connection
        pending = self._pending
        while pending:
            room = min(self._send_window, connection.send_window, connection.peer_max_frame)
            if room <= 0:
                connection.blocked[self.id] = self
                return
            chunk = pending[0]
            if len(chunk) <= room:
                pending.popleft()
            else:
                pending[0] = chunk[room:]
                chunk = chunk[:room]
            size = len(chunk)
            self._pending_bytes -= size
            self._send_window -= size
            connection.send_window -= size
            connection.frame(_DATA, 0, self.id, chunk)
        connection.blocked.pop(self.id, None)
        self._give_credit()
        if self._trailers is not None:
            block, self._trailers = self._trailers, None
            self.send_headers(block, end=True)

    def over(self) -> None:
        """Nothing more is sent, whoever still holds the stream."""
        self._ended_by_us = True
        self._pending.clear()
        self._pending_bytes = 0
        self._trailers = None
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.closed()

    def receive(self, size: int) -> None:
        """Account for `size` bytes of DATA. Raises StreamError when the peer had no window for them."""
        self._recv_window -= size
        if self._recv_window < 0:
            raise StreamError(self.id, ErrorCode.FLOW_CONTROL_ERROR, "more data than the stream's window")

    def consumed(self, size: int) -> None:
        self._recv_consumed += size
        if self._recv_consumed >= STREAM_WINDOW // 2:
            self._give_credit()

    def widen(self, increment: int) -> None:
        self._send_window += increment
        if self._send_window > MAX_WINDOW:
            raise StreamError(self.id, ErrorCode.FLOW_CONTROL_ERROR, "window above 2^31-1")

    def _give_credit(self) -> None:
        # Whoever does not read what it is sent may not send more either.
        if (
            self._recv_consumed >= STREAM_WINDOW // 2
            and self._pending_bytes < PENDING_LIMIT
            and not self.peer_ended
        ):
            self._connection.frame(_WINDOW_UPDATE, 0, self.id, _U32.pack(self._recv_consumed))
            self._recv_window += self._recv_consumed
            self._recv_consumed = 0

    def _finished(self) -> None:
        self._ended_by_us = True
        connection = self._connection
        if not self.peer_ended:
            # Complete without the rest of the request (RFC 9113, 8.1).
            connection.frame(_RST_STREAM, 0, self.id, _U32.pack(ErrorCode.NO_ERROR))
        connection.forget(self.id)


class Connection:
    """One connection. `accept` gets each new stream with its headers and must set its handler."""

    def __init__(self, accept: Callable[[Stream, Headers], None]) -> None:
        self._accept = accept
        self._buffer = b""
        self._preface_left = PREFACE
        self._settings_seen = False
        self._out: list[bytes] = []
        self.streams: dict[int, Stream] = {}
        self.blocked: dict[int, Stream] = {}
        self.send_window = DEFAULT_WINDOW
        self.peer_max_frame = MAX_FRAME
        self._peer_initial_window = DEFAULT_WINDOW
        self._recv_window = CONNECTION_WINDOW
        self._recv_consumed = 0
        self._last_stream = 0
        self._header_block: tuple[int, int, list[bytes], int] | None = None  # stream, flags, parts, size
        self._decoder = hpack.Decoder(max_header_list_size=MAX_HEADER_BLOCK)
        self._stateless = False  # whether the peer has agreed to keep no header table
        self._cache: dict[bytes, tuple[Headers, bool]] = {}
        self._idle_frames = 0
        self._said_no_table = False
        self.closed = False
        self.draining = False
        self.frame(
            _SETTINGS, 0, 0,
            _SETTING.pack(Setting.HEADER_TABLE_SIZE, 0)
            + _SETTING.pack(Setting.MAX_CONCURRENT_STREAMS, MAX_STREAMS)
            + _SETTING.pack(Setting.INITIAL_WINDOW_SIZE, STREAM_WINDOW)
            + _SETTING.pack(Setting.MAX_HEADER_LIST_SIZE, MAX_HEADER_BLOCK),
        )  # fmt: skip
        self.frame(_WINDOW_UPDATE, 0, 0, _U32.pack(CONNECTION_WINDOW - DEFAULT_WINDOW))

    # Out

    def take(self) -> bytes:
        """What is to be written now."""
        out, self._out = self._out, []
        return out[0] if len(out) == 1 else b"".join(out)

    def frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._out.append(_HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id))
        if size:
            self._out.append(payload)

    def header_block(self, flags: int, stream_id: int, block: bytes) -> None:
        if not self._said_no_table:
            # Our encoder keeps no table. A peer that has asked for a small one waits to be told (RFC 7541, 4.2).
            self._said_no_table = True
            block = b"\x20" + block
        self.frame(_HEADERS, flags, stream_id, block)

    def go_away(self) -> None:
        """Tell the peer to open no more streams here. Those that it opens before it has heard are served."""
        if not self.draining and not self.closed:
            self.draining = True
            self.frame(_GOAWAY, 0, 0, _U32.pack(MAX_STREAM_ID) + _U32.pack(ErrorCode.NO_ERROR))

    def reset_stream(self, stream_id: int, code: ErrorCode) -> None:
        self.frame(_RST_STREAM, 0, stream_id, _U32.pack(code))
        self.forget(stream_id)

    def forget(self, stream_id: int) -> None:
        stream = self.streams.pop(stream_id, None)
        self.blocked.pop(stream_id, None)
        if stream is not None:
            stream.over()

    def lost(self) -> None:
        """The transport is gone."""
        self.closed = True
        for stream_id in list(self.streams):
            self.forget(stream_id)

    # In

    def receive(self, data: bytes) -> None:
        """Bytes of the peer. After an error of the connection `closed` is true, and what `take` gives is the last
        that may be written."""
        if self.closed:
            return
        try:
            self._receive(data)
        except ProtocolError as error:
            self._fail(error)

    def _fail(self, error: ProtocolError) -> None:
        message = str(error).encode()[:128]
        self.frame(_GOAWAY, 0, 0, _U32.pack(self._last_stream) + _U32.pack(error.code) + message)
        self.lost()

    def _receive(self, data: bytes) -> None:
        if self._preface_left:
            data = self._preface(data)
        if self._buffer:
            data = self._buffer + data
        position, available = 0, len(data)
        unpack = _HEADER.unpack_from
        while available - position >= 9:
            high, low, kind, flags, stream_id = unpack(data, position)
            size = high << 16 | low
            if size > MAX_FRAME:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, f"frame of {size} bytes")
            end = position + 9 + size
            if end > available:
                break
            payload = data[position + 9 : end]
            position = end
            try:
                if kind == _DATA and self._header_block is None and self._settings_seen:
                    self._on_data(flags, stream_id & MAX_STREAM_ID, payload)
                else:
                    self._frame(kind, flags, stream_id & MAX_STREAM_ID, payload)
            except StreamError as error:
                self.reset_stream(error.stream_id, error.code)
                self._count_idle()
        self._buffer = data[position:] if position < available else b""

    def _preface(self, data: bytes) -> bytes:
        expected = self._preface_left
        common = min(len(expected), len(data))
        if data[:common] != expected[:common]:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 connection preface")
        self._preface_left = expected[common:]
        return data[common:]

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._header_block is not None and (kind != _CONTINUATION or stream_id != self._header_block[0]):
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a header block must not be interrupted")
        if not self._settings_seen and kind != _SETTINGS:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if kind == _DATA:
            self._on_data(flags, stream_id, payload)
        elif kind == _HEADERS:
            self._on_headers(flags, stream_id, payload)
        elif kind == _WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == _RST_STREAM:
            self._on_reset(stream_id, payload)
        elif kind == _PING:
            self._on_ping(flags, stream_id, payload)
        elif kind == _SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif kind == _CONTINUATION:
            self._on_continuation(flags, stream_id, payload)
        elif kind == _PRIORITY:
            self._on_priority(stream_id, payload)
        elif kind == _GOAWAY:
            if stream_id or len(payload) < 8:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "bad GOAWAY")
            self.draining = True
        elif kind == _PUSH_PROMISE:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a client must not push")
        # Frames of unknown types are ignored (RFC 9113, 5.5).

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        stream = self.streams.get(stream_id)
        if stream is None and (not stream_id or stream_id > self._last_stream or not stream_id & 1):
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "DATA on an idle stream")
        # Padding counts for flow control, and so does what comes for a stream that is gone.
        self._recv_window -= size
        if self._recv_window < 0:
            raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's window")
        self._recv_consumed += size
        if self._recv_consumed >= CONNECTION_WINDOW // 2:
            self.frame(_WINDOW_UPDATE, 0, 0, _U32.pack(self._recv_consumed))
            self._recv_window += self._recv_consumed
            self._recv_consumed = 0
        if flags & _PADDED:
            payload = _unpadded(payload)
        if stream is None:
            self._count_idle()  # reset a moment ago: the peer could not know yet
            return
        if stream.peer_ended:
            raise StreamError(stream_id, ErrorCode.STREAM_CLOSED, "DATA after the end of the stream")
        stream.receive(size)
        ends = flags & _END_STREAM
        if payload:
            self._idle_frames = 0
        elif not ends:
            self._count_idle()
        if ends:
            stream.peer_ended = True
        handler = stream.handler
        if handler is not None:
            if payload:
                handler.data(payload)
            stream.consumed(size)
            if ends and stream.handler is not None:
                handler.end()

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream that a client cannot open")
        if flags & _PADDED:
            payload = _unpadded(payload)
        if flags & _HAS_PRIORITY:
            if len(payload) < 5:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            if _U32.unpack_from(payload)[0] & MAX_STREAM_ID == stream_id:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a stream cannot depend on itself")
            payload = payload[5:]
        if flags & _END_HEADERS:
            self._on_header_block(stream_id, flags, payload)
        else:
            self._header_block = (stream_id, flags, [payload], len(payload))

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._header_block is None:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        _, first_flags, parts, size = self._header_block
        size += len(payload)
        if size > MAX_HEADER_BLOCK or len(parts) > 64:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        parts.append(payload)
        self._header_block = (stream_id, first_flags, parts, size)
        if flags & _END_HEADERS:
            self._header_block = None
            self._on_header_block(stream_id, first_flags, b"".join(parts))

    def _on_header_block(self, stream_id: int, flags: int, block: bytes) -> None:
        # Every block must be decoded, also one that is not wanted: it may change the table.
        headers, well_formed = self._decode(block)
        end = bool(flags & _END_STREAM)
        stream = self.streams.get(stream_id)
        if stream is not None:
            if stream.peer_ended or not end:
                raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "a second header block must end the stream")
            stream.peer_ended = True
            if stream.handler is not None:
                stream.handler.end()
            return
        if stream_id <= self._last_stream:
            self._count_idle()
            raise StreamError(stream_id, ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
        self._last_stream = stream_id
        if len(self.streams) >= MAX_STREAMS:
            raise StreamError(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
        if not well_formed:
            raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "malformed request headers")
        stream = self.streams[stream_id] = Stream(self, stream_id, self._peer_initial_window)
        stream.peer_ended = end
        self._idle_frames = 0
        self._accept(stream, headers)
        if end and stream.handler is not None:
            stream.handler.end()

    def _decode(self, block: bytes) -> tuple[Headers, bool]:
        """The fields of a block, and whether they are well formed as a request."""
        found = self._cache.get(block)
        if found is not None:
            return found
        try:
            fields: Any = self._decoder.decode(block)  # text, though their declared type allows bytes
            headers = tuple([(str(name), str(value)) for name, value in fields])
        except (HPACKError, UnicodeDecodeError) as error:
            raise ProtocolError(ErrorCode.COMPRESSION_ERROR, type(error).__name__) from None
        found = (headers, _well_formed(headers))
        # Without a table a block means the same whenever it comes.
        if self._stateless and len(self._cache) < _CACHED_BLOCKS:
            self._cache[block] = found
        return found

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE must have 4 bytes")
        increment = _U32.unpack(payload)[0] & MAX_WINDOW
        if stream_id:
            if stream_id > self._last_stream:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
            stream = self.streams.get(stream_id)
            if stream is None:
                self._count_idle()
                return
            if not increment:
                raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            stream.widen(increment)
            stream.flush()
            return
        if not increment:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        self.send_window += increment
        if self.send_window > MAX_WINDOW:
            raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "window above 2^31-1")
        self._flush_blocked()

    def _flush_blocked(self) -> None:
        for stream in list(self.blocked.values()):
            if self.send_window <= 0:
                break
            # To the end of the line, so that one large answer does not hold up the others.
            self.blocked.pop(stream.id, None)
            stream.flush()

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM must have 4 bytes")
        if not stream_id or stream_id > self._last_stream:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        self._count_idle()
        self.forget(stream_id)

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "PING must have 8 bytes")
        if not flags & _ACK:
            self._count_idle()
            self.frame(_PING, _ACK, 0, payload)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & _ACK:
            if payload:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS acknowledgement with a payload")
            # From here on the peer keeps no table: header blocks stand for themselves.
            self._decoder.max_allowed_table_size = 0
            self._stateless = True
            return
        if len(payload) % 6:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS must have 6 bytes an entry")
        self._settings_seen = True
        self._count_idle()
        for setting, value in _SETTING.iter_unpack(payload):
            if setting == Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "initial window above 2^31-1")
                change = value - self._peer_initial_window
                self._peer_initial_window = value
                try:
                    for stream in self.streams.values():
                        stream.widen(change)
                except StreamError as error:
                    raise ProtocolError(error.code, str(error)) from None
            elif setting == Setting.MAX_FRAME_SIZE:
                if not MAX_FRAME <= value <= 2**24 - 1:
                    raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "frame size out of range")
                self.peer_max_frame = value
            elif setting == Setting.ENABLE_PUSH and value > 1:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH must be 0 or 1")
        self.frame(_SETTINGS, _ACK, 0, b"")
        # Only after the acknowledgement may data count on a larger window.
        for stream in list(self.blocked.values()):
            stream.flush()

    def _on_priority(self, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "PRIORITY without a stream")
        if len(payload) != 5:
            raise StreamError(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY must have 5 bytes")
        if _U32.unpack_from(payload)[0] & MAX_STREAM_ID == stream_id:
            raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream cannot depend on itself")
        self._count_idle()

    def _count_idle(self) -> None:
        self._idle_frames += 1
        if self._idle_frames > MAX_IDLE_FRAMES:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that ask for nothing")


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
    return payload[1 : len(payload) - payload[0]]


def _well_formed(headers: Headers) -> bool:
    """Pseudo-headers first, each once, those of a request and no other; no upper case (RFC 9113, 8.2 and 8.3)."""
    pseudo: set[str] = set()
    regular = False
    for name, _ in headers:
        if not name or name != name.lower():
            return False
        if name[0] != ":":
            regular = True
        elif regular or name in pseudo or name not in (":method", ":scheme", ":path", ":authority"):
            return False
        else:
            pseudo.add(name)
    return {":method", ":scheme", ":path"} <= pseudo


def literal(name: str, value: str) -> bytes:
    """A header field as a literal without indexing (RFC 7541, 6.2.2), without Huffman coding."""
    return b"\x00" + _text(name.encode("ascii")) + _text(value.encode("utf-8"))


def _text(text: bytes) -> bytes:
    """A string of HPACK with its length as an integer with a prefix of 7 bits (RFC 7541, 5.1 and 5.2)."""
    size = len(text)
    if size < 0x7F:
        return bytes((size,)) + text
    size -= 0x7F
    out = bytearray((0x7F,))
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out) + text
