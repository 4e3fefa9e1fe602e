"""One engine under random arrivals in simulated time: what requests meet there, without a wait."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tidemill.sim.engine import Engine, EngineParameters

WARM_UP = 0.2  # share of the time that is left out of the means


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens in and out: gamma distributed with these means and this squared coefficient of variation."""

    input_mean: float
    output_mean: float
    variability: float = 0.5

    def draw(self, rng: random.Random) -> tuple[int, int]:
        shape = 1 / self.variability
        return (
            max(1, round(rng.gammavariate(shape, self.input_mean / shape))),
            max(1, round(rng.gammavariate(shape, self.output_mean / shape))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """Times to the first token, and between tokens, in seconds; requests finished per second; and how many still
    waited at the end. The first share `WARM_UP` of the time is left out."""

    ttft: Sequence[float]
    itl: Sequence[float]
    rate: float
    waiting: int

    @property
    def mean_ttft(self) -> float:
        return fmean(self.ttft)

    @property
    def mean_itl(self) -> float:
        return fmean(self.itl)


def replay(
    parameters: EngineParameters, lengths: Lengths, *, rate: float, seconds: float, rng: random.Random
) -> Met:
    """Poisson arrivals at `rate` per second for `seconds`."""
    engine = Engine(parameters)
    now, arrival, number = 0.0, rng.expovariate(rate), 0
    ttft: list[float] = []
    itl: list[float] = []
    finished = 0
    while now < seconds:
        while arrival <= now:
            number += 1
            engine.submit(str(number), *lengths.draw(rng), arrival)
            arrival += rng.expovariate(rate)
        if not engine.busy:
            now = arrival
            continue
        step = engine.step(now)
        now += step.duration
        if now >= WARM_UP * seconds:
            for token in step.tokens:
                (ttft if token.index == 0 else itl).append(token.since_previous)
                finished += token.finished
    rate = finished / (now - WARM_UP * seconds)
    return Met(ttft=ttft, itl=itl, rate=rate, waiting=len(engine.waiting))
