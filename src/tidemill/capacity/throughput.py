"""Capacity in output tokens per second, learned from served tokens and inter-token latency, so that a fleet can be
sized before queues form.

Of each variant the line ITL(k) = A k + B over KV usage k is learned. At a usage of REACH a replica has
REACH x kv_tokens / KV per request sequences, each with a token every ITL(REACH). Formulas: upstream's throughput
analyzer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from tidemill.api.saturation_config import THROUGHPUT
from tidemill.capacity.report import CapacityReport, Json, NoReport
from tidemill.capacity.saturation import show
from tidemill.capacity.types import Role
from tidemill.capacity.view import EngineLoad, RequestShape, RoleView

UNIT = "output tokens/s"
REACH = 0.85
BASE = 0.006  # seconds, of a step with an empty cache, before any is known
SAMPLES = 20
ENOUGH = 10  # samples for a line
SPREAD = 0.30  # of usage that they must cover
LOWEST, HIGHEST = 0.15, 0.85  # usages that tell something
SHIFT = 0.20  # of input or output tokens: requests have become others
WRONG = 0.15  # share by which a prediction is wrong
WRONG_CYCLES = 3
LOOKS_FROM = 0.30  # usage from which on predictions are judged


@dataclass(slots=True)
class Curve:
    """ITL over KV usage of one variant, for requests of one shape."""

    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    shape: tuple[float, float] | None = None
    base: float = BASE
    wrong: int = 0

    def observe(self, usage: float, itl: float, shape: tuple[float, float]) -> None:
        """Take a measured point. Requests of another shape, or predictions that keep failing, begin anew."""
        if self.shape is not None and any(
            abs(new - old) > SHIFT * old for new, old in zip(shape, self.shape, strict=True)
        ):
            self.samples.clear()
            self.wrong = 0
        if not self.samples:
            self.shape = shape
        line = self.line()
        if line is not None and usage >= LOOKS_FROM:
            predicted = line[0] * usage + line[1]
            self.wrong = self.wrong + 1 if abs(predicted - itl) > WRONG * itl else 0
            if self.wrong >= WRONG_CYCLES:
                self.samples.clear()
                self.shape, self.wrong = shape, 0
        if LOWEST <= usage <= HIGHEST:
            self.samples.append((usage, itl))

    def line(self) -> tuple[float, float] | None:
        """A and B in seconds: by least squares over a wide range, else through the base; None when no line makes
        sense."""
        if not self.samples:
            return None
        usages = [usage for usage, _ in self.samples]
        if len(usages) >= ENOUGH and max(usages) - min(usages) >= SPREAD:
            mean_k = sum(usages) / len(usages)
            mean_t = sum(itl for _, itl in self.samples) / len(usages)
            slope = sum((k - mean_k) * (t - mean_t) for k, t in self.samples) / sum(
                (k - mean_k) ** 2 for k in usages
            )
            found = (slope, mean_t - slope * mean_k)
            if _sensible(found):
                self.base = found[1]
                return found
        slope = sum((t - self.base) * k for k, t in self.samples) / sum(k * k for k in usages)
        found = (slope, self.base)
        return found if _sensible(found) else None


def _sensible(line: tuple[float, float]) -> bool:
    return line[0] > 1e-12 and line[0] * REACH + line[1] > 0


class ThroughputAnalyzer:
    name = THROUGHPUT

    def __init__(self) -> None:
        self._curves: dict[tuple[str, str], Curve] = {}
        self._capacities: dict[tuple[str, str], Decimal] = {}

    def dump(self) -> Json:
        return {
            "curves": [[*key, *_dump_curve(curve)] for key, curve in self._curves.items()],
            "capacities": [[*key, str(capacity)] for key, capacity in self._capacities.items()],
        }

    def load(self, state: Json) -> None:
        for model, variant, samples, shape, base, wrong in state["curves"]:
            curve = self._curves[model, variant] = Curve(base=base, wrong=wrong)
            curve.samples.extend((usage, itl) for usage, itl in samples)
            curve.shape = None if shape is None else (shape[0], shape[1])
        for model, variant, capacity in state["capacities"]:
            self._capacities[model, variant] = Decimal(capacity)

    def report(self, view: RoleView) -> CapacityReport | NoReport:
        if view.role is Role.PREFILL:
            return NoReport(self.name, "prefill makes no output tokens", holds=False)
        shape = view.shape
        if shape.input_tokens is None or not shape.output_tokens:
            return NoReport(self.name, "no request has finished yet, so their size is not known", holds=False)
        size = (float(shape.input_tokens), float(shape.output_tokens))
        for engine in view.engines:
            if engine.itl is not None and engine.kv_tokens:
                curve = self._curves.setdefault((view.model, engine.variant), Curve())
                curve.observe(float(engine.kv_usage), engine.itl, size)
        per_request = kv_per_request(shape)
        by_variant: dict[str, list[EngineLoad]] = {}
        for engine in view.engines:
            by_variant.setdefault(engine.variant, []).append(engine)
        steps: list[float] = []
        for variant, engines in by_variant.items():
            curve = self._curves.get((view.model, variant))
            line = None if curve is None else curve.line()
            sizes = [engine.kv_tokens for engine in engines if engine.kv_tokens is not None]
            if line is None or len(sizes) < len(engines):
                continue
            step = line[0] * REACH + line[1]
            steps.append(step)
            replicas = len({engine.replica for engine in engines})
            each = REACH * sum(sizes) / replicas / per_request / step
            self._capacities[view.model, variant] = Decimal(repr(round(each, 3)))
        capacities = {
            v.name: self._capacities[view.model, v.name]
            for v in view.variants
            if (view.model, v.name) in self._capacities
        }
        generated = view.output_rate
        if not capacities or not steps:
            return NoReport(self.name, "no step times at a telling KV usage were seen yet", holds=False)
        if generated is None:
            return NoReport(self.name, "the rate of tokens is not known for every engine", holds=False)
        # A request that waits will ask for a token each two steps: it reads its prompt meanwhile.
        queued = float(view.waiting) / (2 * max(steps))
        supply, anticipated = view.supply(capacities)
        return CapacityReport(
            analyzer=self.name,
            unit=UNIT,
            per_replica=capacities,
            supply=supply,
            anticipated=anticipated,
            demand=Decimal(repr(round(generated + queued, 3))),
            thresholds=view.thresholds,
            numbers={
                "outputTokensPerSecond": f"{generated:.1f}",
                "waiting": show(view.waiting),
                **{f"capacityPerReplica/{name}": show(c) for name, c in sorted(capacities.items())},
            },
        )


def _dump_curve(curve: Curve) -> list[Any]:
    samples = [[round(usage, 4), round(itl, 6)] for usage, itl in curve.samples]
    return [samples, curve.shape, round(curve.base, 6), curve.wrong]


def kv_per_request(shape: RequestShape) -> float:
    """Tokens of cache that a request holds on average: I (1 - hit rate) + O / 2."""
    size_in, size_out = float(shape.input_tokens or 0), float(shape.output_tokens or 0)
    return max(1.0, size_in * (1 - float(shape.hit_rate or 0)) + size_out / 2)
