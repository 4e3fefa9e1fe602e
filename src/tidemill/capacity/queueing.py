"""A replica as a queue: a state-dependent M/M/1/K over the number of requests in it.

In state n the replica serves at rate mu(n). A request takes one step that reads its prompt and one for every
further token; a step of T seconds reads the prompts that arrived in it, mu I T tokens, so that
    T (1 - mu I delta) = alpha + n_d (beta + gamma c),    n_d = mu (O - 1) T,
with I and O the mean tokens in and out, c the mean context of a decoding sequence and n_d how many decode. Both
solved for T:
    T = alpha / (1 - mu (I delta + (O - 1) (beta + gamma c))).
A request that comes waits for the end of the step that is under way, then for its own prompt and those that came
with it. mu(n) is the rate at which a request stays for n / mu(n) seconds in all; it is found by bisection. The
stationary distribution of the chain weighs the states; arrivals see it as it is (PASTA), tokens see it by the
number of sequences that produce them. Upstream's queueing model is the same chain over simpler step times
(autoscaler documentation of WVA, "queueing model").

Memory bounds the batch: n sequences fit when their mean context, plus two standard deviations of the sum, does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

QUEUE_FACTOR = 10  # requests that may wait, as a multiple of the batch; beyond it the model sees losses
_DEVIATIONS = 2.0  # of the sum of contexts, kept free in the cache
_ROUNDS = 60  # of a bisection: to the last bits of a float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimes:
    """What a step costs, in seconds: `base` (alpha), each decoding sequence (beta), each token of context that
    decoding reads (gamma), each token of prompt (delta)."""

    base: float
    per_sequence: float
    per_context_token: float
    per_prompt_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Mean tokens in (those found in a cache left out) and out, and the squared coefficient of variation of
    both: 0 for equal lengths, 1 for exponential ones. Conversations of the public Azure trace have 0.5 to 0.6."""

    input_tokens: float
    output_tokens: float
    variability: float = 0.5


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """Seconds that `percentile` per cent of first tokens, and of the steps between tokens, may take; None is
    without a target. Percentile 0 means the mean."""

    ttft: float | None = None
    itl: float | None = None
    percentile: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """At one rate: means of TTFT and ITL in seconds with their standard deviations, and requests inside."""

    rate: float
    utilisation: float
    ttft: float
    ttft_deviation: float
    itl: float
    itl_deviation: float
    inside: float

    def ttft_at(self, percentile: float) -> float:
        return _quantile(self.ttft, self.ttft_deviation, percentile)

    def itl_at(self, percentile: float) -> float:
        return _quantile(self.itl, self.itl_deviation, percentile)

    def meets(self, target: LatencyTarget) -> bool:
        return (target.ttft is None or self.ttft_at(target.percentile) <= target.ttft) and (
            target.itl is None or self.itl_at(target.percentile) <= target.itl
        )


