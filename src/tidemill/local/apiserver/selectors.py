"""Label and field selectors, parsed into predicates."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from tidemill.kube.selectors import label_selector
from tidemill.local.apiserver.status import bad_request

Json: TypeAlias = dict[str, Any]
Predicate: TypeAlias = Callable[[Json], bool]

# Fields that selectors may name, beside metadata.name and metadata.namespace.
SELECTABLE: Mapping[str, Collection[str]] = {
    "pods": ("spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName",
             "status.phase", "status.podIP", "status.nominatedNodeName"),
    "events": ("involvedObject.kind", "involvedObject.namespace", "involvedObject.name",
               "involvedObject.uid", "involvedObject.apiVersion", "involvedObject.resourceVersion",
               "involvedObject.fieldPath", "reason", "reportingComponent", "source", "type"),
    "secrets": ("type",),
    "nodes": ("spec.unschedulable",),
    "namespaces": ("status.phase",),
    "replicasets": ("status.replicas",),
}  # fmt: skip


def label_predicate(selector: str) -> Predicate | None:
    """None for the selector that takes everything. Raises StatusError 400."""
    if not selector.strip():
        return None
    try:
        test = label_selector(selector)
    except ValueError as error:
        raise bad_request(str(error)) from None
    return lambda obj: test(obj["metadata"].get("labels") or {})


def field_predicate(selector: str, plural: str) -> Predicate | None:
    """As `label_predicate`, for the fields that the kind lets one select by."""
    if not selector.strip():
        return None
    tests: list[Predicate] = []
    for term in selector.split(","):
        match = re.fullmatch(r"\s*([^\s!=]+)\s*(==|=|!=)\s*(.*?)\s*", term)
        if match is None:
            raise bad_request(f"invalid selector: {selector!r}; can't understand {term!r}")
        path, op, value = match.groups()
        if path not in ("metadata.name", "metadata.namespace") and path not in SELECTABLE.get(plural, ()):
            if plural in SELECTABLE:
                raise bad_request(f"field label not supported: {path}")
            raise bad_request(
                f'"{path}" is not a known field selector: only "metadata.name", "metadata.namespace"'
            )
        tests.append(_field_test(path, op, value))
    return lambda obj: all(test(obj) for test in tests)


def _field_test(path: str, op: str, value: str) -> Predicate:
    parts = path.split(".")

    def test(obj: Json) -> bool:
        node: Any = obj
        for part in parts:
            node = node.get(part) if isinstance(node, dict) else None
        if path == "source" and isinstance(node, dict):
            node = node.get("component")
        text = "" if node is None else str(node).lower() if isinstance(node, bool) else str(node)
        return (text == value) is (op != "!=")

    return test
