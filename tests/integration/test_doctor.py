"""`tidemill doctor`: a cluster where nothing is wrong, and the same broken in each way that it knows of."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from tests.conftest import create_namespace, free_port, program
from tests.definitions import CRDS, define, plain_crd, scaled_object_crd
from tests.elsewhere import KUBECONFIG
from tests.integration.fleet import MODEL, NAMESPACE, Fleet, external_metric
from tests.integration.prometheus import prometheus, serving, static
from tests.integration.test_external_metrics import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, registered
from tests.polling import eventually

from tidemill.api.names import DEFAULT_LEADER_ELECTION_ID, DEFAULT_NAMESPACE
from tidemill.autoscaler.world import SCALED_OBJECTS, VARIANT_AUTOSCALINGS
from tidemill.cli.doctor.checks import Check, examine, needed_rights
from tidemill.cli.doctor.fleet import API_SERVICES, EXTERNAL_METRICS, POD_MONITORS, SERVICES, Right, read
from tidemill.kube import tls
from tidemill.kube.client import PatchType
from tidemill.kube.clock import rfc3339, utc_now
from tidemill.kube.resources import (
    DEPLOYMENTS,
    HORIZONTAL_POD_AUTOSCALERS,
    LEASES,
    PODS,
    SERVICE_MONITORS,
    Json,
    Resource,
)
from tidemill.local.cluster import LocalCluster
from tidemill.manifests import manifests

ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
POD = "controller-manager-0"


def hpa(target: str = "dep", variant: str = "va", **spec: Any) -> Json:
    return {
        "metadata": {"name": "hpa"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
            "minReplicas": 1,
            "maxReplicas": 10,
            "metrics": [external_metric(variant)],
            **spec,
        },
    }


async def rbac(cluster: LocalCluster) -> None:
    """The roles of the manifests."""
    kinds = {r.kind: r for r in (CLUSTER_ROLES, CLUSTER_ROLE_BINDINGS, ROLES, ROLE_BINDINGS)}
    for obj in manifests():
        if obj["kind"] in kinds:
            await cluster.client.create(kinds[obj["kind"]], obj, obj["metadata"].get("namespace"))


@pytest.fixture
async def well(wva: LocalCluster, fleet: Fleet) -> AsyncIterator[Fleet]:
    """A fleet with nothing wrong: installed, led, two replicas decided and there, an HPA that follows."""
    client = fleet.client
    await rbac(wva)
    await manager(fleet)
    await lead(fleet, utc_now())
    await fleet.deployment("dep", 2)
    await fleet.variant("va", "dep")
    await decided(fleet, 2)
    await client.create(HORIZONTAL_POD_AUTOSCALERS, hpa(), NAMESPACE)
    async with answering() as port, registered(client, port, "wva-external-metrics"):
        yield fleet


@asynccontextmanager
async def answering() -> AsyncIterator[int]:
    """Somebody behind TLS who has an answer to everything: what asks whether he is there is content."""
    context = tls.server_context(tls.self_signed("wva-external-metrics", utc_now()))
    context.set_alpn_protocols(["http/1.1"])
    app = web.Application()

    async def content(_: web.Request) -> web.Response:
        return web.json_response({})

    app.router.add_get("/{any:.*}", content)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def manager(fleet: Fleet, *args: str) -> None:
    """The autoscaler's pod."""
    labels = {"control-plane": "controller-manager"}
    container = {"name": "manager", "image": "tidemill", "command": ["tidemill", "autoscaler"], "args": [*args]}
    spec = {"serviceAccountName": "controller-manager", "containers": [container]}
    body = {"metadata": {"name": POD, "labels": labels}, "spec": spec}
    await fleet.client.create(PODS, body, DEFAULT_NAMESPACE)
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    await fleet.client.patch(PODS, POD, {"status": ready}, DEFAULT_NAMESPACE, sub="status")


async def lead(fleet: Fleet, renewed: dt.datetime, holder: str = POD) -> None:
    spec = {
        "holderIdentity": holder, "leaseDurationSeconds": 60,
        "renewTime": rfc3339(renewed).replace("Z", ".000000Z"),
    }  # fmt: skip
    await fleet.client.delete(LEASES, DEFAULT_LEADER_ELECTION_ID, DEFAULT_NAMESPACE)
    body = {"metadata": {"name": DEFAULT_LEADER_ELECTION_ID}, "spec": spec}
    await fleet.client.create(LEASES, body, DEFAULT_NAMESPACE)


