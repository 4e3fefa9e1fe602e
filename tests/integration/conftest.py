from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.conftest import create_namespace
from tests.definitions import define
from tests.integration.fleet import NAMESPACE, Fleet, Harness, running

from tidemill.api.crd import variant_autoscaling_crd
from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.local.cluster import LocalCluster


@pytest.fixture
async def wva(api_only: LocalCluster) -> LocalCluster:
    """An API server with the CRD and the two namespaces."""
    await define(api_only.client, variant_autoscaling_crd())
    for name in (NAMESPACE, DEFAULT_NAMESPACE):
        await create_namespace(api_only.client, name)
    return api_only


@pytest.fixture
def fleet(wva: LocalCluster) -> Fleet:
    return Fleet(wva.client)


@pytest.fixture
async def harness(wva: LocalCluster) -> AsyncIterator[Harness]:
    """A running controller with the default interval of 60 s: what happens sooner is not the periodic pass."""
    async with running(wva.client) as found:
        yield found
