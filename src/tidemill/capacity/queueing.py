"""A replica as a queue: a state-dependent M/M/1/K over the number of requests in it.

In state n the replica serves at rate mu(n). A request takes one step that reads its prompt and one for every
further token; a step of T seconds reads the prompts that arrived in it, mu I T tokens, so that
    T (1 - mu I delta) = alpha + n_d (beta + gamma c),    n_d = mu (O - 1) T,
with I and O the mean tokens in and out, c the mean context of a decoding sequence and n_d how many decode. Both
solved for T:
    T = alpha / (1 - mu (I delta + (O - 1) (beta + gamma c))).
A request that comes waits for the end of the step that is under way, then for its own prompt and those that came
with it. mu(n) is the rate at which a request stays for n / mu(n) seconds in all; it is found by bisection. The
stationary distribution of the chain says how many wait for room in the batch; arrivals see it as it is (PASTA).
Upstream's queueing model is the same chain over simpler step times (autoscaler documentation of WVA, "queueing
model").

Steps of an open replica vary more than those of a closed one: what arrives in a long step makes the next one long
too. Around the mean at arrival rate l that is a linear recursion from step to step, of the prompts read in a step
(a in number, w in seconds) and the sequences n that decode in it, with f = O - 1 and d = I delta:
    n' = n (1 - 1/f) + a,    T = alpha + n (beta + gamma c) + w,    a' ~ Poisson(l T),    w' the sum of a' prompts.
Its stationary covariance solves the discrete Lyapunov equation S = A S A' + Q (the linear noise approximation: van
Kampen, Stochastic Processes in Physics and Chemistry, ch. X). Tokens see steps by the sequences in them,
    ITL = T + cov(n, T) / n,
arrivals by their length: TTFT = what is left of one step, then a step with all prompts that came in the first one
(a queue with gated vacations; Takagi, Queueing Analysis 1, ch. 2).

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
    both: 0 for equal lengths, 1 for exponential ones. Conversations of the public Azure trace have 0.5 to 0.6.
    `cached_tokens` were found in a cache: nobody computes them, and many share their blocks, but each step reads
    them as any other context."""

    input_tokens: float
    output_tokens: float
    variability: float = 0.5
    cached_tokens: float = 0.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """At one rate of arrivals, in seconds: the variance of a step, the mean step that tokens see, and mean and
    variance of the time to the first token where a step is under way and there is room in the batch."""

    variance: float
    itl: float
    ttft: float
    ttft_variance: float


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
        self._context = context + workload.cached_tokens
        n = np.arange(1, self.batch + 1, dtype=np.float64)
        # Of the prompts that slow a request down, its own is none.
        others = (n - 1) / n
        low = np.zeros(self.batch)
        high = 1 / (times.per_prompt_token * size_in * others + self._per_decode * (size_out - 1) + 1e-9)
        for _ in range(_ROUNDS):
            rate = (low + high) / 2
            step, first = self._durations(rate, others)
            below = rate * (first + (size_out - 1) * step) < n
            low, high = np.where(below, rate, low), np.where(below, high, rate)
        self._rates: Array = low
        self._longest_step = float(self._durations(low, others)[0][-1])

    @property
    def max_rate(self) -> float:
        """Requests per second that it can keep up with."""
        return float(self._rates[-1])

    def at(self, rate: float) -> Performance:
        """Under Poisson arrivals at `rate` per second, below or above `max_rate`."""
        count = np.arange(0, self.batch * (1 + QUEUE_FACTOR) + 1)
        weight = self._distribution(rate, count)
        steps = self._steps(rate)
        # An arrival that finds the batch full waits until as many have left as stand before it.
        ahead = np.maximum(count - self.batch + 1, 0) / self.max_rate
        wait = float(weight @ ahead)
        wait_variance = float(weight @ (ahead / self.max_rate + ahead**2)) - wait**2
        # One that finds nobody reads its prompt at once.
        idle = float(weight[0])
        alone = self._times.base + self._prompt
        alone_variance = self._prompt**2 * self._workload.variability
        first = idle * alone + (1 - idle) * steps.ttft
        first_variance = (
            idle * (alone_variance + alone**2) + (1 - idle) * (steps.ttft_variance + steps.ttft**2) - first**2
        )
        return Performance(
            rate=rate,
            utilisation=rate / self.max_rate,
            ttft=wait + first,
            ttft_deviation=math.sqrt(max(0.0, wait_variance + first_variance)),
            itl=steps.itl,
            itl_deviation=math.sqrt(max(0.0, steps.variance)),
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

    @property
    def _prompt(self) -> float:
        """Seconds that reading a prompt of mean length takes."""
        return self._times.per_prompt_token * self._workload.input_tokens

    def _durations(self, rate: Array, others: Array) -> tuple[Array, Array]:
        """Means of a step and of the time to the first token in each state."""
        further = max(0.0, self._workload.output_tokens - 1)
        step = self._times.base / np.maximum(
            1 - rate * self._prompt * others - self._per_decode * rate * further, 1e-9
        )
        plain = self._times.base + self._per_decode * rate * further * step  # a step that reads no prompt
        variance = rate * others * step * self._prompt**2 * (1 + self._workload.variability)
        # What is left of the step that an arrival finds under way; long steps are found more often.
        residual = np.where(others > 0, (step + variance / step) / 2, 0.0)
        return step, residual + plain + self._prompt + self._prompt * rate * others * 2 * residual

    def _steps(self, rate: float) -> _Steps:
        """Steps of the open replica; none is longer in the mean than those of a full batch."""
        base, each, prompt = self._times.base, self._per_decode, self._prompt
        spread = self._workload.variability
        further = max(0.001, self._workload.output_tokens - 1)  # with none at all nothing would see a step
        rate = min(rate, (1 - base / self._longest_step) / max(1e-12, prompt + further * each))
        reading = rate * prompt
        mean = base / (1 - reading - rate * further * each)
        decoding = rate * further * mean
        # A request of less than two tokens on the mean does not always decode.
        change = np.array(
            [
                [1 - 1 / max(1.0, further), min(1.0, further), 0.0],
                [rate * each, 0.0, rate],
                [reading * each, 0.0, reading],
            ]
        )
        come = rate * mean
        noise = np.array(
            [
                [come * min(1.0, further), 0.0, 0.0],
                [0.0, come, come * prompt],
                [0.0, come * prompt, come * prompt**2 * (1 + spread)],
            ]
        )
        covariance = np.linalg.solve(np.eye(9) - np.kron(change, change), noise.reshape(9)).reshape(3, 3)
        with_decoding = float(each * covariance[0, 0] + covariance[0, 2])
        variance = float(each**2 * covariance[0, 0] + 2 * each * covariance[0, 2] + covariance[2, 2])
        # The step that an arrival finds: its mean and mean square, by length.
        found = mean + variance / mean
        found_square = mean**2 + 3 * variance
        ttft = (0.5 + reading) * found + base + each * decoding + prompt
        return _Steps(
            variance=variance,
            itl=mean + (with_decoding / decoding if decoding else 0.0),
            ttft=ttft,
            ttft_variance=(
                (1 / 3 + reading + reading**2) * found_square
                - ((0.5 + reading) * found) ** 2
                + rate * found * prompt**2 * (1 + spread)
                + prompt**2 * spread
                + each**2 * float(covariance[0, 0])
            ),
        )

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
