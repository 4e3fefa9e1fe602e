"""Events on objects, sent in the background, repeats folded into a count."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import aiohttp
import structlog

from tidemill.kube.client import KubeClient
from tidemill.kube.clock import rfc3339
from tidemill.kube.errors import ApiError, NotFoundError
from tidemill.kube.resources import EVENTS, Json, ObjectRef

log = structlog.get_logger(__name__)
EventType = Literal["Normal", "Warning"]
_K = TypeVar("_K")
_V = TypeVar("_V")

REMEMBERED = 4096
SIMILAR_WINDOW = dt.timedelta(minutes=10)
SIMILAR_LIMIT = 10


@dataclass(slots=True)
class _Series:
    """One event object in the cluster and how often its event has happened."""

    name: str
    first: dt.datetime
    count: int = 0
    sent: int = 0


@dataclass(slots=True)
class _Similar:
    """Different messages of one reason on one object since `since`."""

    since: dt.datetime
    messages: int = 0


_Key = tuple[ObjectRef, str, str, str]


class EventRecorder:
    """Records events. Identical ones become one object with a count; when one reason comes with more
    than ten different messages in ten minutes, the rest is combined."""

    def __init__(
        self, client: KubeClient, *, component: str, instance: str, now: Callable[[], dt.datetime]
    ) -> None:
        self._client = client
        self._component = component
        self._instance = instance
        self._now = now
        self._series: OrderedDict[_Key, _Series] = OrderedDict()
        self._similar: OrderedDict[tuple[ObjectRef, str], _Similar] = OrderedDict()
        self._pending: dict[_Key, None] = {}
        self._wake = asyncio.Event()

    def event(self, about: ObjectRef, type: EventType, reason: str, message: str) -> None:
        """Record that something happened. Returns at once; `run` sends it."""
        now = self._now()
        message = message[:1024]
        key = (about, type, reason, message)
        if key not in self._series:
            message = self._combine(about, reason, message, now)
            key = (about, type, reason, message)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series(f"{about.name}.{uuid.uuid4().hex[:16]}", now)
            _trim(self._series)
        self._series.move_to_end(key)
        series.count += 1
        self._pending[key] = None
        self._wake.set()

    def _combine(self, about: ObjectRef, reason: str, message: str, now: dt.datetime) -> str:
        similar = self._similar.get((about, reason))
        if similar is None or now - similar.since > SIMILAR_WINDOW:
            similar = self._similar[about, reason] = _Similar(now)
            _trim(self._similar)
        similar.messages += 1
        return f"(combined from similar events): {reason}" if similar.messages > SIMILAR_LIMIT else message

    async def run(self) -> None:
        """Send what was recorded until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.flush()

    async def flush_quietly(self, timeout: float = 2.0) -> None:
        """Send what waits, on the way out, if that is quick."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.flush()

    async def flush(self) -> None:
        """Send all that waits. An event that cannot be sent in three tries is logged and dropped."""
        while self._pending:
            key = next(iter(self._pending))
            del self._pending[key]
            for attempt in range(3):
                try:
                    await self._send(key)
                    break
                except ApiError as error:
                    if not error.retryable:
                        log.warning("event refused", about=str(key[0]), reason=key[2], error=str(error))
                        break
                    await asyncio.sleep(0.2 * 2**attempt)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    if attempt == 2:
                        log.warning("event not sent", about=str(key[0]), reason=key[2], error=str(error))
                    await asyncio.sleep(0.2 * 2**attempt)

    async def _send(self, key: _Key) -> None:
        series = self._series.get(key)
        if series is None:
            return
        about, namespace = key[0], key[0].namespace or "default"
        last = rfc3339(self._now())
        if series.sent:
            try:
                await self._client.patch(
                    EVENTS, series.name, {"count": series.count, "lastTimestamp": last}, namespace
                )
                series.sent = series.count
                return
            except NotFoundError:
                series.name, series.count = f"{about.name}.{uuid.uuid4().hex[:16]}", 1
        body: Json = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": series.name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": about.api_version,
                "kind": about.kind,
                "namespace": about.namespace,
                "name": about.name,
                "uid": about.uid,
            },
            "type": key[1],
            "reason": key[2],
            "message": key[3],
            "count": series.count,
            "firstTimestamp": rfc3339(series.first),
            "lastTimestamp": last,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
        }
        await self._client.create(EVENTS, body, namespace)
        series.sent = series.count


def _trim(cache: OrderedDict[_K, _V]) -> None:
    while len(cache) > REMEMBERED:
        cache.popitem(last=False)
