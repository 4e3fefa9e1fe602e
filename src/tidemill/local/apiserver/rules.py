"""What the real server refuses of the built-in kinds, as far as a user here could run into it."""

from __future__ import annotations

import base64
import re
from typing import Any, TypeAlias

from tidemill.kube.selectors import matches
from tidemill.local.apiserver.status import Cause, bad_request

Json: TypeAlias = dict[str, Any]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_RBAC_NAME = re.compile(r"[^/%]+")
_CONFIG_KEY = re.compile(r"[-._a-zA-Z0-9]+")


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
        case "Deployment" | "ReplicaSet" | "StatefulSet":
            return _check_workload(obj["spec"], None if old is None else old["spec"])
        case "Pod":
            return _check_containers(obj["spec"], "spec") + _check_pod_update(obj["spec"], old)
        case "ConfigMap" | "Secret":
            _check_binary(obj)
            return [
                Cause(
                    f"data[{key}]", f'Invalid value: "{key}": a valid config key must match {_CONFIG_KEY.pattern}'
                )
                for key in obj.get("data") or ()
                if not _CONFIG_KEY.fullmatch(key)
            ]
        case "Service":
            return _check_service(obj["spec"])
        case "HorizontalPodAutoscaler":
            return _check_scaler(obj.get("spec") or {})
        case "CustomResourceDefinition":
            return _check_definition(obj)
        case _:
            return []


def _check_binary(obj: Json) -> None:
    """Raises StatusError for what is no base64: the real server cannot even read it."""
    field = "binaryData" if obj["kind"] == "ConfigMap" else "data"
    for value in (obj.get(field) or {}).values():
        try:
            base64.b64decode(value, validate=True)
        except (ValueError, TypeError):
            why = f'{obj["kind"]} in version "v1" cannot be handled as a {obj["kind"]}: illegal base64 data'
            raise bad_request(why) from None


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
        for field in ("name", "image")
        if not container.get(field)
    ]


def _check_pod_update(spec: Json, old: Json | None) -> list[Cause]:
    if old is None or _fixed(spec, old["spec"]) == _fixed(old["spec"], old["spec"]):
        return []
    message = (
        "Forbidden: pod updates may not change fields other than `spec.containers[*].image`, "
        "`spec.initContainers[*].image`, `spec.activeDeadlineSeconds`, `spec.tolerations` (only additions to "
        "existing tolerations), `spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was "
        "previously negative)"
    )
    return [Cause("spec", message, "FieldValueForbidden")]


def _fixed(spec: Json, old: Json) -> Json:
    """The part of a pod's spec that stays as it was made. A node may be given to a pod that has none: that is how
    pods are bound here."""
    free = {"activeDeadlineSeconds", "tolerations", *(() if old.get("nodeName") else ("nodeName",))}
    found = {name: value for name, value in spec.items() if name not in free}
    for name in ("containers", "initContainers"):
        if name in found:
            found[name] = [{**container, "image": ""} for container in found[name]]
    return found


def _check_service(spec: Json) -> list[Cause]:
    if spec.get("ports") or spec["type"] == "ExternalName" or spec.get("clusterIP") == "None":
        return []
    return [Cause("spec.ports", "Required value", "FieldValueRequired")]


def _check_scaler(spec: Json) -> list[Cause]:
    """As with the feature gate HPAScaleToZero."""
    target = spec.get("scaleTargetRef") or {}
    causes = [
        Cause(f"spec.scaleTargetRef.{field}", "Required value", "FieldValueRequired")
        for field in ("kind", "name")
        if not target.get(field)
    ]
    least, most = spec.get("minReplicas", 1), spec.get("maxReplicas", 0)
    if most == 0:
        message = "Required value: must be set and greater than 0"
        causes.append(Cause("spec.maxReplicas", message, "FieldValueRequired"))
    if most < least:
        message = f"Invalid value: {most}: must be greater than or equal to `minReplicas`"
        causes.append(Cause("spec.maxReplicas", message))
    if least < 0:
        causes.append(Cause("spec.minReplicas", f"Invalid value: {least}: must be greater than or equal to 0"))
    elsewhere = any(metric.get("type") in ("Object", "External") for metric in spec.get("metrics") or ())
    if least == 0 and not elsewhere:
        message = "must specify at least one Object or External metric to support scaling to zero replicas"
        causes.append(Cause("spec.metrics", f"Forbidden: {message}", "FieldValueForbidden"))
    return causes


def _check_definition(obj: Json) -> list[Cause]:
    group = obj["spec"]["group"]
    if not f".{group}".endswith((".k8s.io", ".kubernetes.io")):
        return []
    if (obj["metadata"].get("annotations") or {}).get("api-approved.kubernetes.io"):
        return []
    message = (
        'Required value: protected groups must have approval annotation "api-approved.kubernetes.io", '
        "see https://github.com/kubernetes/enhancements/pull/1111"
    )
    return [Cause("metadata.annotations[api-approved.kubernetes.io]", message, "FieldValueRequired")]
