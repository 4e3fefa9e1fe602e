"""The picker behind a real Envoy: the gateway's side of the protocol, bodies and streams, byte by byte."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import orjson
import pytest
from tests.conftest import free_port
from tests.integration.gateway import SSE_TAIL, Echo, Gateway, gateway, static_picker, write_endpoints
from tests.picker_rig import DESTINATION, chat, config
from tests.polling import eventually

from tidemill.local.envoy import Envoy, Following, PoolRoute
from tidemill.picker.director import DirectorOptions
from tidemill.picker.server import TransportKind

LIST = config("plugins: [{type: queue-scorer}, {type: max-score-picker, parameters: {maxNumOfEndpoints: 3}}]")


@pytest.fixture
async def echoes() -> AsyncIterator[list[Echo]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Echo()) for _ in range(3)]


@pytest.fixture(params=list(TransportKind))
async def gate(request: pytest.FixtureRequest, echoes: list[Echo], tmp_path: Path) -> AsyncIterator[Gateway]:
    """Envoy, a picker and three servers, with each transport."""
    pools = {"p": [echo.address for echo in echoes]}
    async with (
        static_picker(tmp_path, pools, transport=request.param) as picker,
        gateway(tmp_path, picker) as made,
    ):
        yield made


class TestConformance:
    """The gateway side of the extension's conformance list."""

    async def test_traffic_goes_only_where_the_picker_says(self, echoes: list[Echo], tmp_path: Path) -> None:
        async with static_picker(tmp_path, {"p": []}) as picker, gateway(tmp_path, picker) as gate:
            for count in (1, 2, 3):
                chosen = {echo.address for echo in echoes[:count]}
                write_endpoints(tmp_path / "endpoints.yaml", {"p": sorted(chosen)})
                await eventually(lambda: set(gate.pool().snapshot.by_address) == chosen)  # noqa: B023
                limit = asyncio.Semaphore(10)

                async def one() -> str:
                    async with limit:  # noqa: B023
                        status, told = await gate.post(json=chat())
                        assert status == 200, told
                        return told["served"]

                served = Counter(await asyncio.gather(*(one() for _ in range(100))))
                assert set(served) == chosen

    async def test_a_list_is_followed_in_order_and_who_served_is_reported(
        self, echoes: list[Echo], tmp_path: Path
    ) -> None:
        dead = f"127.0.0.1:{free_port()}"
        alive = [echo.address for echo in echoes[:2]]
        # Without numbers what is in flight decides, and the dead one is named first now and then.
        for echo in echoes[:2]:
            echo.waiting = None
        async with static_picker(tmp_path, {"p": [dead, *alive]}, config=LIST) as picker:
            route = PoolRoute(name="p", pickers=[f"127.0.0.1:{picker.grpc_port}"], following=Following.LIST)
            async with gateway(tmp_path, picker, [route]) as gate:
                gate.envoy.set_endpoints("p", [dead, *alive])
                await eventually(lambda: envoy_knows(gate, 3))
                answers = await asyncio.gather(*(gate.post(json=chat()) for _ in range(60)))
                assert {status for status, _ in answers} == {200}
                served = Counter(told["served"] for _, told in answers)
                named = Counter(dict(told["headers"])[DESTINATION].split(",")[0] for _, told in answers)
                assert named[dead] > 0
                for status, told in answers:
                    order = dict(told["headers"])[DESTINATION].split(",")
                    assert told["served"] == next(a for a in order if a != dead), status
                assert set(served) == set(alive)
                await eventually(lambda: gate.in_flight() == (0, 0))

    async def test_prefixes_are_credited_to_who_served(self, echoes: list[Echo], tmp_path: Path) -> None:
        dead, alive = f"127.0.0.1:{free_port()}", echoes[0].address
        async with static_picker(tmp_path, {"p": [dead, alive]}, config=LIST) as picker:
            route = PoolRoute(name="p", pickers=[f"127.0.0.1:{picker.grpc_port}"], following=Following.LIST)
            async with gateway(tmp_path, picker, [route]) as gate:
                gate.envoy.set_endpoints("p", [dead, alive])
                await eventually(lambda: envoy_knows(gate, 2))
                for _ in range(10):
                    status, _ = await gate.post(json=chat("x" * 2000))
                    assert status == 200
                pool = gate.pool()
                rows = {a: int(pool.snapshot.rows[i]) for a, i in pool.snapshot.by_address.items()}
                assert pool.scheduler.prefix.size_of(rows[alive]) > 0
                assert pool.scheduler.prefix.size_of(rows[dead]) == 0

    async def test_several_target_ports(self, tmp_path: Path) -> None:
        async with Echo(host="127.0.0.21") as first, Echo(host="127.0.0.21") as second:
            async with static_picker(tmp_path, {"p": [first.address, second.address]}) as picker:
                async with gateway(tmp_path, picker) as gate:
                    served = {(await gate.post(json=chat()))[1]["served"] for _ in range(20)}
                    assert served == {first.address, second.address}
                    write_endpoints(tmp_path / "endpoints.yaml", {"p": [second.address]})
                    await eventually(lambda: len(gate.pool().snapshot.endpoints) == 1)
                    served = {(await gate.post(json=chat()))[1]["served"] for _ in range(20)}
                    assert served == {second.address}

    @pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
    @pytest.mark.parametrize("fail_open", [True, False])
    async def test_the_picker_is_away(
        self, fail_open: bool, mode: str, echoes: list[Echo], tmp_path: Path
    ) -> None:
        """With FailOpen any endpoint of the pool serves. In full duplex mode Envoy has given the body away by
        then, so that only requests without one can be saved; who wants it for all has bodies buffered."""
        everyone = [echo.address for echo in echoes]
        async with static_picker(tmp_path, {"p": everyone[:1]}) as picker:
            route = PoolRoute(
                name="p", pickers=[f"127.0.0.1:{picker.grpc_port}"], following=Following.LIST, fail_open=fail_open,
                request_body=mode,
            )  # fmt: skip
            async with gateway(tmp_path, picker, [route]) as gate:
                gate.envoy.set_endpoints("p", everyone)
                await eventually(lambda: envoy_knows(gate, 3))
                assert {(await gate.post(json=chat()))[1]["served"] for _ in range(10)} == {everyone[0]}
                assert picker._transport is not None
                await picker._transport.drain(0.0, lambda: None)

                async def get() -> tuple[int, str]:
                    async with gate.client.get(gate.url + "/any") as response:
                        served = (await response.json())["served"] if response.status == 200 else ""
                        return response.status, served

                bodiless = [await get() for _ in range(12)]
                posted = {(await gate.post(json=chat()))[0] for _ in range(12)}
                if fail_open:
                    assert {status for status, _ in bodiless} == {200}
                    assert {served for _, served in bodiless} == set(everyone)
                    assert posted == ({200} if mode == "BUFFERED" else {500})
                else:
                    assert {status for status, _ in bodiless} | posted <= {500, 503, 504}

    async def test_two_pools_by_weight(self, echoes: list[Echo], tmp_path: Path) -> None:
        first, second, _ = (echo.address for echo in echoes)
        async with static_picker(tmp_path, {"p": [first], "q": [second]}) as picker:
            address = f"127.0.0.1:{picker.grpc_port}"
            routes = [
                PoolRoute(name="p", pickers=[address], pool="ns/p", weight=70),
                PoolRoute(name="q", pickers=[address], pool="ns/q", weight=30),
            ]
            async with gateway(tmp_path, picker, routes) as gate:
                answers = await asyncio.gather(*(gate.post(json=chat()) for _ in range(200)))
                served = Counter(told["served"] for _, told in answers)
                assert served[first] + served[second] == 200
                assert abs(served[first] / 200 - 0.7) < 0.15

    async def test_rules_of_one_route_reach_their_pools(self, echoes: list[Echo], tmp_path: Path) -> None:
        first, second, third = (echo.address for echo in echoes)
        async with static_picker(tmp_path, {"p": [first], "q": [second], "r": [third]}) as picker:
            address = f"127.0.0.1:{picker.grpc_port}"
            expression = "xds.route_metadata.filter_metadata['tidemill']['inference_pool']"
            routes = [
                PoolRoute(name="p", pickers=[address], pool="p", prefix="/p/"),
                PoolRoute(name="q", pickers=[address], pool="q", prefix="/q/"),
                PoolRoute(
                    name="r", pickers=[address], prefix="/r/", attributes=[expression],
                    metadata={"tidemill": {"inference_pool": "ns/r"}},
                ),
                PoolRoute(name="none", pickers=[address], prefix="/none/"),
                PoolRoute(name="wrong", pickers=[address], prefix="/wrong/", pool="elsewhere"),
            ]  # fmt: skip
            async with gateway(tmp_path, picker, routes) as gate:
                for prefix, expected in (("p", first), ("q", second), ("r", third)):
                    served = {
                        (await gate.post(f"/{prefix}/v1/chat/completions", json=chat()))[1]["served"] for _ in "ab"
                    }
                    assert served == {expected}
                for prefix in ("none", "wrong"):
                    status, told = await gate.post(f"/{prefix}/v1/chat/completions", json=chat())
                    assert status == 404
                    assert told["error"]["code"] == 404

    async def test_a_pool_without_endpoints(self, tmp_path: Path) -> None:
        async with static_picker(tmp_path, {"p": []}) as picker, gateway(tmp_path, picker) as gate:
            async with gate.client.post(gate.url + "/v1/chat/completions", json=chat()) as response:
                assert response.status == 503
                assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
                assert (await response.json())["error"]["code"] == 503

    async def test_the_subset_hint_is_obeyed(self, echoes: list[Echo], tmp_path: Path) -> None:
        everyone = [echo.address for echo in echoes]
        async with static_picker(tmp_path, {"p": everyone}) as picker:
            for subset, expected in (
                (everyone[1:], set(everyone[1:])),
                (f"{everyone[0]}, {everyone[2]}", {everyone[0], everyone[2]}),
                (["127.0.0.99:1"], None),
                ([], None),
            ):
                route = PoolRoute(name="p", pickers=[f"127.0.0.1:{picker.grpc_port}"], subset=subset)
                async with gateway(tmp_path / str(len(str(subset))), picker, [route]) as gate:
                    answers = [await gate.post(json=chat()) for _ in range(12)]
                    if expected is None:
                        assert {status for status, _ in answers} == {503}
                    else:
                        assert {told["served"] for _, told in answers} == expected


