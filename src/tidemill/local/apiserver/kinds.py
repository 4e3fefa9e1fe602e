"""Which kinds the server knows: the built-in ones it needs, and whatever CRDs bring."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tidemill.kube.resources import Resource
from tidemill.local.apiserver.lists import ListKinds, built_in_lists, schema_lists
from tidemill.local.apiserver.schema import ResourceSchema

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScalePaths:
    """Where the scale subresource reads and writes."""

    spec_replicas: str = ".spec.replicas"
    status_replicas: str = ".status.replicas"
    selector: str | None = ".spec.selector"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    resource: Resource
    singular: str
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    status: bool = False
    scale: ScalePaths | None = None
    schema: ResourceSchema | None = None
    columns: Sequence[Mapping[str, Any]] | None = None  # of a CRD; built-in ones are in table.py
    lists: ListKinds = built_in_lists
    custom: bool = False

    @property
    def collection(self) -> str:
        return str(self.resource)

    @property
    def qualified(self) -> str:
        """Name in messages: deployments.apps."""
        return str(self.resource)

    @property
    def has_generation(self) -> bool:
        return self.custom or self.status or self.resource.group == "apps"


def _kind(
    group: str,
    version: str,
    plural: str,
    kind: str,
    *,
    namespaced: bool = True,
    short: str = "",
    categories: str = "",
    status: bool = False,
    scale: ScalePaths | None = None,
) -> Kind:
    return Kind(
        resource=Resource(group, version, plural, kind, namespaced),
        singular=kind.lower(),
        short_names=tuple(short.split()),
        categories=tuple(categories.split()),
        status=status,
        scale=scale,
    )


CRDS = _kind(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition",
    namespaced=False, short="crd crds", status=True,
)  # fmt: skip

BUILT_IN: tuple[Kind, ...] = (
    _kind("", "v1", "namespaces", "Namespace", namespaced=False, short="ns", status=True),
    _kind("", "v1", "pods", "Pod", short="po", categories="all", status=True),
    _kind("", "v1", "configmaps", "ConfigMap", short="cm"),
    _kind("", "v1", "secrets", "Secret"),
    _kind("", "v1", "services", "Service", short="svc", categories="all", status=True),
    _kind("", "v1", "serviceaccounts", "ServiceAccount", short="sa"),
    _kind("", "v1", "events", "Event", short="ev"),
    _kind("", "v1", "endpoints", "Endpoints", short="ep"),
    _kind("", "v1", "nodes", "Node", namespaced=False, short="no", status=True),
    _kind("apps", "v1", "deployments", "Deployment", short="deploy", categories="all", status=True,
          scale=ScalePaths()),
    _kind("apps", "v1", "replicasets", "ReplicaSet", short="rs", categories="all", status=True,
          scale=ScalePaths()),
    # Nobody acts on one by itself: the groups of LeaderWorkerSets are owned through them.
    _kind("apps", "v1", "statefulsets", "StatefulSet", short="sts", categories="all", status=True,
          scale=ScalePaths()),
    _kind("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler", short="hpa",
          categories="all", status=True),
    _kind("coordination.k8s.io", "v1", "leases", "Lease"),
    _kind("apiregistration.k8s.io", "v1", "apiservices", "APIService", namespaced=False, status=True),
    _kind("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False),
    _kind("authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False),
    _kind("authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False),
    _kind("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    _kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    _kind("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False),
    _kind("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
    # Kept, and without effect: pods here share the machine's network, and nobody is evicted.
    _kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", short="netpol"),
    _kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", short="pdb", status=True),
    CRDS,
)  # fmt: skip


class Kinds:
    """The kinds served now, by group, version and plural."""

    def __init__(self) -> None:
        self._kinds = {(k.resource.group, k.resource.version, k.resource.plural): k for k in BUILT_IN}

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._kinds.values())

    def find(self, group: str, version: str, plural: str) -> Kind | None:
        return self._kinds.get((group, version, plural))

    def by_collection(self, collection: str) -> Kind | None:
        return next((kind for kind in self if kind.collection == collection), None)

    def add_crd(self, crd: Json) -> None:
        """Serve every served version of a CustomResourceDefinition, in place of what it said before.

        Raises ValueError for a schema or rule that cannot be compiled.
        """
        kinds = list(_kinds_of_crd(crd))
        self.remove_crd(crd)
        for kind in kinds:
            self._kinds[kind.resource.group, kind.resource.version, kind.resource.plural] = kind

    def remove_crd(self, crd: Json) -> None:
        group, plural = crd["spec"]["group"], crd["spec"]["names"]["plural"]
        self._kinds = {key: kind for key, kind in self._kinds.items() if (key[0], key[2]) != (group, plural)}


def _kinds_of_crd(crd: Json) -> Iterator[Kind]:
    spec = crd["spec"]
    names = spec["names"]
    for version in spec["versions"]:
        if not version.get("served", True):
            continue
        schema = (version.get("schema") or {}).get("openAPIV3Schema") or {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
        }
        sub = version.get("subresources") or {}
        scale = sub.get("scale")
        base = _kind(
            spec["group"],
            version["name"],
            names["plural"],
            names["kind"],
            namespaced=spec.get("scope") != "Cluster",
            short=" ".join(names.get("shortNames") or ()),
            categories=" ".join(names.get("categories") or ()),
            status="status" in sub,
            scale=scale
            and ScalePaths(scale["specReplicasPath"], scale["statusReplicasPath"], scale.get("labelSelectorPath")),
        )
        yield dataclasses.replace(
            base,
            singular=names.get("singular") or names["kind"].lower(),
            schema=ResourceSchema(schema),
            columns=version.get("additionalPrinterColumns")
            or [{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}],
            lists=schema_lists(schema),
            custom=True,
        )
