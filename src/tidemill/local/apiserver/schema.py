"""Structural schemas of custom resources: prune, default, validate, check CEL rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import cel
import jsonschema_rs

from tidemill.local.apiserver.status import Cause
from tidemill.local.apiserver.store import copy

Json: TypeAlias = dict[str, Any]
Schema: TypeAlias = Mapping[str, Any]


class ResourceSchema:
    """The schema of one version of a custom resource, compiled once."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._validator = jsonschema_rs.Draft202012Validator(_json_schema(schema))
        self._programs: dict[str, cel.Program] = {}
        for node in _nodes(schema):
            for rule in node.get("x-kubernetes-validations", ()):
                self._programs[rule["rule"]] = cel.compile(rule["rule"])

    def prune(self, obj: Json) -> list[str]:
        """Remove fields that the schema does not know, in place; their paths are returned."""
        removed: list[str] = []
        _prune(obj, self.schema, "", removed, root=True)
        return removed

    def default(self, obj: Json) -> None:
        """Fill in defaults, in place."""
        _default(obj, self.schema)

    def validate(self, obj: Json, old: Json | None) -> list[Cause]:
        """Everything that is wrong with `obj`; CEL rules only see what the schema has let through."""
        causes = [_cause(error) for error in self._validator.iter_errors(obj)]
        return causes or list(self._rules(obj, old, self.schema, ""))

    def _rules(self, value: Any, old: Any, schema: Schema, path: str) -> Iterator[Cause]:
        for rule in schema.get("x-kubernetes-validations", ()):
            text = rule["rule"]
            if "oldSelf" in text and old is None:
                continue
            variables = {"self": value} if old is None else {"self": value, "oldSelf": old}
            try:
                holds = self._programs[text].execute(variables)
            except (KeyError, ValueError, TypeError, RuntimeError) as error:
                yield Cause(path or "<nil>", f"Invalid value: rule {text!r} could not be evaluated: {error}")
                continue
            if holds is not True:
                message = rule.get("message") or f"failed rule: {text}"
                yield Cause(path or "<nil>", f"Invalid value: {message}")
        if isinstance(value, dict):
            for name, child in schema.get("properties", {}).items():
                if name in value:
                    before = old.get(name) if isinstance(old, dict) else None
                    yield from self._rules(value[name], before, child, f"{path}.{name}" if path else name)
        elif isinstance(value, list) and isinstance(schema.get("items"), Mapping):
            for index, item in enumerate(value):
                yield from self._rules(item, None, schema["items"], f"{path}[{index}]")


def _nodes(schema: Schema) -> Iterator[Schema]:
    yield schema
    children = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for child in children:
        if isinstance(child, Mapping):
            yield from _nodes(child)


def _json_schema(node: Schema) -> Json:
    """The structural schema in words that a JSON Schema validator knows."""
    out: Json = {
        k: v for k, v in node.items() if not k.startswith("x-") and k not in ("nullable", "default", "description")
    }
    if node.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
        out["type"] = ["integer", "string"]
    if out.get("format") not in ("date-time", "date"):
        out.pop("format", None)
    if node.get("nullable") and "type" in out:
        out["type"] = [out["type"], "null"]
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if out.get(flag) is True:
            out[flag] = out.pop(bound)
        elif flag in out and isinstance(out[flag], bool):
            del out[flag]
    if "properties" in node:
        out["properties"] = {name: _json_schema(child) for name, child in node["properties"].items()}
    for name in ("items", "additionalProperties", "not"):
        if isinstance(node.get(name), Mapping):
            out[name] = _json_schema(node[name])
    for name in ("allOf", "anyOf", "oneOf"):
        if name in node:
            out[name] = [_json_schema(child) for child in node[name]]
    return out


def _prune(value: Any, schema: Schema, path: str, removed: list[str], *, root: bool = False) -> None:
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            _prune(item, schema.get("items") or {}, f"{path}[{index}]", removed)
    elif isinstance(value, dict):
        if (extra := schema.get("additionalProperties")) is not None:
            if isinstance(extra, Mapping):
                for name, item in value.items():
                    _prune(item, extra, f"{path}.{name}", removed)
            return
        properties = schema.get("properties")
        if properties is None and "type" not in schema:
            return
        for name in list(value):
            if root and name in ("apiVersion", "kind", "metadata"):
                continue
            here = f"{path}.{name}" if path else name
            if name in (properties or {}):
                _prune(value[name], (properties or {})[name], here, removed)
            else:
                removed.append(here)
                del value[name]


def _default(value: Any, schema: Schema) -> None:
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            if child.get("default") is not None and value.get(name) is None:
                value[name] = copy({"v": child["default"]})["v"]
            if name in value:
                _default(value[name], child)
        if isinstance(extra := schema.get("additionalProperties"), Mapping):
            for item in value.values():
                _default(item, extra)
    elif isinstance(value, list) and isinstance(items := schema.get("items"), Mapping):
        for item in value:
            _default(item, items)


def _path(parts: list[Any]) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _cause(error: jsonschema_rs.ValidationError) -> Cause:
    """The error in the words of the Kubernetes API server."""
    path = _path(list(error.instance_path))
    kind: Any = error.kind
    value = error.instance
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    match kind.name:
        case "required":
            name = f"{path}.{kind.property}" if path else kind.property
            return Cause(name, "Required value", "FieldValueRequired")
        case "pattern":
            rule = f"should match '{kind.pattern}'"
        case "minLength":
            rule = f"should be at least {kind.limit} chars long"
        case "maxLength":
            rule = f"should be at most {kind.limit} chars long"
        case "minimum":
            rule = f"should be greater than or equal to {kind.limit}"
        case "maximum":
            rule = f"should be less than or equal to {kind.limit}"
        case "enum":
            options = ", ".join(f'"{option}"' for option in kind.options)
            message = f"Unsupported value: {shown}: supported values: {options}"
            return Cause(path, message, "FieldValueNotSupported")
        case "type":
            rule = f"must be of type {' or '.join(kind.types)}"
            return Cause(path, f"Invalid value: {path} in body {rule}: {shown}", "FieldValueTypeInvalid")
        case _:
            rule = error.message
    return Cause(path, f"Invalid value: {shown}: {path} in body {rule}")
