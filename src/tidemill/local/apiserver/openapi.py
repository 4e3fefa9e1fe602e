"""OpenAPI v3, as far as kubectl needs it: `explain` for custom kinds, and which patches check fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from tidemill.local.apiserver.kinds import Kind

Json: TypeAlias = dict[str, Any]


def index(kinds: Iterable[Kind]) -> Json:
    paths = sorted({_group_path(kind) for kind in kinds})
    return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in paths}}


def document(kinds: Iterable[Kind], path: str) -> Json | None:
    """The document of one group and version; None when nothing is served there."""
    chosen = [kind for kind in kinds if _group_path(kind) == path]
    if not chosen:
        return None
    schemas: Json = {}
    paths: Json = {}
    for kind in chosen:
        resource = kind.resource
        gvk = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        name = f"{'.'.join(reversed((resource.group or 'core').split('.')))}.{resource.version}.{resource.kind}"
        content: Json = (
            dict(kind.schema.schema)
            if kind.schema is not None
            else {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        )
        schemas[name] = {**content, "x-kubernetes-group-version-kind": [gvk]}
        reference = {"$ref": f"#/components/schemas/{name}"}
        answer = {"200": {"description": "OK", "content": {"application/json": {"schema": reference}}}}
        parameters = [
            {"name": parameter, "in": "query", "schema": {"type": "string"}}
            for parameter in ("dryRun", "fieldManager", "fieldValidation", "force")
        ]
        scope = "/namespaces/{namespace}" if resource.namespaced else ""
        base = f"/{path}{scope}/{resource.plural}"
        paths[base] = {
            "post": {"x-kubernetes-action": "post", "x-kubernetes-group-version-kind": gvk,
                     "parameters": parameters, "responses": answer},
        }  # fmt: skip
        paths[f"{base}/{{name}}"] = {
            verb: {"x-kubernetes-action": verb, "x-kubernetes-group-version-kind": gvk,
                   "parameters": parameters if verb != "get" else [], "responses": answer}
            for verb in ("get", "put", "patch")
        }  # fmt: skip
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "local"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _group_path(kind: Kind) -> str:
    resource = kind.resource
    return f"apis/{resource.group}/{resource.version}" if resource.group else f"api/{resource.version}"
