"""Which accelerators there are, and which are free. Unknown is not empty: what is not known limits nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Devices by product. `unknown` says why nothing is known; the counts then mean nothing."""

    total: Mapping[str, int] = field(default_factory=dict)
    used: Mapping[str, int] = field(default_factory=dict)
    unknown: str = ""

    def free(self) -> dict[str, int]:
        return {product: max(0, count - self.used.get(product, 0)) for product, count in self.total.items()}


UNLIMITED = Inventory(unknown="accelerators are not limited")
