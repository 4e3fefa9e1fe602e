"""ConfigMaps whose entries are layers of settings, each a small YAML document.

A layer holds only what was written; what is absent shines through from the layer below, field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from tidemill.api.problem import InvalidObjectError, Problem, problems_of

L = TypeVar("L", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class LayerMap(Generic[L]):
    """One ConfigMap read: its name for messages, and its good layers by entry name."""

    object: str
    layers: Mapping[str, L]


def read_layers(
    layer: type[L],
    data: Mapping[str, str],
    *,
    object_name: str,
    last_good: LayerMap[L] | None,
    check: Callable[[str, L], Problem | None],
) -> tuple[LayerMap[L], list[Problem]]:
    """Layers of a ConfigMap and what is wrong with the others. Never raises.

    An entry that is not YAML, breaks the schema of `layer`, or that `check` objects to keeps the layer that
    it had in `last_good`.
    """
    layers: dict[str, L] = {}
    problems: list[Problem] = []
    for entry in sorted(data):
        found, wrong = _read(layer, entry, data[entry], object_name)
        if found is not None and (objection := check(entry, found)) is not None:
            found, wrong = None, [objection]
        problems += wrong
        if found is None:
            found = None if last_good is None else last_good.layers.get(entry)
        if found is not None:
            layers[entry] = found
    return LayerMap(object_name, layers), problems


def read_document(model: type[L], text: str, *, object_name: str) -> L:
    """A whole YAML or JSON document; fields that are null count as absent. Raises InvalidObjectError."""
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidObjectError([yaml_problem(object_name, "(whole)", text, error)]) from None
    if not isinstance(content, dict | None):
        raise InvalidObjectError(
            [Problem(object_name, "(whole)", str(content)[:120], "must be a mapping of fields")]
        )
    try:
        return model.model_validate({key: value for key, value in (content or {}).items() if value is not None})
    except ValidationError as error:
        raise InvalidObjectError(problems_of(object_name, error.errors())) from None


def yaml_problem(object_name: str, field: str, text: str, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f" (line {mark.line + 1})" if mark is not None else ""
    first_line = text.strip().splitlines()[0][:120] if text.strip() else ""
    return Problem(object_name, field, first_line, f"must be YAML{where}: {getattr(error, 'problem', error)}")


def _read(layer: type[L], entry: str, text: str, object_name: str) -> tuple[L | None, list[Problem]]:
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return None, [yaml_problem(object_name, entry, text, error)]
    if not isinstance(content, dict | None):
        return None, [Problem(object_name, entry, str(content)[:120], "must be a mapping of fields")]
    try:
        return layer.model_validate(content or {}), []
    except ValidationError as error:
        return None, problems_of(object_name, error.errors(), prefix=entry)
