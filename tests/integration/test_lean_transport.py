"""What only the lean transport has to prove: other implementations as clients, TLS, and bad peers."""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import struct
from pathlib import Path

import grpc
import pytest
from tests.conftest import program
from tests.integration.wire import WireTalk, channel, listening
from tests.picker_rig import (
    A,
    Rig,
    destination_of,
    post,
    request_body,
    request_headers,
)
from tests.polling import eventually

from tidemill.kube import tls
from tidemill.picker.transport.http2 import PREFACE
from tidemill.picker.transport.lean import LeanServer


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.endpoints(A)
    return made


async def test_tls_with_alpn_and_a_new_certificate(rig: Rig) -> None:
    now = dt.datetime.now(dt.UTC)
    first, second = tls.self_signed("test", now), tls.self_signed("test", now)
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
async def test_nghttp2s_client(rig: Rig, tmp_path: Path, options: list[str]) -> None:
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


async def test_compressed_messages_are_not_accepted(rig: Rig) -> None:
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


async def test_h2loads_client(rig: Rig, tmp_path: Path) -> None:
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


async def test_bad_peers_do_not_disturb_the_others(rig: Rig) -> None:
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


async def test_a_peer_that_does_not_read_is_not_read_from(rig: Rig) -> None:
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
