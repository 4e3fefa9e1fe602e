"""The contract suite runs on the local API server, and on any other that CONTRACT_KUBECONFIG names."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import create_namespace
from tidemill.kube.client import KubeClient
from tidemill.kube.resources import NAMESPACES
from tidemill.local.cluster import LocalCluster

KUBECONFIG = os.environ.get("CONTRACT_KUBECONFIG")


@pytest.fixture
async def kubeconfig() -> AsyncIterator[Path]:
    if KUBECONFIG:
        yield Path(KUBECONFIG)
    else:
        async with LocalCluster(workloads=False, bookmark_seconds=0.2) as cluster:
            yield cluster.kubeconfig


@pytest.fixture
async def api(kubeconfig: Path) -> AsyncIterator[KubeClient]:
    async with await KubeClient.connect(str(kubeconfig)) as client:
        yield client


@pytest.fixture
async def namespace(api: KubeClient) -> AsyncIterator[str]:
    name = f"contract-{uuid.uuid4().hex[:8]}"
    await create_namespace(api, name)
    yield name
    await api.delete(NAMESPACES, name)
