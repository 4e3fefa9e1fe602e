"""What roles and bindings allow."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.local.apiserver.rbac import Attributes, User, allowed
from tidemill.local.apiserver.store import Store

GROUP = "rbac.authorization.k8s.io"


def rule(groups: list[str], resources: list[str], verbs: list[str], names: list[str] | None = None) -> Any:
    return {"apiGroups": groups, "resources": resources, "verbs": verbs, "resourceNames": names or []}


def bound(kind: str, *rules: Any, subject: Any, namespace: str = "", role_namespace: str = "") -> Store:
    """A store with one role and one binding of it in `namespace`, "" for the whole cluster."""
    store = Store()
    plural = "clusterroles" if kind == "ClusterRole" else "roles"
    store.put(f"{plural}.{GROUP}", (role_namespace, "r"), {"metadata": {"name": "r"}, "rules": list(rules)})
    bindings = "rolebindings" if namespace else "clusterrolebindings"
    binding = {
        "metadata": {"name": "b", "namespace": namespace},
        "roleRef": {"kind": kind, "name": "r"},
        "subjects": [subject],
    }
    store.put(f"{bindings}.{GROUP}", (namespace, "b"), binding)
    return store


SERVICE_ACCOUNT = {"kind": "ServiceAccount", "name": "sa", "namespace": "ns"}
PODS = rule([""], ["pods"], ["get", "list"])
USER = User.named("system:serviceaccount:ns:sa")


def may(store: Store, verb: str, resource: str, *, namespace: str = "", group: str = "", name: str = "") -> bool:
    wanted = Attributes(verb=verb, group=group, resource=resource, namespace=namespace, name=name)
    return allowed(store, USER, wanted)


def test_a_cluster_role_bound_everywhere() -> None:
    store = bound("ClusterRole", PODS, subject=SERVICE_ACCOUNT)
    assert may(store, "list", "pods")
    assert may(store, "get", "pods", namespace="other")
    assert not may(store, "delete", "pods")
    assert not may(store, "get", "pods/log")
    assert not may(store, "get", "pods", group="apps")


def test_a_cluster_role_bound_in_a_namespace_counts_there_only() -> None:
    store = bound("ClusterRole", PODS, subject=SERVICE_ACCOUNT, namespace="ns")
    assert may(store, "list", "pods", namespace="ns")
    assert not may(store, "list", "pods", namespace="other")
    assert not may(store, "list", "pods")


def test_a_role_is_of_its_namespace() -> None:
    here = bound("Role", PODS, subject=SERVICE_ACCOUNT, namespace="ns", role_namespace="ns")
    elsewhere = bound("Role", PODS, subject=SERVICE_ACCOUNT, namespace="ns", role_namespace="other")
    assert may(here, "get", "pods", namespace="ns")
    assert not may(elsewhere, "get", "pods", namespace="ns")


@pytest.mark.parametrize(
    ("subject", "is_me"),
    [
        (SERVICE_ACCOUNT, True),
        ({"kind": "ServiceAccount", "name": "sa", "namespace": "other"}, False),
        ({"kind": "User", "name": "system:serviceaccount:ns:sa"}, True),
        ({"kind": "Group", "name": "system:serviceaccounts:ns"}, True),
        ({"kind": "Group", "name": "system:authenticated"}, True),
        ({"kind": "Group", "name": "system:serviceaccounts:other"}, False),
    ],
)
def test_subjects(subject: dict[str, str], is_me: bool) -> None:
    assert may(bound("ClusterRole", PODS, subject=subject), "get", "pods") is is_me


def test_names_subresources_and_stars() -> None:
    named = bound("ClusterRole", rule([""], ["configmaps"], ["get"], ["mine"]), subject=SERVICE_ACCOUNT)
    assert may(named, "get", "configmaps", name="mine")
    assert not may(named, "get", "configmaps", name="other")
    scale = bound("ClusterRole", rule(["apps"], ["*/scale"], ["patch"]), subject=SERVICE_ACCOUNT)
    assert may(scale, "patch", "deployments/scale", group="apps")
    assert not may(scale, "patch", "deployments", group="apps")
    everything = bound("ClusterRole", rule(["*"], ["*"], ["*"]), subject=SERVICE_ACCOUNT)
    assert may(everything, "delete", "deployments/scale", group="apps")


def test_masters_may_do_everything() -> None:
    wanted = Attributes(verb="delete", group="", resource="nodes")
    assert allowed(Store(), User.named("system:admin"), wanted)
    assert not allowed(Store(), USER, wanted)
