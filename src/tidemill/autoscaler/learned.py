"""What was learned outlives the process: a ConfigMap that the leader writes now and then and a new leader reads.

It is a convenience, not a condition: without it the first minutes after a restart know less. A role that may not
write ConfigMaps is told so once, and nothing else changes.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
from typing import Any

import aiohttp
import orjson
import structlog

from tidemill.api.names import LEARNED_CONFIG
from tidemill.kube.client import KubeClient
from tidemill.kube.errors import ApiError, NotFoundError
from tidemill.kube.resources import CONFIG_MAPS

log = structlog.get_logger(__name__)

VERSION = 1
INTERVAL = 60.0  # seconds between two writes
LIMIT = 900 * 2**10  # bytes; a ConfigMap takes a MiB
_TIMEOUT = 5.0


class LearnedStore:
    """Keeps one JSON document. `read` gives None when there is none that can be read; neither raises."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._written = b""
        self._due = 0.0
        self._refused = False

    async def read(self) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(_TIMEOUT):
                found = await self._client.get(CONFIG_MAPS, LEARNED_CONFIG, self._namespace)
            document = orjson.loads(gzip.decompress(base64.b64decode(found["binaryData"]["learned"])))
            return document["state"] if document["version"] == VERSION else None
        except NotFoundError:
            return None
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("what was learned before could not be read", config_map=LEARNED_CONFIG, error=str(error))
        except (KeyError, TypeError, ValueError, EOFError) as error:
            log.warning("what was learned before is not understood", config_map=LEARNED_CONFIG, error=repr(error))
        return None

    async def write(self, state: dict[str, Any]) -> None:
        """Keep `state`, unless the last write was a moment ago or nothing has changed."""
        clock = asyncio.get_running_loop().time()
        if clock < self._due:
            return
        self._due = clock + INTERVAL
        text = orjson.dumps({"version": VERSION, "state": state})
        if text == self._written:
            return
        packed = base64.b64encode(gzip.compress(text, mtime=0)).decode()
        if len(packed) > LIMIT:
            self._complain(f"{len(packed)} bytes are more than a ConfigMap takes")
            return
        body = {"metadata": {"name": LEARNED_CONFIG}, "binaryData": {"learned": packed}}
        try:
            async with asyncio.timeout(_TIMEOUT):
                try:
                    await self._client.patch(CONFIG_MAPS, LEARNED_CONFIG, body, self._namespace)
                except NotFoundError:
                    await self._client.create(CONFIG_MAPS, body, self._namespace)
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            self._complain(str(error) or type(error).__name__)
            return
        self._written, self._refused = text, False

    def _complain(self, why: str) -> None:
        if not self._refused:
            log.warning("what is learned will be lost at a restart", config_map=LEARNED_CONFIG, error=why)
        self._refused = True
