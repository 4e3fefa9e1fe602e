"""Accelerators of the cluster: what nodes have, what pods of anybody take, where a variant's pods may go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tidemill.api.names import ACCELERATOR_KEYS, ACCELERATOR_LABEL, UNKNOWN_ACCELERATOR
from tidemill.autoscaler.views import NodeView, PodView, ResourceClaimView, TargetView, ValidVariant
from tidemill.autoscaler.world import World
from tidemill.capacity.inventory import Inventory
from tidemill.kube.resources import ObjectKey


def inventory(world: World, selector: Iterable[tuple[str, str]]) -> Inventory:
    """Devices by product and by placement, of nodes with the labels of `selector` (WVA_NODE_SELECTOR)."""
    if world.nodes.absent:
        why = world.nodes.error or "this cluster serves no nodes"
        return Inventory(unknown=f"nodes cannot be listed (verbs list and watch on nodes): {why}")
    wanted = list(selector)
    nodes = {
        node.name: node
        for node in world.nodes.store
        if node.product is not None and all(node.labels.get(key) == value for key, value in wanted)
    }
    placements = {
        placement(target.accelerator, target.node_selector): target.node_selector
        for target in world.targets()
        if target.accelerator is not None
    }
    total: Counter[str] = Counter()
    used: Counter[str] = Counter()
    taken = _taken(world.pods.store, world.claims_by_key(), nodes)
    for node in nodes.values():
        assert node.product is not None
        here = [node.product, *(
            name for name, labels in placements.items()
            if name and name.startswith(f"{node.product} on ") and labels.items() <= node.labels.items()
        )]  # fmt: skip
        for place in here:
            # A cordoned node takes no more pods: what is free there is not to be had.
            total[place] += node.devices if node.schedulable else taken[node.name]
            used[place] += taken[node.name]
    return Inventory(total=total, used=used)


def accelerator_of(world: World, variant: ValidVariant, target: TargetView) -> str:
    """The accelerator of a variant: as its label says, as its target asks for, or the only product there is."""
    known = variant.spec.metadata.labels.get(ACCELERATOR_LABEL) or target.accelerator
    if known:
        return known
    products = products_of(world)
    return products[0] if len(products) == 1 else UNKNOWN_ACCELERATOR


def products_of(world: World) -> list[str]:
    return sorted({node.product for node in world.nodes.store if node.product is not None and node.devices})


def placement(accelerator: str | None, node_selector: Mapping[str, str]) -> str:
    """The part of a product's nodes that a node selector names beyond the product; "" for all of them."""
    rest = ",".join(f"{k}={v}" for k, v in sorted(node_selector.items()) if k not in ACCELERATOR_KEYS)
    return f"{accelerator} on {rest}" if accelerator and rest else ""


def claimed(pod: PodView, claims: Mapping[ObjectKey, ResourceClaimView]) -> int:
    """Devices that a pod has by ResourceClaims, whoever shares them with it."""
    found = (claims.get(ObjectKey(pod.key.namespace, name)) for name in pod.claims)
    return sum(claim.devices for claim in found if claim is not None)


def _taken(
    pods: Iterable[PodView], claims: Mapping[ObjectKey, ResourceClaimView], nodes: Mapping[str, NodeView]
) -> Counter[str]:
    """Devices in use by node. A claim counts once, however many pods share it."""
    taken: Counter[str] = Counter()
    seen: set[ObjectKey] = set()
    for pod in pods:
        if pod.node not in nodes or pod.terminated:
            continue
        taken[pod.node] += pod.gpus
        for name in pod.claims:
            key = ObjectKey(pod.key.namespace, name)
            if key not in seen and (claim := claims.get(key)) is not None:
                seen.add(key)
                taken[pod.node] += claim.devices
    return taken
