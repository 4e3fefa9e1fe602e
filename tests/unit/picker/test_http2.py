"""The lean HTTP/2 against another implementation, against broken peers, and against noise."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.errors
import h2.events
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.picker.transport.http2 import (
    CONNECTION_WINDOW,
    MAX_IDLE_FRAMES,
    MAX_STREAMS,
    PREFACE,
    STREAM_WINDOW,
    Connection,
    ErrorCode,
    Frame,
    Headers,
    Setting,
    Stream,
    literal,
)

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/m"), (":authority", "a"), ("te", "trailers")]
OK = b"\x88"


@dataclass
class Recorder:
    """The server's side of one stream."""

    stream: Stream
    headers: Headers
    events: list[str] = field(default_factory=list)
    received: bytes = b""

    def data(self, chunk: bytes) -> None:
        self.received += chunk

    def end(self) -> None:
        self.events.append("end")

    def closed(self) -> None:
        self.events.append("closed")


class Server:
    def __init__(self) -> None:
        self.calls: list[Recorder] = []
        self.connection = Connection(self.accept)

    def accept(self, stream: Stream, headers: Headers) -> None:
        self.calls.append(Recorder(stream, headers))
        stream.handler = self.calls[-1]


class Pair:
    """Our server and h2 as its client, joined by hand."""

    def __init__(self, *, initial_window: int | None = None) -> None:
        self.server = Server()
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.client.initiate_connection()
        if initial_window is not None:
            self.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: initial_window})
        self.events: list[h2.events.Event] = []
        self.exchange()

    def exchange(self) -> None:
        """Carry bytes both ways until both are silent."""
        while True:
            to_server = self.client.data_to_send()
            if to_server:
                self.server.connection.receive(to_server)
            to_client = self.server.connection.take()
            if to_client:
                self.events += self.client.receive_data(to_client)
            if not to_server and not to_client:
                return

    def open(self, *, end: bool = False) -> tuple[int, Recorder]:
        stream_id = self.client.get_next_available_stream_id()
        self.client.send_headers(stream_id, REQUEST, end_stream=end)
        self.exchange()
        return stream_id, self.server.calls[-1]

    def data(self, stream_id: int) -> bytes:
        return b"".join(
            e.data for e in self.events if isinstance(e, h2.events.DataReceived) and e.stream_id == stream_id
        )

    def of(self, kind: type[h2.events.Event]) -> list[h2.events.Event]:
        return [e for e in self.events if isinstance(e, kind)]


