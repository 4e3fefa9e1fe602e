"""Deployments, ReplicaSets and pods as processes, seen through the real kubectl."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml
from tests.conftest import Kubectl, program
from tests.definitions import define
from tests.polling import eventually

from tidemill.kube.errors import NotFoundError
from tidemill.kube.resources import DEPLOYMENTS, LEADER_WORKER_SETS, NODES, PODS, REPLICA_SETS, Json
from tidemill.local.cluster import LocalCluster
from tidemill.local.controllers.leaderworkerset import leader_worker_set_crd

pytestmark = pytest.mark.kubectl


def server(name: str, replicas: int = 1, *, script: str | None = None, **container: object) -> Json:
    """A Deployment of small web servers, each on its pod's address."""
    labels = {"app": name}
    command = (
        ["python", "-u", "-c", script]
        if script
        else ["python", "-u", "-m", "http.server", "8000", "--bind", "$(IP)"]
    )
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "replicas": replicas, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {
                "terminationGracePeriodSeconds": 2,
                "containers": [{
                    "name": "main", "image": "none", "command": command,
                    "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                    **({} if script else {"readinessProbe": {"httpGet": {"port": 8000}, "periodSeconds": 1}}),
                    **container,
                }],
            }},
        },
    }  # fmt: skip


async def pods(cluster: LocalCluster, name: str) -> list[Json]:
    return (await cluster.client.list(PODS, "default", label_selector=f"app={name}")).items


async def test_apply_scale_restart_and_delete(cluster: LocalCluster, kubectl: Kubectl) -> None:
    await kubectl("apply", "-f", "-", stdin=yaml.safe_dump(server("web", 2)))
    assert "successfully rolled out" in await kubectl("rollout", "status", "deploy/web", "--timeout=30s")
    shown = await kubectl("get", "deploy", "web")
    assert shown.split()[:5] == ["NAME", "READY", "UP-TO-DATE", "AVAILABLE", "AGE"]
    assert shown.split()[5:9] == ["web", "2/2", "2", "2"]
    addresses = {pod["status"]["podIP"] for pod in await pods(cluster, "web")}
    assert len(addresses) == 2

    await kubectl("scale", "deploy/web", "--replicas=3")
    await kubectl("wait", "deploy/web", "--for=jsonpath={.status.readyReplicas}=3", "--timeout=30s")
    first = {pod["metadata"]["uid"] for pod in await pods(cluster, "web")}

    await kubectl("rollout", "restart", "deploy/web")
    await kubectl("rollout", "status", "deploy/web", "--timeout=60s")

    async def replaced() -> bool:
        left = [p for p in await pods(cluster, "web") if "deletionTimestamp" not in p["metadata"]]
        return len(left) == 3 and not first & {p["metadata"]["uid"] for p in left}

    await eventually(replaced, within=30)
    history = await kubectl("rollout", "history", "deploy/web")
    assert [line.split()[0] for line in history.splitlines()[2:] if line.strip()] == ["1", "2"]

    await kubectl("delete", "deploy", "web", "--timeout=30s")

    async def gone() -> bool:
        left = await pods(cluster, "web")
        return not left and not (await cluster.client.list(REPLICA_SETS, "default")).items

    await eventually(gone, within=20)


async def test_a_rollout_keeps_enough_replicas_available(cluster: LocalCluster) -> None:
    await cluster.client.create(DEPLOYMENTS, server("web", 4), "default")

    async def available() -> int:
        return (
            (await cluster.client.get(DEPLOYMENTS, "web", "default")).get("status", {}).get("availableReplicas", 0)
        )

    async def full() -> bool:
        return await available() == 4

    await eventually(full, within=30)
    patch = {"spec": {"template": {"metadata": {"annotations": {"v": "2"}}}}}
    await cluster.client.patch(DEPLOYMENTS, "web", patch, "default")
    lowest, most = 4, 0

    async def done() -> bool:
        nonlocal lowest, most
        status = (await cluster.client.get(DEPLOYMENTS, "web", "default"))["status"]
        lowest = min(lowest, status.get("availableReplicas", 0))
        most = max(most, status.get("replicas", 0))
        return status.get("updatedReplicas") == 4 == status.get("replicas") == status.get("availableReplicas")

    await eventually(done, within=60)
    # 25% of 4: one may be missing, one may be too many.
    assert lowest >= 3
    assert most <= 5


