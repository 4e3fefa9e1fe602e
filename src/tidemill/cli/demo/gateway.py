"""The demo's gateway: a real Envoy that is kept told of the pods, as a gateway controller would do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import aiohttp

from tidemill.autoscaler.views import PodView
from tidemill.cli.demo import manifests
from tidemill.kube.informer import Informer
from tidemill.kube.resources import ObjectKey
from tidemill.local.envoy import Envoy, Following, PoolRoute
from tidemill.metrics.exposition import parse

_HITS, _QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


def serves(pod: PodView) -> bool:
    """Whether a pod is a ready model server of the demo."""
    return (
        pod.key.namespace == manifests.NAMESPACE
        and not pod.key.name.startswith(manifests.PICKER)
        and pod.ready
        and not pod.terminating
    )


@asynccontextmanager
async def gateway(
    directory: Path, pods: Informer[PodView], *, following: Following = Following.LIST
) -> AsyncGenerator[Envoy]:
    """Envoy in front of the demo's pool. It knows the ready pods, and the picker wherever that is."""

    def pickers() -> list[str]:
        return [
            f"{pod.ip}:{manifests.PICKER_PORT}"
            for pod in pods.store
            if pod.key.name.startswith(manifests.PICKER) and pod.ready and not pod.terminating
        ]

    name = manifests.POOL
    route = PoolRoute(name=name, pickers=pickers(), following=following)
    envoy = Envoy(directory, [route], port=_free_port(), admin_port=_free_port(), bypass=True)

    def told(event: object) -> None:
        envoy.set_endpoints(name, sorted(pod.address for pod in pods.store if serves(pod)))
        envoy.set_pickers(name, sorted(pickers()))

    async with envoy:
        told(None)
        pods.add_handler(told)
        yield envoy


class PrefixCounter:
    """What the engines say of their prefix caches, pods that have gone included."""

    def __init__(self) -> None:
        self._counts: dict[ObjectKey, tuple[float, float]] = {}  # hits, queries
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def ratio(self) -> float | None:
        """Share of the prompt tokens looked up that were found; None before any."""
        hits = sum(found[0] for found in self._counts.values())
        queries = sum(found[1] for found in self._counts.values())
        return hits / queries if queries else None

    async def look(self, pods: Iterable[PodView]) -> None:
        await asyncio.gather(*(self._look_at(pod) for pod in pods))

    async def _look_at(self, pod: PodView) -> None:
        try:
            async with self._session.get(f"http://{pod.address}/metrics") as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return  # on its way out: its last numbers stay
        found = {sample.name: sample.value for sample in parse(text, (_HITS, _QUERIES))}
        self._counts[pod.key] = (found.get(_HITS, 0.0), found.get(_QUERIES, 0.0))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
