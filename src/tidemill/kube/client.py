"""Requests to an API server, on raw JSON.

Configuration (kubeconfig, in-cluster, exec plugins, token renewal) is the official client's; the
generated API classes are not used, because informers want bytes decoded once and kinds that the
generator has never heard of.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import aiohttp
import orjson
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException, incluster_config, kube_config

from tidemill.kube.errors import ApiError, NotFoundError
from tidemill.kube.resources import Json, Resource

# A process that is a pod but has no mount namespace of its own finds its volumes below this
# directory, as Windows host-process containers do.
SANDBOX_ENV = "CONTAINER_SANDBOX_MOUNT_POINT"
SERVICE_ACCOUNT_DIR = "var/run/secrets/kubernetes.io/serviceaccount"
REQUEST_TIMEOUT = 30.0
# A connection that has been idle for longer may have died in silence, and a request on it would wait for its
# whole time-out. Below the grace of a watch, so that whoever acts on a watch that came back finds none.
IDLE_SECONDS = 5.0


class PatchType(StrEnum):
    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"
    APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    type: str  # ADDED, MODIFIED, DELETED or BOOKMARK
    object: Json


@dataclass(frozen=True, slots=True)
class ListPage:
    items: list[Json]
    resource_version: str
    continue_token: str


class KubeClient:
    """One API server. Every method raises ApiError for an answer outside 2xx, and aiohttp.ClientError
    or TimeoutError when there was none."""

    def __init__(self, configuration: Configuration) -> None:
        rest = RESTClientObject(configuration)
        self._configuration = configuration
        self._proxy = rest.proxy

        def session(*, fresh: bool) -> aiohttp.ClientSession:
            idle = None if fresh else IDLE_SECONDS
            connector = aiohttp.TCPConnector(
                ssl=rest.ssl_context, limit=0, force_close=fresh, keepalive_timeout=idle
            )
            return aiohttp.ClientSession(connector=connector, trust_env=True)

        self._session = session(fresh=False)
        # A watch opens a connection of its own. A pooled one may have died in silence since it was last used,
        # and a watch that waits on it would be deaf for as long as it may last.
        self._watch_session = session(fresh=True)

    @classmethod
    async def connect(cls, kubeconfig: str | None = None, context: str | None = None) -> Self:
        """The cluster that `kubeconfig` names; without one $KUBECONFIG, then the pod's own, then
        ~/.kube/config. Raises ConfigException when there is none of them."""
        configuration: Configuration = type.__call__(Configuration)
        if kubeconfig and not Path(kubeconfig).is_file():
            raise ConfigException(f"kubeconfig {kubeconfig!r} is no file")
        if kubeconfig or os.environ.get("KUBECONFIG") or "KUBERNETES_SERVICE_HOST" not in os.environ:
            await kube_config.load_kube_config(
                config_file=kubeconfig, context=context, client_configuration=configuration
            )
        else:
            root = Path(os.environ.get(SANDBOX_ENV, "/")) / SERVICE_ACCOUNT_DIR
            incluster_config.InClusterConfigLoader(
                token_filename=str(root / "token"), cert_filename=str(root / "ca.crt")
            ).load_and_set(configuration)
        return cls(configuration)

    async def close(self) -> None:
        await self._session.close()
        await self._watch_session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Json:
        return await self._json("GET", resource.path(namespace, name))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        limit: int = 0,
        continue_token: str = "",
    ) -> ListPage:
        """One page; all there is when `limit` is 0."""
        query = {
            "labelSelector": label_selector,
            "fieldSelector": field_selector,
            "limit": str(limit or ""),
            "continue": continue_token,
        }
        body = await self._json("GET", resource.path(namespace), query=query)
        metadata = body.get("metadata", {})
        return ListPage(
            body.get("items") or [], metadata.get("resourceVersion", ""), metadata.get("continue") or ""
        )

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        timeout_seconds: float,
        grace: float,
        label_selector: str = "",
        field_selector: str = "",
    ) -> AsyncIterator[WatchEvent]:
        """Events after `resource_version` until the server ends the stream.

        The server is asked to end it after `timeout_seconds`; a stream that is still open `grace`
        seconds later has gone silent and raises TimeoutError. An ERROR event raises ApiError.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(max(1, round(timeout_seconds))),
            "labelSelector": label_selector,
            "fieldSelector": field_selector,
        }
        timeout = aiohttp.ClientTimeout(total=timeout_seconds + grace, connect=REQUEST_TIMEOUT)
        async with await self._request(
            "GET", resource.path(namespace), query=query, timeout=timeout, session=self._watch_session
        ) as response:
            pending = b""
            async for chunk in response.content.iter_any():
                *lines, pending = (pending + chunk).split(b"\n") if pending else chunk.split(b"\n")
                for line in lines:
                    if not line.strip():
                        continue
                    event = orjson.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError.of(500, event["object"])
                    yield WatchEvent(event["type"], event["object"])

    async def create(self, resource: Resource, obj: Mapping[str, Any], namespace: str | None = None) -> Json:
        return await self._json("POST", resource.path(namespace), body=_typed(resource, obj))

    async def replace(
        self, resource: Resource, obj: Mapping[str, Any], namespace: str | None = None, *, sub: str = ""
    ) -> Json:
        """PUT the object; with a resourceVersion inside, ConflictError when it changed since."""
        path = resource.path(namespace, obj["metadata"]["name"], sub)
        return await self._json("PUT", path, body=_typed(resource, obj))

    async def patch(
        self,
        resource: Resource,
        name: str,
        body: object,
        namespace: str | None = None,
        *,
        type: PatchType = PatchType.MERGE,
        sub: str = "",
    ) -> Json:
        return await self._json("PATCH", resource.path(namespace, name, sub), body=body, content_type=type)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        grace_period_seconds: int | None = None,
        uid: str | None = None,
    ) -> bool:
        """Delete; False when it was not there. With `uid`, only that very object."""
        options: Json = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if grace_period_seconds is not None:
            options["gracePeriodSeconds"] = grace_period_seconds
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._json("DELETE", resource.path(namespace, name), body=options)
        except NotFoundError:
            return False
        return True

    async def scale(self, resource: Resource, name: str, namespace: str, replicas: int) -> Json:
        """Write spec.replicas through the scale subresource."""
        return await self.patch(resource, name, {"spec": {"replicas": replicas}}, namespace, sub="scale")

    async def get_raw(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        """The body of a GET on any path of the server, such as a pod's proxy or log."""
        async with await self._request("GET", path, query=query) as response:
            return await response.read()

    async def _json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> Json:
        async with await self._request(
            method, path, query=query, body=body, content_type=content_type
        ) as response:
            return orjson.loads(await response.read())

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
        timeout: aiohttp.ClientTimeout | None = None,
        session: aiohttp.ClientSession | None = None,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json", "User-Agent": "tidemill"}
        # Asked for at every request: this is where the official client renews tokens.
        settings: dict[str, Any] = dict(await self._configuration.auth_settings())
        for setting in settings.values():
            headers[str(setting["key"])] = str(setting["value"])
        if body is not None:
            headers["Content-Type"] = content_type
        response = await (session or self._session).request(
            method,
            f"{self._configuration.host}{path}",
            params={k: v for k, v in (query or {}).items() if v},
            data=None if body is None else orjson.dumps(body),
            headers=headers,
            timeout=timeout or aiohttp.ClientTimeout(total=REQUEST_TIMEOUT),
            proxy=self._proxy,
        )
        if response.status < 300:
            return response
        async with response:
            text = await response.read()
        raise ApiError.of(response.status, _status(text), text.decode(errors="replace"))


def _typed(resource: Resource, obj: Mapping[str, Any]) -> Mapping[str, Any]:
    """With its type, which a custom resource must name in its body too."""
    return {"apiVersion": resource.api_version, "kind": resource.kind, **obj}


def _status(text: bytes) -> Mapping[str, Any] | None:
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) and parsed.get("kind") == "Status" else None
