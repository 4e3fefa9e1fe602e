"""A cluster: API server, controllers and runner, started and stopped together."""

from __future__ import annotations

import asyncio
import datetime as dt
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from tidemill.kube.client import KubeClient
from tidemill.kube.clock import utc_now
from tidemill.local.apiserver.server import ApiServer
from tidemill.local.apiserver.tls import issue
from tidemill.local.controllers.deployment import DeploymentController
from tidemill.local.controllers.hpa import HorizontalPodAutoscalerController
from tidemill.local.controllers.leaderworkerset import LeaderWorkerSetController
from tidemill.local.controllers.replicaset import ReplicaSetController
from tidemill.local.controllers.scheduler import Scheduler
from tidemill.local.runner.runner import Runner

log = structlog.get_logger(__name__)


class LocalCluster:
    """`async with LocalCluster() as cluster:` gives a cluster that kubectl can use.

    Without a `directory` everything lies in a temporary one and is gone afterwards; with `keep_data`
    objects survive a restart in the same directory. HPAs are looked at each `hpa_seconds`.
    With `authorize` roles are enforced; without, every pod may do everything.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int = 0,
        keep_data: bool = False,
        history: int = 1000,
        bookmark_seconds: float = 30.0,
        workloads: bool = True,
        hpa_seconds: float = 15.0,
        authorize: bool = False,
        now: Callable[[], dt.datetime] = utc_now,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="tidemill-") if directory is None else None
        self.directory = Path(self._temporary.name) if self._temporary else Path(directory or ".")
        self._workloads = workloads
        self._hpa_seconds = hpa_seconds
        self._now = now
        self.server = ApiServer(
            port=port,
            tls=issue(self.directory / "pki", names=["127.0.0.1", "localhost"], now=now()),
            history=history,
            bookmark_seconds=bookmark_seconds,
            authorize=authorize,
            data_file=self.directory / "cluster.json" if keep_data else None,
            now=now,
        )
        self.token = self.server.add_token("system:admin")
        self._tasks: list[asyncio.Task[None]] = []
        self._client: KubeClient | None = None

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    @property
    def client(self) -> KubeClient:
        assert self._client is not None, "the cluster is not started"
        return self._client

    async def __aenter__(self) -> Self:
        await self.server.start()
        self.server.write_kubeconfig(self.kubeconfig, self.token)
        self._client = await KubeClient.connect(str(self.kubeconfig))
        if self._workloads:
            runner = Runner(self._client, self.server, self.directory / "pods", now=self._now)
            self._tasks = [
                asyncio.create_task(DeploymentController(self._client, now=self._now).run()),
                asyncio.create_task(ReplicaSetController(self._client).run()),
                asyncio.create_task(LeaderWorkerSetController(self._client).run()),
                asyncio.create_task(
                    HorizontalPodAutoscalerController(self._client, now=self._now, period=self._hpa_seconds).run()
                ),
                asyncio.create_task(Scheduler(self._client, now=self._now).run()),
                asyncio.create_task(runner.run()),
            ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("a part of the cluster had failed", error=str(result))
        if self._client is not None:
            await self._client.close()
        await self.server.stop()
        if self._temporary is not None:
            self._temporary.cleanup()
