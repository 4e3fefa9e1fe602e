"""Defaults of the built-in kinds, as far as their controllers and kubectl rely on them."""

from __future__ import annotations

from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]


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
        case "ReplicaSet" | "StatefulSet":
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
