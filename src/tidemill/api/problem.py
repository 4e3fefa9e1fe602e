"""One shape for everything that is wrong with what a user wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails


@dataclass(frozen=True, slots=True)
class Problem:
    """A refused value: which object, which field, what it held and the rule it broke.

    `object` reads like kubectl does, for example `ConfigMap wva-system/wva-manager-config`.
    """

    object: str
    field: str
    value: str
    rule: str

    def __str__(self) -> str:
        return f"{self.object}: {self.field}: invalid value {self.value!r}: {self.rule}"


class InvalidObjectError(ValueError):
    """An object that cannot be used; carries every problem found, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems))


def problems_of(object_name: str, errors: Sequence[ErrorDetails], *, prefix: str = "") -> list[Problem]:
    """Turn pydantic's error details into problems; `prefix` is put before each field path."""

    def path(location: tuple[int | str, ...]) -> str:
        return ".".join(part for part in (prefix, *map(str, location)) if part) or "(whole)"

    def rule(detail: ErrorDetails) -> str:
        message = detail["msg"].removeprefix("Value error, ")
        return message[0].lower() + message[1:]

    def value(detail: ErrorDetails) -> str:
        return "" if detail["type"] == "missing" else _short(detail["input"])

    return [Problem(object_name, path(e["loc"]), value(e), rule(e)) for e in errors]


def _short(value: Any, limit: int = 120) -> str:
    text = str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
