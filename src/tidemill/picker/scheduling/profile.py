"""A profile, and the handlers that decide which profiles run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PrivateAttr

from tidemill.picker.load import FloatArray
from tidemill.picker.pools.endpoints import Endpoint
from tidemill.picker.scheduling.cycle import Cycle
from tidemill.picker.scheduling.plugin import (
    Chosen,
    Decider,
    Emptied,
    Filter,
    Outcome,
    Picker,
    Plugin,
    ProfileHandler,
    Scorer,
)

PREFILL_HEADER = "x-prefiller-host-port"


@dataclass(frozen=True, slots=True)
class Profile:
    """Filters in order, then the weighted sum of scores, then a pick."""

    name: str
    filters: Sequence[tuple[str, Filter]]
    scorers: Sequence[tuple[str, Scorer, float]]
    picker: Picker
    remembering: Sequence[Scorer]  # those that want to be told of the pick

    def run(self, cycle: Cycle) -> Chosen | Emptied:
        for name, plugin in self.filters:
            cycle = cycle.narrowed(plugin.keep(cycle))
            if not len(cycle):
                return Emptied(name)
        totals: FloatArray | None = None
        for _, scorer, weight in self.scorers:
            scores = scorer.score(cycle)
            if weight != 1.0:
                scores *= weight
            totals = scores if totals is None else np.add(totals, scores, out=totals)
        if totals is None:
            totals = np.zeros(len(cycle))
        positions = self.picker.pick(cycle, totals)
        endpoints, rows = cycle.endpoints, cycle.rows
        chosen = Chosen(
            tuple([endpoints[i] for i in positions]),
            tuple([rows.item(i) for i in positions]),
            tuple([totals.item(i) for i in positions]),
        )
        for scorer in self.remembering:
            scorer.picked(cycle, chosen.endpoints[0])
        return chosen

    def timed(self, cycle: Cycle, now: Callable[[], float]) -> Iterator[tuple[str, str, str, float]]:
        """Extension point, type and name of each plugin, and how many seconds of `now` it takes for this cycle."""
        for point, plugins in (("Filter", self.filters), ("Scorer", [(n, s) for n, s, _ in self.scorers])):
            for name, plugin in plugins:
                begun = now()
                plugin.keep(cycle) if isinstance(plugin, Filter) else plugin.score(cycle)
                yield point, type(plugin).__name__, name, now() - begun

    def explain(self, cycle: Cycle) -> list[dict[str, Any]]:
        """Each candidate with what every filter and scorer makes of it."""
        rows: list[dict[str, Any]] = [{"endpoint": endpoint.address} for endpoint in cycle.endpoints]
        for name, plugin in self.filters:
            kept = plugin.keep(cycle)
            for row, stays in zip(rows, kept.tolist(), strict=True):
                row.setdefault("filters", {})[name] = stays
        for name, scorer, weight in self.scorers:
            for row, score in zip(rows, scorer.score(cycle).tolist(), strict=True):
                row.setdefault("scores", {})[name] = round(score, 6)
                row["total"] = round(row.get("total", 0.0) + weight * score, 6)
        return rows


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
