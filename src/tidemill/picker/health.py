"""gRPC health checking (grpc.health.v1) on a port of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

aio: Any = health.aio  # pyright: ignore[reportAttributeAccessIssue]

LIVENESS, READINESS = "liveness", "readiness"
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
_LOOK = 0.1  # seconds


class HealthServer:
    """Answers for the names that probes and gateways ask: "", `liveness`, `readiness` and the ext_proc service.

    Liveness is true as long as the process answers: nothing that a restart would not mend may fail it.
    """

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._servicer: Any = aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def listen(self, host: str | None, port: int, *, reuse_port: bool = False) -> None:
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.look()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", int(reuse_port))])
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        address = f"{host or '[::]'}:{port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address} for health checks: {error}") from None
        await self._server.start()

    async def look(self) -> None:
        """Take over what readiness is now."""
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        status = serving if self._ready() else not_serving
        for name in ("", READINESS, EXT_PROC):
            await self._servicer.set(name, status)

    async def run(self) -> None:
        before = self._ready()
        while True:
            await asyncio.sleep(_LOOK)
            if (now := self._ready()) != before:
                before = now
                await self.look()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
