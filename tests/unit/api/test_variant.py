from __future__ import annotations

import pytest
import yaml

from tidemill.api.crd import variant_autoscaling_crd
from tidemill.api.problem import InvalidObjectError
from tidemill.api.variant import TargetRef, VariantAutoscaling


def va(**spec: object) -> dict:
    return {
        "metadata": {"name": "va-a", "namespace": "serving", "uid": "1"},
        "spec": {"modelID": "m", "scaleTargetRef": {"kind": "Deployment", "name": "dep-a"}, **spec},
    }


def test_defaults() -> None:
    found = VariantAutoscaling.parse({"metadata": {"name": "x", "namespace": "n"}, "spec": {"modelID": "m"}})
    assert found.target == TargetRef(namespace="n", kind="Deployment", name="x")
    assert found.spec.variant_cost == "10.0"
    assert (found.spec.min_replicas, found.spec.max_replicas) == (None, None)


def test_an_empty_allocation_is_none() -> None:
    found = VariantAutoscaling.parse({**va(), "status": {"desiredOptimizedAlloc": {}}})
    assert found.status.desired_optimized_alloc is None


@pytest.mark.parametrize(
    ("spec", "field", "value", "rule"),
    [
        ({"variantCost": "abc"}, "spec.variantCost", "abc", "pattern"),
        ({"modelID": ""}, "spec.modelID", "", "at least 1 character"),
        ({"scaleTargetRef": {"kind": "StatefulSet", "name": "x"}}, "spec.scaleTargetRef.kind", "StatefulSet",
         "'Deployment' or 'LeaderWorkerSet'"),
        ({"minReplicas": -1}, "spec.minReplicas", "-1", "greater than or equal to 0"),
        ({"minReplicas": 5, "maxReplicas": 2}, "spec", "", "minReplicas 5 must not be above maxReplicas 2"),
    ],
)  # fmt: skip
def test_errors_name_object_field_value_and_rule(spec, field, value, rule) -> None:
    with pytest.raises(InvalidObjectError) as caught:
        VariantAutoscaling.parse(va(**spec))
    (problem,) = caught.value.problems
    assert problem.object == "VariantAutoscaling serving/va-a"
    assert problem.field == field
    assert value in problem.value
    assert rule in problem.rule


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(InvalidObjectError) as caught:
        VariantAutoscaling.parse(va(variantCost="x", modelID=""))
    assert len(caught.value.problems) == 2


def test_crd_is_yaml_and_has_the_contract() -> None:
    crd = yaml.safe_load(yaml.safe_dump(variant_autoscaling_crd()))
    (version,) = crd["spec"]["versions"]
    assert crd["metadata"]["name"] == "variantautoscalings.llmd.ai"
    assert crd["spec"]["names"]["shortNames"] == ["va"]
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    assert columns == ["Target", "Model", "Min", "Max", "Optimized", "MetricsReady", "Age"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert spec["required"] == ["modelID"]
    assert spec["properties"]["variantCost"]["default"] == "10.0"
    conditions = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
