"""One pod: start its containers, keep them running, say how they are, stop them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import structlog

from tidemill.kube.client import KubeClient
from tidemill.kube.clock import rfc3339
from tidemill.kube.conditions import set_condition
from tidemill.kube.errors import ApiError, ConflictError, NotFoundError
from tidemill.kube.resources import PODS, Json, ObjectKey
from tidemill.local.children import dying_with_parent
from tidemill.local.runner import sandbox
from tidemill.local.runner.logs import ContainerLog
from tidemill.local.runner.probes import probe_once

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Container:
    """What is known of one container; the status is made from it."""

    spec: Json
    log: ContainerLog
    state: Json = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Json = field(default_factory=dict)
    restarts: int = 0
    ready: bool = False
    started: bool = False
    process: asyncio.subprocess.Process | None = None


class PodWorker:
    """Runs one pod (told apart by uid) until it is deleted or its containers are done."""

    def __init__(
        self,
        client: KubeClient,
        pod: Json,
        *,
        ip: str,
        directory: Path,
        server: tuple[str, int],
        token: str,
        authority: bytes,
        lookup: sandbox.Lookup,
        session: aiohttp.ClientSession,
        backoff: float,
        now: Callable[[], dt.datetime],
    ) -> None:
        self._client = client
        self._pod = pod
        self._ip = ip
        self._root = directory / "root"
        self._server = server
        self._token = token
        self._authority = authority
        self._lookup = lookup
        self._session = session
        self._backoff = backoff
        self._now = now
        self._key = ObjectKey.of(pod)
        self._uid: str = pod["metadata"]["uid"]
        self._containers = [
            _Container(c, ContainerLog(directory / f"{c['name']}.log")) for c in pod["spec"]["containers"]
        ]
        self._directory = directory
        self._stopping = asyncio.Event()
        self._grace: float = 30.0
        self._changed = asyncio.Event()
        self._started_at = rfc3339(now())
        self._conditions: list[Json] = []

    def container_log(self, name: str | None) -> ContainerLog | None:
        if not name:
            return self._containers[0].log
        return next((c.log for c in self._containers if c.spec["name"] == name), None)

    def stop(self, grace: float) -> None:
        """Begin to stop; a second call may shorten the grace period."""
        self._grace = grace
        self._stopping.set()

    async def run(self) -> None:
        """Until the pod is gone from the API server, or ended by itself."""
        writer = asyncio.create_task(self._write_status_on_change())
        runs = [asyncio.create_task(self._run_container(c)) for c in self._containers]
        try:
            self._changed.set()
            # Containers that end for good leave the pod behind until somebody deletes it.
            await self._stopping.wait()
            await self._end_processes()
        finally:
            for task in (writer, *runs):
                task.cancel()
            await self._kill()
            await asyncio.gather(writer, *runs, return_exceptions=True)
            for container in self._containers:
                await container.log.close()
        await self._confirm_deletion()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _confirm_deletion(self) -> None:
        """Tell the API server that nothing runs any more, until it has heard it."""
        delay = 0.2
        while True:
            try:
                await self._client.delete(
                    PODS, self._key.name, self._key.namespace, grace_period_seconds=0, uid=self._uid
                )
                return
            except ConflictError:
                return  # another pod by this name: ours is gone
            except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
                log.info("deletion not confirmed", pod=str(self._key), error=str(error))
            await asyncio.sleep(delay)
            delay = min(delay * 2, 10.0)

    async def _end_processes(self) -> None:
        alive = [c.process for c in self._containers if c.process and c.process.returncode is None]
        for process in alive:
            _signal_group(process, signal.SIGTERM)
        if alive:
            waits = asyncio.gather(*(process.wait() for process in alive))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._grace):
                    await asyncio.shield(waits)
        await self._kill()

    async def _kill(self) -> None:
        for container in self._containers:
            process = container.process
            if process is not None and process.returncode is None:
                _signal_group(process, signal.SIGKILL)
                await process.wait()

    async def _run_container(self, container: _Container) -> None:
        """Start, wait, and start again as the restart policy says."""
        policy = self._pod["spec"]["restartPolicy"]
        delay = self._backoff
        while not self._stopping.is_set():
            clock = asyncio.get_running_loop().time
            began = clock()
            code = await self._run_once(container)
            container.ready = container.started = False
            self._changed.set()
            if self._stopping.is_set() or policy == "Never" or (policy == "OnFailure" and code == 0):
                return
            if clock() - began > 10 * self._backoff:
                delay = self._backoff
            if code is not None:
                container.last_state = container.state
                message = f"back-off {delay:g}s restarting failed container={container.spec['name']}"
                container.state = {"waiting": {"reason": "CrashLoopBackOff", "message": message}}
                container.restarts += 1
                self._changed.set()
            await asyncio.sleep(delay)
            delay = min(delay * 2, 300.0)

    async def _run_once(self, container: _Container) -> int | None:
        """One run of the process: its exit code, or None when it could not be started."""
        try:
            sandbox.write_volumes(self._pod, container.spec, self._root, self._lookup)
            sandbox.write_service_account(
                self._root, token=self._token, authority=self._authority, namespace=self._key.namespace
            )
            env = sandbox.environment(
                self._pod, container.spec, ip=self._ip, root=self._root, server=self._server,
                lookup=self._lookup,
            )  # fmt: skip
            command = sandbox.command_line(container.spec, env)
            container.log.rotate()
            cwd = container.spec.get("workingDir") or self._root
            process = await asyncio.create_subprocess_exec(
                *dying_with_parent(command, env, cwd), env=env, cwd=cwd,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except sandbox.ConfigError as error:
            container.state = {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}}
            return None
        except OSError as error:
            container.state = {"waiting": {"reason": "RunContainerError", "message": str(error)}}
            return None
        container.process = process
        began = rfc3339(self._now())
        container.state = {"running": {"startedAt": began}}
        container.started = "startupProbe" not in container.spec
        container.ready = container.started and "readinessProbe" not in container.spec
        self._changed.set()
        assert process.stdout is not None
        copying = asyncio.create_task(container.log.copy_from(process.stdout, self._now))
        probing = asyncio.create_task(self._probe(container, process, env))
        try:
            code = await process.wait()
            # A grandchild may keep the pipe open: do not wait for ever for its last words.
            await asyncio.wait({copying}, timeout=1.0)
        finally:
            probing.cancel()
            copying.cancel()
            await asyncio.gather(probing, copying, return_exceptions=True)
        container.state = {
            "terminated": {
                "exitCode": code if code >= 0 else 128 - code,
                **({"signal": -code} if code < 0 else {}),
                "reason": "Completed" if code == 0 else "Error",
                "startedAt": began,
                "finishedAt": rfc3339(self._now()),
            }
        }
        return code

    async def _probe(
        self, container: _Container, process: asyncio.subprocess.Process, env: dict[str, str]
    ) -> None:
        spec = container.spec
        if (startup := spec.get("startupProbe")) is not None:
            if not await self._until_passed(startup, container, env):
                log.info("startup probe failed", pod=str(self._key), container=spec["name"])
                _signal_group(process, signal.SIGTERM)
                return
            container.started = True
            container.ready = "readinessProbe" not in spec
            self._changed.set()
        async with asyncio.TaskGroup() as group:
            if (readiness := spec.get("readinessProbe")) is not None:
                group.create_task(self._watch_readiness(readiness, container, env))
            if (liveness := spec.get("livenessProbe")) is not None:
                group.create_task(self._watch_liveness(liveness, container, process, env))

    async def _check(self, probe: Json, container: _Container, env: dict[str, str]) -> bool:
        why = await probe_once(probe, container.spec, ip=self._ip, env=env, session=self._session)
        return why is None

    async def _until_passed(self, probe: Json, container: _Container, env: dict[str, str]) -> bool:
        await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
        for _ in range(int(probe["failureThreshold"])):
            if await self._check(probe, container, env):
                return True
            await asyncio.sleep(float(probe["periodSeconds"]))
        return False

    async def _watch_readiness(self, probe: Json, container: _Container, env: dict[str, str]) -> None:
        await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
        failures = successes = 0
        while True:
            if await self._check(probe, container, env):
                successes, failures = successes + 1, 0
                if not container.ready and successes >= int(probe["successThreshold"]):
                    container.ready = True
                    self._changed.set()
            else:
                failures, successes = failures + 1, 0
                if container.ready and failures >= int(probe["failureThreshold"]):
                    container.ready = False
                    self._changed.set()
            await asyncio.sleep(float(probe["periodSeconds"]))

    async def _watch_liveness(
        self, probe: Json, container: _Container, process: asyncio.subprocess.Process, env: dict[str, str]
    ) -> None:
        await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
        failures = 0
        while failures < int(probe["failureThreshold"]):
            failures = 0 if await self._check(probe, container, env) else failures + 1
            await asyncio.sleep(float(probe["periodSeconds"]))
        log.info("liveness probe failed", pod=str(self._key), container=container.spec["name"])
        _signal_group(process, signal.SIGTERM)

    async def _write_status_on_change(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._client.patch(
                    PODS, self._key.name, {"metadata": {"uid": self._uid}, "status": self._status()},
                    self._key.namespace, sub="status",
                )  # fmt: skip
            except NotFoundError:
                self.stop(0)
            except ApiError as error:
                log.info("pod status refused", pod=str(self._key), error=str(error))
            except (aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(0.5)
                self._changed.set()

    def _status(self) -> Json:
        ready = all(c.ready for c in self._containers)
        waiting = [c.spec["name"] for c in self._containers if not c.ready]
        now = rfc3339(self._now())
        for type_, value in (
            ("PodScheduled", True), ("Initialized", True), ("ContainersReady", ready), ("Ready", ready),
        ):  # fmt: skip
            self._conditions = set_condition(
                self._conditions, type=type_, status=value,
                reason="" if value else "ContainersNotReady",
                message="" if value else f"containers with unready status: {waiting}",
                generation=None, now=now,
            )  # fmt: skip
        return {
            "phase": self._phase(),
            "hostIP": "127.0.0.1",
            "podIP": self._ip,
            "podIPs": [{"ip": self._ip}],
            "startTime": self._started_at,
            "conditions": self._conditions,
            "containerStatuses": [
                {
                    "name": c.spec["name"],
                    "image": c.spec.get("image", ""),
                    "imageID": "",
                    "ready": c.ready,
                    "started": c.started,
                    "restartCount": c.restarts,
                    # A merge patch leaves what it does not name: the other states are taken away.
                    "state": {"waiting": None, "running": None, "terminated": None} | c.state,
                    "lastState": c.last_state,
                }
                for c in self._containers
            ],
        }

    def _phase(self) -> str:
        states = [c.state for c in self._containers]
        policy = self._pod["spec"]["restartPolicy"]
        if all("terminated" in s for s in states) and policy != "Always":
            failed = any(s["terminated"]["exitCode"] for s in states)
            if not failed or policy == "Never":
                return "Failed" if failed else "Succeeded"
        begun = any("waiting" not in c.state or c.restarts for c in self._containers)
        return "Running" if begun else "Pending"


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
