"""The node, whatever its name: takes every pod that is bound to one, and runs it here."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import random
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import aiohttp
import structlog

from tidemill.kube.client import KubeClient
from tidemill.kube.errors import ApiError
from tidemill.kube.informer import Added, Deleted, Informer, InformerEvent, Modified, identity
from tidemill.kube.resources import CONFIG_MAPS, PODS, Json, ObjectKey, Resource
from tidemill.local.apiserver.server import ApiServer
from tidemill.local.apiserver.status import StatusError, bad_request
from tidemill.local.runner import sandbox
from tidemill.local.runner.pod import PodWorker

log = structlog.get_logger(__name__)
SECRETS = Resource("", "v1", "secrets", "Secret")


class Runner:
    """Runs each pod as processes with an address of its own.

    Addresses come from 127.0.0.0/8, all of which is this machine on Linux, so every pod can listen on
    the same port.
    """

    def __init__(
        self,
        client: KubeClient,
        server: ApiServer,
        directory: Path,
        *,
        now: Callable[[], dt.datetime],
        restart_backoff: float = 1.0,
    ) -> None:
        self._client = client
        self._server = server
        self._directory = directory
        self._now = now
        self._backoff = restart_backoff
        self._network = random.randrange(16, 250)
        self._addresses = itertools.count(1)
        self._workers: dict[str, PodWorker] = {}  # by uid
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pods = Informer(client, PODS, decode=identity)
        self._config_maps = Informer(client, CONFIG_MAPS, decode=identity)
        self._secrets = Informer(client, SECRETS, decode=identity)
        self._pods.add_handler(self._on_pod)
        self._session: aiohttp.ClientSession | None = None
        server.pod_logs = self.logs

    async def run(self) -> None:
        """Until cancelled; then every process is stopped."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            self._session = session
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._config_maps.run())
                    group.create_task(self._secrets.run())
                    await self._config_maps.wait_synced()
                    await self._secrets.wait_synced()
                    group.create_task(self._pods.run())
            finally:
                for task in self._tasks.values():
                    task.cancel()
                await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _on_pod(self, event: InformerEvent[Json]) -> None:
        pod = event.new if isinstance(event, Added | Modified) else event.old
        uid = pod["metadata"]["uid"]
        worker = self._workers.get(uid)
        if isinstance(event, Deleted):
            if worker is not None:
                worker.stop(0)
            return
        deleting = "deletionTimestamp" in pod["metadata"]
        if worker is not None:
            if deleting:
                worker.stop(float(pod["metadata"].get("deletionGracePeriodSeconds") or 0))
        elif not deleting and uid not in self._tasks and pod["spec"].get("nodeName"):
            self._tasks[uid] = asyncio.create_task(self._run_pod(pod))
        elif deleting and uid not in self._tasks:
            # Left by an earlier node: nothing runs here that could be waited for.
            self._tasks[uid] = asyncio.create_task(self._forget(pod))

    async def _forget(self, pod: Json) -> None:
        key, uid = ObjectKey.of(pod), pod["metadata"]["uid"]
        await self._client.delete(PODS, key.name, key.namespace, grace_period_seconds=0, uid=uid)
        self._tasks.pop(uid, None)

    async def _run_pod(self, pod: Json) -> None:
        key, uid = ObjectKey.of(pod), pod["metadata"]["uid"]
        number = next(self._addresses)
        ip = f"127.{self._network}.{number // 250}.{number % 250 + 1}"
        token = self._server.add_token(
            f"system:serviceaccount:{key.namespace}:{pod['spec'].get('serviceAccountName', 'default')}"
        )
        try:
            assert self._session is not None
            worker = PodWorker(
                self._client, pod, ip=ip, directory=self._directory / uid,
                server=(self._server.host, self._server.port), token=token,
                authority=self._server.tls.ca.read_bytes(), lookup=self._lookup(key.namespace),
                session=self._session, backoff=self._backoff, now=self._now,
            )  # fmt: skip
            self._workers[uid] = worker
            current = self._pods.store.get(key)
            if current is None or current["metadata"]["uid"] != uid or "deletionTimestamp" in current["metadata"]:
                worker.stop(0)
            await worker.run()
        except ApiError as error:
            log.info("pod not run", pod=str(key), error=str(error))
        finally:
            self._server.tokens.pop(token, None)
            self._workers.pop(uid, None)
            self._tasks.pop(uid, None)

    def _lookup(self, namespace: str) -> sandbox.Lookup:
        def find(kind: str, name: str) -> Mapping[str, str] | None:
            key = ObjectKey(namespace, name)
            if kind == "ConfigMap":
                found = self._config_maps.store.get(key)
                return None if found is None else found.get("data") or {}
            found = self._secrets.store.get(key)
            return None if found is None else sandbox.secret_text(found)

        return find

    async def logs(self, pod: Json, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Lines for `kubectl logs`. Raises StatusError when there is no such container here."""
        metadata = pod["metadata"]
        worker = self._workers.get(metadata["uid"])
        if worker is None:
            raise bad_request(f'pod "{metadata["name"]}" does not run on this node')
        name = query.get("container")
        found = worker.container_log(name)
        if found is None:
            raise StatusError(400, "BadRequest", f"container {name} is not valid for pod {metadata['name']}")
        async for chunk in found.read(query, self._now()):
            yield chunk
