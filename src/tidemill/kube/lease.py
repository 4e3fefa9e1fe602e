"""Leader election by a Lease, with release on the way out.

Own code rather than the official client's: that one compares wall clocks of different machines,
does not release the lease, and works on the generated models.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import structlog

from tidemill.kube.client import KubeClient
from tidemill.kube.clock import rfc3339_micro
from tidemill.kube.errors import AlreadyExistsError, ApiError, ConflictError, NotFoundError
from tidemill.kube.resources import LEASES, Json

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """Durations in seconds; a leader that could not renew within `renew_deadline` stops leading, before
    others may take over at `duration`."""

    name: str
    namespace: str
    identity: str
    duration: float = 60.0
    renew_deadline: float = 50.0
    retry_period: float = 10.0

    def __post_init__(self) -> None:
        if not self.retry_period < self.renew_deadline < self.duration:
            raise ValueError(
                f"lease {self.namespace}/{self.name}: retry period {self.retry_period:g}s must be below "
                f"renew deadline {self.renew_deadline:g}s, and that below lease duration {self.duration:g}s"
            )


class LeaderElector:
    """Runs a coroutine while this process holds the lease, and cancels it when the lease is lost.

    Others' renewals are timed by when they were seen here, never by the timestamps in the Lease, so
    clocks need not agree.
    """

    def __init__(self, client: KubeClient, config: LeaseConfig, *, now: Callable[[], dt.datetime]) -> None:
        self._client = client
        self._config = config
        self._now = now
        self._seen: tuple[str, float] = ("", 0.0)
        self.is_leader = False

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Compete until cancelled. Returns only when `lead` returns or raises."""
        config = self._config
        try:
            while True:
                while not await self._try():  # noqa: ASYNC110 - the server is polled, there is no event
                    await asyncio.sleep(config.retry_period)
                log.info("became leader", lease=config.name, identity=config.identity)
                self.is_leader = True
                leading = asyncio.ensure_future(lead())
                renewing = asyncio.ensure_future(self._renew())
                try:
                    await asyncio.wait({leading, renewing}, return_when=asyncio.FIRST_COMPLETED)
                    self.is_leader = False
                    if leading.done():
                        leading.result()
                        return
                    log.warning("lost the lease", lease=config.name, identity=config.identity)
                finally:
                    self.is_leader = False
                    for task in (leading, renewing):
                        task.cancel()
                    await asyncio.gather(leading, renewing, return_exceptions=True)
        finally:
            await asyncio.shield(self._release())

    async def _renew(self) -> None:
        """Renew until that has failed for the renew deadline."""
        config, clock = self._config, asyncio.get_running_loop().time
        last = clock()
        while clock() - last < config.renew_deadline:
            await asyncio.sleep(config.retry_period)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.1, config.renew_deadline - (clock() - last))):
                    if await self._try():
                        last = clock()

    async def _try(self) -> bool:
        """Take or renew the lease; False when another holds it or the server did not answer."""
        config, clock = self._config, asyncio.get_running_loop().time
        now = rfc3339_micro(self._now())
        try:
            try:
                lease = await self._client.get(LEASES, config.name, config.namespace)
            except NotFoundError:
                await self._client.create(LEASES, self._body({}, now, now, 0), config.namespace)
                return True
            spec = lease.get("spec") or {}
            holder = spec.get("holderIdentity") or ""
            mark = f"{holder}/{spec.get('renewTime')}/{lease['metadata'].get('resourceVersion')}"
            if mark != self._seen[0]:
                self._seen = (mark, clock())
            held = float(spec.get("leaseDurationSeconds") or config.duration)
            if holder not in ("", config.identity) and clock() - self._seen[1] < held:
                return False
            transitions = int(spec.get("leaseTransitions") or 0)
            acquired = str(spec.get("acquireTime") or now)
            if holder != config.identity:
                transitions, acquired = transitions + 1, now
            await self._client.replace(LEASES, self._body(lease, acquired, now, transitions), config.namespace)
            return True
        except (ConflictError, AlreadyExistsError):
            return False
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("lease not renewed", lease=config.name, error=str(error))
            return False

    def _body(self, lease: Json, acquired: str, renewed: str, transitions: int) -> Json:
        config = self._config
        metadata = lease.get("metadata") or {"name": config.name, "namespace": config.namespace}
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": metadata,
            "spec": {
                "holderIdentity": config.identity,
                "leaseDurationSeconds": max(1, round(config.duration)),
                "acquireTime": acquired,
                "renewTime": renewed,
                "leaseTransitions": transitions,
            },
        }

    async def _release(self) -> None:
        """Give the lease back, so that a successor need not wait for it to expire."""
        config = self._config
        try:
            async with asyncio.timeout(2.0):
                lease = await self._client.get(LEASES, config.name, config.namespace)
                if (lease.get("spec") or {}).get("holderIdentity") == config.identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._client.replace(LEASES, lease, config.namespace)
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("lease not released", lease=config.name, error=str(error))
