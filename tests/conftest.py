"""What all tests share: a local cluster, kubectl, a named way to do without a missing program."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog

from tests.definitions import define
from tests.elsewhere import KUBECONFIG, Elsewhere, elsewhere
from tidemill.api.crd import variant_autoscaling_crd
from tidemill.kube.client import KubeClient
from tidemill.kube.errors import AlreadyExistsError
from tidemill.kube.resources import NAMESPACES, Json
from tidemill.local.cluster import LocalCluster


def pytest_configure(config: pytest.Config) -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),
    )


def program(name: str) -> str:
    """Path of a program that a test needs. Without it the test is skipped, except in CI, where it fails."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        message = f"{name} is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


# Ports below those that the kernel gives to whoever asks for any: a part for each process of a parallel run, given
# in turn, so that none is given to two before it is in use.
_PART = 1500
_PORTS = range(20_000, 32_000)
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_turn = itertools.cycle(_PORTS[_WORKER * _PART % len(_PORTS) :][:_PART])


def free_port(following: int = 0) -> int:
    """A port that nobody listens at, nor at the `following` after it."""
    while True:
        ports = [next(_turn)]
        ports += [next(_turn) for _ in range(following)]
        with ExitStack() as stack:
            try:
                for one in ports:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", one))
            except OSError:
                continue
            if ports[-1] - ports[0] == following:
                return ports[0]


@dataclass
class Kubectl:
    """The real kubectl, pointed at a cluster."""

    binary: str
    kubeconfig: Path

    async def __call__(self, *args: str, stdin: str = "", check: bool = True) -> str:
        code, out, err = await self.run(*args, stdin=stdin)
        if check and code:
            raise AssertionError(f"kubectl {' '.join(args)} exited with {code}: {err}")
        return out if not code else err

    async def run(self, *args: str, stdin: str = "") -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            self.binary,
            *args,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate(stdin.encode())
        return process.returncode or 0, out.decode(), err.decode()


@pytest.fixture
async def api_only(tmp_path: Path) -> AsyncIterator[LocalCluster | Elsewhere]:
    """An API server without controllers or runner."""
    async with _api_server(tmp_path) as cluster:
        yield cluster


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[LocalCluster | Elsewhere]:
    """The same with roles that are enforced."""
    async with _api_server(tmp_path, authorize=True) as cluster:
        yield cluster


def _api_server(directory: Path, **options: bool) -> AbstractAsyncContextManager[LocalCluster | Elsewhere]:
    if KUBECONFIG:
        return elsewhere(directory)
    return LocalCluster(workloads=False, bookmark_seconds=0.2, **options)


@pytest.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    """A whole local cluster with the VariantAutoscaling CRD."""
    async with LocalCluster(bookmark_seconds=0.5) as local:
        await define(local.client, variant_autoscaling_crd())
        yield local


@pytest.fixture
def kubectl(cluster: LocalCluster) -> Kubectl:
    return Kubectl(program("kubectl"), cluster.kubeconfig)


async def create_namespace(client: KubeClient, name: str, **metadata: object) -> Json:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, **metadata}}
    try:
        return await client.create(NAMESPACES, body)
    except AlreadyExistsError:  # by an earlier test on a server that goes on
        return await client.patch(
            NAMESPACES, name, {"metadata": {"labels": None, "annotations": None, **metadata}}
        )
