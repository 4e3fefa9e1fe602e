"""What a plugin is: its parameters are its fields, and its base class says at which point it acts.

Plugins are made for each pool, so what one remembers is of that pool.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.api.model import StrictModel
from tidemill.picker.load import FloatArray
from tidemill.picker.pools.endpoints import Endpoint
from tidemill.picker.scheduling.cycle import Cycle

if TYPE_CHECKING:
    from tidemill.picker.scheduling.profile import Profile


class Plugin(StrictModel):
    """Base of all. Its fields are the parameters that a configuration may give. Those `without_effect` are taken
    because configurations of the original have them, and said when they are given."""

    without_effect: ClassVar[frozenset[str]] = frozenset()


class Filter(Plugin):
    """Says which candidates stay."""

    @abstractmethod
    def keep(self, cycle: Cycle) -> NDArray[np.bool_]: ...


class Scorer(Plugin):
    """Gives each candidate a score from 0 to 1; what it cannot know gets its worst."""

    @abstractmethod
    def score(self, cycle: Cycle) -> FloatArray: ...

    def picked(self, cycle: Cycle, endpoint: Endpoint) -> None:
        """Told of the pick, for scorers that remember."""


class Picker(Plugin):
    """Orders candidates by their total score and takes the best."""

    @abstractmethod
    def pick(self, cycle: Cycle, totals: FloatArray) -> list[int]:
        """Positions of the chosen candidates, the best first; at least one."""


class Chosen(NamedTuple):
    """What one profile chose: endpoints, the best first, with their rows and total scores."""

    endpoints: tuple[Endpoint, ...]
    rows: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Emptied:
    """A profile found no endpoint: every candidate was taken out by `plugin`."""

    plugin: str


class Outcome(NamedTuple):
    """What the handler made of its profiles: where the request goes and what it is told on the way."""

    primary: Chosen
    headers: tuple[tuple[str, str], ...] = ()
    prefill: Chosen | None = None


class ProfileHandler(Plugin):
    """Decides which profiles run and which of them names the destination."""

    @abstractmethod
    def run(self, cycle: Cycle, profiles: Mapping[str, Profile]) -> Outcome | Emptied: ...

    def check(self, profiles: Mapping[str, Profile]) -> str | None:
        """What is wrong with these profiles for this handler, if anything."""


class Decider(Plugin):
    """Whether a request is worth a prefill elsewhere."""

    @abstractmethod
    def disaggregate(self, cycle: Cycle, endpoint: Endpoint) -> bool: ...


class Setting(Plugin):
    """A plugin of the original that chooses what is built in here; it takes parameters and does nothing
    by itself."""
