"""Which accelerators there are, and which are free. Unknown is not empty: what is not known limits nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.api.names import UNKNOWN_ACCELERATOR
from tidemill.capacity.types import VariantState


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Devices by product, and by placement (the nodes of a product that a variant's pods may go to). `unknown`
    says why nothing is known; the counts then mean nothing."""

    total: Mapping[str, int] = field(default_factory=dict)
    used: Mapping[str, int] = field(default_factory=dict)
    unknown: str = ""

    def free(self) -> dict[str, int]:
        return {place: max(0, count - self.used.get(place, 0)) for place, count in self.total.items()}

    def take(self, variant: VariantState) -> Inventory | None:
        """What is left after one replica of `variant`; None when there is not enough for it."""
        if self.unknown:
            return self
        free = self.free()
        if not take(variant, free):
            return None
        return Inventory(total=self.total, used={place: self.total[place] - left for place, left in free.items()})


UNLIMITED = Inventory(unknown="accelerators are not limited")


def places(variant: VariantState) -> tuple[str, ...]:
    """What a replica of `variant` takes devices from: its product, and its part of it where it is bound to one."""
    return (variant.accelerator, variant.placement) if variant.placement else (variant.accelerator,)


def take(variant: VariantState, free: dict[str, int]) -> bool:
    """Take the devices of one replica; False when there are not enough of them."""
    size = variant.gpus or 1
    if variant.accelerator != UNKNOWN_ACCELERATOR:
        mine = places(variant)
        if any(free.get(place, 0) < size for place in mine):
            return False
        for place in mine:
            free[place] -= size
        return True
    # Any product will do, but one replica is not spread over two.
    for product in sorted(free, key=lambda p: (-free[p], p)):
        if free[product] >= size:
            free[product] -= size
            return True
    return False