async def decided(fleet: Fleet, replicas: int, *, metrics: str = "True") -> None:
    now = rfc3339(utc_now())
    condition = {
        "type": "MetricsAvailable", "status": metrics, "reason": "MetricsMissing",
        "message": "pod dep-0 says nothing", "lastTransitionTime": now,
    }  # fmt: skip
    alloc = {"accelerator": "A100", "numReplicas": replicas, "lastRunTime": now}
    status = {"desiredOptimizedAlloc": alloc, "conditions": [condition]}
    await fleet.client.patch(VARIANT_AUTOSCALINGS, "va", {"status": status}, NAMESPACE, sub="status")


async def examined(fleet: Fleet, prometheus: str = "") -> list[Check]:
    found = await read(fleet.client, DEFAULT_NAMESPACE, needed_rights, prometheus=prometheus)
    return examine(found, utc_now())


async def only_wrong(fleet: Fleet, check: str, prometheus: str = "") -> tuple[str, str]:
    """What was found and what mends it, when just this one thing is wrong."""
    found = {c.name: c.wrong for c in await examined(fleet, prometheus) if c.wrong}
    assert list(found) == [check], found
    (wrong,) = found[check]
    assert wrong.about
    return wrong.found, wrong.mend


async def test_nothing_is_wrong(well: Fleet) -> None:
    checks = await examined(well)
    assert [check for check in checks if check.wrong] == []
    assert all(check.looked_at for check in checks)
    assert {check.name for check in checks if check.skipped} == {"prometheus", "shadow pods"}
    assert len({check.name for check in checks}) == len(checks) == 17


async def test_the_crd_is_missing(well: Fleet) -> None:
    await well.client.delete(CRDS, "variantautoscalings.llmd.ai")
    await well.client.delete(HORIZONTAL_POD_AUTOSCALERS, "hpa", NAMESPACE)
    found, mend = await only_wrong(well, "installed")
    assert "does not serve it" in found
    assert mend == "tidemill crd | kubectl apply -f -"


async def test_the_autoscaler_is_away(well: Fleet) -> None:
    await well.client.delete(PODS, POD, DEFAULT_NAMESPACE)
    found, mend = await only_wrong(well, "installed")
    assert "no pod of the autoscaler" in found
    assert "--controller-namespace" in mend


async def test_the_autoscaler_is_not_ready(well: Fleet) -> None:
    conditions = [{"type": "Ready", "status": "False", "message": "readiness probe failed: 503"}]
    await well.client.patch(PODS, POD, {"status": {"conditions": conditions}}, DEFAULT_NAMESPACE, sub="status")
    found, mend = await only_wrong(well, "installed")
    assert found == "readiness probe failed: 503"
    assert f"kubectl logs -n {DEFAULT_NAMESPACE} {POD}" in mend


@pytest.mark.parametrize(
    ("holder", "age", "words"), [("", 5, "nobody leads"), ("gone-0", 600, "gone-0 leads and has renewed 60")]
)
async def test_nobody_leads(well: Fleet, holder: str, age: float, words: str) -> None:
    await lead(well, utc_now() - dt.timedelta(seconds=age), holder)
    found, _ = await only_wrong(well, "leader")
    assert words in found


async def test_a_right_is_missing(well: Fleet) -> None:
    name = "workload-variant-autoscaler-manager"
    role = await well.client.get(CLUSTER_ROLES, name)
    rules = [rule for rule in role["rules"] if "deployments/scale" not in rule["resources"]]
    await well.client.patch(CLUSTER_ROLES, name, {"rules": rules})
    found, mend = await only_wrong(well, "rights")
    assert found == "may not patch deployments/scale.apps"
    assert mend == "tidemill install --image IMAGE | kubectl apply -f -"


@pytest.mark.parametrize("watched", ["", NAMESPACE])
def test_the_rights_are_those_of_the_manifests(watched: str) -> None:
    """One truth in two places: what doctor asks for is what is granted, where it is and by its name."""
    granted = {
        Right(verb, group, resource, role["metadata"].get("namespace", ""), name)
        for role in manifests(watch_namespace=watched)
        for rule in role.get("rules") or ()
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames") or ("",)
    }
    assert set(needed_rights(DEFAULT_NAMESPACE, watched)) == granted


