"""The demo's clients: requests through the gateway at a rate that rises and falls, conversations among them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from tidemill.local.envoy import BYPASS_HEADER

PROMPT_CHARACTERS = 2000  # 500 tokens
SHARED_CHARACTERS = 1024  # of them, which all requests of a conversation have in common
CONVERSATIONS = 12
OUTPUT_TOKENS = 150
PEAK_RATE = 12.0  # requests per second
BASE_RATE = 0.5
BYPASS_EVERY = 4  # one request in so many goes without the picker, for comparison
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
    """What became of the requests. Latencies in seconds, of those served."""

    served: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    by_endpoint: Counter[str] = field(default_factory=Counter)
    picked: list[float] = field(default_factory=list)
    unpicked: list[float] = field(default_factory=list)


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of all do not exceed; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class Load:
    """Sends chat requests to the gateway at `url`."""

    def __init__(self, model: str, url: str, rng: random.Random) -> None:
        self._model = model
        self._url = f"{url}/v1/chat/completions"
        self._rng = rng
        self._beginnings = [self._text(SHARED_CHARACTERS) for _ in range(CONVERSATIONS)]
        self._sent = 0
        self.in_flight = 0
        self.summary = LoadSummary()
        self.rate = 0.0

    async def run(self, duration: float) -> None:
        """Send for `duration` seconds, then wait for the last answers."""
        clock = asyncio.get_running_loop().time
        start = clock()
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=120), connector=aiohttp.TCPConnector(limit=0)
            ) as session,
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
        prompt = self._rng.choice(self._beginnings) + self._text(PROMPT_CHARACTERS - SHARED_CHARACTERS)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": OUTPUT_TOKENS,
        }
        self._sent += 1
        bypass = self._sent % BYPASS_EVERY == 0
        summary = self.summary
        clock = asyncio.get_running_loop().time
        begun = clock()
        self.in_flight += 1
        try:
            headers = {BYPASS_HEADER: "1"} if bypass else {}
            async with session.post(self._url, json=body, headers=headers) as response:
                await response.read()
                if response.status == 200:
                    summary.served += 1
                    summary.by_endpoint[response.headers.get("x-inference-pod", "unknown")] += 1
                    (summary.unpicked if bypass else summary.picked).append(clock() - begun)
                    return
                error = f"status {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            error = type(failure).__name__
        finally:
            self.in_flight -= 1
        summary.failed += 1
        summary.reasons[error] += 1

    def _text(self, characters: int) -> str:
        return "".join(self._rng.choices("abcdefghij klmnopqrst", k=characters))
