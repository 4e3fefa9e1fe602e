"""The scheduler of one pool: built from an EndpointPickerConfig, asked once a request."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from pydantic import ValidationError

from tidemill.api.picker_config import EndpointPickerConfig, PluginSpec
from tidemill.api.problem import InvalidObjectError, Problem, problems_of
from tidemill.picker.load import IntArray, LoadTable
from tidemill.picker.pools.endpoints import Endpoint
from tidemill.picker.scheduling.cycle import Cycle, SchedulingRequest
from tidemill.picker.scheduling.filters import FILTERS
from tidemill.picker.scheduling.handlers import HANDLERS, DisaggProfileHandler, SingleProfileHandler
from tidemill.picker.scheduling.pickers import PICKERS, MaxScorePicker
from tidemill.picker.scheduling.plugin import (
    Decider,
    Emptied,
    Filter,
    Outcome,
    Picker,
    Plugin,
    ProfileHandler,
    Scorer,
)
from tidemill.picker.scheduling.prefix import DEFAULT_CAPACITY, PrefixIndex
from tidemill.picker.scheduling.profile import Profile
from tidemill.picker.scheduling.scorers import SCORERS, PrefixCacheScorer
from tidemill.picker.scheduling.settings import SETTINGS, ApproxPrefixCacheProducer

log = structlog.get_logger(__name__)

DEFAULT_BLOCK_TOKENS = 64
DEFAULT_MAX_TOKENS = 131_072
DEFAULT_CONFIG = EndpointPickerConfig.model_validate(
    {
        "plugins": [
            {"type": "queue-scorer"},
            {"type": "kv-cache-utilization-scorer"},
            {"type": "prefix-cache-scorer"},
            {"type": "max-score-picker"},
        ],
        "schedulingProfiles": [
            {
                "name": "default",
                "plugins": [
                    {"pluginRef": "queue-scorer", "weight": 2},
                    {"pluginRef": "kv-cache-utilization-scorer", "weight": 2},
                    {"pluginRef": "prefix-cache-scorer", "weight": 3},
                    {"pluginRef": "max-score-picker"},
                ],
            }
        ],
    }
)
PLUGIN_TYPES: Mapping[str, type[Any]] = {**SCORERS, **FILTERS, **PICKERS, **HANDLERS, **SETTINGS}


@dataclass(frozen=True, slots=True)
class NoCandidates:
    """Nobody may serve the request; `reason` says why, in words for the client."""

    reason: str


class Scheduler:
    """Picks among the endpoints of one pool. Owns the pool's prefix index.

    Raises InvalidObjectError for a configuration that cannot be run; `source` names it in the message.
    """

    def __init__(
        self, config: EndpointPickerConfig, load: LoadTable, rng: random.Random, *, source: str = "(default)"
    ) -> None:
        where = f"EndpointPickerConfig {source}"
        self.plugins = _instantiate(config, where)
        self.profiles, self.handler = _assemble(config, self.plugins, where)
        self.prefix = _prefix_index(self.plugins, where)
        self._load = load
        self._rng = rng
        load.on_reset(self.prefix.forget)

    def cycle(
        self,
        request: SchedulingRequest,
        endpoints: Sequence[Endpoint],
        rows: IntArray,
        now: float,
        *,
        select: slice | None = None,
    ) -> Cycle:
        """A cycle over `endpoints` in `rows`; `select` is the same as a slice, where they follow each other."""
        return Cycle(
            request, endpoints=endpoints, rows=rows, load=self._load, prefix=self.prefix, now=now, rng=self._rng,
            select=select,
        )  # fmt: skip

    def schedule(self, cycle: Cycle) -> Outcome | Emptied | NoCandidates:
        """Screen, then let the handler run its profiles. `cycle` holds who may be picked at all."""
        if not len(cycle):
            return NoCandidates("no ready endpoint")
        screened = screen(cycle)
        if screened is None:
            return NoCandidates("every endpoint is asleep")
        return self.handler.run(screened, self.profiles)


def screen(cycle: Cycle) -> Cycle | None:
    """Those awake; of these, those with numbers if there are any. None when all are asleep: a sleeping engine
    does not wake by being asked."""
    if cycle.load.sleeping:
        awake = cycle.load.awake[cycle.rows]
        if not awake.any():
            return None
        cycle = cycle.narrowed(awake)
    return cycle if cycle.all_known or cycle.blind else cycle.narrowed(cycle.known)


def _instantiate(config: EndpointPickerConfig, where: str) -> dict[str, Plugin]:
    plugins: dict[str, Plugin] = {}
    problems: list[Problem] = []
    for index, spec in enumerate(config.plugins):
        kind = PLUGIN_TYPES.get(spec.type)
        if kind is None:
            rule = f"must be one of {', '.join(sorted(PLUGIN_TYPES))}"
            problems.append(Problem(where, f"plugins.{index}.type", spec.type, rule))
            continue
        try:
            plugin = plugins[spec.name] = kind.model_validate(spec.parameters or {})
        except ValidationError as error:
            prefix = f"plugins.{index} ({_label(spec)}) parameters"
            problems += problems_of(where, error.errors(), prefix=prefix)
            continue
        for name in sorted(plugin.without_effect & plugin.model_fields_set):
            field = kind.model_fields[name].alias or name
            log.warning("parameter has no effect here", config=where, plugin=_label(spec), parameter=field)
    if problems:
        raise InvalidObjectError(problems)
    return plugins


def _label(spec: PluginSpec) -> str:
    return spec.name if spec.name == spec.type else f"{spec.name}, {spec.type}"


def _assemble(
    config: EndpointPickerConfig, plugins: dict[str, Plugin], where: str
) -> tuple[dict[str, Profile], ProfileHandler]:
    problems: list[Problem] = []

    def referenced(field: str, name: str) -> Plugin | None:
        found = plugins.get(name)
        if found is None:
            rule = f"must name one of the plugins: {', '.join(sorted(plugins)) or 'there are none'}"
            problems.append(Problem(where, field, name, rule))
        return found

    default_picker = next((p for p in plugins.values() if isinstance(p, Picker)), MaxScorePicker())
    profiles: dict[str, Profile] = {}
    for index, spec in enumerate(config.scheduling_profiles):
        members: list[tuple[str, Plugin, float]] = []
        for position, ref in enumerate(spec.plugins):
            field = f"schedulingProfiles.{index} ({spec.name}) plugins.{position}.pluginRef"
            found = referenced(field, ref.plugin_ref)
            if found is None:
                continue
            if not isinstance(found, Filter | Scorer | Picker | ProfileHandler):
                rule = "must be a filter, a scorer or a picker"
                problems.append(Problem(where, field, ref.plugin_ref, rule))
            members.append((ref.plugin_ref, found, ref.weight))
        profiles[spec.name] = _profile(spec.name, members, default_picker)
    if not config.scheduling_profiles:
        profiles["default"] = _profile("default", [(n, p, 1.0) for n, p in plugins.items()], default_picker)

    handlers = [(name, p) for name, p in plugins.items() if isinstance(p, ProfileHandler)]
    if len(handlers) > 1:
        names = ", ".join(name for name, _ in handlers)
        problems.append(Problem(where, "plugins", names, "must hold at most one profile handler"))
    name, handler = handlers[0] if handlers else ("single-profile-handler", SingleProfileHandler())
    if isinstance(handler, DisaggProfileHandler) and handler.decider_ref:
        decider = referenced(f"plugins ({name}) parameters.deciders.prefill", handler.decider_ref)
        if isinstance(decider, Decider):
            handler.use(decider)
        elif decider is not None:
            problems.append(
                Problem(where, f"plugins ({name}) parameters", handler.decider_ref, "must be a decider")
            )
    if not problems and (objection := handler.check(profiles)) is not None:
        problems.append(Problem(where, f"plugins ({name})", "schedulingProfiles", objection))
    for field, ref in (
        ("flowControl.saturationDetector.pluginRef", config.detector_ref),
        *((f"dataLayer.sources.{i}.pluginRef", s.plugin_ref) for i, s in enumerate(config.data_layer.sources)),
        *((f"requestHandler.parsers.{i}", p.plugin_ref) for i, p in enumerate(config.request_handler.parsers)),
    ):
        if ref and ref not in plugins:
            referenced(field, ref)
    if problems:
        raise InvalidObjectError(problems)
    return profiles, handler


def _profile(name: str, members: Sequence[tuple[str, Plugin, float]], default_picker: Picker) -> Profile:
    return Profile(
        name,
        filters=tuple((n, p) for n, p, _ in members if isinstance(p, Filter)),
        scorers=tuple((n, p, weight) for n, p, weight in members if isinstance(p, Scorer)),
        picker=next((p for _, p, _ in members if isinstance(p, Picker)), default_picker),
        remembering=tuple(
            p for _, p, _ in members if isinstance(p, Scorer) and type(p).picked is not Scorer.picked
        ),
    )


def _prefix_index(plugins: Mapping[str, Plugin], where: str) -> PrefixIndex:
    """One index a pool, set up by the producer or, in older configurations, by the scorer."""
    sources = [(n, p) for n, p in plugins.items() if isinstance(p, ApproxPrefixCacheProducer | PrefixCacheScorer)]

    def setting(field: str, wire: str) -> int | None:
        values = {n: getattr(p, field) for n, p in sources if getattr(p, field) is not None}
        if len(set(values.values())) > 1:
            rule = f"must be the same in {' and '.join(sorted(values))}: a pool has one prefix index"
            raise InvalidObjectError([Problem(where, f"plugins {wire}", str(values), rule)])
        return next(iter(values.values()), None)

    block = setting("block_size_tokens", "blockSizeTokens") or DEFAULT_BLOCK_TOKENS
    max_tokens = setting("max_prefix_tokens_to_match", "maxPrefixTokensToMatch")
    max_blocks = setting("max_prefix_blocks_to_match", "maxPrefixBlocksToMatch")
    if max_tokens is None:
        max_tokens = max_blocks * block if max_blocks is not None else DEFAULT_MAX_TOKENS
    capacity = setting("lru_capacity_per_server", "lruCapacityPerServer") or DEFAULT_CAPACITY
    if block < DEFAULT_BLOCK_TOKENS:
        log.warning(
            "small prefix blocks cost memory and time: each endpoint may hold lruCapacityPerServer of them",
            blockSizeTokens=block, default=DEFAULT_BLOCK_TOKENS, lruCapacityPerServer=capacity,
        )  # fmt: skip
    return PrefixIndex(block_tokens=block, max_tokens=max_tokens, capacity=capacity)