async def test_a_target_name_does_not_match(well: Fleet) -> None:
    spec = {"scaleTargetRef": {"kind": "Deployment", "name": "depp"}}
    await well.client.patch(VARIANT_AUTOSCALINGS, "va", {"spec": spec}, NAMESPACE)
    found = {c.name: c.wrong for c in await examined(well) if c.wrong}
    (wrong,) = found.pop("targets")
    assert "'depp': no such Deployment in namespace serving; there are dep" in wrong.found
    assert '{"spec":{"scaleTargetRef":{"name":"dep"}}}' in wrong.mend
    assert list(found) == ["follows"]  # the HPA then scales what nobody decides for


async def test_annotations_of_a_managed_scaler_are_bad(well: Fleet) -> None:
    await define(well.client, scaled_object_crd())
    await well.deployment("other", 1)
    body = {
        "metadata": {"name": "so", "annotations": {"llm-d.ai/managed": "true"}},
        "spec": {"scaleTargetRef": {"name": "other"}},
    }
    await well.client.create(SCALED_OBJECTS, body, NAMESPACE)
    found, mend = await only_wrong(well, "valid")
    assert "llm-d.ai/model-id" in found
    assert mend == "kubectl edit scaledobject so -n serving"


async def test_numbers_are_missing(well: Fleet) -> None:
    await decided(well, 2, metrics="False")
    found, mend = await only_wrong(well, "numbers")
    assert found == "MetricsMissing: pod dep-0 says nothing"
    assert mend == "tidemill explain va/va -n serving"


async def test_two_scalers_on_one_target(well: Fleet) -> None:
    other = hpa()
    other["metadata"]["name"] = "other"
    await well.client.create(HORIZONTAL_POD_AUTOSCALERS, other, NAMESPACE)
    found, _ = await only_wrong(well, "one scaler")
    assert "HorizontalPodAutoscaler serving/hpa and by HorizontalPodAutoscaler serving/other" in found


async def test_an_hpa_beside_direct_writes(well: Fleet) -> None:
    await well.client.delete(PODS, POD, DEFAULT_NAMESPACE, grace_period_seconds=0)
    await manager(well, "--actuation", "scale")
    found, _ = await only_wrong(well, "one scaler")
    assert "serving/hpa and by the autoscaler (--actuation scale)" in found


async def test_an_hpa_follows_nobody(well: Fleet) -> None:
    await well.client.patch(HORIZONTAL_POD_AUTOSCALERS, "hpa", {"spec": hpa(variant="vaa")["spec"]}, NAMESPACE)
    found, mend = await only_wrong(well, "follows")
    assert "variant_name 'vaa', which is no variant of namespace serving; there are va" in found
    assert mend == "kubectl edit hpa hpa -n serving"


async def test_an_hpa_scales_something_else(well: Fleet) -> None:
    await well.deployment("other", 1)
    await well.client.patch(HORIZONTAL_POD_AUTOSCALERS, "hpa", {"spec": hpa("other")["spec"]}, NAMESPACE)
    found, _ = await only_wrong(well, "follows")
    assert found == "it follows variant va of Deployment serving/dep, and scales Deployment serving/other"


async def test_nobody_serves_external_metrics(well: Fleet) -> None:
    await well.client.delete(API_SERVICES, EXTERNAL_METRICS)
    found, mend = await only_wrong(well, "external metrics")
    assert "nobody serves it, and HPAs ask for it: hpa" in found
    assert "tidemill install" in mend


async def test_who_serves_external_metrics_is_not_available(well: Fleet) -> None:
    await well.client.delete(SERVICES, "wva-external-metrics", DEFAULT_NAMESPACE)
    if not KUBECONFIG:  # where nobody looks after it
        condition = {"type": "Available", "status": "False", "message": "service is not present"}
        body = {"status": {"conditions": [condition]}}
        await well.client.patch(API_SERVICES, EXTERNAL_METRICS, body, sub="status")

    async def said() -> bool:
        found, _ = await only_wrong(well, "external metrics")
        start = f"{DEFAULT_NAMESPACE}/wva-external-metrics serves it, and is not available: "
        return start in found and "is not present" in found

    await eventually(said, within=30)


async def test_a_limit_hides_the_decision(well: Fleet) -> None:
    await decided(well, 12)
    found, mend = await only_wrong(well, "limits")
    assert found == "12 replicas are decided for variant va, and maxReplicas 10 hides it"
    assert '{"spec":{"maxReplicas":12}}' in mend


async def test_value_multiplies(well: Fleet) -> None:
    metrics = hpa()["spec"]["metrics"]
    metrics[0]["external"]["target"] = {"type": "Value", "value": "1"}
    await well.client.patch(HORIZONTAL_POD_AUTOSCALERS, "hpa", {"spec": {"metrics": metrics}}, NAMESPACE)
    found, mend = await only_wrong(well, "target type")
    assert "3, 9, 27" in found
    assert "AverageValue" in mend


