"""From a view to a need: asks the analyzers, and weighs what they say against what they said before."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from statistics import median_low

from tidemill.api.saturation_config import SaturationSettings
from tidemill.capacity.analyzers import ANALYZERS, Analyzer
from tidemill.capacity.arrivals import Arrivals
from tidemill.capacity.demand import Level
from tidemill.capacity.departures import Departures
from tidemill.capacity.experience import Experience
from tidemill.capacity.needs import Need
from tidemill.capacity.report import CapacityReport, Json, NoReport, Thresholds
from tidemill.capacity.types import Role
from tidemill.capacity.view import RequestShape, RoleView

SHAPE = ("input_tokens", "output_tokens", "hit_rate")
SILENT_CYCLES = 3  # after which an analyzer without a report abstains
SAME = Decimal("0.20")  # share by which a capacity may differ and still be taken for the same
SAME_SETTLED = Decimal("0.5")  # while the demand stays at its level, and replicas have been provided for it
LOOKS = 3  # of a capacity, whose middle one counts: one that goes by itself is noise


@dataclass(slots=True)
class Capacity:
    """What one replica of a variant can take, as it counts: what is measured when that differs for longer."""

    counts: Decimal
    measured: deque[Decimal] = field(default_factory=lambda: deque(maxlen=LOOKS))

    def observe(self, now: Decimal, *, settled: bool) -> Decimal:
        self.measured.append(now)
        middle = median_low(self.measured) if len(self.measured) == LOOKS else now
        if abs(middle - self.counts) > (SAME_SETTLED if settled else SAME) * self.counts:
            self.counts = middle
        return self.counts


class Judge:
    """Remembers what the analyzers learned, how long each has been silent, and the level of each demand."""

    def __init__(self) -> None:
        self._analyzers: dict[str, Analyzer] = {name: make() for name, make in ANALYZERS.items()}
        self._silent: dict[tuple[str, Role, str], int] = {}
        self._levels: dict[tuple[str, Role, str], Level] = {}
        self._capacities: dict[tuple[str, Role, str], dict[str, Capacity]] = {}
        self._experiences: dict[tuple[str, Role], Experience] = {}
        self._departures: dict[tuple[str, Role], Departures] = {}
        self._arrivals: dict[tuple[str, Role], Arrivals] = {}
        self._shapes: dict[tuple[str, Role], dict[str, Level]] = {}

    def need(self, view: RoleView, settings: SaturationSettings, *, now: float, lead: float) -> Need:
        """What the role asks for at `now` (seconds); a replica takes `lead` seconds to start."""
        departures = self._departures.setdefault((view.model, view.role), Departures())
        arrivals = self._arrivals.setdefault((view.model, view.role), Arrivals())
        flow = arrivals.observe(view.engines, now=now, window=view.window)
        view = replace(
            view,
            departed=departures.observe(view.engines, now=now, window=view.rate_seconds),
            growth=flow.growth,
            unsettled=flow.unsettled,
            queued=flow.queued,
            shape=self._steady_shape(view, now),
        )
        votes: list[CapacityReport] = []
        now_said: list[CapacityReport] = []  # the same as they were said
        silent: list[NoReport] = []
        stand_ins = settings.stand_ins
        for name, (up, down) in sorted(
            settings.voting().items(), key=lambda item: (item[0] in stand_ins, item[0])
        ):
            found = self._analyzers[name].report(replace(view, thresholds=Thresholds(up=up, down=down)))
            slot = (view.model, view.role, name)
            if isinstance(found, CapacityReport):
                if name in stand_ins and (other := self._speaker(view, votes, silent)) is not None:
                    self._silent.pop(slot, None)
                    self._levels.pop(slot, None)
                    silent.append(NoReport(name, f"stands in for {other}, which has its say", holds=False))
                    continue
                self._silent.pop(slot, None)
                now_said.append(found)
                votes.append(self._steadied(slot, found, view, now, lead))
                continue
            if found.demand is not None:
                # Its level is then known when the capacities are.
                self._level(slot).observe(now, float(found.demand), window=view.window)
            cycles = self._silent[slot] = self._silent.get(slot, 0) + 1
            silent.append(found if found.holds or cycles >= SILENT_CYCLES else replace(found, holds=True))
        experience = self._experiences.setdefault((view.model, view.role), Experience())
        experience.observe(view, now_said, now)
        if votes and (vote := experience.vote(view, votes)) is not None:
            votes.append(self._steadied((view.model, view.role, vote.analyzer), vote, view, now, 0.0))
        return Need(
            model=view.model, role=view.role, variants=view.variants, votes=tuple(votes), silent=tuple(silent),
            priority=settings.priority, filling=len(flow.filling),
        )  # fmt: skip

    def dump(self) -> Json:
        """All that was learned, for a successor."""
        return {
            "analyzers": {name: analyzer.dump() for name, analyzer in self._analyzers.items()},
            "levels": [[*slot, *level.dump()] for slot, level in self._levels.items()],
            "experiences": [[*slot, *found.dump()] for slot, found in self._experiences.items()],
            "capacities": [
                [*slot, {name: str(each.counts) for name, each in found.items()}]
                for slot, found in self._capacities.items()
            ],
        }

    def load(self, state: Json) -> None:
        """Go on from what `dump` gave. Raises KeyError, TypeError, ValueError or ArithmeticError for others."""
        for name, found in state["analyzers"].items():
            if name in self._analyzers:
                self._analyzers[name].load(found)
        for model, role, analyzer, *level in state["levels"]:
            self._levels.setdefault((model, Role(role), analyzer), Level()).load(level)
        for model, role, *found in state["experiences"]:
            self._experiences.setdefault((model, Role(role)), Experience()).load(found)
        for model, role, analyzer, found in state["capacities"]:
            self._capacities[model, Role(role), analyzer] = {
                name: Capacity(Decimal(each)) for name, each in found.items()
            }

    def forget(self, models: Collection[str]) -> None:
        """Keep nothing of any model but these; what analyzers learned of engines stays, for when it comes back."""
        for slots in (self._silent, self._levels, self._capacities):
            for gone in [slot for slot in slots if slot[0] not in models]:
                del slots[gone]
        for remembered in (self._experiences, self._departures, self._arrivals, self._shapes):
            for gone in [slot for slot in remembered if slot[0] not in models]:
                del remembered[gone]

    def _steady_shape(self, view: RoleView, now: float) -> RequestShape:
        """Means of requests over as long as they stay alike: those of one window are of few requests, and what is
        learned of their chance is wrong."""
        levels = self._shapes.setdefault((view.model, view.role), {})
        found: dict[str, Decimal] = {}
        for name in SHAPE:
            value = getattr(view.shape, name)
            if value is not None:
                level = levels.setdefault(name, Level())
                level.observe(now, float(value), window=view.window)
                found[name] = value if len(level.samples) == 1 else Decimal(repr(round(level.mean, 6)))
        return RequestShape(**found)

    def _level(self, slot: tuple[str, Role, str]) -> Level:
        return self._levels.setdefault(slot, Level())

    def _speaker(self, view: RoleView, votes: Sequence[CapacityReport], silent: Sequence[NoReport]) -> str | None:
        """An analyzer that says something, or did so lately and will again."""
        if votes:
            return votes[0].analyzer
        spoke = [s.analyzer for s in silent if s.holds and (view.model, view.role, s.analyzer) in self._capacities]
        return spoke[0] if spoke else None

    def _steadied(
        self, slot: tuple[str, Role, str], report: CapacityReport, view: RoleView, now: float, lead: float
    ) -> CapacityReport:
        """The report with its demand as the level shows it (the sample itself stays among the numbers), and with
        capacities that are measured anew only when they differ."""
        level = self._level(slot)
        level.observe(now, float(report.demand), window=report.window)
        report = self._with_held_capacity(slot, report, view, settled=level.settled)
        if len(level.samples) == 1:
            return report
        demand = Decimal(repr(round(level.upper(lead), 3)))
        return replace(report, demand=demand, numbers={"demandNow": f"{report.demand:.3f}", **report.numbers})

    def _with_held_capacity(
        self, slot: tuple[str, Role, str], report: CapacityReport, view: RoleView, *, settled: bool
    ) -> CapacityReport:
        held = self._capacities.get(slot, {})
        self._capacities[slot] = {
            name: held.get(name) or Capacity(now) for name, now in report.per_replica.items()
        }
        capacities = {
            name: self._capacities[slot][name].observe(now, settled=settled)
            for name, now in report.per_replica.items()
        }
        if capacities == report.per_replica:
            return report
        supply, anticipated = view.supply(capacities)
        return replace(report, per_replica=capacities, supply=supply, anticipated=anticipated)
