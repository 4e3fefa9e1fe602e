"""The endpoints file: who is there when no cluster says so."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from tidemill.api.inference import PortNumber
from tidemill.api.layers import read_document
from tidemill.api.model import StrictModel

DEFAULT_POOL = "default/default"


class StaticEndpoint(StrictModel):
    """One endpoint. `pool` is `namespace/name`, or a name in the endpoint's namespace."""

    name: Annotated[str, Field(min_length=1)]
    namespace: str = "default"
    address: str
    port: PortNumber
    labels: Annotated[dict[str, str], Field(default_factory=dict)]
    pool: str = ""

    @field_validator("address")
    @classmethod
    def _is_ip(cls, value: str) -> str:
        try:
            return str(ipaddress.ip_address(value.strip("[]")))
        except ValueError:
            raise ValueError("must be an IP address; names are not resolved") from None

    @property
    def pool_key(self) -> tuple[str, str]:
        """Namespace and name of the pool."""
        namespace, slash, name = (self.pool or DEFAULT_POOL).rpartition("/")
        return (namespace if slash else self.namespace), name


class EndpointsFile(StrictModel):
    endpoints: tuple[StaticEndpoint, ...] = ()

    @model_validator(mode="after")
    def _unique(self) -> Self:
        seen: set[tuple[str, str]] = set()
        for endpoint in self.endpoints:
            if (key := (endpoint.namespace, endpoint.name)) in seen:
                raise ValueError(f"endpoint {endpoint.namespace}/{endpoint.name} must be there once")
            seen.add(key)
        return self

    @classmethod
    def parse(cls, text: str, *, source: str) -> EndpointsFile:
        """Read YAML or JSON. Raises InvalidObjectError."""
        return read_document(cls, text, object_name=f"endpoints file {source}")
