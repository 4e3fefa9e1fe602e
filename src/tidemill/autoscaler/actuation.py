"""How a decision reaches the replicas."""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp

from tidemill.api.variant import TargetRef
from tidemill.kube.client import KubeClient
from tidemill.kube.errors import ApiError, NotFoundError
from tidemill.kube.resources import DEPLOYMENTS, LEADER_WORKER_SETS

_RESOURCES = {"Deployment": DEPLOYMENTS, "LeaderWorkerSet": LEADER_WORKER_SETS}


class ActuationError(Exception):
    """The decision was not carried out. The message says by whom and why."""


class Actuator(Protocol):
    async def apply(self, target: TargetRef, current: int, desired: int) -> None:
        """Carry out a decision. Raises ActuationError."""
        ...


class MetricsActuator:
    """Exporting the number is all: an HPA or KEDA moves the replicas."""

    async def apply(self, target: TargetRef, current: int, desired: int) -> None:
        pass


class ScaleActuator:
    """Writes the scale subresource of the target itself."""

    def __init__(self, client: KubeClient, *, timeout: float = 5.0) -> None:
        self._client = client
        self._timeout = timeout

    async def apply(self, target: TargetRef, current: int, desired: int) -> None:
        if current == desired:
            return
        try:
            async with asyncio.timeout(self._timeout):
                await self._client.scale(_RESOURCES[target.kind], target.name, target.namespace, desired)
        except NotFoundError:
            raise ActuationError(f"{target} is gone") from None
        except ApiError as error:
            raise ActuationError(f"the API server refused to scale {target}: {error}") from error
        except TimeoutError:
            raise ActuationError(f"no answer to scaling {target} in {self._timeout:g}s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ActuationError(f"{target} could not be scaled: {error}") from error
