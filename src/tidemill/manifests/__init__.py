"""Manifests of what can be installed, as files that kustomize reads, and as objects for those without."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from importlib.resources import files
from typing import Any

import yaml

from tidemill.api.crd import variant_autoscaling_crd
from tidemill.api.names import DEFAULT_NAMESPACE

Json = dict[str, Any]
EXTERNAL_METRICS = "APIService"


class Part(StrEnum):
    AUTOSCALER = "autoscaler"
    PICKER = "picker"
    MONITORING = "monitoring"  # of the Prometheus operator


POOLS_NAMESPACE = "llm-d"
_NAMESPACES = {
    Part.AUTOSCALER: DEFAULT_NAMESPACE, Part.PICKER: POOLS_NAMESPACE, Part.MONITORING: DEFAULT_NAMESPACE
}  # fmt: skip

# What no namespace holds.
_CLUSTER_SCOPED = frozenset({"nodes", "namespaces", "tokenreviews", "subjectaccessreviews"})


def manifests(
    part: Part = Part.AUTOSCALER,
    *,
    image: str = "",
    namespace: str = "",
    watch_namespace: str = "",
    external_metrics: bool = True,
) -> list[Json]:
    """All objects of a part, in the order in which they can be created; for the autoscaler with its CRD.
    `namespace` is another one than the usual. With a `watch_namespace` the autoscaler looks after that one only,
    and has rights there and in its own. Without `external_metrics` another server keeps that API."""
    usual = _NAMESPACES[part]
    found = list(_files(part))
    if part is Part.AUTOSCALER:
        found.insert(0, variant_autoscaling_crd())
    if not external_metrics:
        found = [obj for obj in found if obj["kind"] != EXTERNAL_METRICS]
    namespace = namespace or usual
    if namespace != usual:
        found = [_moved(obj, usual, namespace) for obj in found]
    for obj in found:
        if obj["kind"] == "Deployment":
            container = obj["spec"]["template"]["spec"]["containers"][0]
            container["image"] = image or container["image"]
            if watch_namespace:
                container["args"].append(f"--watch-namespace={watch_namespace}")
    return list(_confined(found, namespace, watch_namespace)) if watch_namespace else found


def _confined(objects: list[Json], namespace: str, watched: str) -> Iterator[Json]:
    """With the rules of the ClusterRole, but for what no namespace holds, in Roles of two namespaces."""
    for obj in objects:
        if obj["kind"] != "ClusterRole":
            yield obj
            continue
        own: list[Json] = []
        everywhere: list[Json] = []
        for rule in obj["rules"]:
            for rules, resources in (
                (everywhere, [r for r in rule["resources"] if r in _CLUSTER_SCOPED]),
                (own, [r for r in rule["resources"] if r not in _CLUSTER_SCOPED]),
            ):
                if resources:
                    rules.append({**rule, "resources": resources})
        yield {**obj, "rules": everywhere}
        name = obj["metadata"]["name"]
        home = [
            {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]},
            {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
        ]
        for place, rules in ((watched, own), *(((namespace, home),) if namespace != watched else ())):
            role = f"{name}-watching"
            head = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": role, "namespace": place}}
            yield {**head, "kind": "Role", "rules": rules}
            yield {
                **head,
                "kind": "RoleBinding",
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
                "subjects": [{"kind": "ServiceAccount", "name": "controller-manager", "namespace": namespace}],
            }


def _files(part: Part) -> Iterator[Json]:
    directory = files(__name__).joinpath(part.value)
    for name in yaml.safe_load(directory.joinpath("kustomization.yaml").read_text())["resources"]:
        yield from yaml.safe_load_all(directory.joinpath(name).read_text())


def _moved(value: Any, usual: str, namespace: str) -> Any:
    """With the usual namespace, wherever it is named, replaced."""
    if isinstance(value, dict):
        return {key: _moved(inner, usual, namespace) for key, inner in value.items()}
    if isinstance(value, list):
        return [_moved(inner, usual, namespace) for inner in value]
    return namespace if value == usual else value
