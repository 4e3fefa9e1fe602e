"""What a role's engines say together: absent is not zero."""

from __future__ import annotations

from decimal import Decimal

from tidemill.capacity.types import Role
from tidemill.capacity.view import EngineLoad, RoleView, UpstreamQueue


def view(*rates: tuple[float | None, float | None]) -> RoleView:
    engines = tuple(
        EngineLoad(
            variant="a", replica=f"p{i}", kv_usage=Decimal(0), queue_length=Decimal(2), request_rate=requests,
            output_rate=tokens,
        )
        for i, (requests, tokens) in enumerate(rates)
    )  # fmt: skip
    return RoleView(model="ns/m", role=Role.BOTH, variants=(), engines=engines, upstream=UpstreamQueue(Decimal(3)))


def test_rates_add_up_where_every_engine_says_its_own() -> None:
    seen = view((1.5, 100.0), (0.0, 50.0))
    assert (seen.request_rate, seen.output_rate) == (1.5, 150.0)


def test_an_engine_that_does_not_say_its_rate_leaves_the_sum_unknown() -> None:
    assert view((1.5, 100.0), (None, 50.0)).request_rate is None
    assert view((1.5, 100.0), (0.5, None)).output_rate is None


def test_what_waits_is_in_the_engines_and_before_them() -> None:
    assert view((1.0, 1.0), (1.0, 1.0)).waiting == 7
