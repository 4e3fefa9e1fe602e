"""Readiness, liveness and startup probes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp

from tidemill.kube.resources import Json


async def probe_once(
    probe: Json, container: Json, *, ip: str, env: Mapping[str, str], session: aiohttp.ClientSession
) -> str | None:
    """None when the container passes, else what was wrong."""
    timeout = float(probe.get("timeoutSeconds", 1))
    try:
        async with asyncio.timeout(timeout):
            if (http := probe.get("httpGet")) is not None:
                port = _port(http["port"], container)
                scheme = http.get("scheme", "HTTP").lower()
                url = f"{scheme}://{http.get('host') or ip}:{port}{http.get('path', '/')}"
                async with session.get(url, ssl=False, allow_redirects=False) as response:
                    if 200 <= response.status < 400:
                        return None
                    return f"HTTP probe failed with statuscode: {response.status}"
            if (tcp := probe.get("tcpSocket")) is not None:
                _, writer = await asyncio.open_connection(tcp.get("host") or ip, _port(tcp["port"], container))
                writer.close()
                return None
            if (run := probe.get("exec")) is not None:
                process = await asyncio.create_subprocess_exec(
                    *run["command"], env=dict(env), stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                )  # fmt: skip
                code = await process.wait()
                return None if code == 0 else f"command exited with {code}"
    except TimeoutError:
        return f"timed out after {timeout:g}s"
    except (aiohttp.ClientError, OSError) as error:
        return str(error)
    return "probe names neither httpGet, tcpSocket nor exec"


def _port(port: int | str, container: Json) -> int:
    if isinstance(port, int) or port.isdigit():
        return int(port)
    named = [p["containerPort"] for p in container.get("ports") or () if p.get("name") == port]
    if not named:
        raise OSError(f'container has no port named "{port}"')
    return int(named[0])
