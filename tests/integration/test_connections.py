"""Ways in: exec plugins for the cluster, TLS for Prometheus, the pages that probes and people ask."""

from __future__ import annotations

import ssl
from pathlib import Path

import orjson
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from tests.conftest import create_namespace
from tests.integration.fleet import NAMESPACE, Fleet, Harness

from tidemill.api.manager_config import PrometheusConfig
from tidemill.autoscaler.decisions import DecisionStore
from tidemill.autoscaler.web import health_app, listen, metrics_app
from tidemill.kube.client import KubeClient
from tidemill.kube.clock import utc_now
from tidemill.kube.errors import ApiError
from tidemill.kube.resources import NAMESPACES
from tidemill.local.apiserver.tls import issue
from tidemill.local.cluster import LocalCluster
from tidemill.metrics.prometheus import PrometheusClient, PrometheusError


async def test_a_kubeconfig_with_an_exec_plugin(api_only: LocalCluster) -> None:
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
        "status": {"token": api_only.token},
    }  # fmt: skip
    content = yaml.safe_load(api_only.kubeconfig.read_text())
    content["users"][0]["user"] = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1", "command": "echo",
            "args": [orjson.dumps(credential).decode()], "interactiveMode": "Never",
        }
    }  # fmt: skip
    path = api_only.directory / "exec"
    path.write_text(yaml.safe_dump(content))
    async with await KubeClient.connect(str(path)) as client:
        await create_namespace(client, "made")
        assert (await client.get(NAMESPACES, "made"))["metadata"]["name"] == "made"


async def test_in_cluster_as_a_pod_finds_it(
    api_only: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.local.runner.sandbox import write_service_account

    authority = api_only.server.tls.ca.read_bytes()
    write_service_account(tmp_path, token=api_only.token, authority=authority, namespace="default")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", api_only.server.host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api_only.server.port))
    monkeypatch.setenv("CONTAINER_SANDBOX_MOUNT_POINT", str(tmp_path))
    async with await KubeClient.connect() as client:
        assert (await client.get(NAMESPACES, "default"))["status"]["phase"] == "Active"


async def test_a_wrong_token_is_refused(api_only: LocalCluster) -> None:
    path = api_only.server.write_kubeconfig(api_only.directory / "wrong", "no-such-token")
    async with await KubeClient.connect(str(path)) as client:
        with pytest.raises(ApiError) as caught:
            await client.list(NAMESPACES)
    assert (caught.value.code, caught.value.reason) == (401, "Unauthorized")


class TestPrometheusOverTls:
    @pytest.fixture
    async def server(self, tmp_path: Path):
        async def query(request: web.Request) -> web.Response:
            return web.json_response({"status": "success", "data": {"resultType": "vector", "result": []}})

        app = web.Application()
        app.router.add_get("/api/v1/query", query)
        files = issue(tmp_path / "pki", names=["prometheus.example"], now=utc_now())
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(files.certificate, files.key)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        yield f"https://127.0.0.1:{runner.addresses[0][1]}", files
        await runner.cleanup()

    async def ask(self, url: str, **options: object) -> None:
        client = PrometheusClient(PrometheusConfig(base_url=url, **options))
        try:
            assert await client.query("up", 5) == []
        finally:
            await client.close()

    async def test_authority_and_server_name(self, server) -> None:
        url, files = server
        await self.ask(url, ca_cert_path=str(files.ca), server_name="prometheus.example")
        with pytest.raises(PrometheusError, match=r"cannot be reached.*certificate"):
            await self.ask(url, ca_cert_path=str(files.ca))  # the certificate is for another name
        with pytest.raises(PrometheusError, match=r"cannot be reached.*certificate"):
            await self.ask(url, server_name="prometheus.example")  # nobody vouches for it

    async def test_verification_may_be_skipped(self, server) -> None:
        url, _ = server
        await self.ask(url, tls_insecure_skip_verify=True)


async def test_health_readiness_and_explanations(fleet: Fleet, harness: Harness) -> None:
    pods = await fleet.deployment("dep", 1)
    await fleet.variant("va", "dep")
    harness.source.put_all(pods, 0.95, 9)
    await harness.cycle()
    waiting = ["waiting for the first list of pods"]
    app = health_app(ready=lambda: waiting, is_leader=lambda: True, decisions=harness.controller.decisions)
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/healthz")).status == 200
        response = await client.get("/readyz")
        assert (response.status, await response.text()) == (503, waiting[0])
        waiting.clear()
        assert (await client.get("/readyz")).status == 200
        body = await (await client.get(f"/explain/{NAMESPACE}/va")).json()
        step = next(d for d in body["decisions"] if d["direction"] == "up")
        assert (step["current"], step["desired"]) == (1, 2)
        assert step["explanation"]["cause"] == "AllReplicasSaturated"
        assert step["explanation"]["numbers"]["saturatedReplicas"] == "1"
        assert (await client.get(f"/explain/{NAMESPACE}/nope")).status == 404
        assert len((await (await client.get("/explain")).json())["decisions"]) == 1
    async with TestClient(TestServer(metrics_app(harness.controller.registry))) as client:
        text = await (await client.get("/metrics")).text()
        assert (
            f'wva_desired_replicas{{accelerator_type="A100",namespace="{NAMESPACE}",variant_name="va"}} 2.0'
            in text
        )
        assert "wva_models_processed 1.0" in text


async def test_an_address_that_is_none_names_its_flag() -> None:
    app = health_app(ready=list, is_leader=lambda: False, decisions=DecisionStore())
    for address in ("8081", "host:port", ":99999"):
        with pytest.raises(ValueError, match=r"--health-probe-bind-address: invalid value .* must be host:port"):
            await listen(app, address, flag="--health-probe-bind-address")
