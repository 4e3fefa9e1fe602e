"""Another API server in the place of the local one, named by INTEGRATION_KUBECONFIG, and left as it was found.

It is the tests' own, without controllers of workloads: pods are written by hand, and whatever appears while a test
runs is deleted after it, whoever made it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
import yaml

from tests.definitions import CRDS
from tests.polling import eventually
from tidemill.api.crd import variant_autoscaling_crd
from tidemill.cli.demo.manifests import SERVICE_ACCOUNTS
from tidemill.kube.client import KubeClient
from tidemill.kube.errors import AlreadyExistsError, ApiError, NotFoundError
from tidemill.kube.resources import NAMESPACES, Json, ObjectKey, Resource
from tidemill.local.cluster import LocalCluster

KUBECONFIG = os.environ.get("INTEGRATION_KUBECONFIG")

_VARIANTS = variant_autoscaling_crd()["metadata"]["name"]


class Server:
    """Where it listens. What tests do to the local server itself cannot be done to it: they are skipped."""

    def __init__(self, url: str) -> None:
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port or 443

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(f"needs {name} of the local API server")


class Elsewhere:
    """What tests use of a LocalCluster."""

    def __init__(self, client: KubeClient, directory: Path) -> None:
        assert KUBECONFIG is not None
        self.client = client
        self.directory = directory
        self.kubeconfig = Path(KUBECONFIG)
        content = yaml.safe_load(self.kubeconfig.read_text())
        self.server = Server(content["clusters"][0]["cluster"]["server"])
        self.token: str = content["users"][0]["user"].get("token", "")


@asynccontextmanager
async def elsewhere(directory: Path) -> AsyncIterator[Elsewhere]:
    """That server; afterwards what is new in it is taken away again."""
    async with await KubeClient.connect(KUBECONFIG) as client:
        before = (await _everything(client)).keys()
        try:
            yield Elsewhere(client, directory)
        finally:
            await _sweep(client, before)


async def kubeconfig_of(cluster: LocalCluster | Elsewhere, account: ObjectKey) -> Path:
    """A kubeconfig with the rights of a service account."""
    path = cluster.directory / account.name
    if isinstance(cluster, LocalCluster):
        return cluster.server.write_kubeconfig(path, cluster.server.add_token(user_of(account)))
    with suppress(AlreadyExistsError):
        await cluster.client.create(SERVICE_ACCOUNTS, {"metadata": {"name": account.name}}, account.namespace)
    asked = SERVICE_ACCOUNTS.path(account.namespace, account.name, "token")
    answer = await cluster.client._json("POST", asked, body={"spec": {}})
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    content["users"][0]["user"] = {"token": answer["status"]["token"]}
    path.write_text(yaml.safe_dump(content))
    return path


def user_of(account: ObjectKey) -> str:
    """Its name as a user."""
    return f"system:serviceaccount:{account.namespace}:{account.name}"


async def _sweep(client: KubeClient, before: Set[str]) -> None:
    new = {
        uid: found
        for uid, found in (await _everything(client)).items()
        if uid not in before and not _stays(*found)
    }

    async def clean() -> bool:
        # By identity: what a controller makes again in place of what was taken away is its own affair.
        return not (await _everything(client)).keys() & new.keys()

    await asyncio.gather(*(_remove(client, *found) for found in new.values()))
    await eventually(clean, within=30)


def _stays(resource: Resource, obj: Json) -> bool:
    """What takes a server seconds to be rid of, and nearly every test makes anew."""
    return resource == NAMESPACES or (resource == CRDS and obj["metadata"]["name"] == _VARIANTS)


async def _remove(client: KubeClient, resource: Resource, obj: Json) -> None:
    key = ObjectKey.of(obj)
    if obj["metadata"].get("finalizers") and resource != CRDS:
        with suppress(NotFoundError):  # gone with its owner meanwhile
            await client.patch(resource, key.name, {"metadata": {"finalizers": None}}, key.namespace)
    await client.delete(resource, key.name, key.namespace, grace_period_seconds=0)


async def _everything(client: KubeClient) -> dict[str, tuple[Resource, Json]]:
    """Every object that can be listed and deleted, by its uid."""
    paths = [f"/api/{version}" for version in (await _read(client, "/api"))["versions"]]
    groups = (await _read(client, "/apis"))["groups"]
    paths += [f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups]
    kinds = [
        resource for found in await asyncio.gather(*(_kinds(client, path) for path in paths)) for resource in found
    ]
    pages = await asyncio.gather(*(_listed(client, resource) for resource in kinds))
    return {
        obj["metadata"]["uid"]: (resource, obj)
        for resource, page in zip(kinds, pages, strict=True)
        for obj in page
        # Made by the server itself for each custom resource.
        if "kube-aggregator.kubernetes.io/automanaged" not in obj["metadata"].get("labels", {})
    }


async def _listed(client: KubeClient, resource: Resource) -> list[Json]:
    try:
        return (await client.list(resource)).items
    except ApiError:  # a kind that goes, or whose server is away
        return []


async def _kinds(client: KubeClient, path: str) -> list[Resource]:
    try:
        listed = await _read(client, path)
    except ApiError:
        return []
    group, _, version = listed["groupVersion"].rpartition("/")
    return [
        Resource(group, version, kind["name"], kind["kind"], kind["namespaced"])
        for kind in listed["resources"]
        if {"list", "delete"} <= set(kind["verbs"])
    ]


async def _read(client: KubeClient, path: str) -> Json:
    return orjson.loads(await client.get_raw(path))
