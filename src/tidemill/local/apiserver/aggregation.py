"""Other servers behind this one: an APIService says which group and version a Service answers for."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator
from typing import Any, TypeAlias

import aiohttp
import orjson
from aiohttp import web

from tidemill.kube.selectors import matches
from tidemill.local.apiserver.rbac import User
from tidemill.local.apiserver.status import StatusError
from tidemill.local.apiserver.store import Store
from tidemill.local.apiserver.tls import FRONT_PROXY, ServingFiles

Json: TypeAlias = dict[str, Any]

API_SERVICES = "apiservices.apiregistration.k8s.io"
AUTHENTICATION = "extension-apiserver-authentication"
_TIMEOUT = 5.0


class Aggregator:
    """Passes requests on, and says for whom they are."""

    def __init__(self, store: Store, tls: ServingFiles) -> None:
        self._store = store
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_TIMEOUT), auto_decompress=False)

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()

    def authentication(self) -> Json:
        """The ConfigMap that tells extension servers how to know this one."""
        headers = {
            "requestheader-username-headers": ["X-Remote-User"],
            "requestheader-group-headers": ["X-Remote-Group"],
            "requestheader-extra-headers-prefix": ["X-Remote-Extra-"],
            "requestheader-allowed-names": [FRONT_PROXY],
        }
        return {
            "metadata": {"name": AUTHENTICATION, "namespace": "kube-system"},
            "data": {
                "requestheader-client-ca-file": self._tls.ca.read_text(),
                **{key: orjson.dumps(value).decode() for key, value in headers.items()},
            },
        }

    def groups(self) -> Iterator[tuple[str, str]]:
        """Groups and versions that others answer for."""
        for service in self._store.list(API_SERVICES):
            if service["spec"].get("service"):
                yield service["spec"]["group"], service["spec"]["version"]

    def find(self, path: str) -> Json | None:
        """The APIService for a path."""
        parts = path.strip("/").split("/")
        if len(parts) < 3 or parts[0] != "apis":
            return None
        found = self._store.get(API_SERVICES, ("", f"{parts[2]}.{parts[1]}"))
        return found if found is not None and found["spec"].get("service") else None

    async def forward(self, request: web.Request, service: Json, user: User) -> web.Response:
        """Raises StatusError 503 when nobody answers."""
        assert self._session is not None
        spec = service["spec"]
        address = self._address(spec["service"])
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        context.check_hostname = False  # the certificate is for the Service's name, and this goes to a pod
        if spec.get("insecureSkipTLSVerify"):
            context.verify_mode = ssl.CERT_NONE
        elif spec.get("caBundle"):
            context.load_verify_locations(cadata=base64.b64decode(spec["caBundle"]).decode())
        context.load_cert_chain(self._tls.client_certificate, self._tls.client_key)
        headers = [("X-Remote-User", user.name), *(("X-Remote-Group", group) for group in user.groups)]
        try:
            async with self._session.request(
                request.method, f"https://{address}{request.rel_url}", headers=headers, ssl=context,
                data=await request.read(),
            ) as upstream:  # fmt: skip
                return web.Response(
                    status=upstream.status, body=await upstream.read(), content_type=upstream.content_type
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unavailable(f"{address}: {type(error).__name__}: {error}") from None

    def _address(self, reference: Json) -> str:
        """A ready pod of the Service, at the port that the Service's port leads to; or the host that it names."""
        namespace, name = reference["namespace"], reference["name"]
        found = self._store.get("services", (namespace, name))
        if found is None:
            raise self._unavailable(f"service {namespace}/{name} is not there")
        number = reference.get("port", 443)
        port = next((p for p in found["spec"].get("ports") or () if p["port"] == number), None)
        if port is None:
            raise self._unavailable(f"service {namespace}/{name} has no port {number}")
        if found["spec"].get("type") == "ExternalName":
            return f"{found['spec']['externalName']}:{reference.get('port', 443)}"
        selector = {"matchLabels": found["spec"].get("selector") or {}}
        for pod in self._store.list("pods", namespace):
            status = pod.get("status") or {}
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
            labels = pod["metadata"].get("labels") or {}
            if ready and "deletionTimestamp" not in pod["metadata"] and matches(selector, labels):
                return f"{status['podIP']}:{_port_number(pod, port.get('targetPort', number))}"
        raise self._unavailable(f"service {namespace}/{name} has no ready pod")

    def _unavailable(self, why: str) -> StatusError:
        return StatusError(503, "ServiceUnavailable", f"error trying to reach service: {why}")


def _port_number(pod: Json, target: int | str) -> int:
    if isinstance(target, int):
        return target
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == target:
                return port["containerPort"]
    raise StatusError(503, "ServiceUnavailable", f"pod {pod['metadata']['name']} has no port named {target!r}")
