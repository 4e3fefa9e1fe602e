"""Waiting for what other processes do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def eventually(
    check: Callable[[], object] | Callable[[], Awaitable[object]], *, within: float = 10.0
) -> object:
    """Poll `check` until it gives something true; its last word is in the failure.

    For state that changes in another process or behind a socket, where there is no event to await.
    """
    deadline = asyncio.get_running_loop().time() + within
    while True:
        try:
            found = check()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            last: object = found
        except AssertionError as error:
            last = error
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {within:g}s: {last!r}")
        await asyncio.sleep(0.02)
