"""From zero: a request that waits at an endpoint picker wakes its model, at once and once.

An HPA rests while its target has no replicas, so a number alone wakes nobody: the scale is written here, whoever
moves the replicas otherwise. One variant of each role is woken, the cheapest. Nothing wakes what somebody has
paused, or a model that may not sleep (its target was set to 0 by hand).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from tidemill.autoscaler import picker_queues
from tidemill.autoscaler.actuation import ActuationError, Actuator
from tidemill.autoscaler.attribution import NOTHING_ATTRIBUTED, Ownership
from tidemill.autoscaler.configuration import Configuration
from tidemill.autoscaler.members import Member, members
from tidemill.autoscaler.world import World
from tidemill.capacity.types import Role
from tidemill.metrics.samples import PickerQueue

log = structlog.get_logger(__name__)

POLL = 0.3  # seconds between looks while anybody sleeps
RETRY = 5.0  # after a wake that the API server refused

Read = Callable[[], Awaitable[tuple[PickerQueue, ...]]]


class Waker:
    """`woken` is told of each variant whose scale was written, with its replicas and how many requests waited."""

    def __init__(
        self, *, world: World, configuration: Configuration, scale: Actuator,
        woken: Callable[[Member, int, int], None],
    ) -> None:  # fmt: skip
        self._world = world
        self._configuration = configuration
        self._scale = scale
        self._woken = woken
        self._not_before: dict[str, float] = {}  # uid of a target

    async def run(self, read: Read) -> None:
        """Look at what `read` gives for as long as anybody sleeps."""
        while True:
            try:
                if self.sleeping():
                    await self.wake(await read())
            except Exception:
                log.exception("looking for requests that wait failed")
            await asyncio.sleep(POLL)

    def sleeping(self) -> dict[picker_queues.Group, list[Member]]:
        """Models of which a role has no replica, that may be woken."""
        if all(target.replicas for target in self._world.targets()):
            return {}
        groups = members(self._world, Ownership(self._world), {}, NOTHING_ATTRIBUTED)
        tracked = self._world.tracked_namespaces()
        return {
            key: group
            for key, group in groups.items()
            if self._configuration.scale_to_zero(model=key[1], namespace=key[0], tracked=key[0] in tracked).enabled
            and any(not _awake(group, role) for role in {m.target.role for m in group})
        }

    async def wake(self, queues: Sequence[PickerQueue]) -> None:
        """Wake what these requests wait for."""
        sleeping = self.sleeping()
        waiting, _ = picker_queues.assign(queues, sleeping, self._world.inference_pools())
        for key, queue in waiting.items():
            if not queue.requests:
                continue
            group = sleeping[key]
            for role in sorted({m.target.role for m in group}):
                if _awake(group, role):
                    continue
                candidates = [
                    m for m in group if m.target.role is role and not self._world.paused(m.variant.spec.target)
                ]
                if candidates:
                    cheapest = min(candidates, key=lambda m: (m.variant.spec.cost, m.variant.key.name))
                    await self._wake(cheapest, int(queue.requests))

    async def _wake(self, member: Member, requests: int) -> None:
        target, clock = member.target, asyncio.get_running_loop().time()
        # The write shows in the cache only a moment later.
        if clock < self._not_before.get(target.uid, 0.0):
            return
        self._not_before[target.uid] = clock + RETRY
        replicas = max(1, member.variant.spec.spec.min_replicas or 0)
        try:
            await self._scale.apply(target.ref, 0, replicas)
        except ActuationError as error:
            log.warning("a model could not be woken", variant=str(member.variant.key), error=str(error))
            return
        log.info("woken", variant=str(member.variant.key), replicas=replicas, waiting=requests)
        self._woken(member, replicas, requests)


def _awake(group: Sequence[Member], role: Role) -> bool:
    return any(member.target.replicas for member in group if member.target.role is role)