@pytest.mark.parametrize(("replicas", "lost"), [(10, 1), (20, 2), (50, 5)])
async def test_a28_from_where_on_single_steps_are_lost(well: Fleet, replicas: int, lost: int) -> None:
    await well.scale("dep", replicas)
    await decided(well, replicas)
    wide = {"spec": {"maxReplicas": 100}}
    await well.client.patch(HORIZONTAL_POD_AUTOSCALERS, "hpa", wide, NAMESPACE)
    found, mend = await only_wrong(well, "single steps")
    assert f"at {replicas} replicas, changes of up to {lost} are within its tolerance" in found
    assert "--actuation scale" in mend
    exact = {"scaleUp": {"tolerance": "0"}, "scaleDown": {"tolerance": "0"}}
    await well.client.patch(HORIZONTAL_POD_AUTOSCALERS, "hpa", {"spec": {"behavior": exact}}, NAMESPACE)
    assert [c for c in await examined(well) if c.wrong] == []


RULE = {
    "sourceLabels": ["__meta_kubernetes_pod_label_llm_d_ai_variant"], "targetLabel": "llm_d_ai_variant",
    "action": "replace",
}  # fmt: skip


class TestMonitors:
    """The two things that the original leaves to its operators."""

    async def crds(self, fleet: Fleet) -> None:
        for plural, kind in (("servicemonitors", "ServiceMonitor"), ("podmonitors", "PodMonitor")):
            await define(fleet.client, plain_crd("monitoring.coreos.com", "v1", plural, kind))

    async def shadow_pod(self, fleet: Fleet) -> None:
        """A pod that nothing but its label ties to the variant, and the Service before it."""
        labels = {"llm-d.ai/variant": "va", "app": "shadow"}
        spec = {"containers": [{"name": "vllm", "image": "none"}]}
        await fleet.client.create(
            PODS, {"metadata": {"name": "shadow", "labels": labels}, "spec": spec}, NAMESPACE
        )
        service = {
            "metadata": {"name": "vllm", "labels": {"app": "vllm"}},
            "spec": {"selector": {"app": "shadow"}, "ports": [{"port": 80}]},
        }
        await fleet.client.create(SERVICES, service, NAMESPACE)

    async def monitor(self, fleet: Fleet, kind: str, **endpoint: Any) -> None:
        resource = SERVICE_MONITORS if kind == "ServiceMonitor" else POD_MONITORS
        field = "endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"
        labels = {"app": "vllm" if kind == "ServiceMonitor" else "shadow"}
        spec = {"selector": {"matchLabels": labels}, field: [{"port": "http", **endpoint}]}
        await fleet.client.create(resource, {"metadata": {"name": "vllm"}, "spec": spec}, NAMESPACE)

    @pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor"])
    @pytest.mark.parametrize(
        ("endpoint", "words", "path"),
        [
            ({}, "no rule under relabelings brings it into the series", "/0/relabelings"),
            (
                {"metricRelabelings": [RULE]},
                "under metricRelabelings, where pod labels are gone",
                "/0/relabelings",
            ),
            ({"relabelings": [{"targetLabel": "x", "replacement": "y"}]}, "no rule", "/0/relabelings/-"),
        ],
    )
    async def test_the_rule_is_missing(
        self, well: Fleet, kind: str, endpoint: Json, words: str, path: str
    ) -> None:
        await self.crds(well)
        await self.shadow_pod(well)
        await self.monitor(well, kind, **endpoint)
        found, mend = await only_wrong(well, "relabelling")
        assert words in found
        assert "scrapes shadow with the label llm-d.ai/variant" in found
        # The command is one that works.
        patch = orjson.loads(mend.partition("-p ")[2].strip("'"))
        assert patch[0]["path"].endswith(path)
        resource = SERVICE_MONITORS if kind == "ServiceMonitor" else POD_MONITORS
        assert mend.startswith(f"kubectl patch {kind.lower()} vllm -n serving --type=json")
        await well.client.patch(resource, "vllm", patch, NAMESPACE, type=PatchType.JSON)
        assert [c for c in await examined(well) if c.wrong] == []

    async def test_pods_without_the_label_need_no_rule(self, well: Fleet) -> None:
        await self.crds(well)
        await self.monitor(well, "PodMonitor")
        assert [c for c in await examined(well) if c.wrong] == []

    async def test_the_autoscalers_own_is_gone(self, well: Fleet) -> None:
        await self.crds(well)
        await create_namespace(well.client, "monitoring")
        ours = await well.client.get(SERVICES, "wva-external-metrics", DEFAULT_NAMESPACE)
        spec = {field: ours["spec"][field] for field in ("type", "externalName", "ports")}
        adapter = {"metadata": {"name": "prometheus-adapter"}, "spec": spec}
        await well.client.create(SERVICES, adapter, "monitoring")
        change = {"spec": {"service": {"namespace": "monitoring", "name": "prometheus-adapter"}}}
        await well.client.patch(API_SERVICES, EXTERNAL_METRICS, change)

        async def said() -> tuple[str, str]:
            return await only_wrong(well, "own monitor")

        found, mend = await eventually(said, within=30)
        assert "it is gone, and HPAs read what it has scraped: hpa" in found
        assert mend == "tidemill install monitoring | kubectl apply -f -"
        body = {"metadata": {"name": "wva-controller-manager-metrics-monitor"}, "spec": {}}
        await well.client.create(SERVICE_MONITORS, body, DEFAULT_NAMESPACE)
        assert [c for c in await examined(well) if c.wrong] == []


