"""Objects of the demo, as a user would write them."""

from __future__ import annotations

from typing import Any, TypeAlias

from tidemill.api.names import DEFAULT_NAMESPACE, MANAGER_CONFIG, SATURATION_CONFIG
from tidemill.api.variant import API_VERSION, KIND
from tidemill.autoscaler.world import VARIANT_AUTOSCALINGS
from tidemill.kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    NAMESPACES,
    Json,
    Resource,
)
from tidemill.picker.pools.cluster import INFERENCE_POOLS

Manifest: TypeAlias = tuple[Resource, str | None, Json]

NAMESPACE = "llm-d"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
KV_BLOCKS = 512  # a small cache, so that a small load fills it
VARIANTS = {
    "llama-8b-l40s": ("llama-3.1-8b/l40s", "L40S", "10.0"),
    "llama-8b-a100": ("llama-3.1-8b/a100", "A100", "40.0"),
}
POOL = "llama-8b"
MODEL_LABEL = {"llm-d.ai/model": POOL}
PICKER = "llama-8b-epp"
PICKER_PORT = 9002
PICKER_CONFIG = """
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
- {type: max-score-picker, parameters: {maxNumOfEndpoints: 2}}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: max-score-picker}
"""
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")


def controller() -> list[Manifest]:
    """The autoscaler as it runs in a cluster: a Deployment with a service account."""
    name = "controller-manager"
    labels = {"control-plane": name, "app.kubernetes.io/name": "workload-variant-autoscaler"}
    return [
        (NAMESPACES, None, _object("v1", "Namespace", DEFAULT_NAMESPACE)),
        (SERVICE_ACCOUNTS, DEFAULT_NAMESPACE, _object("v1", "ServiceAccount", name)),
        (CONFIG_MAPS, DEFAULT_NAMESPACE,
         {**_object("v1", "ConfigMap", MANAGER_CONFIG), "data": {"GLOBAL_OPT_INTERVAL": "1s"}}),
        (CONFIG_MAPS, DEFAULT_NAMESPACE,
         {**_object("v1", "ConfigMap", SATURATION_CONFIG),
          "data": {"default": "kvCacheThreshold: 0.80\nqueueLengthThreshold: 5\n"
                              "kvSpareTrigger: 0.10\nqueueSpareTrigger: 3\n"}}),
        (DEPLOYMENTS, DEFAULT_NAMESPACE, _deployment(
            name,
            labels,
            replicas=1,
            pod={"serviceAccountName": name, "terminationGracePeriodSeconds": 10},
            container={
                "name": "manager",
                "image": "tidemill",
                "command": ["tidemill", "autoscaler"],
                "args": [
                    "--actuation", "scale", "--metrics-source", "direct", "--scrape-interval", "500ms",
                    "--scrape-window", "4s", "--leader-elect",
                    "--metrics-bind-address", "$(POD_IP):8080",
                    "--health-probe-bind-address", "$(POD_IP):8081",
                ],
                "env": [
                    _field("POD_IP", "status.podIP"), _field("POD_NAME", "metadata.name"),
                    _field("POD_NAMESPACE", "metadata.namespace"),
                ],
                "ports": [{"name": "metrics", "containerPort": 8080}, {"name": "health", "containerPort": 8081}],
                "readinessProbe": {"httpGet": {"path": "/readyz", "port": "health"}, "periodSeconds": 1},
                "livenessProbe": {"httpGet": {"path": "/healthz", "port": "health"}, "periodSeconds": 5},
            },
        )),
    ]  # fmt: skip


def variants() -> list[Manifest]:
    """Two variants of one model: a cheap one and a dear one."""
    found: list[Manifest] = [(NAMESPACES, None, _object("v1", "Namespace", NAMESPACE))]
    for name, (preset, accelerator, cost) in VARIANTS.items():
        container: Json = {
            "name": "vllm",
            "image": "simulated",
            "command": ["tidemill", "model-server"],
            "args": [
                "--model", MODEL, "--preset", preset, "--kv-blocks", str(KV_BLOCKS), "--host", "$(POD_IP)",
                "--port", "8000", "--startup", "2s",
            ],
            "env": [_field("POD_IP", "status.podIP"), _field("POD_NAME", "metadata.name")],
            "ports": [{"name": "http", "containerPort": 8000}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1},
        }  # fmt: skip
        labels = {"app": name, **MODEL_LABEL}
        pod = {"nodeSelector": {"nvidia.com/gpu.product": accelerator}}
        deployment = _deployment(name, labels, replicas=1, pod=pod, container=container)
        variant: Json = {
            **_object(API_VERSION, KIND, name),
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
                "modelID": MODEL,
                "variantCost": cost,
                "minReplicas": 1,
                "maxReplicas": 6,
            },
        }
        found += [(DEPLOYMENTS, NAMESPACE, deployment), (VARIANT_AUTOSCALINGS, NAMESPACE, variant)]
    return found


def picker() -> list[Manifest]:
    """The pool of all variants, and its endpoint picker as it runs in a cluster."""
    pool: Json = {
        **_object(INFERENCE_POOLS[0].api_version, INFERENCE_POOLS[0].kind, POOL),
        "spec": {
            "selector": {"matchLabels": MODEL_LABEL},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": PICKER, "port": {"number": PICKER_PORT}},
        },
    }
    container: Json = {
        "name": "epp",
        "image": "tidemill",
        "command": ["tidemill", "picker"],
        "args": [
            "--pool-name", POOL, "--pool-namespace", NAMESPACE, "--bind-address", "$(POD_IP)",
            "--grpc-port", str(PICKER_PORT), "--secure-serving=false", "--drain-timeout", "3s",
            "--config-text", PICKER_CONFIG,
        ],
        "env": [_field("POD_IP", "status.podIP")],
        "ports": [{"name": "grpc", "containerPort": PICKER_PORT}, {"name": "metrics", "containerPort": 9090}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "metrics"}, "periodSeconds": 1},
    }  # fmt: skip
    pod = {"serviceAccountName": PICKER, "terminationGracePeriodSeconds": 10}
    return [
        (SERVICE_ACCOUNTS, NAMESPACE, _object("v1", "ServiceAccount", PICKER)),
        (INFERENCE_POOLS[0], NAMESPACE, pool),
        (DEPLOYMENTS, NAMESPACE, _deployment(PICKER, {"app": PICKER}, replicas=1, pod=pod, container=container)),
    ]


def _object(api_version: str, kind: str, name: str) -> Json:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}}


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _deployment(name: str, labels: dict[str, str], *, replicas: int, pod: dict[str, Any], container: Json) -> Json:
    return {
        **_object("apps/v1", "Deployment", name),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {**pod, "containers": [container]}},
        },
    }