class TestWithAnotherImplementation:
    def test_a_call(self) -> None:
        pair = Pair()
        stream_id, call = pair.open()
        assert dict(call.headers)[":path"] == "/m"
        pair.client.send_data(stream_id, b"question", end_stream=True)
        pair.exchange()
        assert call.received == b"question"
        assert call.events == ["end"]
        call.stream.send_headers(OK + literal("content-type", "application/grpc"))
        call.stream.send_data(b"answer")
        call.stream.send_trailers(literal("grpc-status", "0"))
        pair.exchange()
        (headers,) = pair.of(h2.events.ResponseReceived)
        assert (b":status", b"200") in headers.headers  # type: ignore[attr-defined]
        assert pair.data(stream_id) == b"answer"
        (trailers,) = pair.of(h2.events.TrailersReceived)
        assert (b"grpc-status", b"0") in trailers.headers  # type: ignore[attr-defined]
        assert call.events == ["end", "closed"]
        assert not pair.server.connection.streams

    def test_padding_counts_for_the_windows(self) -> None:
        pair = Pair()
        stream_id, call = pair.open()
        for _ in range(200):
            pair.client.send_data(stream_id, b"x" * 10_000, pad_length=200)
            pair.exchange()
        assert call.received == b"x" * 2_000_000

    def test_large_requests_get_credit(self) -> None:
        pair = Pair()
        stream_id, call = pair.open()
        sent = 0
        while sent < CONNECTION_WINDOW * 5 // 4:
            room = min(16_384, pair.client.local_flow_control_window(stream_id))
            assert room > 0, "the server gave no credit"
            pair.client.send_data(stream_id, bytes(room))
            sent += room
            pair.exchange()
        assert len(call.received) == sent

    @pytest.mark.parametrize("window", [0, 1, 1000])
    def test_what_the_window_does_not_take_waits(self, window: int) -> None:
        pair = Pair(initial_window=window)
        stream_id, call = pair.open()
        call.stream.send_headers(OK)
        body = bytes(range(256)) * 20
        call.stream.send_data(body)
        call.stream.send_trailers(literal("grpc-status", "0"))
        pair.exchange()
        assert pair.data(stream_id) == body[:window]
        assert not pair.of(h2.events.TrailersReceived)
        while len(pair.data(stream_id)) < len(body):
            pair.client.increment_flow_control_window(777, stream_id)
            pair.exchange()
        assert pair.data(stream_id) == body
        assert pair.of(h2.events.TrailersReceived)

    def test_the_connections_window_is_shared_fairly(self) -> None:
        pair = Pair(initial_window=2**20)
        calls = [pair.open() for _ in range(3)]
        for _, call in calls:
            call.stream.send_headers(OK)
            call.stream.send_data(b"x" * 100_000)
        pair.exchange()
        assert sum(len(pair.data(stream_id)) for stream_id, _ in calls) == 65_535
        for _ in range(40):
            pair.client.increment_flow_control_window(10_000)
            pair.exchange()
        assert [len(pair.data(stream_id)) for stream_id, _ in calls] == [100_000] * 3

    def test_a_changed_initial_window_moves_open_streams(self) -> None:
        pair = Pair(initial_window=100)
        stream_id, call = pair.open()
        call.stream.send_headers(OK)
        call.stream.send_data(b"x" * 500)
        pair.exchange()
        assert len(pair.data(stream_id)) == 100
        pair.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 50})
        pair.exchange()
        pair.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 300})
        pair.exchange()
        assert len(pair.data(stream_id)) == 300

    def test_a_reader_that_does_not_read_may_not_send_either(self) -> None:
        pair = Pair(initial_window=0)
        stream_id, call = pair.open()
        call.stream.send_headers(OK)
        call.stream.send_data(b"x" * 300_000)
        sent = 0
        while (room := min(16_384, pair.client.local_flow_control_window(stream_id))) > 0:
            pair.client.send_data(stream_id, bytes(room))
            sent += room
            pair.exchange()
        assert sent == STREAM_WINDOW
        pair.client.increment_flow_control_window(300_000, stream_id)
        pair.client.increment_flow_control_window(300_000)
        pair.exchange()
        assert pair.client.local_flow_control_window(stream_id) > 0

    def test_ping_and_settings_are_answered(self) -> None:
        pair = Pair()
        pair.client.ping(b"12345678")
        pair.exchange()
        assert pair.of(h2.events.PingAckReceived)
        assert pair.of(h2.events.SettingsAcknowledged)
        assert pair.client.remote_settings.header_table_size == 0

    def test_the_client_resets(self) -> None:
        pair = Pair()
        stream_id, call = pair.open()
        pair.client.reset_stream(stream_id, h2.errors.ErrorCodes.CANCEL)
        pair.exchange()
        assert call.events == ["closed"]
        call.stream.send_data(b"late")
        pair.exchange()
        _, second = pair.open(end=True)
        assert second.events == ["end"]

    def test_client_trailers_end_the_request(self) -> None:
        pair = Pair()
        stream_id, call = pair.open()
        pair.client.send_headers(stream_id, [("x-checksum", "abc")], end_stream=True)
        pair.exchange()
        assert call.events == ["end"]

    def test_going_away_lets_streams_end(self) -> None:
        pair = Pair()
        _stream_id, call = pair.open()
        pair.server.connection.go_away()
        pair.exchange()
        (event,) = pair.of(h2.events.ConnectionTerminated)
        assert event.error_code == 0  # type: ignore[attr-defined]
        call.stream.send_headers(OK)
        call.stream.send_trailers(literal("grpc-status", "0"))
        assert not pair.server.connection.streams

    def test_an_answer_before_the_request_is_over(self) -> None:
        pair = Pair()
        _stream_id, call = pair.open()
        call.stream.send_headers(OK)
        call.stream.send_trailers(literal("grpc-status", "0"))
        pair.exchange()
        assert call.events == ["closed"]
        (reset,) = pair.of(h2.events.StreamReset)
        assert reset.error_code == 0  # type: ignore[attr-defined]

    def test_equal_header_blocks_are_decoded_once(self) -> None:
        pair = Pair()
        for _ in range(5):
            pair.open(end=True)
        assert len(pair.server.connection._cache) <= 2
        assert [call.headers for call in pair.server.calls] == [tuple(REQUEST)] * 5

    def test_too_many_streams_are_refused(self) -> None:
        server = ready()
        for i in range(MAX_STREAMS + 1):
            server.connection.receive(raw(Frame.HEADERS, 0x4, 2 * i + 1, block()))
        frames = parsed(server.connection.take())
        assert frames[-1] == (
            Frame.RST_STREAM,
            0,
            2 * MAX_STREAMS + 1,
            struct.pack(">I", ErrorCode.REFUSED_STREAM),
        )
        assert len(server.connection.streams) == MAX_STREAMS