class ReplicaModel:
    """One replica with a cache of `kv_tokens` and at most `max_sequences` at a time, under one workload."""

    def __init__(
        self, times: ServiceTimes, workload: Workload, *, kv_tokens: float, max_sequences: int = 256
    ) -> None:
        size_in, size_out = workload.input_tokens, max(1.0, workload.output_tokens)
        spread = workload.variability
        # A sequence that is seen decoding is a long one more often than not: its age is E[O^2] / 2 E[O].
        context = size_in + size_out * (1 + spread) / 2
        deviation = math.sqrt(spread * (size_in**2 + size_out**2))
        root = (-_DEVIATIONS * deviation + math.sqrt((_DEVIATIONS * deviation) ** 2 + 4 * context * kv_tokens)) / (
            2 * context
        )
        self.batch = max(1, min(max_sequences, int(root**2)))
        self._times = times
        self._workload = workload
        self._context = context
        n = np.arange(1, self.batch + 1, dtype=np.float64)
        # Of the prompts that slow a request down, its own is none.
        others = (n - 1) / n
        low = np.zeros(self.batch)
        high = 1 / (times.per_prompt_token * size_in * others + self._per_decode * (size_out - 1) + 1e-9)
        for _ in range(_ROUNDS):
            rate = (low + high) / 2
            step, first, _, _ = self._durations(rate, others)
            below = rate * (first + (size_out - 1) * step) < n
            low, high = np.where(below, rate, low), np.where(below, high, rate)
        self._rates: Array = low
        self._step, self._first, self._step_variance, self._first_variance = self._durations(low, others)

    @property
    def max_rate(self) -> float:
        """Requests per second that it can keep up with."""
        return float(self._rates[-1])

    def at(self, rate: float) -> Performance:
        """Under Poisson arrivals at `rate` per second, below or above `max_rate`."""
        count = np.arange(0, self.batch * (1 + QUEUE_FACTOR) + 1)
        weight = self._distribution(rate, count)
        in_batch = np.minimum(count, self.batch)
        index = np.maximum(in_batch, 1) - 1
        by_tokens = weight * in_batch
        by_tokens /= by_tokens.sum()
        itl = float(by_tokens @ self._step[index])
        itl_variance = float(by_tokens @ (self._step_variance[index] + self._step[index] ** 2)) - itl**2
        # An arrival that finds the batch full waits until as many have left as stand before it.
        ahead = np.maximum(count - self.batch + 1, 0) / self._rates[-1]
        seen = np.minimum(count + 1, self.batch) - 1
        first = ahead + self._first[seen]
        ttft = float(weight @ first)
        ttft_variance = float(weight @ (self._first_variance[seen] + ahead / self._rates[-1] + first**2)) - ttft**2
        return Performance(
            rate=rate,
            utilisation=rate / self.max_rate,
            ttft=ttft,
            ttft_deviation=math.sqrt(max(0.0, ttft_variance)),
            itl=itl,
            itl_deviation=math.sqrt(max(0.0, itl_variance)),
            inside=float(weight @ count),
        )

    def largest_rate(self, target: LatencyTarget) -> float:
        """The highest rate per second at which `target` is met; 0 when it is not met even by one request alone."""
        low, high = self.max_rate * 1e-3, self.max_rate * 0.999
        if not self.at(low).meets(target):
            return 0.0
        if self.at(high).meets(target):
            return high
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self.at(middle).meets(target) else (low, middle)
        return low

    @cached_property
    def floor(self) -> Performance:
        """As fast as it gets: one request now and then."""
        return self.at(self.max_rate * 1e-3)

    @property
    def _per_decode(self) -> float:
        return self._times.per_sequence + self._times.per_context_token * self._context

    def _durations(self, rate: Array, others: Array) -> tuple[Array, Array, Array, Array]:
        """Means of a step and of the time to the first token in each state, and the variances of both."""
        times, workload = self._times, self._workload
        further = max(0.0, workload.output_tokens - 1)
        prompt = times.per_prompt_token * workload.input_tokens
        step = times.base / np.maximum(1 - rate * prompt * others - self._per_decode * rate * further, 1e-9)
        plain = times.base + self._per_decode * rate * further * step  # a step that reads no prompt
        variance = rate * others * step * prompt**2 * (1 + workload.variability)
        # What is left of the step that an arrival finds under way; long steps are found more often.
        residual = np.where(others > 0, (step + variance / step) / 2, 0.0)
        first = residual + plain + prompt + prompt * rate * others * 2 * residual
        first_variance = residual**2 / 3 + prompt**2 * workload.variability + variance
        return step, first, variance, first_variance

    def _distribution(self, rate: float, count: NDArray[np.int64]) -> Array:
        """Stationary probabilities: p(n) = p(n - 1) rate / mu(n)."""
        rates = self._rates[np.minimum(count[1:], self.batch) - 1]
        log = np.concatenate([[0.0], np.cumsum(math.log(rate) - np.log(rates))])
        weight = np.exp(log - log.max())
        return weight / weight.sum()


def _quantile(mean: float, deviation: float, percentile: float) -> float:
    """Of a gamma distribution with this mean and deviation (Wilson and Hilferty 1931)."""
    if not percentile or not deviation:
        return mean
    shape = (mean / deviation) ** 2
    z = NormalDist().inv_cdf(percentile / 100)
    return mean * max(0.0, 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))) ** 3
