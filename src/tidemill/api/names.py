"""Well-known names: labels, annotations, ConfigMaps, metrics. Facts shared with WVA; see docs/autoscaler.md."""

from __future__ import annotations

GROUP = "llmd.ai"
VERSION = "v1alpha1"

DEFAULT_NAMESPACE = "workload-variant-autoscaler-system"
DEFAULT_LEADER_ELECTION_ID = "72dd1cf1.llm-d.ai"

# ConfigMaps; the first name is today's, older ones stay accepted.
MANAGER_CONFIG = "wva-manager-config"
MANAGER_CONFIG_OLDER = "wva-variantautoscaling-config"
SATURATION_CONFIG = "wva-saturation-scaling-config"
SCALE_TO_ZERO_CONFIG = "wva-model-scale-to-zero-config"
WELL_KNOWN_CONFIG_MAPS = frozenset({MANAGER_CONFIG, MANAGER_CONFIG_OLDER, SATURATION_CONFIG, SCALE_TO_ZERO_CONFIG})

SERVICE_MONITOR = "wva-controller-manager-metrics-monitor"
LEARNED_CONFIG = "wva-capacity-learned"

VARIANT_LABEL = "llm-d.ai/variant"
ROLE_LABEL = "llm-d.ai/role"
LEADER_WORKER_SET_LABEL = "leaderworkerset.sigs.k8s.io/name"  # on what belongs to one: pods and StatefulSets
WORKER_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"  # of a pod in its group; "0" leads
ACCELERATOR_LABEL = "inference.optimization/acceleratorName"
CONTROLLER_INSTANCE_LABEL = "wva.llmd.ai/controller-instance"
CONFIG_ENABLED_LABEL = "wva.llmd.ai/config-enabled"
EXCLUDE_ANNOTATION = "wva.llmd.ai/exclude"

# Fast model actuation: a pod that asks for an engine and the one that runs it name each other; an engine that
# nobody asks for sleeps, with its weights in memory.
DUAL_LABEL = "dual-pods.llm-d.ai/dual"
SLEEPING_LABEL = "dual-pods.llm-d.ai/sleeping"
# A pod that GKE restores from the snapshot of that name.
SNAPSHOT_ANNOTATION = "podsnapshot.gke.io/ps-name"

# Product keys of nodes by vendor, in the order they are looked at.
ACCELERATOR_KEYS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product",
    "amd.com/gpu.product-name",
    "intel.com/gpu.product",
    "gpu.intel.com/product",
    "habana.ai/product.name",
    "cloud.google.com/gke-accelerator",
)
UNKNOWN_ACCELERATOR = "unknown"
# Resources that count devices, by vendor.
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "intel.com/gpu", "gpu.intel.com/i915", "habana.ai/gaudi")

# Annotations of a HorizontalPodAutoscaler or ScaledObject that stands for a variant.
MANAGED_ANNOTATION = "llm-d.ai/managed"
MODEL_ID_ANNOTATION = "llm-d.ai/model-id"
VARIANT_COST_ANNOTATION = "llm-d.ai/variant-cost"
