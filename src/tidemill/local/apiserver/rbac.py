"""Role-based access control: what roles and bindings allow a user to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from tidemill.local.apiserver.store import Store

Json: TypeAlias = dict[str, Any]

MASTERS = "system:masters"  # may do everything
_GROUP = "rbac.authorization.k8s.io"


@dataclass(frozen=True, slots=True)
class User:
    name: str
    groups: tuple[str, ...] = ()

    @classmethod
    def named(cls, name: str) -> User:
        """With the groups that follow from a name."""
        groups = ["system:authenticated"]
        if name.startswith("system:serviceaccount:"):
            namespace = name.split(":")[2]
            groups += ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
        if name == "system:admin":
            groups.append(MASTERS)
        return cls(name, tuple(groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """What a request is about. `resource` has its subresource after a slash."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


def allowed(store: Store, user: User, wanted: Attributes) -> bool:
    """Whether some rule of a role that is bound to the user covers what is wanted."""
    if MASTERS in user.groups:
        return True
    return any(_covers(rule, wanted) for rule in _rules(store, user, wanted.namespace))


def _rules(store: Store, user: User, namespace: str) -> Iterator[Json]:
    """Rules in force for a user in a namespace; "" is the cluster."""
    bindings = [("", binding) for binding in store.list(f"clusterrolebindings.{_GROUP}")]
    if namespace:
        bindings += [(namespace, binding) for binding in store.list(f"rolebindings.{_GROUP}", namespace)]
    for place, binding in bindings:
        if not any(_is(subject, user, place) for subject in binding.get("subjects") or ()):
            continue
        reference = binding["roleRef"]
        if reference["kind"] == "ClusterRole":
            role = store.get(f"clusterroles.{_GROUP}", ("", reference["name"]))
        else:
            role = store.get(f"roles.{_GROUP}", (place, reference["name"]))
        yield from () if role is None else role.get("rules") or ()


def _is(subject: Json, user: User, namespace: str) -> bool:
    match subject.get("kind"):
        case "User":
            return subject["name"] == user.name
        case "Group":
            return subject["name"] in user.groups
        case "ServiceAccount":
            place = subject.get("namespace") or namespace
            return user.name == f"system:serviceaccount:{place}:{subject['name']}"
        case _:
            return False


def _covers(rule: Json, wanted: Attributes) -> bool:
    names = rule.get("resourceNames") or ()
    _, _, sub = wanted.resource.partition("/")
    resources = rule.get("resources") or ()
    return (
        _has(rule.get("verbs"), wanted.verb)
        and _has(rule.get("apiGroups"), wanted.group)
        and (_has(resources, wanted.resource) or (sub != "" and f"*/{sub}" in resources))
        and (not names or wanted.name in names)
    )


def _has(values: Iterable[str] | None, value: str) -> bool:
    found = tuple(values or ())
    return "*" in found or value in found
