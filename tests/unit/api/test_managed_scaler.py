from __future__ import annotations

import pytest

from tidemill.api.managed_scaler import bounds, is_managed, synthetic_variant
from tidemill.api.problem import InvalidObjectError
from tidemill.api.variant import TargetRef


def scaler(annotations: dict[str, str], **spec: object) -> dict:
    target = {"name": "dep"}
    return {
        "metadata": {"name": "s", "namespace": "n", "uid": "1", "annotations": annotations, "labels": {"a": "b"}},
        "spec": {"scaleTargetRef": target, **spec},
    }


MANAGED = {"llm-d.ai/managed": "true", "llm-d.ai/model-id": "m"}


@pytest.mark.parametrize(
    ("kind", "spec", "want"),
    [
        ("ScaledObject", {"minReplicaCount": 0}, (0, 100)),
        ("ScaledObject", {}, (0, 100)),
        ("ScaledObject", {"minReplicaCount": 3, "maxReplicaCount": 7}, (3, 7)),
        ("HorizontalPodAutoscaler", {"maxReplicas": 9}, (1, 9)),
        ("HorizontalPodAutoscaler", {"minReplicas": 0, "maxReplicas": 9}, (0, 9)),
        ("HorizontalPodAutoscaler", {"minReplicas": 2, "maxReplicas": 9}, (2, 9)),
    ],
)
def test_what_is_absent_has_its_own_default_and_zero_is_zero(kind, spec, want) -> None:
    assert bounds(kind, spec) == want


def test_a_synthetic_variant() -> None:
    found = synthetic_variant("ScaledObject", scaler(MANAGED | {"llm-d.ai/variant-cost": "0.5"}))
    assert found.key == "n/s"
    assert found.target == TargetRef(namespace="n", kind="Deployment", name="dep")
    assert (found.spec.model_id, found.spec.variant_cost) == ("m", "0.5")
    assert found.metadata.labels == {"a": "b"}


def test_default_cost() -> None:
    assert synthetic_variant("ScaledObject", scaler(MANAGED)).spec.variant_cost == "10.0"


@pytest.mark.parametrize(
    ("annotations", "field"),
    [
        ({"llm-d.ai/managed": "true"}, "metadata.annotations[llm-d.ai/model-id]"),
        (MANAGED | {"llm-d.ai/variant-cost": "free"}, "metadata.annotations[llm-d.ai/variant-cost]"),
    ],
)
def test_problems_name_the_annotation(annotations, field) -> None:
    with pytest.raises(InvalidObjectError) as caught:
        synthetic_variant("HorizontalPodAutoscaler", scaler(annotations, maxReplicas=3))
    (problem,) = caught.value.problems
    assert (problem.object, problem.field) == ("HorizontalPodAutoscaler n/s", field)


def test_who_is_managed() -> None:
    assert is_managed(scaler(MANAGED))
    assert not is_managed(scaler({}))
    assert not is_managed(scaler({"llm-d.ai/managed": "True"}))
    # KEDA copies annotations to the HPA that it makes.
    made = scaler(MANAGED)
    made["metadata"]["ownerReferences"] = [{"kind": "ScaledObject", "name": "s", "uid": "2"}]
    assert not is_managed(made)
