"""Both transports carry the same exchange; the lean one understands other implementations and outlives bad
peers."""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import struct
from pathlib import Path

import grpc
import pytest
from tests.conftest import eventually, program
from tests.integration.wire import TRANSPORTS, WireTalk, channel, listening
from tests.picker_rig import (
    BUFFERED,
    STREAMED,
    A,
    Rig,
    chat,
    destination_of,
    post,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.unit.picker.test_exchange import ANSWERED, KINDS, LEGAL

from tidemill.picker import tls
from tidemill.picker.director import DirectorOptions
from tidemill.picker.transport.http2 import PREFACE
from tidemill.picker.transport.lean import LeanServer

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.endpoints(A)
    return made


async def test_every_sequence_gets_the_answers_of_the_exchange(transport: str, rig: Rig) -> None:
    """Random sequences of messages, most of them illegal: the wire adds and loses nothing."""
    rng = random.Random(11)
    sequences = [[*r, *a] for r in LEGAL for a in ANSWERED]
    sequences += [rng.choices(sorted(KINDS), k=rng.randrange(1, 9)) for _ in range(60)]
    async with listening(rig, transport) as (port, server), channel(port) as client:
        for sequence in sequences:
            messages = [KINDS[kind]() for kind in sequence]
            mode = rng.choice([None, None, BUFFERED, STREAMED])
            for message in messages:
                if mode is not None and message.HasField("request_headers"):
                    message.protocol_config.request_body_mode = mode
            expected = rig.ask(*messages)
            expected.close()
            talk = WireTalk(client)
            for message in messages:
                await talk.send(message)
            answers = await talk.rest()
            assert answers == expected.answers, sequence
            assert await talk.code() is grpc.StatusCode.OK
        await eventually(lambda: server.streams == 0)
    assert rig.total_in_flight() == (0, 0)


async def test_many_streams_at_once(transport: str, rig: Rig) -> None:
    async with listening(rig, transport) as (port, _), channel(port) as client:

        async def one(number: int) -> None:
            body = random.Random(number).randbytes(number * 997)
            talk = WireTalk(client)
            for message in post("/any", body):
                await talk.send(message)
            assert destination_of(await talk.read()) == A
            got = b""
            while True:
                answer = await talk.read()
                streamed = answer.request_body.response.body_mutation.streamed_response
                got += streamed.body
                if streamed.end_of_stream:
                    break
            assert got == body
            await talk.send(response_headers())
            await talk.send(response_body(b"{}", eos=True))
            assert [a.WhichOneof("choice") for a in await talk.rest()] == ["response_headers", "response_body"]

        await asyncio.gather(*(one(number) for number in range(100)))
    assert rig.total_in_flight() == (0, 0)


async def test_a_client_that_leaves_gives_everything_back(transport: str, rig: Rig) -> None:
    async with listening(rig, transport) as (port, server), channel(port) as client:
        talks = []
        for _ in range(20):
            talk = WireTalk(client)
            for message in post("/v1/chat/completions", chat()):
                await talk.send(message)
            await talk.read()
            talks.append(talk)
        assert rig.total_in_flight()[0] == 20
        for talk in talks:
            talk.call.cancel()
        await eventually(lambda: rig.total_in_flight() == (0, 0))
        await eventually(lambda: server.streams == 0)


async def test_p14_large_messages(transport: str) -> None:
    rig = Rig(options=DirectorOptions(max_body=8 * 2**20))
    rig.endpoints(A)
    async with listening(rig, transport) as (port, _), channel(port) as client:

        async def ask(*messages: object) -> WireTalk:
            talk = WireTalk(client)
            for message in messages:
                await talk.send(message)
            return talk

        body = b'{"model":"m","messages":[],"x":"' + b"x" * (8 * 2**20 - 34) + b'"}'
        assert len(body) == 8 * 2**20
        whole = await ask(request_headers(mode=BUFFERED), request_body(body, eos=True))
        await whole.read()
        assert destination_of(await whole.read()) == A
        for size in (len(body) + 1, len(body) + 3 * 2**20):
            over = await ask(request_headers(mode=BUFFERED), request_body(bytes(size), eos=True))
            await over.read()
            assert (await over.read()).immediate_response.status.code == 413
        pieces = [
            request_body(body[i : i + 65_536], eos=i + 65_536 >= len(body)) for i in range(0, len(body), 65_536)
        ]
        split = await ask(request_headers(), *pieces)
        assert destination_of(await split.read()) == A
        got = 0
        while got < len(body):
            got += len((await split.read()).request_body.response.body_mutation.streamed_response.body)
        await split.send(response_headers())
        await split.send(response_body(bytes(45_000_000), eos=True))
        back = sum(len(a.response_body.response.body_mutation.streamed_response.body) for a in await split.rest())
        assert back == 45_000_000


async def test_what_is_no_message(transport: str, rig: Rig) -> None:
    async with listening(rig, transport) as (port, _), channel(port) as client:
        talk = WireTalk(client)
        await talk.call.write(b"\xff\xff\xff\xff")
        assert await talk.code() is grpc.StatusCode.INVALID_ARGUMENT
        other = client.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Other")()
        assert await other.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_metadata_and_port_arrive(transport: str, rig: Rig) -> None:
    other = rig.add_pool("ns", "q")
    rig.endpoints("10.0.0.12:8000", pool=other)
    async with listening(rig, transport) as (port, _), channel(port) as client:
        for metadata, expected in ({"x_inference_pool": "q"}, "10.0.0.12:8000"), ({"x_inference_pool": "p"}, A):
            talk = WireTalk(client, **metadata)
            await talk.send(request_headers("/any", eos=True))
            assert destination_of(await talk.read()) == expected
        rig.pools.assign(port, other.key)
        talk = WireTalk(client)
        await talk.send(request_headers("/any", eos=True))
        assert destination_of(await talk.read()) == "10.0.0.12:8000"


async def test_draining_lets_streams_end(transport: str, rig: Rig) -> None:
    async with listening(rig, transport) as (port, server), channel(port) as client:
        talk = WireTalk(client)
        await talk.send(request_headers("/any", eos=True))
        assert destination_of(await talk.read()) == A
        draining = asyncio.create_task(server.drain(10.0, lambda: None))
        await talk.send(response_headers())
        assert (await talk.read()).WhichOneof("choice") == "response_headers"
        await talk.send(response_body(b"{}", eos=True))
        assert len(await talk.rest()) == 1
        assert await talk.code() is grpc.StatusCode.OK
        await asyncio.wait_for(draining, 10)


class TestLean:
    """What only the lean transport has to prove."""

    @pytest.fixture(autouse=True)
    def _lean(self, transport: str) -> None:
        if transport != "lean":
            pytest.skip("grpcio is the reference")

    async def test_tls_with_alpn_and_a_new_certificate(self, rig: Rig) -> None:
        now = dt.datetime.now(dt.UTC)
        first, second = tls.self_signed(now), tls.self_signed(now)
        context = tls.server_context(first)
        async with listening(rig, "lean", tls=context) as (port, _):
            for pair in (first, second):
                tls.load(context, pair)
                credentials = grpc.ssl_channel_credentials(pair.certificate)
                async with channel(port, credentials=credentials) as client:
                    talk = WireTalk(client)
                    await talk.send(request_headers("/any", eos=True))
                    assert destination_of(await talk.read()) == A

    @pytest.mark.parametrize(
        "options",
        [[], ["--padding=200"], ["--window-bits=1", "--connection-window-bits=14"], ["--header-table-size=0"],
         ["--continuation"], ["--multiply=20"], ["--max-concurrent-streams=1"], ["--no-dep"]],
    )  # fmt: skip
    async def test_nghttp2s_client(self, rig: Rig, tmp_path: Path, options: list[str]) -> None:
        message = request_headers("/any", eos=True).SerializeToString()
        body = tmp_path / "message"
        body.write_bytes(b"\x00" + struct.pack(">I", len(message)) + message)
        async with listening(rig, "lean") as (port, server):
            url = f"http://127.0.0.1:{port}/envoy.service.ext_proc.v3.ExternalProcessor/Process"
            process = await asyncio.create_subprocess_exec(
                program("nghttp"), "-v", "-d", str(body), "-H", "content-type: application/grpc",
                "-H", "te: trailers", "-H", ":method: POST", *options, url, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _ = await asyncio.wait_for(process.communicate(), 20)
            text = out.decode("latin-1")
            assert process.returncode == 0, text
            assert text.count("grpc-status: 0") == (20 if "--multiply=20" in options else 1), text
            assert "x-gateway-destination-endpoint" in text or "--window-bits=1" in options
            assert "error_code=PROTOCOL_ERROR" not in text
            assert "error_code=FLOW_CONTROL_ERROR" not in text
            await eventually(lambda: server.streams == 0)
        assert rig.total_in_flight() == (0, 0)

    async def test_compressed_messages_are_not_accepted(self, rig: Rig) -> None:
        """Nothing that Envoy sends; a client that does is told, and the next call is served."""
        async with listening(rig, "lean") as (port, _), channel(port) as client:
            method = client.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
            call = method(compression=grpc.Compression.Gzip)
            await call.write(request_body(bytes(10_000)).SerializeToString())
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "compressed" in await call.details()
            talk = WireTalk(client)
            await talk.send(request_headers("/any", eos=True))
            assert destination_of(await talk.read()) == A

    async def test_h2loads_client(self, rig: Rig, tmp_path: Path) -> None:
        message = request_headers("/any", eos=True).SerializeToString()
        body = tmp_path / "message"
        body.write_bytes(b"\x00" + struct.pack(">I", len(message)) + message)
        async with listening(rig, "lean") as (port, server):
            url = f"http://127.0.0.1:{port}/envoy.service.ext_proc.v3.ExternalProcessor/Process"
            process = await asyncio.create_subprocess_exec(
                program("h2load"), "-n", "2000", "-c", "4", "-m", "50", "-d", str(body), "-H", "te: trailers",
                "-H", "content-type: application/grpc", url, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _ = await asyncio.wait_for(process.communicate(), 60)
            assert b"2000 succeeded, 0 failed" in out, out.decode()
            await eventually(lambda: server.streams == 0)
        assert rig.total_in_flight() == (0, 0)

    async def test_bad_peers_do_not_disturb_the_others(self, rig: Rig) -> None:
        rng = random.Random(17)
        async with listening(rig, "lean") as (port, server), channel(port) as client:
            assert isinstance(server, LeanServer)
            talk = WireTalk(client)
            await talk.send(request_headers("/any"))
            for number in range(60):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                start = PREFACE + bytes(rng.choice([(0, 0, 0, 4, 0, 0, 0, 0, 0), ()]))
                writer.write((start if number % 3 else b"") + rng.randbytes(rng.randrange(1, 4000)))
                if number % 2:
                    writer.write_eof()
                await asyncio.wait_for(reader.read(), 10) if number % 2 else None
                writer.transport.abort()
            await talk.send(request_body(b"still here", eos=True))
            assert destination_of(await talk.read()) == A
            assert (await talk.read()).request_body.response.body_mutation.streamed_response.body == b"still here"
            talk.call.cancel()
            await eventually(lambda: len(server.connections) == 1)
        assert rig.total_in_flight() == (0, 0)

    async def test_a_peer_that_does_not_read_is_not_read_from(self, rig: Rig) -> None:
        """It stops taking answers in the middle of a large body; others go on, and its memory is given back."""
        async with listening(rig, "lean") as (port, server), channel(port) as client:
            assert isinstance(server, LeanServer)
            async with channel(port) as slow:
                talk = WireTalk(slow)
                for message in post("/any", bytes(20_000_000)):
                    await talk.send(message)
                assert destination_of(await talk.read()) == A
                other = WireTalk(client)
                await other.send(request_headers("/any", eos=True))
                assert destination_of(await other.read()) == A
                talk.call.cancel()
                other.call.cancel()
            await eventually(lambda: server.streams == 0)
        assert rig.total_in_flight() == (0, 0)