def envoy_knows(gate: Gateway, count: int) -> object:
    async def look() -> bool:
        async with gate.client.get(f"http://127.0.0.1:{gate.envoy.admin_port}/clusters?format=json") as response:
            found = await response.json(content_type=None)
        pools = [c for c in found["cluster_statuses"] if c["name"] == "pool-p"]
        return bool(pools) and len(pools[0].get("host_statuses", ())) == count

    return look()


class TestBodies:
    @pytest.mark.parametrize("size", [0, 1, 8_192, 61_999, 62_000, 62_001, 130_000, 1_000_000, 10_000_000])
    async def test_they_arrive_to_the_byte(self, gate: Gateway, size: int) -> None:
        body = random.Random(size).randbytes(size)
        status, told = await gate.post("/anything", data=body)
        assert status == 200, told
        assert (told["size"], told["sha256"]) == (size, hashlib.sha256(body).hexdigest())
        assert [v for k, v in told["headers"] if k.lower() == DESTINATION] == [told["served"]]
        lengths = [v for k, v in told["headers"] if k.lower() == "content-length"]
        assert lengths in ([], [str(size)])

    @pytest.mark.parametrize("size", [130_000, 1_000_000])
    async def test_e3_long_chats(self, gate: Gateway, size: int) -> None:
        body = orjson.dumps(chat("é☃" * (size // 5)))
        status, told = await gate.post(data=body, headers={"content-type": "application/json"})
        assert (status, told["size"], told["sha256"]) == (200, len(body), hashlib.sha256(body).hexdigest())

    async def test_chunked_and_cut_inside_a_character(self, gate: Gateway) -> None:
        body = '{"model":"m1","messages":[{"role":"user","content":"☃☃☃"}]}'.encode()
        place = body.index("☃".encode()) + 1

        async def pieces() -> AsyncIterator[bytes]:
            yield body[:place]
            await asyncio.sleep(0.02)
            yield body[place:]

        status, told = await gate.post(data=pieces(), headers={"content-type": "application/json"})
        assert (status, told["sha256"]) == (200, hashlib.sha256(body).hexdigest())
        assert gate.picker.instruments.model_label("m1") == "m1"

    async def test_expect_continue(self, gate: Gateway) -> None:
        body = b"x" * 70_000
        status, told = await gate.post("/any", data=body, expect100=True)
        assert (status, told["size"]) == (200, 70_000)

    async def test_http_trailers_both_ways(self, gate: Gateway) -> None:
        raw = (
            b"POST /trailers HTTP/1.1\r\nHost: gateway\r\nTE: trailers\r\nTransfer-Encoding: chunked\r\n"
            b"Trailer: x-checksum\r\n\r\n5\r\nhello\r\n0\r\nx-checksum: abc\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.envoy.port)
        writer.write(raw)
        answer = await asyncio.wait_for(reader.readuntil(b"x-answer-checksum: xyz\r\n\r\n"), 10)
        assert b"200 OK" in answer
        assert hashlib.sha256(b"hello").hexdigest().encode() in answer
        assert b'["x-checksum","abc"]' in answer
        writer.close()
        await eventually(lambda: gate.in_flight() == (0, 0))

    async def test_a_request_without_a_body(self, gate: Gateway) -> None:
        async with gate.client.get(gate.url + "/v1/models") as response:
            assert response.status == 200

    async def test_bad_json_and_the_next_request_on_the_connection(self, gate: Gateway) -> None:
        status, told = await gate.post(data=b"{", headers={"content-type": "application/json"})
        assert (status, told["error"]["message"]) == (400, "body: must be JSON")
        assert (await gate.post(json=chat()))[0] == 200

    async def test_what_clients_forge_does_not_arrive(self, gate: Gateway) -> None:
        forged = {DESTINATION: "169.254.169.254:80", "x-prefiller-host-port": "10.9.9.9:22"}
        status, told = await gate.post(json=chat(), headers=forged)
        assert status == 200
        headers = [(k.lower(), v) for k, v in told["headers"]]
        assert [v for k, v in headers if k == DESTINATION] == [told["served"]]
        assert "x-prefiller-host-port" not in dict(headers)

    async def test_e9_behind_another_external_processor(
        self, echoes: list[Echo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Both filters are on for the route: the second one sees what the first made of the request.
        monkeypatch.setattr(Envoy, "_only", lambda self, route: {})
        async with static_picker(tmp_path, {"p": [echo.address for echo in echoes]}) as picker:
            address = f"127.0.0.1:{picker.grpc_port}"
            routes = [
                PoolRoute(name="p", pickers=[address]),
                PoolRoute(name="again", pickers=[address], prefix="/never"),
            ]
            async with gateway(tmp_path, picker, routes) as gate:
                body = random.Random(1).randbytes(8_192)
                status, told = await gate.post("/any", data=body)
                assert (status, told["sha256"]) == (200, hashlib.sha256(body).hexdigest())
                assert gate.picker.instruments.successes.value == 2

    async def test_the_limit(self, echoes: list[Echo], tmp_path: Path) -> None:
        options = DirectorOptions(max_body=100_000)
        async with static_picker(tmp_path, {"p": [echoes[0].address]}, director=options) as picker:
            async with gateway(tmp_path, picker) as gate:
                assert (await gate.post("/any", data=bytes(100_000)))[0] == 200
                assert (await gate.post("/any", data=bytes(100_001)))[0] == 413
                assert (await gate.post("/any", data=bytes(3_000_000)))[0] == 413

    @pytest.mark.parametrize("mode", ["BUFFERED", "NONE", "STREAMED"])
    async def test_other_modes(self, mode: str, echoes: list[Echo], tmp_path: Path) -> None:
        async with static_picker(tmp_path, {"p": [echo.address for echo in echoes]}) as picker:
            route = PoolRoute(
                name="p", pickers=[f"127.0.0.1:{picker.grpc_port}"], request_body=mode, response_body=mode
            )
            async with gateway(tmp_path, picker, [route]) as gate:
                body = b'{"model":"m1","messages":[]}' + b" " * 50_000
                status, told = await gate.post(data=body, headers={"content-type": "application/json"})
                assert (status, told["sha256"]) == (200, hashlib.sha256(body).hexdigest())
                assert dict(told["headers"])[DESTINATION] == told["served"]


class TestStreams:
    async def test_10000_chunks_in_order(self, gate: Gateway) -> None:
        async with gate.client.post(gate.url + "/sse/10000", json=chat(stream=True)) as response:
            assert response.headers["content-type"] == "text/event-stream"
            got = await response.read()
        assert got == b"".join(b"data: %d\n\n" % number for number in range(10_000)) + SSE_TAIL
        await eventually(lambda: gate.in_flight() == (0, 0))

    async def test_the_first_chunk_does_not_wait_for_the_rest(self, gate: Gateway, echoes: list[Echo]) -> None:
        async with gate.client.post(gate.url + "/sse/100000", json=chat(stream=True)) as response:
            first = await asyncio.wait_for(response.content.readany(), 5)
            assert first.startswith(b"data: 0\n\n")

    async def test_e11_clients_that_leave_at_any_point(self, gate: Gateway) -> None:
        rng = random.Random(23)

        async def one(number: int) -> None:
            kind = number % 4
            if kind == 0:  # in the headers
                _, writer = await asyncio.open_connection("127.0.0.1", gate.envoy.port)
                writer.write(b"POST /any HTTP/1.1\r\nHost: x\r\nContent-Le")
            elif kind == 1:  # in the body
                _, writer = await asyncio.open_connection("127.0.0.1", gate.envoy.port)
                writer.write(b"POST /any HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + bytes(30_000))
            else:  # in the stream
                reader, writer = await asyncio.open_connection("127.0.0.1", gate.envoy.port)
                writer.write(b"POST /sse/20000 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
                if kind == 2:
                    await reader.read(rng.randrange(1, 50_000))
            await asyncio.sleep(rng.random() * 0.05)
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            writer.transport.abort()

        for start in range(0, 200, 20):
            await asyncio.gather(*(one(number) for number in range(start, start + 20)))
        await eventually(lambda: gate.in_flight() == (0, 0))
        await eventually(lambda: gate.picker.streams == 0)
        assert (await gate.post(json=chat()))[0] == 200


class TestWaiting:
    """Flow control behind a gateway that has a patience of its own."""

    @pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
    async def test_ps9_nobody_waits_for_a_stream_that_is_gone(
        self, mode: str, echoes: list[Echo], tmp_path: Path
    ) -> None:
        flow = config("featureGates: [flowControl]")
        echoes[0].waiting = 100
        async with static_picker(tmp_path, {"p": [echoes[0].address]}, config=flow) as picker:
            route = PoolRoute(
                name="p", pickers=[f"127.0.0.1:{picker.grpc_port}"], request_body=mode, message_timeout="0.5s"
            )
            async with gateway(tmp_path, picker, [route]) as gate:
                load = gate.pool().load
                await eventually(lambda: np.nanmax(load.waiting, initial=0) == 100)
                room = picker.director.flow(gate.pool())
                assert room is not None
                asking = asyncio.create_task(gate.post(json=chat()))
                await eventually(lambda: room.requests == 1)
                if mode == "BUFFERED":
                    # Envoy's patience ends before the room has a place: the entry goes with the stream.
                    status, _ = await asking
                    assert status in (500, 504)
                else:
                    # In full duplex mode Envoy has no such time: only the client can end it.
                    asking.cancel()
                await eventually(lambda: room.requests == 0)
                await eventually(lambda: picker.streams == 0)

    async def test_a_request_waits_for_the_first_endpoint(self, echoes: list[Echo], tmp_path: Path) -> None:
        flow = config("featureGates: [flowControl]")
        async with static_picker(tmp_path, {"p": []}, config=flow) as picker, gateway(tmp_path, picker) as gate:
            asking = asyncio.create_task(gate.post(json=chat()))
            room = picker.director.flow(gate.pool())
            assert room is not None
            await eventually(lambda: room.requests == 1)
            write_endpoints(tmp_path / "endpoints.yaml", {"p": [echoes[0].address]})
            status, told = await asking
            assert (status, told["served"]) == (200, echoes[0].address)

    async def test_shutting_down_tells_who_waits(self, tmp_path: Path) -> None:
        flow = config("featureGates: [flowControl]")
        async with static_picker(tmp_path, {"p": []}, config=flow) as picker, gateway(tmp_path, picker) as gate:
            asking = asyncio.create_task(gate.post(json=chat()))
            room = picker.director.flow(gate.pool())
            assert room is not None
            await eventually(lambda: room.requests == 1)
            await picker.drain()
            status, told = await asking
            assert status == 503
            assert "shutting down" in told["error"]["message"]