@pytest.mark.prometheus
@pytest.mark.parametrize("by", ["kubectl apply", "argocd-controller"])
async def test_as8_a_manifest_sets_the_replicas_too(well: Fleet, by: str) -> None:
    applied: Json = {"spec": {"replicas": 2}}
    if by == "kubectl apply":
        annotations = {"kubectl.kubernetes.io/last-applied-configuration": orjson.dumps(applied).decode()}
        await well.client.patch(DEPLOYMENTS, "dep", {"metadata": {"annotations": annotations}}, NAMESPACE)
    else:
        body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "dep"}, **applied}
        path, query = DEPLOYMENTS.path(NAMESPACE, "dep"), {"fieldManager": by, "force": "true"}
        await well.client._json("PATCH", path, query=query, body=body, content_type=PatchType.APPLY)
    found, mend = await only_wrong(well, "manifests")
    assert found.startswith(f"{by} sets spec.replicas")
    assert "deployment dep -n serving" in mend


class TestPrometheus:
    """A real one, that scrapes a model server and the autoscaler's series in each of several ways."""

    ENGINE = f'vllm:num_requests_waiting{{model_name="{MODEL}"}} 0\n'
    DECISION = 'wva_desired_replicas{variant_name="va",namespace="serving",accelerator_type="A100"} 2\n'

    async def look(
        self, well: Fleet, directory: Path, *, engine: dict[str, str] | None, honor_labels: bool = False
    ) -> tuple[str, str] | None:
        """What is wrong, if just one thing is, with series of these labels; None is without a model server."""
        async with serving(lambda: self.ENGINE) as server, serving(lambda: self.DECISION) as autoscaler:
            decisions = static("wva", autoscaler, namespace=DEFAULT_NAMESPACE) | {"honor_labels": honor_labels}
            engines = [] if engine is None else [static("vllm", server, **engine)]
            async with prometheus(directory, [decisions, *engines]) as url:
                names = ["wva_desired_replicas", *(["vllm:num_requests_waiting"] if engines else [])]
                for name in names:
                    await scraped(url, name)
                found = [wrong for check in await examined(well, url) for wrong in check.wrong]
        if not found:
            return None
        (wrong,) = found
        return wrong.found, wrong.mend

    @pytest.mark.parametrize(
        ("engine", "words", "mend"),
        [
            ({"namespace": "serving", "pod": "dep-0"}, "", ""),
            (None, "it answers, and has no series vllm:num_requests_waiting", "kubectl get podmonitor"),
            (
                {"namespace": "serving"},
                "1 series of model servers have no label pod",
                "__meta_kubernetes_pod_name",
            ),
            ({"pod": "dep-0"}, "1 series of model servers have no label namespace", "_kubernetes_namespace"),
        ],
    )
    async def test_series_of_model_servers(
        self, well: Fleet, tmp_path: Path, engine: dict[str, str] | None, words: str, mend: str
    ) -> None:
        found = await self.look(well, tmp_path, engine=engine)
        if not words:
            assert found is None
            return
        assert found is not None
        assert words in found[0]
        assert mend in found[1]

    @pytest.mark.parametrize(
        ("labels", "owner", "mend"),
        [
            (
                {},
                "other",
                'kubectl patch deployment other -n serving --type=merge -p \'{"spec":{"template":{"metadata":',
            ),
            ({}, None, 'kubectl patch pod shadow -n serving --type=merge -p \'{"metadata":'),
            ({"llm-d.ai/variant": "va"}, "other", ""),
            ({}, "dep", ""),
            ({}, "managed", ""),
            ({"leaderworkerset.sigs.k8s.io/worker-index": "1"}, "other", ""),
        ],
        ids=["of a namesake", "of nobody", "labelled", "of the target", "of a managed HPA's target", "a worker"],
    )
    async def test_a_pod_that_serves_and_counts_for_nobody(
        self, well: Fleet, tmp_path: Path, labels: dict[str, str], owner: str | None, mend: str
    ) -> None:
        await well.deployment("other", 0)
        await well.deployment("managed", 0)
        await well.hpa("managed", "managed")
        await create_namespace(well.client, "elsewhere")
        elsewhere = Fleet(well.client, "elsewhere")  # its Deployment other is a target, this one is not
        await elsewhere.deployment("other", 0)
        await elsewhere.variant("va", "other")
        await well.pod("shadow", owner, labels=labels)
        found = await self.look(well, tmp_path, engine={"namespace": "serving", "pod": "shadow"})
        if not mend:
            assert found is None
            return
        assert found is not None
        assert "counts for nobody" in found[0]
        assert found[1].startswith(mend)
        assert '{"llm-d.ai/variant":"va"}' in found[1]

    @pytest.mark.parametrize(
        ("label", "honor_labels", "right"),
        [("namespace", False, "exported_namespace"), ("exported_namespace", True, "namespace")],
    )
    async def test_the_namespace_of_decisions_has_another_name(
        self, well: Fleet, tmp_path: Path, label: str, honor_labels: bool, right: str
    ) -> None:
        metrics = hpa()["spec"]["metrics"]
        metrics[0]["external"]["metric"]["selector"]["matchLabels"][label] = NAMESPACE
        await well.client.patch(HORIZONTAL_POD_AUTOSCALERS, "hpa", {"spec": {"metrics": metrics}}, NAMESPACE)
        engine = {"namespace": "serving", "pod": "dep-0"}
        found = await self.look(well, tmp_path, engine=engine, honor_labels=honor_labels)
        assert found is not None
        assert f"it selects {label}=serving, and Prometheus has the namespace of variants as {right}" in found[0]

    async def test_it_cannot_be_reached(self, well: Fleet) -> None:
        found, mend = await only_wrong(well, "prometheus", f"http://127.0.0.1:{free_port()}")
        assert "cannot be reached" in found
        assert "PROMETHEUS_BASE_URL" in mend


