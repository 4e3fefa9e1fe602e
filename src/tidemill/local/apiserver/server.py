"""The HTTP side: paths, queries and content types in, JSON out."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime as dt
import re
import secrets
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import aiohttp
import orjson
import structlog
import yaml
from aiohttp import web

from tidemill.kube.clock import utc_now
from tidemill.local.apiserver import openapi, protobuf
from tidemill.local.apiserver.aggregation import Aggregator
from tidemill.local.apiserver.gc import GarbageCollector
from tidemill.local.apiserver.kinds import CRDS, Kind, Kinds
from tidemill.local.apiserver.patch import json_patch, merge_patch, strategic_merge_patch
from tidemill.local.apiserver.rbac import Attributes, User, allowed
from tidemill.local.apiserver.registry import Registry
from tidemill.local.apiserver.reviews import review
from tidemill.local.apiserver.selectors import Predicate, field_predicate, label_predicate
from tidemill.local.apiserver.status import StatusError, bad_request, gone
from tidemill.local.apiserver.store import Change, Store
from tidemill.local.apiserver.table import table
from tidemill.local.apiserver.tls import ServingFiles

Json: TypeAlias = dict[str, Any]
log = structlog.get_logger(__name__)

PAGED_LISTS = 64  # snapshots kept for `continue`; older ones answer 410, as etcd does after compaction


class PodLogs(Protocol):
    """Where `kubectl logs` comes from; the runner of pods implements it."""

    def __call__(self, pod: Json, query: Mapping[str, str]) -> AsyncIterator[bytes]: ...


class _NoSuchPath(Exception):
    """No group and version of this name is served: not even an answer in the API's own form."""


@dataclass(frozen=True, slots=True)
class _Target:
    """What a path names."""

    kind: Kind
    namespace: str
    name: str
    sub: str
    rest: str = ""


@dataclass(frozen=True, slots=True)
class _Named:
    """What a path names, whether or not the server has such a kind."""

    group: str
    version: str
    plural: str
    namespace: str
    name: str
    sub: str
    rest: str

    @classmethod
    def of(cls, path: str) -> _Named:
        """Raises StatusError 404 for what names nothing."""
        parts = path.strip("/").split("/")
        if parts[0] == "api" and len(parts) >= 3:
            group, version, rest = "", parts[1], parts[2:]
        elif parts[0] == "apis" and len(parts) >= 4:
            group, version, rest = parts[1], parts[2], parts[3:]
        else:
            raise _no_such_resource()
        namespace = ""
        if rest[0] == "namespaces" and len(rest) >= 3 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        plural, name, sub, *tail = [*rest, "", ""]
        return cls(group, version, plural, namespace, name, sub, "/".join(t for t in tail if t))


def _no_such_resource() -> StatusError:
    return StatusError(404, "NotFound", "the server could not find the requested resource")


