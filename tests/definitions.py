"""Custom resources in tests: made, awaited, gone again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.polling import eventually
from tidemill.kube.client import KubeClient
from tidemill.kube.errors import AlreadyExistsError, NotFoundError
from tidemill.kube.resources import Json, Resource

CRDS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)


def plain_crd(group: str, version: str, plural: str, kind: str, short: str = "") -> Json:
    """A CRD that checks nothing, for kinds of which only names matter."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "metadata": {
            "name": f"{plural}.{group}",
            # Kubernetes' own groups want to be told that nobody there knows of this.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": {"plural": plural, "kind": kind, "singular": kind.lower(), "shortNames": short.split()},
            "versions": [
                {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
            ],
        },
    }  # fmt: skip


def scaled_object_crd() -> Json:
    """KEDA's kind, without its schema."""
    return plain_crd("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject")


async def define(client: KubeClient, *crds: Json) -> None:
    """Make the custom resources, or make them what is given, and wait until the server serves them."""
    for crd in crds:
        try:
            await client.create(CRDS, crd)
        except AlreadyExistsError:
            there = await client.get(CRDS, crd["metadata"]["name"])
            version = {"resourceVersion": there["metadata"]["resourceVersion"]}
            await client.replace(CRDS, {**crd, "metadata": {**crd["metadata"], **version}})
    for crd in crds:
        await eventually(lambda crd=crd: _served(client, crd), within=30)


@asynccontextmanager
async def defined(client: KubeClient, crd: Json) -> AsyncIterator[None]:
    """With a custom resource, which is gone afterwards: a server takes its time, and the next one has its name."""
    await define(client, crd)
    try:
        yield
    finally:
        name = crd["metadata"]["name"]
        await client.delete(CRDS, name)
        await eventually(lambda: is_gone(client, CRDS, name), within=30)


async def is_gone(client: KubeClient, resource: Resource, name: str, namespace: str | None = None) -> bool:
    try:
        await client.get(resource, name, namespace)
    except NotFoundError:
        return True
    return False


async def _served(client: KubeClient, crd: Json) -> bool:
    """A CRD is served a moment after it was made."""
    spec = crd["spec"]
    for version in spec["versions"]:
        if not version["served"]:
            continue
        try:
            await client.list(
                Resource(spec["group"], version["name"], spec["names"]["plural"], spec["names"]["kind"]), limit=1
            )
        except NotFoundError:
            return False
    return True
