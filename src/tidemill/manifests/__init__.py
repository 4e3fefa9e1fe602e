"""Manifests of the autoscaler, as files that kustomize reads, and as objects for those without."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import yaml

from tidemill.api.crd import variant_autoscaling_crd
from tidemill.api.names import DEFAULT_NAMESPACE

Json = dict[str, Any]
EXTERNAL_METRICS = "APIService"


# What no namespace holds.
_CLUSTER_SCOPED = frozenset({"nodes", "namespaces", "tokenreviews", "subjectaccessreviews"})


def manifests(
    *,
    image: str = "",
    namespace: str = DEFAULT_NAMESPACE,
    watch_namespace: str = "",
    external_metrics: bool = True,
) -> list[Json]:
    """The CRD and everything that runs the autoscaler, in the order in which it can be created. With a
    `watch_namespace` it looks after that one only, and has rights there and in its own. Without
    `external_metrics` another server keeps that API."""
    found = [variant_autoscaling_crd(), *_files()]
    if not external_metrics:
        found = [obj for obj in found if obj["kind"] != EXTERNAL_METRICS]
    if namespace != DEFAULT_NAMESPACE:
        found = [_moved(obj, namespace) for obj in found]
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
        config_maps = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]}]
        for place, rules in ((watched, own), *(((namespace, config_maps),) if namespace != watched else ())):
            role = f"{name}-watching"
            head = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": role, "namespace": place}}
            yield {**head, "kind": "Role", "rules": rules}
            yield {
                **head,
                "kind": "RoleBinding",
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
                "subjects": [{"kind": "ServiceAccount", "name": "controller-manager", "namespace": namespace}],
            }


def _files() -> Iterator[Json]:
    directory = files(__name__)
    for name in yaml.safe_load(directory.joinpath("kustomization.yaml").read_text())["resources"]:
        yield from yaml.safe_load_all(directory.joinpath(name).read_text())


def _moved(value: Any, namespace: str) -> Any:
    """With the namespace of the autoscaler, wherever it is named, replaced."""
    if isinstance(value, dict):
        return {key: _moved(inner, namespace) for key, inner in value.items()}
    if isinstance(value, list):
        return [_moved(inner, namespace) for inner in value]
    return namespace if value == DEFAULT_NAMESPACE else value
