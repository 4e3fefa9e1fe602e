"""For which model in which namespace do the requests wait that an endpoint picker holds?

A picker's series carries the gateway's namespace or none, so it is the pool that tells: by name, and by which
targets its selector takes. What nothing tells apart is counted once, and said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tidemill.api.inference import InferencePool
from tidemill.autoscaler.members import Member, exactly
from tidemill.capacity.view import UpstreamQueue
from tidemill.metrics.samples import PickerQueue

Group = tuple[str, str]
"""Namespace and model."""


def assign(
    queues: Iterable[PickerQueue], groups: Mapping[Group, Sequence[Member]], pools: Sequence[InferencePool]
) -> tuple[dict[Group, UpstreamQueue], list[str]]:
    """What waits for each group, and remarks on what could not be told apart."""
    found: dict[Group, UpstreamQueue] = {}
    remarks: list[str] = []
    for queue in queues:
        mine = sorted(key for key in groups if key[1] == queue.model)
        if not mine or not (queue.requests or queue.bytes):
            continue
        theirs = [key for key in mine if _is_for(queue, key, groups[key], pools)]
        if not theirs:
            continue
        if len(theirs) > 1:
            names = ", ".join(namespace for namespace, _ in theirs)
            remarks.append(
                f"nothing tells for which of the namespaces {names} the requests wait that an endpoint picker "
                f"holds for model {queue.model!r}: they are counted once, for {theirs[0][0]}"
            )
        before = found.get(theirs[0], UpstreamQueue())
        found[theirs[0]] = UpstreamQueue(
            before.requests + exactly(queue.requests), before.bytes + exactly(queue.bytes)
        )
    return found, remarks


def _is_for(queue: PickerQueue, group: Group, members: Sequence[Member], pools: Sequence[InferencePool]) -> bool:
    namespace, _ = group
    if queue.namespace and queue.namespace != namespace:
        return False
    named = [pool for pool in pools if pool.name == queue.pool]
    if not queue.pool or not named:
        return True  # what is not known tells nothing apart
    return any(
        pool.namespace == namespace and pool.match_labels.items() <= member.target.pod_labels.items()
        for pool in named
        for member in members
    )
