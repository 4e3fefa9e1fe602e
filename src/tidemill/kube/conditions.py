"""Status conditions the Kubernetes way: lastTransitionTime moves only when the status does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tidemill.kube.resources import Json


def set_condition(
    conditions: Iterable[Mapping[str, Any]],
    *,
    type: str,
    status: bool | None,
    reason: str,
    message: str,
    generation: int | None,
    now: str,
) -> list[Json]:
    """`conditions` with the one of `type` set; None is Unknown. The order of the others is kept."""
    word = {True: "True", False: "False", None: "Unknown"}[status]
    new: Json = {"type": type, "status": word, "reason": reason, "message": message}
    if generation is not None:
        new["observedGeneration"] = generation
    out: list[Json] = []
    found = False
    for condition in conditions:
        if condition["type"] != type:
            out.append(dict(condition))
            continue
        found = True
        since = condition.get("lastTransitionTime") if condition.get("status") == word else None
        out.append({**new, "lastTransitionTime": since or now})
    if not found:
        out.append({**new, "lastTransitionTime": now})
    return out


def find_condition(conditions: Iterable[Mapping[str, Any]], type: str) -> Mapping[str, Any] | None:
    return next((c for c in conditions if c.get("type") == type), None)
