"""What is printed for `kubectl apply` is taken by an API server; nothing is left there (--dry-run=server)."""

from __future__ import annotations

import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.conftest import Kubectl, program
from tests.definitions import defined
from tidemill.api.inference_crd import inference_crds
from tidemill.kube.client import KubeClient

EXAMPLES = Path(__file__).parents[2] / "deploy/examples"


@pytest.fixture
def kubectl(kubeconfig: Path) -> Kubectl:
    return Kubectl(program("kubectl"), kubeconfig)


def printed(*command: str) -> str:
    return subprocess.run((program("tidemill"), *command), capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("kinds", ["variant", "inference", "leaderworkerset"])
async def test_custom_resources(kubectl: Kubectl, kinds: str) -> None:
    said = await kubectl("apply", "--dry-run=server", "-f", "-", stdin=printed("crd", kinds))
    assert said.count("server dry run") == {"inference": 3}.get(kinds, 1)


@pytest.mark.parametrize(
    "arguments", [("autoscaler",), ("autoscaler", "--watch-namespace", "default"), ("picker",)], ids=" ".join
)
async def test_installation(kubectl: Kubectl, namespace: str, arguments: tuple[str, ...]) -> None:
    text = printed("install", *arguments, "--image", "registry.example/tidemill:1", "--namespace", namespace)
    said = await kubectl("apply", "--dry-run=server", "-f", "-", stdin=text)
    assert said.count("server dry run") == text.count("\nkind: ")


@pytest.mark.parametrize("name", ["hpa.yaml", "hpa-external-metrics.yaml", "inferencepool.yaml"])
async def test_examples(kubectl: Kubectl, api: KubeClient, namespace: str, name: str) -> None:
    text = (EXAMPLES / name).read_text().replace("namespace: llm-d", f"namespace: {namespace}")
    async with AsyncExitStack() as stack:
        for crd in inference_crds():
            await stack.enter_async_context(defined(api, crd))
        said = await kubectl("apply", "--dry-run=server", "-f", "-", stdin=text)
    assert "created (server dry run)" in said