class ApiServer:
    """Serves HTTPS on `host`:`port`. Every request needs a bearer token that `tokens` knows; with `authorize` also
    a role that allows it, and `used` has what was allowed to whom."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ServingFiles,
        history: int = 1000,
        bookmark_seconds: float = 30.0,
        authorize: bool = False,
        data_file: Path | None = None,
        now: Callable[[], dt.datetime] = utc_now,
    ) -> None:
        self.host = host
        self.port = port
        self.tls = tls
        self.tokens: dict[str, str] = {}  # token: user
        self.store = Store(history=history)
        self.kinds = Kinds()
        self.registry = Registry(self.store, self.kinds, now=now)
        self.pod_logs: PodLogs | None = None
        self._now = now
        self._bookmark_seconds = bookmark_seconds
        self._authorize = authorize
        self.used: set[tuple[str, Attributes]] = set()
        self._data_file = data_file
        self._snapshots: OrderedDict[str, tuple[int, list[Json]]] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._proxy: aiohttp.ClientSession | None = None
        self._aggregator = Aggregator(self.store, tls)
        self._stopping = False

    @property
    def url(self) -> str:
        return f"https://{self.host}:{self.port}"

    async def start(self) -> None:
        if self._data_file is not None and self._data_file.exists() and self.store.version == 1:
            self.store.load(self._data_file.read_bytes())
            for crd in self.store.list(CRDS.collection):
                self.kinds.add_crd(crd)
        for name in ("default", "kube-system"):
            if self.store.get("namespaces", ("", name)) is None:
                self._create_namespace(name)
        self._tell_extension_servers()
        self._stopping = False
        collector = GarbageCollector(self.registry)
        self._tasks = [asyncio.create_task(collector.run())]
        if self._data_file is not None:
            self._tasks.append(asyncio.create_task(self._save_changes(self._data_file)))
        self._proxy = aiohttp.ClientSession(auto_decompress=False)
        await self._aggregator.start()
        app = web.Application(client_max_size=8 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.tls.certificate, self.tls.key)
        site = web.TCPSite(self._runner, self.host, self.port, ssl_context=context, reuse_address=True)
        await site.start()
        if self.port == 0:
            self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop serving; the data stays, so that `start` goes on with it."""
        self._stopping = True
        self.store.end_watches()
        self.store.observers.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._proxy is not None:
            await self._proxy.close()
        await self._aggregator.stop()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._data_file is not None:
            self._save(self._data_file)

    def add_token(self, user: str) -> str:
        token = secrets.token_urlsafe(32)
        self.tokens[token] = user
        return token

    def kubeconfig(self, token: str) -> Json:
        """Contents of a kubeconfig file for this server."""
        authority = base64.b64encode(self.tls.ca.read_bytes()).decode()
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tidemill-local",
            "clusters": [
                {
                    "name": "tidemill-local",
                    "cluster": {"server": self.url, "certificate-authority-data": authority},
                }
            ],
            "users": [{"name": "tidemill-local", "user": {"token": token}}],
            "contexts": [
                {
                    "name": "tidemill-local",
                    "context": {"cluster": "tidemill-local", "user": "tidemill-local", "namespace": "default"},
                }
            ],
        }

    def write_kubeconfig(self, path: Path, token: str) -> Path:
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(self.kubeconfig(token)))
        return path

    def _create_namespace(self, name: str) -> None:
        kind = self.kinds.find("", "v1", "namespaces")
        accounts = self.kinds.find("", "v1", "serviceaccounts")
        assert kind is not None
        assert accounts is not None
        labels = {"kubernetes.io/metadata.name": name}
        self.registry.create(kind, "", {"metadata": {"name": name, "labels": labels}})
        self.registry.create(accounts, name, {"metadata": {"name": "default"}})

    def _tell_extension_servers(self) -> None:
        """How this server makes itself known, and the role that may read it. The authority is a new one with every
        start."""
        kind = self.kinds.find("", "v1", "configmaps")
        assert kind is not None
        told = self._aggregator.authentication()
        name = told["metadata"]["name"]
        if self.store.get(kind.collection, ("kube-system", name)) is None:
            self.registry.create(kind, "kube-system", told)
        else:
            self.registry.update(kind, "kube-system", name, lambda old: {**old, "data": told["data"]})
        roles = self.kinds.find("rbac.authorization.k8s.io", "v1", "roles")
        assert roles is not None
        reader = f"{name}-reader"
        if self.store.get(roles.collection, ("kube-system", reader)) is None:
            rule = {
                "apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name],
                "verbs": ["get", "list", "watch"],
            }  # fmt: skip
            self.registry.create(roles, "kube-system", {"metadata": {"name": reader}, "rules": [rule]})

    async def _save_changes(self, path: Path) -> None:
        changed = asyncio.Event()
        self.store.observers.append(lambda collection, change: changed.set())
        while True:
            await changed.wait()
            changed.clear()
            self._save(path)
            await asyncio.sleep(1.0)

    def _save(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(self.store.dump())
        temporary.replace(path)

    # Requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self._stopping:
            # A connection that was still shaking hands when the server stopped: it must not outlive it.
            return _shutting_down()
        try:
            path = "/" + request.match_info["path"]
            if path in ("/healthz", "/livez", "/readyz"):
                return web.Response(text="ok")
            user = self._authenticate(request)
            if (service := self._aggregator.find(path)) is not None:
                self._check(user, _aggregated(path))
                return await self._aggregator.forward(request, service, user)
            if (fixed := self._discovery(path)) is not None:
                return _json(fixed)
            named = _Named.of(path)
            # As the real server: who may not ask is not told whether there is such a kind.
            self._check(user, _attributes(request, named))
            target = self._target(named)
            if request.method == "POST" and (answer := await self._review(request, target, user)) is not None:
                return _json(answer, 201)
            return await self._serve(request, target)
        except StatusError as error:
            return _json(error.body(), error.code)
        except _NoSuchPath:
            return web.Response(status=404, text="404 page not found\n")

    async def _review(self, request: web.Request, target: _Target, user: User) -> Json | None:
        if not target.kind.resource.group.startswith("auth"):
            return None
        body = await _body(request)
        kind = target.kind.resource.kind
        return review(kind, body, store=self.store, tokens=self.tokens, asker=user)

    def _check(self, user: User, wanted: Attributes | None) -> None:
        """Raises StatusError 403. Looking around (None) is for everybody."""
        if not self._authorize or wanted is None:
            return
        if not allowed(self.store, user, wanted):
            scope = f'in the namespace "{wanted.namespace}"' if wanted.namespace else "at the cluster scope"
            name = f' "{wanted.name}"' if wanted.name else ""
            plural = wanted.resource.partition("/")[0]
            qualified = f"{plural}.{wanted.group}" if wanted.group else plural
            raise StatusError(
                403, "Forbidden",
                f'{qualified}{name} is forbidden: User "{user.name}" cannot {wanted.verb} resource '
                f'"{wanted.resource}" in API group "{wanted.group}" {scope}',
            )  # fmt: skip
        self.used.add((user.name, wanted))

    def _authenticate(self, request: web.Request) -> User:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        user = self.tokens.get(token.strip()) if scheme.lower() == "bearer" else None
        if user is None:
            raise StatusError(401, "Unauthorized", "Unauthorized")
        return User.named(user)

    def _discovery(self, path: str) -> Json | None:
        parts = path.strip("/").split("/")
        match parts:
            case ["version"]:
                return {"major": "1", "minor": "36", "gitVersion": "v1.36.0+tidemill-local",
                        "platform": "tidemill/local", "gitTreeState": "clean", "goVersion": "none",
                        "compiler": "none", "buildDate": "1970-01-01T00:00:00Z", "gitCommit": ""}  # fmt: skip
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
            case ["apis"]:
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": self._groups()}
            case ["api", version]:
                return self._resources("", version)
            case ["apis", group]:
                found = [g for g in self._groups() if g["name"] == group]
                if not found:
                    raise _no_such_resource()
                return {"kind": "APIGroup", "apiVersion": "v1", **found[0]}
            case ["apis", group, version]:
                return self._resources(group, version)
            case ["openapi", "v3"]:
                return openapi.index(self.kinds)
            case ["openapi", "v3", *rest]:
                found = openapi.document(self.kinds, "/".join(rest))
                if found is None:
                    raise _no_such_resource()
                return found
            case _:
                return None

    def _groups(self) -> list[Json]:
        versions: dict[str, list[str]] = {}
        for kind in self.kinds:
            group, version = kind.resource.group, kind.resource.version
            if group and version not in versions.setdefault(group, []):
                versions[group].append(version)
        for group, version in self._aggregator.groups():
            if version not in versions.setdefault(group, []):
                versions[group].append(version)
        return [
            {
                "name": group,
                "versions": [{"groupVersion": f"{group}/{v}", "version": v} for v in found],
                "preferredVersion": {"groupVersion": f"{group}/{found[0]}", "version": found[0]},
            }
            for group, found in versions.items()
        ]

    def _resources(self, group: str, version: str) -> Json:
        resources: list[Json] = []
        for kind in self.kinds:
            resource = kind.resource
            if (resource.group, resource.version) != (group, version):
                continue
            base = {"singularName": "", "namespaced": resource.namespaced, "kind": resource.kind}
            resources.append(
                {
                    **base,
                    "name": resource.plural,
                    "singularName": kind.singular,
                    "verbs": ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
                    **({"shortNames": list(kind.short_names)} if kind.short_names else {}),
                    **({"categories": list(kind.categories)} if kind.categories else {}),
                }
            )
            verbs = ["get", "patch", "update"]
            if kind.status:
                resources.append({**base, "name": f"{resource.plural}/status", "verbs": verbs})
            if kind.scale:
                scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
                resources.append({**base, **scale, "name": f"{resource.plural}/scale", "verbs": verbs})
            if resource.plural == "pods":
                resources.append({**base, "name": "pods/log", "verbs": ["get"]})
                resources.append({**base, "name": "pods/proxy", "verbs": ["get"]})
        if not resources:
            raise _no_such_resource()
        group_version = f"{group}/{version}" if group else version
        return {
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources,
        }  # fmt: skip

    def _target(self, named: _Named) -> _Target:
        kind = self.kinds.find(named.group, named.version, named.plural)
        if kind is None:
            version = (named.group, named.version)
            if not any((k.resource.group, k.resource.version) == version for k in self.kinds):
                raise _NoSuchPath
            raise _no_such_resource()
        known = {"status": kind.status, "scale": kind.scale is not None, "finalize": named.plural == "namespaces",
                 "log": named.plural == "pods", "proxy": named.plural == "pods", "": True}  # fmt: skip
        if not known.get(named.sub):
            raise _no_such_resource()
        return _Target(kind, named.namespace, named.name, named.sub, named.rest)

    async def _serve(self, request: web.Request, target: _Target) -> web.StreamResponse:
        match request.method, bool(target.name), target.sub:
            case "GET", False, _:
                watching = request.query.get("watch") in ("true", "1")
                return await self._watch(request, target) if watching else self._list(request, target)
            case "GET", True, "log":
                return await self._logs(request, target)
            case "GET", True, "proxy":
                return await self._proxied(request, target)
            case "GET", True, "scale":
                obj = self.registry.get(target.kind, target.namespace, target.name)
                return _json(self.registry.scale_of(target.kind, obj))
            case "GET", True, _:
                return self._get(request, target)
            case "POST", False, _:
                return await self._create(request, target)
            case "PUT", True, "" | "status" | "scale" | "finalize":
                return await self._replace(request, target)
            case "PATCH", True, "" | "status" | "scale":
                return await self._patch(request, target)
            case "DELETE", _, "":
                return await self._delete(request, target)
            case _:
                raise StatusError(
                    405, "MethodNotAllowed", "the server does not allow this method on the requested resource"
                )

    def _predicate(self, request: web.Request, target: _Target) -> Predicate:
        tests = [
            label_predicate(request.query.get("labelSelector", "")),
            field_predicate(request.query.get("fieldSelector", ""), target.kind.resource.plural),
        ]
        kept = [test for test in tests if test is not None]
        namespace = target.namespace
        if namespace:
            kept.append(lambda obj: obj["metadata"].get("namespace") == namespace)
        return lambda obj: all(test(obj) for test in kept)

    def _get(self, request: web.Request, target: _Target) -> web.Response:
        obj = self.registry.get(target.kind, target.namespace, target.name)
        if _wants_table(request):
            version = obj["metadata"]["resourceVersion"]
            return _json(self._table(request, target.kind, [obj], {"resourceVersion": version}))
        return _json(obj)

    def _table(self, request: web.Request, kind: Kind, objects: list[Json], metadata: Json) -> Json:
        include = request.query.get("includeObject", "Metadata")
        return table(kind, objects, now=self._now(), metadata=metadata, include=include)

    def _list(self, request: web.Request, target: _Target) -> web.Response:
        limit = _integer(request, "limit")
        token = request.query.get("continue")
        if token:
            version, found = self._snapshots.pop(token, (0, None))
            if found is None:
                raise gone("The provided continue parameter is too old to display a consistent list result.")
        else:
            predicate = self._predicate(request, target)
            version = self.store.version
            found = [o for o in self.store.list(target.kind.collection, target.namespace) if predicate(o)]
        metadata: Json = {"resourceVersion": str(version)}
        if limit and len(found) > limit:
            token = secrets.token_urlsafe(16)
            self._snapshots[token] = (version, found[limit:])
            while len(self._snapshots) > PAGED_LISTS:
                self._snapshots.popitem(last=False)
            metadata |= {"continue": token, "remainingItemCount": len(found) - limit}
            found = found[:limit]
        if _wants_table(request):
            return _json(self._table(request, target.kind, found, metadata))
        resource = target.kind.resource
        if not target.kind.custom:
            # What they are is said of the list alone, as the real server does with the kinds it is built of.
            found = [{k: v for k, v in obj.items() if k not in ("apiVersion", "kind")} for obj in found]
        return _json(
            {
                "kind": f"{resource.kind}List",
                "apiVersion": resource.api_version,
                "metadata": metadata,
                "items": found,
            }
        )

    async def _watch(self, request: web.Request, target: _Target) -> web.StreamResponse:
        predicate = self._predicate(request, target)
        collection = target.kind.collection
        version = request.query.get("resourceVersion", "")
        bookmarks = request.query.get("allowWatchBookmarks") in ("true", "1")
        initial = version in ("", "0") or request.query.get("sendInitialEvents") == "true"
        timeout = _integer(request, "timeoutSeconds") or 1800
        if not version.isdigit() and version:
            raise bad_request(f"invalid resource version {version!r}")
        since = self.store.version if initial else int(version)
        # Objects that exist already; what is there now is what the subscription goes on from.
        existing = self.store.list(collection, target.namespace) if initial else []
        past, subscription = self.store.subscribe(collection, since)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        try:
            await response.prepare(request)

            async def send(type_: str, obj: Json) -> None:
                shown = obj
                if _wants_table(request) and type_ != "BOOKMARK":
                    found = {"resourceVersion": obj["metadata"]["resourceVersion"]}
                    shown = self._table(request, target.kind, [obj], found)
                await response.write(orjson.dumps({"type": type_, "object": shown}) + b"\n")

            async def bookmark(annotations: Json | None = None) -> None:
                resource = target.kind.resource
                metadata: Json = {"resourceVersion": str(self.store.version), "creationTimestamp": None}
                if annotations:
                    metadata["annotations"] = annotations
                shape = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
                await send("BOOKMARK", shape)

            for obj in existing:
                if predicate(obj):
                    await send("ADDED", obj)
            if request.query.get("sendInitialEvents") == "true":
                await bookmark({"k8s.io/initial-events-end": "true"})
            for change in past:
                if (event := _seen_through(change, predicate)) is not None:
                    await send(*event)
            deadline = time.monotonic() + timeout
            while (left := deadline - time.monotonic()) > 0 and not self._stopping:
                try:
                    async with asyncio.timeout(min(left, self._bookmark_seconds)):
                        change = await subscription.queue.get()
                except TimeoutError:
                    if bookmarks:
                        await bookmark()
                    continue
                if change is None:
                    break
                if (event := _seen_through(change, predicate)) is not None:
                    await send(*event)
        except ConnectionError:
            log.debug("watcher left", collection=collection)
        finally:
            with contextlib.suppress(ValueError):  # the collection may have been dropped meanwhile
                self.store.unsubscribe(collection, subscription)
        return response

    async def _create(self, request: web.Request, target: _Target) -> web.Response:
        body = await _body(request)
        _must_be_typed(target.kind, body)
        if target.kind.resource.kind == "Namespace":
            name = (body.get("metadata") or {}).get("name", "")
            obj = self.registry.create(target.kind, "", body, manager=_manager(request), dry_run=_dry_run(request))
            accounts = self.kinds.find("", "v1", "serviceaccounts")
            if accounts is not None and not _dry_run(request):
                self.registry.create(accounts, name, {"metadata": {"name": "default"}})
            return _json(obj, 201)
        namespace = target.namespace or (body.get("metadata") or {}).get("namespace") or ""
        if target.kind.resource.namespaced and not namespace:
            raise bad_request("an empty namespace may not be set during creation")
        obj = self.registry.create(
            target.kind, namespace, body, manager=_manager(request), dry_run=_dry_run(request)
        )
        return _json(obj, 201)

    async def _replace(self, request: web.Request, target: _Target) -> web.Response:
        body = await _body(request)
        _must_be_typed(target.kind, body)
        return self._changed(request, target, lambda old: body)

    async def _patch(self, request: web.Request, target: _Target) -> web.Response:
        content_type = request.content_type
        if content_type in ("application/apply-patch+yaml", "application/apply-patch+cbor"):
            config = yaml.safe_load(await request.read())
            manager = request.query.get("fieldManager")
            if not manager:
                raise bad_request("PatchOptions.meta.k8s.io is invalid: fieldManager: Required value")
            obj, created = self.registry.apply(
                target.kind, target.namespace, target.name, config,
                manager=manager, force=request.query.get("force") == "true", dry_run=_dry_run(request),
                sub=target.sub,
            )  # fmt: skip
            return _json(obj, 201 if created else 200)
        body = await _body(request)
        lists = target.kind.lists
        if content_type == "application/merge-patch+json":
            return self._changed(request, target, lambda old: merge_patch(old, body))
        if content_type == "application/json-patch+json":
            return self._changed(request, target, lambda old: json_patch(old, body))
        if content_type == "application/strategic-merge-patch+json" and not target.kind.custom:
            return self._changed(request, target, lambda old: strategic_merge_patch(old, body, lists))
        raise StatusError(
            415,
            "UnsupportedMediaType",
            f"the body of the request was in an unknown format - accepted media types include: "
            f"application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml "
            f"(got {content_type})",
        )

    def _changed(self, request: web.Request, target: _Target, change: Callable[[Json], Json]) -> web.Response:
        arguments: Json = {"manager": _manager(request), "dry_run": _dry_run(request)}
        if target.sub == "scale":
            obj = self.registry.set_scale(target.kind, target.namespace, target.name, change, **arguments)
        else:
            obj = self.registry.update(
                target.kind, target.namespace, target.name, change, sub=target.sub, **arguments
            )
        return _json(obj)

    async def _delete(self, request: web.Request, target: _Target) -> web.Response:
        options = await _body(request) if request.can_read_body else {}
        for name in ("propagationPolicy", "gracePeriodSeconds"):
            if name in request.query:
                options.setdefault(name, request.query[name])
        dry_run = _dry_run(request) or bool(options.get("dryRun"))
        if not target.name:
            predicate = self._predicate(request, target)
            found = [o for o in self.store.list(target.kind.collection, target.namespace) if predicate(o)]
            for obj in found:
                metadata = obj["metadata"]
                namespace = metadata.get("namespace", "")
                self.registry.delete(target.kind, namespace, metadata["name"], options, dry_run=dry_run)
            return _json({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})
        obj, removed = self.registry.delete(target.kind, target.namespace, target.name, options, dry_run=dry_run)
        if not removed:
            return _json(obj)
        details = {"name": target.name, "kind": target.kind.resource.plural, "uid": obj["metadata"]["uid"],
                   **({"group": target.kind.resource.group} if target.kind.resource.group else {})}  # fmt: skip
        return _json(
            {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        )

    async def _logs(self, request: web.Request, target: _Target) -> web.StreamResponse:
        pod = self.registry.get(target.kind, target.namespace, target.name)
        if self.pod_logs is None:
            raise StatusError(503, "ServiceUnavailable", "no runner is attached to this server")
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        chunks = self.pod_logs(pod, request.query)
        try:
            # The first chunk decides between an answer and a refusal.
            first = await anext(chunks, b"")
            await response.prepare(request)
            await response.write(first)
            async for chunk in chunks:
                await response.write(chunk)
        except ConnectionError:
            log.debug("log reader left", pod=target.name)
        return response

    async def _proxied(self, request: web.Request, target: _Target) -> web.Response:
        """GET on a pod's port through the server, named as kubectl does: [scheme:]name[:port]."""
        parts = target.name.split(":")
        name, port = (parts[1], parts[2]) if len(parts) == 3 else (parts[0], (parts[1:] or ["80"])[0])
        pod = self.registry.get(target.kind, target.namespace, name)
        address = pod.get("status", {}).get("podIP")
        assert self._proxy is not None
        if not address:
            raise StatusError(503, "ServiceUnavailable", f'pod "{name}" has no address yet')
        try:
            async with self._proxy.get(
                f"http://{address}:{port}/{target.rest}", params=request.query, timeout=aiohttp.ClientTimeout(30)
            ) as upstream:
                return web.Response(
                    status=upstream.status, body=await upstream.read(), content_type=upstream.content_type
                )
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise StatusError(
                503, "ServiceUnavailable", f"error trying to reach pod {name} on port {port}: {error}"
            ) from None


_ONE_NAME = re.compile(r"metadata\.name==?([^,=!]+)")
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


def _attributes(request: web.Request, named: _Named) -> Attributes:
    """What a request is about, as authorization sees it. A collection of one by its name is about that one."""
    verb = _VERBS.get(request.method)
    name = named.name
    if request.method == "GET":
        watching = request.query.get("watch") in ("true", "1")
        verb = "get" if named.name else "watch" if watching else "list"
    elif request.method == "DELETE":
        verb = "delete" if named.name else "deletecollection"
    if not name and (only := _ONE_NAME.fullmatch(request.query.get("fieldSelector", ""))):
        name = only[1]
    return Attributes(
        verb=verb or request.method.lower(),
        group=named.group,
        resource=f"{named.plural}/{named.sub}" if named.sub else named.plural,
        namespace=named.namespace,
        name=name,
    )


def _aggregated(path: str) -> Attributes | None:
    """The same for what another server answers; None for what it says of itself."""
    match path.strip("/").split("/"):
        case ["apis", group, _, "namespaces", namespace, plural, *rest]:
            return Attributes(
                verb="get" if rest else "list", group=group, resource=plural, namespace=namespace,
                name=rest[0] if rest else "",
            )  # fmt: skip
        case _:
            return None


def _seen_through(change: Change, predicate: Predicate) -> tuple[str, Json] | None:
    """The event that a selector makes of a change: an object that stops matching is deleted for it."""
    now = change.type != "DELETED" and predicate(change.object)
    before = change.old is not None and predicate(change.old)
    if now:
        return ("MODIFIED" if before else "ADDED"), change.object
    if not before:
        return None
    if change.type == "DELETED" or change.old is None:
        return "DELETED", change.object
    version = change.object["metadata"]["resourceVersion"]
    return "DELETED", {**change.old, "metadata": {**change.old["metadata"], "resourceVersion": version}}


def _shutting_down() -> web.Response:
    message = "The apiserver is shutting down, please try again later."
    answer = _json(StatusError(429, "TooManyRequests", message).body(), 429)
    answer.headers["Retry-After"] = "5"
    answer.force_close()
    return answer


def _json(body: Json, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def _must_be_typed(kind: Kind, body: Json) -> None:
    """The type of a built-in resource follows from its path; a custom one must name it."""
    if kind.custom and not body.get("kind"):
        what = f"Object 'Kind' is missing in '{orjson.dumps(body).decode()}'"
        raise bad_request(f"the object provided is unrecognized (must be of type {kind.resource.kind}): {what}")


async def _body(request: web.Request) -> Json:
    raw = await request.read()
    try:
        if request.content_type == "application/vnd.kubernetes.protobuf":
            return protobuf.decode(raw)
        if "yaml" in request.content_type:
            return yaml.safe_load(raw)
        return orjson.loads(raw) if raw else {}
    except (orjson.JSONDecodeError, yaml.YAMLError) as error:
        raise bad_request(f"the object provided is unrecognized: {error}") from None


def _wants_table(request: web.Request) -> bool:
    return "as=Table" in request.headers.get("Accept", "")


def _integer(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if not text.isdigit() and text:
        raise bad_request(f"{name}: must be a number, not {text!r}")
    return int(text or 0)


def _manager(request: web.Request) -> str:
    agent = request.headers.get("User-Agent", "unknown").split("/", 1)[0]
    return request.query.get("fieldManager") or agent


def _dry_run(request: web.Request) -> bool:
    return request.query.get("dryRun", "") == "All"
