"""What waits at endpoint pickers: read from their own metrics without Prometheus, or from one in this process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Protocol

import aiohttp
import structlog

from tidemill.metrics.exposition import parse
from tidemill.metrics.samples import PICKER_QUEUE, PICKER_QUEUE_BYTES, PickerQueue

log = structlog.get_logger(__name__)
_WANTED = frozenset({*PICKER_QUEUE, *PICKER_QUEUE_BYTES})


class PickerHere(Protocol):
    """An endpoint picker that runs in this process."""

    @property
    def waiting_for(self) -> list[str]:
        """Why it is not ready; empty when it is."""
        ...

    def queues(self) -> tuple[PickerQueue, ...]: ...


class PickerPoll:
    """Reads the metrics of each picker in `urls`, and asks the one in this process, if any. One that does not
    answer counts as having nobody waiting, and is said once: a request that waits there is seen when it answers
    again."""

    def __init__(self, urls: Sequence[str], *, here: PickerHere | None = None, timeout: float = 1.0) -> None:
        self._urls = tuple(urls)
        self._here = here
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None
        self._failing: set[str] = set()

    async def read(self) -> tuple[PickerQueue, ...]:
        """Queues by pool and model, those of several pickers of one pool together."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        found: dict[tuple[str, str, str], tuple[float, float]] = {}
        texts = await asyncio.gather(*(self._fetch(self._session, url) for url in self._urls))
        told = [PickerQueue(*key, *sums) for text in texts for key, sums in picker_queues(text).items()]
        for queue in (*told, *(() if self._here is None else self._here.queues())):
            key = (queue.model, queue.pool, queue.namespace)
            requests, size = found.get(key, (0.0, 0.0))
            found[key] = (requests + queue.requests, size + queue.bytes)
        return tuple(PickerQueue(*key, *values) for key, values in sorted(found.items()))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _fetch(self, session: aiohttp.ClientSession, url: str) -> str:
        try:
            async with session.get(url) as response:
                response.raise_for_status()
                text = (await response.read()).decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if url not in self._failing:
                log.warning("endpoint picker gives no numbers", url=url, error=f"{type(error).__name__}: {error}")
            self._failing.add(url)
            return ""
        self._failing.discard(url)
        return text


def picker_queues(text: str) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Requests and bytes by model, pool and namespace of the pool. The two names of one metric say the same:
    the larger counts. A series is for its target model, else for its model."""
    sums: dict[tuple[str, str, str], dict[str, float]] = {}
    for sample in parse(text, _WANTED):
        labels = sample.labels
        model = labels.get("target_model_name") or labels.get("model_name") or ""
        if not model or not math.isfinite(sample.value):
            continue
        key = (model, labels.get("inference_pool", ""), labels.get("namespace", ""))
        by_name = sums.setdefault(key, {})
        by_name[sample.name] = by_name.get(sample.name, 0.0) + sample.value
    return {
        key: (
            max(by_name.get(name, 0.0) for name in PICKER_QUEUE),
            max(by_name.get(name, 0.0) for name in PICKER_QUEUE_BYTES),
        )
        for key, by_name in sums.items()
    }
