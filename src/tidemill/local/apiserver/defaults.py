"""Defaults and rules of the built-in kinds, as far as their controllers and kubectl rely on them."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from tidemill.kube.selectors import matches
from tidemill.local.apiserver.status import Cause

Json: TypeAlias = dict[str, Any]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_RBAC_NAME = re.compile(r"[^/%]+")
_CONFIG_KEY = re.compile(r"[-._a-zA-Z0-9]+")


def apply_defaults(obj: Json) -> None:
    """Fill in what the real server would, in place."""
    match obj["kind"]:
        case "Deployment":
            spec = obj.setdefault("spec", {})
            spec.setdefault("replicas", 1)
            spec.setdefault("revisionHistoryLimit", 10)
            spec.setdefault("progressDeadlineSeconds", 600)
            strategy = spec.setdefault("strategy", {})
            if strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
                rolling = strategy.setdefault("rollingUpdate", {})
                rolling.setdefault("maxSurge", "25%")
                rolling.setdefault("maxUnavailable", "25%")
            _default_pod(spec.setdefault("template", {}).setdefault("spec", {}))
        case "ReplicaSet":
            spec = obj.setdefault("spec", {})
            spec.setdefault("replicas", 1)
            _default_pod(spec.setdefault("template", {}).setdefault("spec", {}))
        case "Pod":
            _default_pod(obj.setdefault("spec", {}))
            obj.setdefault("status", {}).setdefault("phase", "Pending")
        case "Namespace":
            obj.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])
            obj.setdefault("status", {}).setdefault("phase", "Active")
        case "Service":
            obj.setdefault("spec", {}).setdefault("type", "ClusterIP")
        case "Secret":
            obj.setdefault("type", "Opaque")
        case _:
            pass


def _default_pod(spec: Json) -> None:
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("serviceAccountName", "default")
    for container in spec.get("containers") or ():
        container.setdefault("imagePullPolicy", "IfNotPresent")
        for port in container.get("ports") or ():
            port.setdefault("protocol", "TCP")
        for name in ("readinessProbe", "livenessProbe", "startupProbe"):
            if (probe := container.get(name)) is not None:
                probe.setdefault("periodSeconds", 10)
                probe.setdefault("timeoutSeconds", 1)
                probe.setdefault("successThreshold", 1)
                probe.setdefault("failureThreshold", 3)


def check_name(obj: Json) -> list[Cause]:
    name = obj["metadata"].get("name", "")
    pattern = _RBAC_NAME if obj["apiVersion"].startswith("rbac.") else _NAME
    if not pattern.fullmatch(name) or len(name) > 253:
        message = (
            f'Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist of lower case '
            "alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character"
        )
        return [Cause("metadata.name", message)]
    return []


def check(obj: Json, old: Json | None) -> list[Cause]:
    """What is wrong with an object of a built-in kind."""
    match obj["kind"]:
        case "Deployment" | "ReplicaSet":
            return _check_workload(obj["spec"], None if old is None else old["spec"])
        case "Pod":
            return _check_containers(obj["spec"], "spec")
        case "ConfigMap" | "Secret":
            return [
                Cause(
                    f"data[{key}]", f'Invalid value: "{key}": a valid config key must match {_CONFIG_KEY.pattern}'
                )
                for key in obj.get("data") or ()
                if not _CONFIG_KEY.fullmatch(key)
            ]
        case _:
            return []


def _check_workload(spec: Json, old: Json | None) -> list[Cause]:
    causes: list[Cause] = []
    replicas = spec["replicas"]
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
        causes.append(Cause("spec.replicas", f"Invalid value: {replicas}: must be greater than or equal to 0"))
    selector = spec.get("selector")
    if not selector:
        causes.append(Cause("spec.selector", "Required value", "FieldValueRequired"))
    else:
        if old is not None and old.get("selector") != selector:
            causes.append(Cause("spec.selector", "Invalid value: field is immutable"))
        labels = (spec["template"].get("metadata") or {}).get("labels") or {}
        if not matches(selector, labels):
            message = f"Invalid value: {labels}: `selector` does not match template `labels`"
            causes.append(Cause("spec.template.metadata.labels", message))
    return causes + _check_containers(spec["template"]["spec"], "spec.template.spec")


def _check_containers(spec: Json, path: str) -> list[Cause]:
    containers = spec.get("containers")
    if not containers:
        return [Cause(f"{path}.containers", "Required value", "FieldValueRequired")]
    return [
        Cause(f"{path}.containers[{index}].{field}", "Required value", "FieldValueRequired")
        for index, container in enumerate(containers)
        for field in ("name",)
        if not container.get(field)
    ]
