"""The demo's clients: requests at a rate that rises and falls, each to the replica with the fewest of them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

PROMPT_CHARACTERS = 2000  # 500 tokens
OUTPUT_TOKENS = 150
PEAK_RATE = 12.0  # requests per second
BASE_RATE = 0.5
_RATES = (  # progress, requests per second
    (0.0, BASE_RATE),
    (0.08, BASE_RATE),
    (0.2, PEAK_RATE),
    (0.5, PEAK_RATE),
    (0.58, BASE_RATE),
    (1.0, BASE_RATE),
)


def rate_at(progress: float) -> float:
    """Requests per second at `progress`, from 0 to 1, of the demo: quiet, rise, peak, fall, quiet."""
    for (start, low), (end, high) in itertools.pairwise(_RATES):
        if start <= progress <= end:
            return low + (high - low) * (progress - start) / (end - start)
    return BASE_RATE


@dataclass(slots=True)
class LoadSummary:
    served: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class Load:
    """Sends chat requests to whatever addresses `endpoints` gives at the time."""

    def __init__(self, model: str, endpoints: Callable[[], list[str]], rng: random.Random) -> None:
        self._model = model
        self._endpoints = endpoints
        self._rng = rng
        self._in_flight: Counter[str] = Counter()
        self.summary = LoadSummary()
        self.rate = 0.0

    @property
    def in_flight(self) -> int:
        return self._in_flight.total()

    async def run(self, duration: float) -> None:
        """Send for `duration` seconds, then wait for the last answers."""
        clock = asyncio.get_running_loop().time
        start = clock()
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
            asyncio.TaskGroup() as group,
        ):
            due = start
            while (elapsed := due - start) < duration:
                self.rate = rate_at(elapsed / duration)
                group.create_task(self._send(session))
                due += self._rng.expovariate(self.rate)
                await asyncio.sleep(max(0.0, due - clock()))
            self.rate = 0.0

    async def _send(self, session: aiohttp.ClientSession) -> None:
        prompt = "".join(self._rng.choices("abcdefghij klmnopqrst", k=PROMPT_CHARACTERS))
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": OUTPUT_TOKENS,
        }
        error = "no replica is ready"
        # One more try elsewhere when a replica goes away, as a gateway would do.
        for _ in range(2):
            known = self._endpoints()
            if not known:
                break
            fewest = min(self._in_flight[address] for address in known)
            address = self._rng.choice([a for a in known if self._in_flight[a] == fewest])
            self._in_flight[address] += 1
            try:
                async with session.post(f"http://{address}/v1/chat/completions", json=body) as response:
                    await response.read()
                    if response.status == 200:
                        self.summary.served += 1
                        return
                    error = f"status {response.status}"
            except (aiohttp.ClientError, TimeoutError, OSError) as failure:
                error = type(failure).__name__
            finally:
                self._in_flight[address] -= 1
        self.summary.failed += 1
        self.summary.reasons[error] += 1
