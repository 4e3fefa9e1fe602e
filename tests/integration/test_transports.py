"""Both transports carry the same exchange."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest
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
from tests.polling import eventually
from tests.unit.picker.test_exchange import ANSWERED, KINDS, LEGAL

from tidemill.picker.director import DirectorOptions

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
