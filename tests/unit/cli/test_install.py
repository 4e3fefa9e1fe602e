"""`tidemill install`, the kustomize bases and the chart say the same, and what they say is valid."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.conftest import program
from typer.testing import CliRunner

from tidemill.api.crd import variant_autoscaling_crd
from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.cli.main import app
from tidemill.manifests import Part

Json = dict[str, Any]

DEPLOY = Path(__file__).parents[3] / "deploy"
IMAGE = ("--image", "example.com/tidemill:1")
OPERATOR_KINDS = {"ServiceMonitor", "PodMonitor"}  # of the Prometheus operator: Kubernetes has no schema of them


def installed(*args: str) -> list[Json]:
    found = CliRunner().invoke(app, ["install", *args, *IMAGE])
    assert found.exit_code == 0, found.output
    return list(yaml.safe_load_all(found.stdout))


def charted(namespace: str, *values: str) -> list[Json]:
    """What the chart renders to, without the CRDs, which Helm installs by itself."""
    out = helm(namespace, *values)
    assert out.returncode == 0, out.stderr
    return [obj for obj in yaml.safe_load_all(out.stdout) if obj is not None]


def helm(namespace: str, *values: str) -> subprocess.CompletedProcess[str]:
    sets = [
        part
        for value in ("image.repository=example.com/tidemill", "image.tag=1", *values)
        for part in ("--set", value)
    ]
    command = [program("helm"), "template", "release", str(DEPLOY / "chart"), "--namespace", namespace, *sets]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def key(obj: Json) -> tuple[str, str, str]:
    metadata = obj["metadata"]
    return (obj["kind"], metadata.get("namespace", ""), metadata["name"])


def manager(objects: list[Json]) -> Json:
    (found,) = [obj for obj in objects if obj["kind"] == "Deployment"]
    return found["spec"]["template"]["spec"]["containers"][0]


def rights(rules: list[Json]) -> set[tuple[str, ...]]:
    return {
        (group, resource, verb, *rule.get("resourceNames", ()))
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def comparable(objects: list[Json]) -> dict[tuple[str, str, str], Any]:
    """By name; of roles what they grant, however it is grouped; without what only one way of installing has."""
    found: dict[tuple[str, str, str], Any] = {}
    for obj in objects:
        if obj["kind"] in ("Namespace", "CustomResourceDefinition"):
            continue  # helm install --create-namespace, and its directory crds
        if obj["kind"] == "Deployment":
            for container in obj["spec"]["template"]["spec"]["containers"]:
                container.pop("imagePullPolicy", None)
        found[key(obj)] = {**obj, "rules": rights(obj["rules"])} if "rules" in obj else obj
    return found


@pytest.mark.parametrize("part", list(Part))
def test_the_same_as_kustomize_makes_of_the_base(part: Part) -> None:
    out = subprocess.run(
        [program("kubectl"), "kustomize", str(DEPLOY / part)], capture_output=True, text=True, check=True
    )
    base = {key(obj): obj for obj in yaml.safe_load_all(out.stdout)}
    mine = installed(part)
    for container in [manager(mine)] if part != Part.MONITORING else []:
        assert container["image"] == "example.com/tidemill:1"
        container["image"] = "tidemill"
    assert {key(obj): obj for obj in mine if obj["kind"] != "CustomResourceDefinition"} == base


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ([], []),
        (["--watch-namespace", "llm-d"], ["autoscaler.watchNamespace=llm-d"]),
        (["--watch-namespace", "mine"], ["autoscaler.watchNamespace=mine"]),
    ],
)
def test_the_chart_says_the_same_of_the_autoscaler(flags: list[str], values: list[str]) -> None:
    assert comparable(charted("mine", *values)) == comparable(installed("--namespace", "mine", *flags))


def test_the_chart_says_the_same_of_the_picker() -> None:
    chart = charted(DEFAULT_NAMESPACE, "autoscaler.enabled=false", "picker.enabled=true", "picker.namespace=llm-d")
    assert comparable(chart) == comparable(installed("picker"))


def test_the_chart_says_the_same_of_monitoring() -> None:
    chart = charted(DEFAULT_NAMESPACE, "autoscaler.enabled=false", "monitoring.enabled=true")
    assert comparable(chart) == comparable(installed("monitoring"))


def test_the_chart_has_the_crd() -> None:
    (path,) = (DEPLOY / "chart" / "crds").iterdir()
    assert yaml.safe_load(path.read_text()) == variant_autoscaling_crd()


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("image.repository=", "image.repository"),
        ("autoscaler.replicas=0", "autoscaler.replicas"),
        ("autoscaler.metricsSource=guess", "autoscaler.metricsSource"),
        ("autoscaler.watchNamespaces=x", "watchNamespaces"),
        ("monitoring.interval=often", "monitoring.interval"),
    ],
)
def test_a_bad_value_of_the_chart_is_named(value: str, field: str) -> None:
    out = helm("mine", value)
    assert out.returncode != 0
    assert field in out.stderr.replace("/", ".")


def test_everything_is_valid() -> None:
    chart = charted("mine", "picker.enabled=true", "monitoring.enabled=true", "autoscaler.replicas=2")
    objects = [obj for part in Part for obj in installed(part)] + chart
    checked = [obj for obj in objects if obj["kind"] not in OPERATOR_KINDS]
    assert len(objects) - len(checked) == 4
    for obj in checked:
        kubernetes_validate.validate(obj, "1.34", strict=True)


def test_another_namespace_is_meant_everywhere() -> None:
    objects = installed("--namespace", "mine")
    assert DEFAULT_NAMESPACE not in yaml.safe_dump_all(objects)
    assert {obj["metadata"].get("namespace") for obj in objects} == {None, "mine", "kube-system"}
    (service,) = [obj["spec"]["service"] for obj in objects if obj["kind"] == "APIService"]
    assert service["namespace"] == "mine"


def test_another_server_keeps_the_external_metrics() -> None:
    def kinds(objects: list[Json]) -> set[str]:
        return {obj["kind"] for obj in objects}

    assert kinds(installed()) - kinds(installed("--no-external-metrics")) == {"APIService"}
    without = charted("mine", "autoscaler.externalMetrics.enabled=false")
    assert kinds(charted("mine")) - kinds(without) == {"APIService"}
    assert not [arg for arg in manager(without)["args"] if "external-metrics" in arg]


@pytest.mark.parametrize("part", [Part.AUTOSCALER, Part.PICKER])
def test_it_runs_without_rights_of_its_own(part: Part) -> None:
    context = manager(installed(part))["securityContext"]
    assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
    assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["gateway", *IMAGE], "'gateway' is not one of autoscaler, picker, monitoring"),
        (["picker"], "the image that has `tidemill` must be given"),
        (["picker", "--watch-namespace", "x", *IMAGE], "is the autoscaler's own"),
    ],
)
def test_what_cannot_be_installed_is_said(flags: list[str], said: str) -> None:
    found = CliRunner().invoke(app, ["install", *flags])
    assert found.exit_code == 2
    assert said in " ".join(found.output.replace("│", " ").split())


@pytest.mark.parametrize("name", ["hpa", "hpa-external-metrics", "keda-scaledobject", "keda-external-scaler"])
def test_a28_a29_examples_hand_on_the_number_as_it_is(name: str) -> None:
    """AverageValue of 1, no step within a tolerance, and no answer is neither zero nor one."""
    (obj,) = yaml.safe_load_all((DEPLOY / "examples" / f"{name}.yaml").read_text())
    spec = obj["spec"]
    if obj["kind"] == "HorizontalPodAutoscaler":
        kubernetes_validate.validate(obj, "1.35", strict=True)
        (metric,) = spec["metrics"]
        assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
        behavior = spec["behavior"]
    else:
        (trigger,) = spec["triggers"]
        assert trigger["metricType"] == "AverageValue"
        if trigger["type"] == "prometheus":
            assert (trigger["metadata"]["threshold"], trigger["metadata"]["ignoreNullValues"]) == ("1", "false")
            assert trigger["metadata"]["query"].startswith("max(")
        assert spec["fallback"]["behavior"] == "currentReplicas"
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert {way: behavior[way]["tolerance"] for way in behavior} == {"scaleUp": "0", "scaleDown": "0"}
