"""What a step costs on a real engine, learned from what it exports.

The model of `queueing` says for the mean step T (the inter-token latency), with n_d sequences decoding c tokens of
context each, and mu I prompt tokens arriving a second,
    T = alpha + beta n_d + gamma n_d c + delta mu I T,
and for the first token of a request that meets no queue, roughly 1.5 T + delta I. Both are linear in the four
costs, so a Kalman filter for constants fits them: a cycle is two observations, the state is scaled by its prior,
and what is observed once in ten cycles is not forgotten by the other nine. Costs stay within a factor of 20 of
their prior: beyond it the numbers are not of such an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.capacity.queueing import ServiceTimes

Array = NDArray[np.float64]

PRIOR = ServiceTimes(base=0.012, per_sequence=4e-5, per_context_token=8e-8, per_prompt_token=6e-5)
"""Between the fits of an 8B model on H100 and of a 70B model on A100: right within a factor of 3 for most."""
ENOUGH = 3  # observations before a fit from that is trusted
PATIENCE = 10  # cycles that bring only windows of no one state, until these have to do
_PRIOR_SPREAD = 1.0  # standard deviation of a cost, as a multiple of itself
_PRESET_SPREAD = 0.3  # of one that is published for this model and accelerator
_DRIFT = 0.003  # of a cost a cycle
_ERROR = 0.05  # of an observation, as a share of it
_TTFT_ERROR = 0.3  # the formula for the first token is rough
_CERTAIN = 0.5  # of that error: a prediction that is known so well is not made better by more of the same
_OFF = 2.0  # times that error, by which an observation is off such a prediction
_SURPRISE = 5.0  # standard deviations from which on an observation counts for less
_BOUND = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Means of one engine over one window. Seconds, requests per second, tokens."""

    itl: float
    ttft: float | None  # None also where a queue stood before the first tokens
    decoding: float
    context: float
    request_rate: float
    prompt_tokens: float  # that had to be computed, of one request


class Calibration:
    """Costs of one variant's engines. Starts from those published for them, where there are any."""

    def __init__(self, preset: ServiceTimes | None = None) -> None:
        prior = preset or PRIOR
        self._trusted = 0 if preset is not None else ENOUGH  # observations
        self._passed_over = 0  # cycles of which no window was of one state
        self._prior = np.array(
            [prior.base, prior.per_sequence, prior.per_context_token, prior.per_prompt_token], dtype=np.float64
        )
        self._state: Array = np.ones(4)
        self._covariance: Array = np.eye(4) * (_PRIOR_SPREAD if preset is None else _PRESET_SPREAD) ** 2
        self.observations = 0

    @property
    def times(self) -> ServiceTimes:
        base, per_sequence, per_context_token, per_prompt_token = (self._state * self._prior).tolist()
        return ServiceTimes(
            base=base,
            per_sequence=per_sequence,
            per_context_token=per_context_token,
            per_prompt_token=per_prompt_token,
        )

    def dump(self) -> list[Any]:
        return [self.observations, self._state.tolist(), self._covariance.tolist(), self._prior.tolist()]

    def load(self, state: list[Any]) -> None:
        """Go on from what `dump` gave. Raises ValueError for anything else."""
        observations, costs, covariance, prior = state
        found, spread = np.array(costs, dtype=np.float64), np.array(covariance, dtype=np.float64)
        units = np.array(prior, dtype=np.float64)
        if found.shape != (4,) or spread.shape != (4, 4) or not np.isfinite(spread).all() or not (found > 0).all():
            raise ValueError("not the state of a fit")
        if units.shape != (4,) or not (units > 0).all():
            raise ValueError("not the costs that a fit began with")
        self.observations, self._state, self._covariance = int(observations), found, spread
        self._prior = units

    @property
    def known(self) -> bool:
        """Whether the costs are to be relied on."""
        return self.observations >= self._trusted

    def observe(self, settled: Iterable[Observation], unsettled: Iterable[Observation] = ()) -> None:
        """Take the windows of one cycle into account, one for each engine. Those over which a batch filled or
        emptied are of no one state, and teach nothing; but where only such ones come, they have to do at first."""
        telling = [seen for seen in settled if seen.itl > 0 and seen.decoding > 0]
        if not telling and not self.known:
            telling = [seen for seen in unsettled if seen.itl > 0 and seen.decoding > 0]
            self._passed_over += bool(telling)
            if self._passed_over <= PATIENCE:
                return
        if telling:
            self._covariance += np.eye(4) * _DRIFT**2
        for seen in telling:
            self._observe(seen)

    def _observe(self, seen: Observation) -> None:
        prompts = seen.request_rate * seen.prompt_tokens * seen.itl
        # One equation of four costs: what it leaves out is the same at every look, and taken for chance again and
        # again it would draw them away while nothing changes. (A first token is of one cost, and has its mean.)
        row = np.array([1.0, seen.decoding, seen.decoding * seen.context, prompts])
        self._update(row, seen.itl, _ERROR * seen.itl, off=_OFF)
        if seen.ttft is not None and seen.ttft > 1.5 * seen.itl:
            own = seen.ttft - 1.5 * seen.itl
            self._update(np.array([0.0, 0.0, 0.0, seen.prompt_tokens]), own, _TTFT_ERROR * seen.ttft)
        self.observations += 1

    def _update(self, factors: Array, value: float, error: float, *, off: float = 0.0) -> None:
        """Correct the costs by one observation. One that is known well enough already counts only when it is `off`
        by so many errors."""
        row = factors * self._prior
        innovation = value - float(row @ self._state)
        known = float(row @ self._covariance @ row)
        if known < (_CERTAIN * error) ** 2 and abs(innovation) < off * error:
            return
        variance = known + error**2
        # One wild window (a stall, a clock that jumped) must not undo a hundred good ones.
        surprise = abs(innovation) / variance**0.5
        if surprise > _SURPRISE:
            variance *= (surprise / _SURPRISE) ** 2
        gain = self._covariance @ row / variance
        self._state = np.clip(self._state + gain * innovation, 1 / _BOUND, _BOUND)
        covariance = self._covariance - np.outer(gain, row @ self._covariance)
        self._covariance = (covariance + covariance.T) / 2
