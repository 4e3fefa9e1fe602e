"""Who asks, and may they: an extension API server leaves both to the main one.

The aggregation layer presents a client certificate of its own and names the user in headers; whoever comes
directly brings a token, of which a TokenReview says whose it is. What the user may do a SubjectAccessReview says.
(https://kubernetes.io/docs/tasks/extend-kubernetes/configure-aggregation-layer)
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import structlog

from tidemill.kube.client import KubeClient
from tidemill.kube.errors import ApiError
from tidemill.kube.resources import CONFIG_MAPS, Resource

log = structlog.get_logger(__name__)

AUTHENTICATION = "extension-apiserver-authentication"  # ConfigMap in kube-system
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False)
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False
)
REFRESH = 60.0  # seconds between two looks at the authorities
REMEMBERED = 10.0  # seconds for which an answer counts, as upstream's delegating servers have it
_MOST = 4096  # answers remembered


@dataclass(frozen=True, slots=True)
class User:
    name: str
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What is asked for."""

    verb: str
    group: str
    resource: str
    namespace: str


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """How the aggregation layer makes itself known, and which headers name the user."""

    authority: str = ""  # PEM
    names: tuple[str, ...] = ()  # common names allowed; none means any
    user_headers: tuple[str, ...] = ("X-Remote-User",)
    group_headers: tuple[str, ...] = ("X-Remote-Group",)

    @classmethod
    def parse(cls, data: Mapping[str, str]) -> FrontProxy:
        """From the data of the ConfigMap. Raises ValueError."""

        def names(key: str, default: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(map(str, orjson.loads(data[key]))) if data.get(key) else default

        return cls(
            data.get("requestheader-client-ca-file", ""),
            names("requestheader-allowed-names", ()),
            names("requestheader-username-headers", cls.user_headers),
            names("requestheader-group-headers", cls.group_headers),
        )

    def user(self, common_name: str, headers: Any) -> User | None:
        """Whom the headers (a multi-dict) name, when the verified certificate is that of the aggregation layer."""
        if self.names and common_name not in self.names:
            return None
        name = next((headers[header] for header in self.user_headers if headers.get(header)), "")
        groups = tuple(value for header in self.group_headers for value in headers.getall(header, ()))
        return User(name, groups) if name else None


class Delegated:
    """Asks the main API server, and remembers its answers for a moment. `context` is the serving one: it learns
    whose client certificates to verify."""

    def __init__(
        self, client: KubeClient, context: ssl.SSLContext, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._context = context
        self._clock = clock
        self._proxy: FrontProxy | None = None
        self._said = ""
        self._users: dict[bytes, tuple[float, User | None]] = {}
        self._allowed: dict[tuple[User, Access], tuple[float, str]] = {}
        context.verify_mode = ssl.CERT_OPTIONAL

    async def run(self) -> None:
        """Keep up with the authorities, until cancelled."""
        while True:
            await asyncio.sleep(REFRESH)
            await self.refresh()

    async def refresh(self) -> None:
        """Read the ConfigMap. What cannot be read stays as it was, and is said once."""
        try:
            found = await self._client.get(CONFIG_MAPS, AUTHENTICATION, "kube-system")
            proxy = FrontProxy.parse(found.get("data") or {})
            if proxy.authority and (self._proxy is None or proxy.authority != self._proxy.authority):
                self._context.load_verify_locations(cadata=proxy.authority)
            self._proxy, problem = proxy, ""
            if not proxy.authority:
                problem = (
                    "requestheader-client-ca-file is missing: the aggregation layer cannot be told from others"
                )
        except (ApiError, OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem and problem != self._said:
            log.warning("authorities not known", config_map=f"kube-system/{AUTHENTICATION}", error=problem)
        self._said = problem

    async def user(self, peer: Mapping[str, Any] | None, headers: Any) -> User | None:
        """Who asks; None when nobody vouches for it. `peer` is a verified client certificate as `ssl` gives it.
        Raises ApiError when the API server cannot be asked."""
        if peer and self._proxy is not None and self._proxy.authority:
            found = self._proxy.user(_common_name(peer), headers)
            if found is not None:
                return found
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return None
        key = hashlib.sha256(token.strip().encode()).digest()  # no token is kept
        now = self._clock()
        if (known := self._users.get(key)) is not None and now < known[0]:
            return known[1]
        review = await self._client.create(
            TOKEN_REVIEWS, {**_head(TOKEN_REVIEWS), "spec": {"token": token.strip()}}
        )
        status = review.get("status") or {}
        about = status.get("user") or {}
        user = (
            User(about.get("username", ""), tuple(about.get("groups") or ()))
            if status.get("authenticated")
            else None
        )
        _remember(self._users, key, (now + REMEMBERED, user), now)
        return user

    async def denied(self, user: User, access: Access) -> str:
        """Why not; empty when it is allowed. Raises ApiError when the API server cannot be asked."""
        now = self._clock()
        if (known := self._allowed.get((user, access))) is not None and now < known[0]:
            return known[1]
        spec = {
            "user": user.name,
            "groups": list(user.groups),
            "resourceAttributes": {
                "verb": access.verb, "group": access.group, "resource": access.resource,
                "namespace": access.namespace,
            },
        }  # fmt: skip
        review = await self._client.create(ACCESS_REVIEWS, {**_head(ACCESS_REVIEWS), "spec": spec})
        status = review.get("status") or {}
        why = ""
        if not status.get("allowed"):
            why = (
                f'{access.resource}.{access.group} is forbidden: User "{user.name}" cannot {access.verb} resource '
                f'"{access.resource}" in API group "{access.group}" in the namespace "{access.namespace}"'
            )
            if status.get("reason"):
                why += f": {status['reason']}"
        _remember(self._allowed, (user, access), (now + REMEMBERED, why), now)
        return why


def _remember(answers: dict[Any, tuple[float, Any]], key: Any, answer: tuple[float, Any], now: float) -> None:
    if len(answers) >= _MOST:
        for old in [k for k, (until, _) in answers.items() if until <= now] or list(answers):
            del answers[old]
    answers[key] = answer


def _head(resource: Resource) -> dict[str, Any]:
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {}}


def _common_name(peer: Mapping[str, Any]) -> str:
    return next((value for part in peer.get("subject", ()) for key, value in part if key == "commonName"), "")
