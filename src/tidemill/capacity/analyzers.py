"""The analyzers there are, by the name that a configuration gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tidemill.api.saturation_config import QUEUEING_MODEL, THROUGHPUT, TOKENS
from tidemill.capacity.latency import QueueingModelAnalyzer
from tidemill.capacity.report import CapacityReport, Json, NoReport
from tidemill.capacity.throughput import ThroughputAnalyzer
from tidemill.capacity.tokens import TokenAnalyzer
from tidemill.capacity.view import RoleView


class Analyzer(Protocol):
    """Says what replicas can do and what is asked of them, in a unit of its own. It may remember what it saw;
    `dump` gives that for a successor to `load`."""

    @property
    def name(self) -> str: ...

    def report(self, view: RoleView) -> CapacityReport | NoReport: ...

    def dump(self) -> Json: ...

    def load(self, state: Json) -> None: ...


ANALYZERS: Mapping[str, Callable[[], Analyzer]] = {
    TOKENS: TokenAnalyzer,
    THROUGHPUT: ThroughputAnalyzer,
    QUEUEING_MODEL: QueueingModelAnalyzer,
}