async def scraped(url: str, name: str) -> None:
    async with aiohttp.ClientSession() as session:

        async def there() -> bool:
            async with session.get(f"{url}/api/v1/query", params={"query": name}) as response:
                return bool((await response.json())["data"]["result"])

        await eventually(there, within=20)


async def run(cluster: LocalCluster, *args: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        program("tidemill"), "doctor", "--kubeconfig", str(cluster.kubeconfig), *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_as_a_command(wva: LocalCluster, well: Fleet) -> None:
    status, out = await run(wva)
    assert (status, out.count("ok   "), "wrong" in out) == (0, 15, False), out
    assert "--    prometheus: not looked at: give --prometheus URL" in out
    await decided(well, 12)
    status, out = await run(wva)
    assert status == 1
    assert "wrong limits" in out
    assert "HorizontalPodAutoscaler serving/hpa: 12 replicas are decided" in out
    assert "mend: kubectl patch hpa hpa -n serving" in out
    status, out = await run(wva, "-o", "json")
    found = orjson.loads(out)
    assert (status, found["ok"]) == (1, False)
    (limits,) = [check for check in found["checks"] if check["wrong"]]
    assert set(limits) == {"name", "looked_at", "wrong", "skipped"}
    assert set(limits["wrong"][0]) == {"about", "found", "mend"}


async def test_what_was_not_looked_at_is_not_called_well(api_only: LocalCluster) -> None:
    """An empty cluster: one thing is wrong, and of the others nothing can be said."""
    checks = examine(await read(api_only.client, DEFAULT_NAMESPACE, needed_rights), utc_now())
    assert [check.name for check in checks if check.wrong] == ["installed"]
    assert all(check.skipped for check in checks[1:])


async def test_without_a_cluster() -> None:
    process = await asyncio.create_subprocess_exec(
        program("tidemill"), "doctor", "--kubeconfig", "/nope", stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"no cluster" in err
