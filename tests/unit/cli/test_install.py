"""`tidemill install` and the kustomize base say the same."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml
from tests.conftest import program
from typer.testing import CliRunner

from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.cli.main import app

BASE = Path(__file__).parents[3] / "deploy" / "base"


def installed(*args: str) -> list[dict[str, Any]]:
    found = CliRunner().invoke(app, ["install", "--image", "example.com/tidemill:1", *args])
    assert found.exit_code == 0, found.output
    return list(yaml.safe_load_all(found.stdout))


def key(obj: dict[str, Any]) -> tuple[str, str, str]:
    metadata = obj["metadata"]
    return (obj["kind"], metadata.get("namespace", ""), metadata["name"])


def manager(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [obj for obj in objects if obj["kind"] == "Deployment"]
    return found["spec"]["template"]["spec"]["containers"][0]


def test_the_same_as_kustomize_makes_of_the_base() -> None:
    out = subprocess.run([program("kubectl"), "kustomize", str(BASE)], capture_output=True, text=True, check=True)
    base = {key(obj): obj for obj in yaml.safe_load_all(out.stdout)}
    mine = installed()
    assert manager(mine)["image"] == "example.com/tidemill:1"
    manager(mine)["image"] = "tidemill"
    assert mine[0]["kind"] == "CustomResourceDefinition"
    assert {key(obj): obj for obj in mine[1:]} == base


def test_another_namespace_is_meant_everywhere() -> None:
    objects = installed("--namespace", "mine")
    assert DEFAULT_NAMESPACE not in yaml.safe_dump_all(objects)
    assert {obj["metadata"].get("namespace") for obj in objects} == {None, "mine", "kube-system"}
    (service,) = [obj["spec"]["service"] for obj in objects if obj["kind"] == "APIService"]
    assert service["namespace"] == "mine"


def test_another_server_keeps_the_external_metrics() -> None:
    assert {o["kind"] for o in installed()} - {o["kind"] for o in installed("--no-external-metrics")} == {
        "APIService"
    }


def test_it_runs_without_rights_of_its_own() -> None:
    context = manager(installed())["securityContext"]
    assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
    assert context["capabilities"] == {"drop": ["ALL"]}
