"""One variant with one ready pod at 127.0.0.1, written into an API server without controllers."""

from __future__ import annotations

from tidemill.api.crd import variant_autoscaling_crd
from tidemill.autoscaler.world import VARIANT_AUTOSCALINGS
from tidemill.kube.client import KubeClient
from tidemill.kube.resources import DEPLOYMENTS, NAMESPACES, PODS, REPLICA_SETS, Json, Resource

CRDS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)


async def one_variant(client: KubeClient, namespace: str, port: int) -> None:
    def owner(obj: Json) -> Json:
        metadata = obj["metadata"]
        return {"apiVersion": "apps/v1", "kind": obj["kind"], "name": metadata["name"], "uid": metadata["uid"],
                "controller": True}  # fmt: skip

    await client.create(CRDS, variant_autoscaling_crd())
    for name in (namespace, "workload-variant-autoscaler-system"):
        await client.create(NAMESPACES, {"metadata": {"name": name}})
    template = {"metadata": {"labels": {"app": "v"}}, "spec": {"containers": [{"name": "vllm"}]}}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": "v"}}, "template": template}
    made = await client.create(DEPLOYMENTS, {"metadata": {"name": "v"}, "spec": spec}, namespace)
    owned = {"metadata": {"name": "v-rs", "ownerReferences": [owner(made)]}, "spec": spec}
    replica_set = await client.create(REPLICA_SETS, owned, namespace)
    pod = {
        "metadata": {"name": "v-0", "ownerReferences": [owner(replica_set)],
                     "annotations": {"prometheus.io/port": str(port)}},
        "spec": {"containers": [{"name": "vllm"}]},
    }  # fmt: skip
    await client.create(PODS, pod, namespace)
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"}
    status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": [ready]}
    await client.patch(PODS, "v-0", {"status": status}, namespace, sub="status")
    await client.create(VARIANT_AUTOSCALINGS, variant("v"), namespace)


def variant(name: str) -> Json:
    return {"metadata": {"name": name}, "spec": {"modelID": "m"}}
