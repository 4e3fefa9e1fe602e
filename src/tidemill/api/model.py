"""The base of every kind that users write."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Camel case on the wire, snake case in Python, immutable, tolerant of fields it does not know."""

    model_config = ConfigDict(
        frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore", use_enum_values=False
    )


class StrictModel(BaseModel):
    """Camel case on the wire, immutable, and nothing unknown."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="forbid")
