"""The handlers that decide which profiles run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from tidemill.picker.pools.endpoints import Endpoint
from tidemill.picker.scheduling.cycle import Cycle
from tidemill.picker.scheduling.plugin import Decider, Emptied, Outcome, Plugin, ProfileHandler
from tidemill.picker.scheduling.profile import Profile

PREFILL_HEADER = "x-prefiller-host-port"


class SingleProfileHandler(ProfileHandler):
    def run(self, cycle: Cycle, profiles: Mapping[str, Profile]) -> Outcome | Emptied:
        found = next(iter(profiles.values())).run(cycle)
        return found if isinstance(found, Emptied) else Outcome(found)

    def check(self, profiles: Mapping[str, Profile]) -> str | None:
        return None if len(profiles) == 1 else f"needs exactly one scheduling profile, not {len(profiles)}"


class DisaggProfileHandler(ProfileHandler):
    """Decode first; then, when the decider thinks it worth it, a prefill endpoint that the decode server is told
    of in a header. Without a decider there is no prefill. `always-disagg-pd-decider` means always: no prefill
    endpoint is then an error, where other deciders let decode do the work alone."""

    decode_profile: str = "decode"
    prefill_profile: str = "prefill"
    deciders: Annotated[dict[Literal["prefill", "encode"], str], Field(default_factory=dict)]
    decider_plugin_name: str = ""  # of the older pd-profile-handler
    prefix_plugin_name: str = ""
    prefix_plugin_type: str = ""
    hash_block_size: int | None = None
    threshold: int | None = None
    primary_port: int | None = None
    # Of the older pd-profile-handler, which decided by itself; a decider does now.
    without_effect = frozenset(
        {"prefix_plugin_name", "prefix_plugin_type", "hash_block_size", "threshold", "primary_port"}
    )
    _decider: Decider | None = PrivateAttr(default=None)

    @property
    def decider_ref(self) -> str:
        return self.deciders.get("prefill", "") or self.decider_plugin_name

    def use(self, decider: Decider | None) -> None:
        self._decider = decider

    def check(self, profiles: Mapping[str, Profile]) -> str | None:
        for name in (self.decode_profile, self.prefill_profile):
            if name not in profiles:
                return f"needs a scheduling profile named {name!r}; there are {', '.join(sorted(profiles))}"
        if "encode" in self.deciders:
            return "deciders.encode: encode disaggregation is not supported"
        return None

    def run(self, cycle: Cycle, profiles: Mapping[str, Profile]) -> Outcome | Emptied:
        decode = profiles[self.decode_profile].run(cycle)
        if isinstance(decode, Emptied):
            return decode
        decider = self._decider
        if decider is None or not decider.disaggregate(cycle, decode.endpoints[0]):
            return Outcome(decode)
        prefill = profiles[self.prefill_profile].run(cycle)
        if isinstance(prefill, Emptied):
            return prefill if isinstance(decider, AlwaysDisaggPdDecider) else Outcome(decode)
        return Outcome(decode, ((PREFILL_HEADER, prefill.endpoints[0].address),), prefill)


class AlwaysDisaggPdDecider(Decider):
    def disaggregate(self, cycle: Cycle, endpoint: Endpoint) -> bool:
        return True


class PrefixBasedPdDecider(Decider):
    """A prefill elsewhere when the prompt has at least `promptTokens` tokens, and at least `nonCachedTokens` of
    them are not cached where it will be decoded. 0 turns disaggregation off."""

    non_cached_tokens: Annotated[int, Field(ge=0)] = 0
    prompt_tokens: Annotated[int, Field(ge=0)] = 0

    def disaggregate(self, cycle: Cycle, endpoint: Endpoint) -> bool:
        tokens = cycle.request.prompt.tokens
        if not self.non_cached_tokens or tokens < max(self.prompt_tokens, self.non_cached_tokens):
            return False
        seat = cycle.load.seat(endpoint.id)
        cached = 0 if seat is None else cycle.match.of(seat.row)
        return tokens - cached * cycle.prefix.block_tokens >= self.non_cached_tokens


HANDLERS: dict[str, type[Plugin]] = {
    "single-profile-handler": SingleProfileHandler,
    "disagg-profile-handler": DisaggProfileHandler,
    "pd-profile-handler": DisaggProfileHandler,
    "always-disagg-pd-decider": AlwaysDisaggPdDecider,
    "prefix-based-pd-decider": PrefixBasedPdDecider,
}