async def test_logs_follow_previous_and_timestamps(cluster: LocalCluster, kubectl: Kubectl) -> None:
    script = "import time\nfor n in range(3): print('line', n)\ntime.sleep(600)"
    await cluster.client.create(DEPLOYMENTS, server("talker", script=script), "default")
    await kubectl("rollout", "status", "deploy/talker", "--timeout=30s")
    await eventually(lambda: _has(kubectl, "line 2", "logs", "deploy/talker"))
    assert (await kubectl("logs", "deploy/talker")).splitlines() == ["line 0", "line 1", "line 2"]
    assert (await kubectl("logs", "deploy/talker", "--tail=1")).strip() == "line 2"
    stamped = await kubectl("logs", "deploy/talker", "--timestamps", "--tail=1")
    assert stamped.split()[0].endswith("Z")
    code, out, _ = await kubectl.run("logs", "-f", "deploy/talker", "--request-timeout=1s")
    assert out.splitlines() == ["line 0", "line 1", "line 2"]
    assert code in (0, 1)


async def _has(kubectl: Kubectl, text: str, *args: str) -> bool:
    return text in await kubectl(*args, check=False)


async def test_a_container_that_ends_is_started_again_later_and_later(
    cluster: LocalCluster, kubectl: Kubectl
) -> None:
    await cluster.client.create(
        DEPLOYMENTS, server("crash", script="print('bye'); raise SystemExit(3)"), "default"
    )

    async def looping() -> Json | None:
        for pod in await pods(cluster, "crash"):
            for status in pod.get("status", {}).get("containerStatuses") or ():
                if status["restartCount"] >= 2 and "waiting" in status["state"]:
                    return status
        return None

    status = await eventually(looping, within=30)
    assert status["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert status["lastState"]["terminated"]["exitCode"] == 3
    assert "CrashLoopBackOff" in await kubectl("get", "pods", "-l", "app=crash")
    assert "bye" in await kubectl("logs", "deploy/crash", "--previous")


async def test_a_liveness_probe_restarts(cluster: LocalCluster) -> None:
    probe = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}
    body = server("sick", script="import time; time.sleep(600)", livenessProbe=probe)
    await cluster.client.create(DEPLOYMENTS, body, "default")

    async def restarted() -> bool:
        found = await pods(cluster, "sick")
        return any(
            s["restartCount"] > 0 for p in found for s in p.get("status", {}).get("containerStatuses") or ()
        )

    await eventually(restarted, within=30)


@pytest.mark.parametrize(
    ("container", "reason", "words"),
    [
        ({"command": None}, "CreateContainerConfigError", "starts processes, not images"),
        ({"command": ["/no/such/program"]}, "RunContainerError", "No such file"),
        ({"envFrom": [{"configMapRef": {"name": "absent"}}]}, "CreateContainerConfigError",
         'configmap "absent" not found'),
    ],
)  # fmt: skip
async def test_a_pod_that_cannot_start_says_why(
    cluster: LocalCluster, container: Json, reason: str, words: str
) -> None:
    body = server("bad", **container)
    await cluster.client.create(DEPLOYMENTS, body, "default")

    async def waiting() -> Json | None:
        for pod in await pods(cluster, "bad"):
            for status in pod.get("status", {}).get("containerStatuses") or ():
                if status["state"].get("waiting", {}).get("reason") == reason:
                    return status["state"]["waiting"]
        return None

    found = await eventually(waiting, within=20)
    assert words in found["message"]


