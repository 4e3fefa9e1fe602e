"""How lists inside objects merge: by key, as a set, or whole (which is the default)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

FieldPath: TypeAlias = tuple[str, ...]  # field names from the root; steps into list items leave no trace


@dataclass(frozen=True, slots=True)
class ListKind:
    """`keys` of a list-map with the defaults of those that may be absent, or none for a set."""

    keys: tuple[str, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()

    @property
    def is_set(self) -> bool:
        return not self.keys

    def key_of(self, item: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        defaults = dict(self.defaults)
        return tuple((key, item.get(key, defaults.get(key))) for key in self.keys)


ListKinds: TypeAlias = Callable[[FieldPath], ListKind | None]

_SET = ListKind()
_NAMED = ListKind(("name",))
_BUILT_IN: Mapping[str, ListKind] = {
    "containers": _NAMED,
    "initContainers": _NAMED,
    "ephemeralContainers": _NAMED,
    "volumes": _NAMED,
    "env": _NAMED,
    "imagePullSecrets": _NAMED,
    "secrets": _NAMED,
    "resourceClaims": _NAMED,
    "volumeMounts": ListKind(("mountPath",)),
    "volumeDevices": ListKind(("devicePath",)),
    "conditions": ListKind(("type",)),
    "hostAliases": ListKind(("ip",)),
    "ownerReferences": ListKind(("uid",)),
    "topologySpreadConstraints": ListKind(("topologyKey", "whenUnsatisfiable")),
    "finalizers": _SET,
}
_CONTAINER_PORTS = ListKind(("containerPort", "protocol"), (("protocol", "TCP"),))
_SERVICE_PORTS = ListKind(("port", "protocol"), (("protocol", "TCP"),))


def built_in_lists(path: FieldPath) -> ListKind | None:
    """List kinds of the built-in types, by the names that their fields share."""
    if path[-1] == "ports":
        return _CONTAINER_PORTS if any(p.endswith("ontainers") for p in path) else _SERVICE_PORTS
    return _BUILT_IN.get(path[-1])


def schema_lists(schema: Mapping[str, Any]) -> ListKinds:
    """List kinds that a custom resource's schema declares."""

    def lookup(path: FieldPath) -> ListKind | None:
        if path[0] == "metadata":
            return built_in_lists(path)
        node: Mapping[str, Any] = schema
        for part in path:
            while "items" in node:
                node = node["items"]
            if part in node.get("properties", {}):
                node = node["properties"][part]
            elif isinstance(node.get("additionalProperties"), dict):
                node = node["additionalProperties"]
            else:
                return None
        if node.get("x-kubernetes-list-type") == "set":
            return _SET
        if node.get("x-kubernetes-list-type") == "map":
            keys = tuple(node.get("x-kubernetes-list-map-keys", ()))
            properties = node.get("items", {}).get("properties", {})
            defaults = tuple((k, properties[k]["default"]) for k in keys if "default" in properties.get(k, {}))
            return ListKind(keys, defaults)
        return None

    return lookup
