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


def manifests(*, image: str = "", namespace: str = DEFAULT_NAMESPACE, external_metrics: bool = True) -> list[Json]:
    """The CRD and everything that runs the autoscaler, in the order in which it can be created. Without
    `external_metrics` another server keeps that API."""
    found = [variant_autoscaling_crd(), *_files()]
    if not external_metrics:
        found = [obj for obj in found if obj["kind"] != EXTERNAL_METRICS]
    if namespace != DEFAULT_NAMESPACE:
        found = [_moved(obj, namespace) for obj in found]
    for obj in found:
        if image and obj["kind"] == "Deployment":
            obj["spec"]["template"]["spec"]["containers"][0]["image"] = image
    return found


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