# Frames by hand


def raw(kind: int, flags: int, stream_id: int, payload: bytes = b"", *, size: int | None = None) -> bytes:
    length = len(payload) if size is None else size
    return struct.pack(">BHBBI", length >> 16, length & 0xFFFF, kind, flags, stream_id) + payload


def block(headers: list[tuple[str, str]] | None = None) -> bytes:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder.encode(REQUEST if headers is None else headers)


def parsed(data: bytes) -> list[tuple[int, int, int, bytes]]:
    frames, position = [], 0
    while position < len(data):
        high, low, kind, flags, stream_id = struct.unpack_from(">BHBBI", data, position)
        end = position + 9 + (high << 16 | low)
        frames.append((kind, flags, stream_id, data[position + 9 : end]))
        position = end
    return frames


def ready() -> Server:
    """After preface and SETTINGS both ways."""
    server = Server()
    server.connection.receive(PREFACE + raw(Frame.SETTINGS, 0, 0) + raw(Frame.SETTINGS, 1, 0))
    server.connection.take()
    return server


def setting(code: int, value: int) -> bytes:
    return struct.pack(">HI", code, value)


u32 = struct.Struct(">I").pack
OPEN = raw(Frame.HEADERS, 0x4, 1, block())
DONE = raw(Frame.HEADERS, 0x5, 1, block())


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (raw(Frame.DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (OPEN + raw(Frame.DATA, 0x8, 1, b"\x05abc"), ErrorCode.PROTOCOL_ERROR),
        (OPEN + raw(Frame.DATA, 0x8, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.HEADERS, 0x4, 2, block()), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.HEADERS, 0x4, 0, block()), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.HEADERS, 0x24, 1, u32(1) + b"\x10" + block()), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.HEADERS, 0x4, 1, b"\xff\xff\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (raw(Frame.HEADERS, 0x4, 1, b"\xbe"), ErrorCode.COMPRESSION_ERROR),  # an entry of the dynamic table
        (raw(Frame.HEADERS, 0, 1, block()) + raw(Frame.PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.HEADERS, 0, 1, block()) + raw(Frame.CONTINUATION, 4, 3, b""), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.CONTINUATION, 4, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.PUSH_PROMISE, 4, 1, u32(2)), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.RST_STREAM, 0, 1, u32(0)), ErrorCode.PROTOCOL_ERROR),
        (OPEN + raw(Frame.RST_STREAM, 0, 1, b"xyz"), ErrorCode.FRAME_SIZE_ERROR),
        (raw(Frame.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
        (raw(Frame.SETTINGS, 1, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
        (raw(Frame.SETTINGS, 0, 0, setting(Setting.ENABLE_PUSH, 2)), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.SETTINGS, 0, 0, setting(Setting.INITIAL_WINDOW_SIZE, 2**31)), ErrorCode.FLOW_CONTROL_ERROR),
        (raw(Frame.SETTINGS, 0, 0, setting(Setting.MAX_FRAME_SIZE, 100)), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (raw(Frame.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.WINDOW_UPDATE, 0, 0, u32(0)), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.WINDOW_UPDATE, 0, 0, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
        (raw(Frame.WINDOW_UPDATE, 0, 0, u32(2**31 - 1)), ErrorCode.FLOW_CONTROL_ERROR),
        (raw(Frame.WINDOW_UPDATE, 0, 5, u32(1)), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.DATA, 0, 1, size=16_385), ErrorCode.FRAME_SIZE_ERROR),
        (raw(Frame.HEADERS, 0, 1, block()) + raw(Frame.CONTINUATION, 0, 1, bytes(16_384)) * 5,
         ErrorCode.ENHANCE_YOUR_CALM),
        (raw(Frame.HEADERS, 0, 1, b"") + raw(Frame.CONTINUATION, 0, 1, b"") * 100, ErrorCode.ENHANCE_YOUR_CALM),
        (raw(Frame.PING, 0, 0, bytes(8)) * (MAX_IDLE_FRAMES + 1), ErrorCode.ENHANCE_YOUR_CALM),
        (raw(Frame.SETTINGS, 0, 0) * (MAX_IDLE_FRAMES + 1), ErrorCode.ENHANCE_YOUR_CALM),
        (OPEN + raw(Frame.DATA, 0, 1, b"") * (MAX_IDLE_FRAMES + 1), ErrorCode.ENHANCE_YOUR_CALM),
    ],
)  # fmt: skip
def test_a_broken_connection_ends_with_goaway(frames: bytes, code: ErrorCode) -> None:
    server = ready()
    server.connection.receive(frames)
    kind, _, stream_id, payload = parsed(server.connection.take())[-1]
    assert (kind, stream_id) == (Frame.GOAWAY, 0)
    assert struct.unpack_from(">I", payload, 4)[0] == code
    assert server.connection.closed
    assert not server.connection.streams
    assert all(call.events[-1] == "closed" for call in server.calls)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (OPEN + raw(Frame.WINDOW_UPDATE, 0, 1, u32(0)), ErrorCode.PROTOCOL_ERROR),
        (OPEN + raw(Frame.WINDOW_UPDATE, 0, 1, u32(2**31 - 1)), ErrorCode.FLOW_CONTROL_ERROR),
        (DONE + raw(Frame.DATA, 0, 1, b"x"), ErrorCode.STREAM_CLOSED),
        (OPEN + raw(Frame.HEADERS, 0x4, 1, block()), ErrorCode.PROTOCOL_ERROR),
        (OPEN + raw(Frame.DATA, 0, 1, bytes(16_384)) * 65, None),  # credit is given: no error
        (raw(Frame.HEADERS, 0x4, 1, block([(":method", "POST")])), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.HEADERS, 0x4, 1, block([*REQUEST, (":path", "/again")])), ErrorCode.PROTOCOL_ERROR),
        (raw(Frame.HEADERS, 0x4, 1, block([*REQUEST, ("X-Upper", "1")])), ErrorCode.PROTOCOL_ERROR),
        (OPEN + raw(Frame.PRIORITY, 0, 1, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_a_broken_stream_is_reset_and_the_others_live_on(frames: bytes, code: ErrorCode | None) -> None:
    server = ready()
    server.connection.receive(frames)
    resets = [f for f in parsed(server.connection.take()) if f[0] == Frame.RST_STREAM]
    assert [struct.unpack(">I", f[3])[0] for f in resets] == ([] if code is None else [code])
    assert not server.connection.closed
    server.connection.receive(raw(Frame.HEADERS, 0x5, 3, block()))
    assert server.calls[-1].events == ["end"]


def test_rapid_resets_are_an_attack() -> None:
    server = ready()
    for i in range(MAX_IDLE_FRAMES * 3):
        if server.connection.closed:
            break
        server.connection.receive(
            raw(Frame.HEADERS, 0x4, 2 * i + 1, block()) + raw(Frame.RST_STREAM, 0, 2 * i + 1, u32(8))
        )
        server.connection.take()
    assert not server.connection.streams  # each is given back at once, so that this costs the peer as much as us


@pytest.mark.parametrize(
    "start",
    [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX", bytes(24), PREFACE + raw(Frame.PING, 0, 0, bytes(8))],
)
def test_what_does_not_begin_as_http2(start: bytes) -> None:
    server = Server()
    server.connection.receive(start)
    assert server.connection.closed
    assert parsed(server.connection.take())[-1][0] == Frame.GOAWAY


def test_unknown_frames_and_settings_are_ignored() -> None:
    server = ready()
    server.connection.receive(raw(0xFA, 0xFF, 7, b"anything") + raw(Frame.SETTINGS, 0, 0, setting(0x99, 5)) + DONE)
    assert server.calls[0].events == ["end"]


def test_a_dynamic_table_before_settings_are_acknowledged() -> None:
    """Until the peer has agreed to keep none, its table must be followed."""
    server = Server()
    encoder = hpack.Encoder()
    first, second = encoder.encode(REQUEST), encoder.encode(REQUEST)
    assert first != second
    server.connection.receive(PREFACE + raw(Frame.SETTINGS, 0, 0) + raw(Frame.HEADERS, 5, 1, first))
    server.connection.receive(raw(Frame.HEADERS, 5, 3, second))
    encoder.header_table_size = 0
    server.connection.receive(raw(Frame.SETTINGS, 1, 0) + raw(Frame.HEADERS, 5, 5, encoder.encode(REQUEST)))
    assert [call.headers for call in server.calls] == [tuple(REQUEST)] * 3
    assert not server.connection.closed


def test_a_peer_that_keeps_its_table_all_the_same() -> None:
    server = Server()
    encoder = hpack.Encoder()
    server.connection.receive(
        PREFACE + raw(Frame.SETTINGS, 0, 0) + raw(Frame.HEADERS, 5, 1, encoder.encode(REQUEST))
    )
    server.connection.receive(raw(Frame.SETTINGS, 1, 0) + raw(Frame.HEADERS, 5, 3, encoder.encode(REQUEST)))
    kind, _, _, payload = parsed(server.connection.take())[-1]
    assert (kind, struct.unpack_from(">I", payload, 4)[0]) == (Frame.GOAWAY, ErrorCode.COMPRESSION_ERROR)


def session() -> bytes:
    """A good session of several calls."""
    head = block()
    return (
        PREFACE
        + raw(Frame.SETTINGS, 0, 0, setting(Setting.INITIAL_WINDOW_SIZE, 70_000))
        + raw(Frame.SETTINGS, 1, 0)
        + raw(Frame.WINDOW_UPDATE, 0, 0, u32(100_000))
        + raw(Frame.HEADERS, 0, 1, head[:5]) + raw(Frame.CONTINUATION, 0, 1, head[5:9])
        + raw(Frame.CONTINUATION, 4, 1, head[9:])
        + raw(Frame.DATA, 0, 1, b"first")
        + raw(Frame.HEADERS, 0x2D, 3, b"\x03" + u32(0) + b"\x10" + head + bytes(3))
        + raw(Frame.DATA, 0x9, 1, b"\x02 and last" + bytes(2))
        + raw(Frame.PING, 0, 0, b"pingping")
        + raw(Frame.HEADERS, 4, 5, head) + raw(Frame.RST_STREAM, 0, 5, u32(8))
        + raw(Frame.HEADERS, 4, 7, head) + raw(Frame.DATA, 0, 7, b"x" * 500)
        + raw(Frame.HEADERS, 5, 7, block([("x-t", "1")]))
    )  # fmt: skip


def outcome(server: Server) -> list[tuple[int, bytes, list[str]]]:
    return [(call.stream.id, call.received, call.events) for call in server.calls]


@given(st.lists(st.integers(0, 900), max_size=20))
def test_however_the_bytes_are_cut(cuts: list[int]) -> None:
    whole = Server()
    whole.connection.receive(session())
    cut = Server()
    data = session()
    places = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    for start, end in itertools.pairwise(places):
        cut.connection.receive(data[start:end])
    assert outcome(cut) == outcome(whole)
    assert outcome(whole) == [
        (1, b"first and last", ["end"]), (3, b"", ["end"]), (5, b"", ["closed"]), (7, b"x" * 500, ["end"]),
    ]  # fmt: skip
    assert cut.connection.take() == whole.connection.take()


@settings(max_examples=400)
@given(st.data())
def test_noise(data: st.DataObject) -> None:
    """Broken sessions: bytes changed, dropped, put in. Whatever happens, nothing is raised, an end is a GOAWAY,
    and every stream that was opened is over when the connection is."""
    noise = bytearray(session())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(24 if data.draw(st.booleans()) else 0, len(noise) - 1))
        action = data.draw(st.integers(0, 2))
        if action == 0:
            noise[place] = data.draw(st.integers(0, 255))
        elif action == 1:
            del noise[place : place + data.draw(st.integers(1, 20))]
        else:
            noise[place:place] = data.draw(st.binary(max_size=30))
        if not noise:
            noise = bytearray(1)
    server = Server()
    step = data.draw(st.integers(1, 400))
    for start in range(0, len(noise), step):
        server.connection.receive(bytes(noise[start : start + step]))
        for call in server.calls:
            call.stream.send_headers(OK)
            call.stream.send_data(b"answer")
    frames = parsed(server.connection.take())
    if server.connection.closed:
        assert frames[-1][0] == Frame.GOAWAY
    else:
        assert all(frame[0] != Frame.GOAWAY for frame in frames)
    server.connection.lost()
    assert not server.connection.streams
    assert not server.connection.blocked
    assert all(call.events.count("closed") == 1 for call in server.calls)