async def test_environment_and_volumes(cluster: LocalCluster, kubectl: Kubectl) -> None:
    await kubectl("create", "configmap", "conf", "--from-literal=KEY=from-map", "--from-literal=file=content")
    await kubectl("create", "secret", "generic", "hidden", "--from-literal=pass=word")
    script = (
        "import os, pathlib, time\n"
        "root = pathlib.Path(os.environ['CONTAINER_SANDBOX_MOUNT_POINT'])\n"
        "print(os.environ['KEY'], os.environ['PASS'], os.environ['NAME'], os.environ['BOTH'])\n"
        "print((root / 'etc/conf/file').read_text())\n"
        "print((root / 'var/run/secrets/kubernetes.io/serviceaccount/namespace').read_text())\n"
        "time.sleep(600)"
    )
    body = server("env", script=script)
    spec = body["spec"]["template"]["spec"]
    spec["volumes"] = [{"name": "v", "configMap": {"name": "conf"}}]
    spec["containers"][0] |= {
        "envFrom": [{"configMapRef": {"name": "conf"}}],
        "env": [
            {"name": "PASS", "valueFrom": {"secretKeyRef": {"name": "hidden", "key": "pass"}}},
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
            {"name": "BOTH", "value": "$(NAME)-$(PASS)-$(UNKNOWN)-$$(X)"},
        ],
        "volumeMounts": [{"name": "v", "mountPath": "/etc/conf"}],
    }
    await cluster.client.create(DEPLOYMENTS, body, "default")
    await eventually(lambda: _has(kubectl, "default", "logs", "deploy/env"), within=20)
    assert (await kubectl("logs", "deploy/env")).splitlines() == [
        "from-map word env env-word-$(UNKNOWN)-$(X)", "content", "default",
    ]  # fmt: skip


