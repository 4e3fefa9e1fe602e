"""A real Prometheus, and small servers for it to scrape."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from tests.conftest import free_port, program
from tests.polling import eventually


@contextlib.asynccontextmanager
async def prometheus(
    directory: Path, scrape_configs: list[dict[str, Any]], *, interval: str = "200ms"
) -> AsyncIterator[str]:
    """Start the program with these scrape configs; its URL."""
    binary = program("prometheus")
    port = free_port()
    config = {"global": {"scrape_interval": interval, "scrape_timeout": "200ms"}, "scrape_configs": scrape_configs}
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        binary, f"--config.file={path}", f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session:

            async def ready() -> bool:
                try:
                    async with session.get(f"{url}/-/ready") as response:
                        return response.status == 200
                except aiohttp.ClientError:
                    assert process.returncode is None, "prometheus has ended: see promtool check config"
                    return False

            await eventually(ready, within=30)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def serving(content: Callable[[], str], path: str = "/metrics") -> AsyncIterator[str]:
    """A server that exposes `content`; its address as host:port."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=content())

    app = web.Application()
    app.router.add_get(path, metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def static(job: str, address: str, **labels: str) -> dict[str, Any]:
    return {"job_name": job, "static_configs": [{"targets": [address], "labels": labels}]}
