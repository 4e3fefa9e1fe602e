"""Reviews: questions to the server about tokens and rights. They are answered, and not kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from tidemill.local.apiserver.rbac import Attributes, User, allowed
from tidemill.local.apiserver.store import Store

Json: TypeAlias = dict[str, Any]


def review(kind: str, body: Json, *, store: Store, tokens: Mapping[str, str], asker: User) -> Json | None:
    """The review with its status; None for a kind that is no review."""
    spec = body.get("spec") or {}
    match kind:
        case "TokenReview":
            name = tokens.get(spec.get("token", ""))
            if name is None:
                return {**body, "status": {"authenticated": False, "error": "the token is not known"}}
            user = User.named(name)
            about = {"username": user.name, "groups": list(user.groups)}
            return {**body, "status": {"authenticated": True, "user": about}}
        case "SubjectAccessReview":
            user = User(spec.get("user", ""), tuple(spec.get("groups") or ()))
        case "SelfSubjectAccessReview":
            user = asker
        case _:
            return None
    wanted = spec.get("resourceAttributes")
    if wanted is None:
        return {**body, "status": {"allowed": False, "reason": "only resources are decided about here"}}
    resource, sub = wanted.get("resource", ""), wanted.get("subresource", "")
    attributes = Attributes(
        verb=wanted.get("verb", ""),
        group=wanted.get("group", ""),
        resource=f"{resource}/{sub}" if sub else resource,
        namespace=wanted.get("namespace", ""),
        name=wanted.get("name", ""),
    )
    return {**body, "status": {"allowed": allowed(store, user, attributes)}}
