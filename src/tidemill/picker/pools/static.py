"""Endpoints from a file, for use without Kubernetes. The file is read again when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from tidemill.api.endpoints_file import EndpointsFile
from tidemill.api.problem import InvalidObjectError
from tidemill.kube.resources import ObjectKey
from tidemill.picker.address import join
from tidemill.picker.pools.endpoints import Endpoint, EndpointId, EndpointSet
from tidemill.picker.pools.pool import Pool, Pools

log = structlog.get_logger(__name__)

_LOOK = 0.25  # seconds between two looks at the file


def endpoint_sets(file: EndpointsFile) -> dict[ObjectKey, EndpointSet]:
    """The endpoints of each pool that the file names. An address that two entries of a pool share counts once."""
    found: dict[ObjectKey, dict[str, Endpoint]] = {}
    for entry in file.endpoints:
        address = join(entry.address, entry.port)
        pod = ObjectKey(entry.namespace, entry.name)
        pool = found.setdefault(ObjectKey(*entry.pool_key), {})
        pool.setdefault(
            address,
            Endpoint(
                id=EndpointId(f"{pod} {address}", entry.port),
                address=address,
                pod=pod,
                rank=0,
                labels=entry.labels,
            ),
        )
    return {key: EndpointSet(tuple(endpoints.values())) for key, endpoints in found.items()}


class StaticPools:
    """Pools of an endpoints file."""

    def __init__(self, path: Path, pools: Pools, make: Callable[[ObjectKey, str], Pool]) -> None:
        self._path = path
        self._pools = pools
        self._make = make
        self._seen: tuple[int, int, int] | None = None

    @property
    def waiting_for(self) -> list[str]:
        """What readiness waits for: nothing, as the file has been read before anything is served."""
        return []

    def load(self) -> None:
        """Read the file. Raises InvalidObjectError or OSError; what was known stays."""
        seen = self._stamp()
        sets = endpoint_sets(EndpointsFile.parse(self._path.read_text(), source=str(self._path)))
        self._seen = seen
        for pool in self._pools.all():
            if pool.key not in sets:
                pool.clear(f"{self._path} names no endpoint of this pool")
        for key, found in sets.items():
            pool = self._pools.get(key)
            if pool is None:
                pool = self._make(key, "")
                self._pools.add(pool)
            pool.replace(found)

    async def run(self) -> None:
        """Look at the file now and then until cancelled."""
        said = ""
        while True:
            await asyncio.sleep(_LOOK)
            try:
                if self._stamp() == self._seen:
                    continue
                self.load()
                said = ""
            except (InvalidObjectError, OSError) as error:
                # A file that is being written, or that is wrong, changes nothing.
                if str(error) != said:
                    said = str(error)
                    log.warning("endpoints file cannot be used; what was known stays", error=said)

    def _stamp(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino
