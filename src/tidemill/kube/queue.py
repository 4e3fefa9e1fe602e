"""A work queue: each key is worked on by one worker at a time, and many wishes for it become one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """Keys to work on.

    A key added while it waits is not added twice; one added while it is worked on comes again after
    `done`. Delayed and rate-limited additions never bring a key forward that already waits.
    """

    def __init__(self, *, first_delay: float = 0.05, max_delay: float = 60.0) -> None:
        self._ready: deque[K] = deque()
        self._waiting: set[K] = set()
        self._working: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._first_delay = first_delay
        self._max_delay = max_delay
        self._wakeup: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, key: K) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if key in self._working:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)
            while self._wakeup:
                waiter = self._wakeup.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    break

    def add_after(self, key: K, delay: float) -> None:
        """Add later; the earliest of several wishes counts."""
        loop = asyncio.get_running_loop()
        current = self._timers.get(key)
        if current is not None:
            if current.when() <= loop.time() + delay:
                return
            current.cancel()
        self._timers[key] = loop.call_later(delay, self.add, key)

    def add_rate_limited(self, key: K) -> None:
        """Add after a delay that doubles with each failure since the last `forget`."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        self.add_after(key, min(self._max_delay, self._first_delay * 2 ** min(failures, 32)))

    def forget(self, key: K) -> None:
        self._failures.pop(key, None)

    def failures(self, key: K) -> int:
        return self._failures.get(key, 0)

    async def get(self) -> K:
        """The next key; call `done` with it afterwards."""
        while not self._ready:
            waiter = asyncio.get_running_loop().create_future()
            self._wakeup.append(waiter)
            await waiter
        key = self._ready.popleft()
        self._waiting.discard(key)
        self._working.add(key)
        return key

    def done(self, key: K) -> None:
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    async def work(self, handle: Callable[[K], object], on_error: Callable[[K, Exception], None]) -> None:
        """Be one worker: call `handle` (a coroutine function) for each key, retry what raises."""
        while True:
            key = await self.get()
            try:
                result = handle(key)
                if asyncio.iscoroutine(result):
                    await result
                self.forget(key)
            except Exception as error:  # noqa: BLE001 - reported, and tried again
                on_error(key, error)
                self.add_rate_limited(key)
            finally:
                self.done(key)
