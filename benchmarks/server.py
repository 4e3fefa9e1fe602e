"""The other side of the benchmarks, in a process of its own so that its work is not measured: an API server
full of objects, a fake Prometheus with their numbers, and a switch to change all pods at once.

Usage: python -m benchmarks.server VARIANTS REPLICAS; prints one line of JSON when it is ready.
"""

from __future__ import annotations

import asyncio
import sys

import orjson
from aiohttp import web

from tidemill.api.crd import variant_autoscaling_crd
from tidemill.kube.clock import rfc3339, utc_now
from tidemill.kube.resources import Json
from tidemill.local.apiserver.kinds import Kind
from tidemill.local.cluster import LocalCluster

NAMESPACE = "bench"


def fill(cluster: LocalCluster, variants: int, replicas: int) -> None:
    """Write the objects past HTTP, as fast as the registry takes them."""
    registry, kinds = cluster.server.registry, cluster.server.kinds

    def kind(group: str, version: str, plural: str) -> Kind:
        found = kinds.find(group, version, plural)
        assert found is not None
        return found

    namespaces = kind("", "v1", "namespaces")
    for name in (NAMESPACE, "workload-variant-autoscaler-system"):
        registry.create(namespaces, "", {"metadata": {"name": name}})
    thresholds = {"default": "kvCacheThreshold: 0.80\nkvSpareTrigger: 0.10"}
    registry.create(
        kind("", "v1", "configmaps"),
        "workload-variant-autoscaler-system",
        {"metadata": {"name": "wva-saturation-scaling-config"}, "data": thresholds},
    )
    crd = kind("apiextensions.k8s.io", "v1", "customresourcedefinitions")
    registry.create(crd, "", variant_autoscaling_crd())
    deployments, sets = kind("apps", "v1", "deployments"), kind("apps", "v1", "replicasets")
    pods, vas = kind("", "v1", "pods"), kind("llmd.ai", "v1alpha1", "variantautoscalings")
    long_ago = rfc3339(utc_now().replace(year=2020))

    def owner(api_version: str, obj: Json) -> Json:
        metadata = obj["metadata"]
        return {"apiVersion": api_version, "kind": obj["kind"], "name": metadata["name"], "uid": metadata["uid"],
                "controller": True}  # fmt: skip

    for index in range(variants):
        name = f"v{index:04}"
        template = {
            "metadata": {"labels": {"app": name}},
            "spec": {"containers": [{"name": "vllm", "image": "x"}]},
        }
        spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
        made = registry.create(deployments, NAMESPACE, {"metadata": {"name": name}, "spec": spec})
        owned = {"metadata": {"name": f"{name}-rs", "ownerReferences": [owner("apps/v1", made)]}, "spec": spec}
        replica_set = registry.create(sets, NAMESPACE, owned)
        for number in range(replicas):
            address = f"10.{index // 250}.{index % 250}.{number + 1}"
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": long_ago}
            registry.create(
                pods,
                NAMESPACE,
                {
                    "metadata": {"name": f"{name}-{number}", "labels": {"app": name},
                                 "ownerReferences": [owner("apps/v1", replica_set)]},
                    "spec": {"containers": [{"name": "vllm", "image": "x", "ports": [{"containerPort": 8000}],
                                             "env": [{"name": f"V{n}", "value": "x" * 40} for n in range(20)]}]},
                    "status": {"phase": "Running", "podIP": address, "conditions": [ready]},
                },
            )  # fmt: skip
        registry.create(
            vas,
            NAMESPACE,
            {
                "metadata": {"name": name, "labels": {"inference.optimization/acceleratorName": "A100"}},
                "spec": {"modelID": f"m{index:04}", "scaleTargetRef": {"name": name}},
            },
        )


def prometheus(variants: int, replicas: int) -> web.Application:
    """Answers every query with a value for every pod, rendered once."""
    metrics = [
        {"namespace": NAMESPACE, "pod": f"v{i:04}-{n}", "instance": f"10.{i // 250}.{i % 250}.{n + 1}:8000",
         "engine": "0", "model_name": f"m{i:04}"}
        for i in range(variants)
        for n in range(replicas)
    ]  # fmt: skip

    def answer(value: str) -> bytes:
        result = [{"metric": metric, "value": [0, value]} for metric in metrics]
        return orjson.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})

    age, kv, queue = answer("1.5"), answer("0.6512345678"), answer("1")

    async def query(request: web.Request) -> web.Response:
        text = request.query.get("query") or str((await request.post())["query"])
        body = age if text.startswith("time()") else kv if "kv_cache" in text else queue
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/api/v1/query", query)
    return app


async def main(variants: int, replicas: int) -> None:
    async with LocalCluster(workloads=False, history=100_000) as cluster:
        fill(cluster, variants, replicas)
        app = prometheus(variants, replicas)
        pods = cluster.server.kinds.find("", "v1", "pods")
        assert pods is not None

        async def touch(request: web.Request) -> web.Response:
            """Change every pod once."""
            mark = request.query["mark"]
            for obj in cluster.server.store.list("pods"):
                new = {**obj, "metadata": {**obj["metadata"], "annotations": {"mark": mark}}}
                cluster.server.store.put("pods", (NAMESPACE, obj["metadata"]["name"]), new)
            return web.Response(text="done")

        app.router.add_post("/touch", touch)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        print(orjson.dumps({"kubeconfig": str(cluster.kubeconfig), "prometheus": url}).decode(), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
