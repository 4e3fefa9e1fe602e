"""From a pool and its pods to the endpoints: one pure function, so that no order of events matters."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tidemill.api.inference import (
    ACTIVE_PORTS_ANNOTATION,
    ACTIVE_PORTS_ANNOTATION_OLDER,
    InferencePool,
)
from tidemill.kube.conditions import find_condition
from tidemill.kube.resources import Json, ObjectKey
from tidemill.picker.address import join


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """What the picker keeps of a pod."""

    key: ObjectKey
    uid: str
    ips: tuple[str, ...]  # status.podIP first
    ready: bool
    terminating: bool
    restarts: int  # of all containers together
    declared_ports: tuple[int, ...]
    active_ports: str | None  # the annotation as written; None when absent
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EndpointId:
    """Which endpoint it is, over all changes of its state. A namesake of a pod is another one."""

    uid: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One port of one pod that may be picked. `address` is canonical."""

    id: EndpointId
    address: str
    pod: ObjectKey
    rank: int  # index of the port in the pool's targetPorts
    restarts: int = 0
    other_addresses: tuple[str, ...] = ()  # of the pod's other IP family
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class EndpointSet:
    """`remarks` are what an operator should know of a pod that yields less than its spec suggests."""

    endpoints: tuple[Endpoint, ...]
    remarks: frozenset[tuple[ObjectKey, str]] = frozenset()


def pod_view(obj: Json) -> PodView:
    metadata = obj["metadata"]
    status: Json = obj.get("status") or {}
    annotations = metadata.get("annotations") or {}
    ips = [status.get("podIP") or "", *(entry.get("ip") or "" for entry in status.get("podIPs") or ())]
    ready = find_condition(status.get("conditions") or (), "Ready")
    statuses = status.get("containerStatuses") or ()
    containers = (obj.get("spec") or {}).get("containers") or ()
    return PodView(
        key=ObjectKey.of(obj),
        uid=metadata.get("uid") or "",
        ips=tuple(dict.fromkeys(ip for ip in ips if ip)),
        ready=ready is not None and ready.get("status") == "True",
        terminating=metadata.get("deletionTimestamp") is not None,
        restarts=sum(int(entry.get("restartCount") or 0) for entry in statuses),
        declared_ports=tuple(port["containerPort"] for c in containers for port in c.get("ports") or ()),
        active_ports=annotations.get(ACTIVE_PORTS_ANNOTATION, annotations.get(ACTIVE_PORTS_ANNOTATION_OLDER)),
        labels=dict(metadata.get("labels") or {}),
    )


def endpoints_of(pool: InferencePool, pods: Iterable[PodView]) -> EndpointSet:
    """The endpoints of `pool`: (pod, target port) for each pod in its namespace that matches the selector,
    is Ready, does not terminate and has an IP. An address that two pods claim is offered once."""
    found: dict[str, Endpoint] = {}
    remarks: set[tuple[ObjectKey, str]] = set()
    for pod in sorted(pods, key=lambda pod: (pod.key, pod.uid)):
        if pod.key.namespace != pool.namespace or not matches(pool, pod.labels):
            continue
        if not pod.ready or pod.terminating:
            continue
        addresses = _addresses(pod, remarks)
        if not addresses:
            remarks.add((pod.key, "is Ready but has no IP address: no endpoint"))
            continue
        ports, complaints = active_ports(pool.target_ports, pod.active_ports)
        remarks.update((pod.key, complaint) for complaint in complaints)
        if pod.declared_ports and ports and not set(ports) & set(pod.declared_ports):
            remarks.add(
                (pod.key, f"declares containerPorts {_list(pod.declared_ports)}, none of the pool's targetPorts "
                 f"{_list(ports)}: requests to it will fail unless it listens there all the same")
            )  # fmt: skip
        for port in ports:
            address, *others = (join(ip, port) for ip in addresses)
            if (holder := found.get(address)) is not None:
                remarks.add((pod.key, f"claims {address}, which {holder.pod} has: offered once, for {holder.pod}"))
                continue
            found[address] = Endpoint(
                id=EndpointId(pod.uid, port),
                address=address,
                pod=pod.key,
                rank=pool.target_ports.index(port),
                restarts=pod.restarts,
                other_addresses=tuple(others),
                labels=pod.labels,
            )
    return EndpointSet(tuple(found.values()), frozenset(remarks))


def matches(pool: InferencePool, labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in pool.match_labels.items())


def active_ports(targets: tuple[int, ...], annotation: str | None) -> tuple[tuple[int, ...], list[str]]:
    """Target ports that a pod's annotation leaves, and what is wrong with it. Absent leaves all of them,
    present and empty none. A part that is no whole number is no port (`8000abc` is not 8000)."""
    if annotation is None:
        return targets, []
    wanted: set[int] = set()
    complaints: list[str] = []
    for part in annotation.split(","):
        text = part.strip()
        if not text:
            continue
        if not (text.isascii() and text.isdigit()):
            complaints.append(f"{ACTIVE_PORTS_ANNOTATION}: {text!r} must be a port number: ignored")
        elif int(text) not in targets:
            complaints.append(
                f"{ACTIVE_PORTS_ANNOTATION}: {text} is not one of the pool's targetPorts {_list(targets)}: ignored"
            )
        else:
            wanted.add(int(text))
    ports = tuple(port for port in targets if port in wanted)
    if not ports:
        complaints.append(f"{ACTIVE_PORTS_ANNOTATION}: {annotation!r} leaves no port: no endpoint")
    return ports, complaints


def _addresses(pod: PodView, remarks: set[tuple[ObjectKey, str]]) -> list[str]:
    good: list[str] = []
    for ip in pod.ips:
        try:
            good.append(str(ipaddress.ip_address(ip)))
        except ValueError:
            remarks.add((pod.key, f"status.podIP: {ip!r} must be an IP address: ignored"))
    return good


def _list(ports: Iterable[int]) -> str:
    return ", ".join(map(str, ports))
