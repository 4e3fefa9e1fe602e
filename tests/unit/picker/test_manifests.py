"""The picker's manifests grant what it watches, and nothing else; an example pool leads to it."""

from __future__ import annotations

from pathlib import Path

import yaml

from tidemill.api.inference import InferencePool
from tidemill.kube.resources import PODS
from tidemill.manifests import Part, manifests
from tidemill.picker.health import LIVENESS, READINESS
from tidemill.picker.pools.cluster import INFERENCE_MODEL_REWRITES, INFERENCE_OBJECTIVES, INFERENCE_POOLS

OBJECTS = {obj["kind"]: obj for obj in manifests(Part.PICKER)}
EXAMPLE = Path(__file__).parents[3] / "deploy/examples/inferencepool.yaml"


def test_the_role_is_what_is_watched() -> None:
    watched = {
        (resource.group, resource.plural)
        for resource in (PODS, *INFERENCE_POOLS, *INFERENCE_OBJECTIVES, *INFERENCE_MODEL_REWRITES)
    }
    granted = {
        (group, plural)
        for rule in OBJECTS["Role"]["rules"]
        for group in rule["apiGroups"]
        for plural in rule["resources"]
    }
    assert granted == watched
    assert {verb for rule in OBJECTS["Role"]["rules"] for verb in rule["verbs"]} == {"list", "watch"}


def test_the_objects_fit_each_other() -> None:
    example = yaml.safe_load(EXAMPLE.read_text())
    pool, reference = InferencePool.parse(example), example["spec"]["endpointPickerRef"]
    service, deployment = OBJECTS["Service"], OBJECTS["Deployment"]
    assert (reference["name"], pool.namespace) == (service["metadata"]["name"], service["metadata"]["namespace"])
    assert reference["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    probes = [container[name]["grpc"]["service"] for name in ("livenessProbe", "readinessProbe")]
    assert probes == [LIVENESS, READINESS]