async def test_a_pod_may_finish_what_it_does(cluster: LocalCluster, kubectl: Kubectl, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = (
        "import signal, sys, time, pathlib\n"
        f"def end(*_): time.sleep(0.5); pathlib.Path({str(mark)!r}).write_text('done'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('up')\ntime.sleep(600)"
    )
    await cluster.client.create(DEPLOYMENTS, server("graceful", script=script), "default")
    await eventually(lambda: _has(kubectl, "up", "logs", "deploy/graceful"), within=20)
    (pod,) = await pods(cluster, "graceful")
    await kubectl("delete", "pod", pod["metadata"]["name"], "--timeout=20s")
    assert mark.read_text() == "done"


async def test_a_stubborn_pod_is_killed_after_its_grace_period(cluster: LocalCluster, kubectl: Kubectl) -> None:
    script = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\ntime.sleep(600)"
    await cluster.client.create(DEPLOYMENTS, server("stubborn", script=script), "default")
    await eventually(lambda: _has(kubectl, "up", "logs", "deploy/stubborn"), within=20)
    await cluster.client.scale(DEPLOYMENTS, "stubborn", "default", 0)

    async def gone() -> bool:
        return not await pods(cluster, "stubborn")

    await eventually(gone, within=10)


async def test_data_survives_a_restart_when_asked(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, keep_data=True, workloads=False) as first:
        await define(first.client, _crd())
        made = await first.client.create(DEPLOYMENTS, server("web", 0), "default")
    async with LocalCluster(tmp_path, keep_data=True, workloads=False) as second:
        found = await second.client.get(DEPLOYMENTS, "web", "default")
        assert found == made
        # Versions go on from where they were, and custom kinds are served.
        changed = await second.client.patch(DEPLOYMENTS, "web", {"metadata": {"labels": {"x": "y"}}}, "default")
        assert int(changed["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
        kubectl = Kubectl(program("kubectl"), second.kubeconfig)
        assert "variantautoscalings" in await kubectl("api-resources", "--api-group=llmd.ai")


def _crd() -> Json:
    from tidemill.api.crd import variant_autoscaling_crd

    return variant_autoscaling_crd()


async def test_processes_do_not_outlive_the_cluster() -> None:
    async with LocalCluster() as cluster:
        await cluster.client.create(DEPLOYMENTS, server("web"), "default")

        async def running() -> bool:
            return any(p.get("status", {}).get("phase") == "Running" for p in await pods(cluster, "web"))

        await eventually(running, within=20)
        (pod,) = await pods(cluster, "web")
        address = pod["status"]["podIP"]

        async def listening() -> bool:
            try:
                _, writer = await asyncio.open_connection(address, 8000)
            except OSError:
                return False
            writer.close()
            return True

        await eventually(listening, within=20)
    assert not await listening()


async def test_kubectl_says_what_the_server_says(cluster: LocalCluster, kubectl: Kubectl) -> None:
    bad = {"apiVersion": "llmd.ai/v1alpha1", "kind": "VariantAutoscaling", "metadata": {"name": "x"},
           "spec": {"modelID": "m", "variantCost": "abc"}}  # fmt: skip
    text = await kubectl("apply", "-f", "-", stdin=yaml.safe_dump(bad), check=False)
    assert 'spec.variantCost: Invalid value: "abc": spec.variantCost in body should match' in text
    assert "not found" in await kubectl("get", "va", "nope", check=False)
    assert "modelID" in await kubectl("explain", "va.spec")
    with pytest.raises(NotFoundError):
        await cluster.client.get(PODS, "nope", "default")


async def test_server_side_apply_by_kubectl(cluster: LocalCluster, kubectl: Kubectl) -> None:
    body = yaml.safe_dump(server("web", 1))
    await kubectl("apply", "--server-side", "-f", "-", stdin=body)
    await kubectl("scale", "deploy/web", "--replicas=2")
    text = await kubectl("apply", "--server-side", "-f", "-", stdin=body, check=False)
    assert "conflict" in text
    assert ".spec.replicas" in text
    await kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=body)
    assert (await cluster.client.get(DEPLOYMENTS, "web", "default"))["spec"]["replicas"] == 1


async def test_groups_of_a_leader_and_its_workers(cluster: LocalCluster, kubectl: Kubectl) -> None:
    """A LeaderWorkerSet by kubectl: groups start, follow its scale, and go with it."""
    await define(cluster.client, leader_worker_set_crd())
    template = server("big")["spec"]["template"]
    group = {"size": 2, "workerTemplate": template}
    body = {
        "apiVersion": LEADER_WORKER_SETS.api_version, "kind": "LeaderWorkerSet",
        "metadata": {"name": "big", "namespace": "default"},
        "spec": {"replicas": 2, "leaderWorkerTemplate": group},
    }  # fmt: skip
    await kubectl("apply", "-f", "-", stdin=yaml.safe_dump(body))
    await kubectl("wait", "lws/big", "--for=jsonpath={.status.readyReplicas}=2", "--timeout=30s")
    names = {pod["metadata"]["name"] for pod in await pods(cluster, "big")}
    assert names == {"big-0", "big-0-1", "big-1", "big-1-1"}
    label = "jsonpath={.spec.leaderWorkerTemplate.workerTemplate.metadata.labels.app}"
    assert await kubectl("get", "lws", "big", "-o", label) == "big"

    await kubectl("scale", "lws/big", "--replicas=1")

    async def one_group() -> bool:
        return {pod["metadata"]["name"] for pod in await pods(cluster, "big")} == {"big-0", "big-0-1"}

    await eventually(one_group, within=20)
    await kubectl("delete", "lws", "big", "--timeout=30s")

    async def gone() -> bool:
        return not await pods(cluster, "big")

    await eventually(gone, within=20)


async def test_pods_wait_for_accelerators(cluster: LocalCluster, kubectl: Kubectl) -> None:
    """Two nodes of two devices: of three pods with two each, one waits and says why, until a node comes."""

    async def gpu_node(name: str) -> None:
        await cluster.client.create(NODES, {"metadata": {"name": name}})
        devices = {"status": {"allocatable": {"nvidia.com/gpu": "2"}}}
        await cluster.client.patch(NODES, name, devices, sub="status")

    for name in ("node-a", "node-b"):
        await gpu_node(name)
    deployment = server("gpu", 3, resources={"limits": {"nvidia.com/gpu": "2"}})
    await kubectl("apply", "-f", "-", stdin=yaml.safe_dump(deployment))
    await kubectl("wait", "deploy/gpu", "--for=jsonpath={.status.readyReplicas}=2", "--timeout=30s")
    (waiting,) = [pod for pod in await pods(cluster, "gpu") if not pod["spec"].get("nodeName")]
    shown = await kubectl("get", "pod", waiting["metadata"]["name"])
    assert "Pending" in shown

    async def told() -> bool:
        events = await kubectl("get", "events", "--field-selector=reason=FailedScheduling")
        return "0/2 nodes are available: 2 Insufficient nvidia.com/gpu." in events

    await eventually(told)
    await gpu_node("node-c")
    await kubectl("wait", "deploy/gpu", "--for=jsonpath={.status.readyReplicas}=3", "--timeout=30s")
    assert {pod["spec"]["nodeName"] for pod in await pods(cluster, "gpu")} == {"node-a", "node-b", "node-c"}
