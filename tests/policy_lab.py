"""A fleet that is not there, under the real analyzers and the real allocation, in simulated time.

Each cycle the queueing model says how a replica runs at its share of the load, and noise is laid over it as a
finite number of requests and sequences would bring. Requests go to the replica with the shortest queue, and what
exceeds its rate piles up there and is worked off there. It is a model of servers, not a server: scenarios with
engines that schedule real batches are in tests/e2e.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import pairwise

from tidemill.api.saturation_config import QUEUEING_MODEL, SaturationSettings
from tidemill.capacity import allocation
from tidemill.capacity.inventory import UNLIMITED
from tidemill.capacity.judgement import Judge
from tidemill.capacity.latency import QueueingModelAnalyzer
from tidemill.capacity.queueing import LatencyTarget, ReplicaModel, ServiceTimes, Workload
from tidemill.capacity.types import Role, VariantState
from tidemill.capacity.view import EngineLoad, RequestShape, RoleView
from tidemill.sim.presets import presets


def times_of(preset: str) -> tuple[ServiceTimes, int]:
    """Step times of a preset, and the tokens that its cache holds."""
    parameters = presets()[preset].parameters
    return ServiceTimes(
        base=parameters.decode_base,
        per_sequence=parameters.decode_per_sequence,
        per_context_token=parameters.decode_per_sequence_token,
        per_prompt_token=parameters.prefill_per_token,
    ), parameters.kv_blocks * 16


@dataclass
class Lab:
    """One variant of one model. `rate` gives requests per second at a time; a replica starts in `startup` s."""

    rate: Callable[[float], float]
    settings: SaturationSettings
    preset: str = "llama-3.1-8b/l40s"
    workload: Workload = Workload(input_tokens=1024, output_tokens=256)
    startup: float = 60.0
    interval: float = 60.0
    window: float = 60.0  # seconds over which rates and means of requests are taken
    replicas: int = 1
    patience: float = 60.0  # seconds that a client waits in a queue before it gives up
    seed: int = 1
    noise: bool = True
    history: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        times, self._kv = times_of(self.preset)
        self._model = ReplicaModel(times, self.workload, kv_tokens=self._kv)
        self._judge = Judge()
        self._ready_at = [0.0] * self.replicas
        self._target = self.replicas
        self._backlog: dict[str, float] = {}  # by replica
        self._inside: dict[str, float] = {}  # in the batch of each
        self.replica_seconds = 0.0
        # By replica, in each cycle of the window: how much finished and how much was generated per second (both in
        # requests), with which TTFT and ITL.
        self._served: dict[str, list[tuple[float, float, float, float]]] = {}

    @property
    def capacity(self) -> float:
        """Requests per second that one replica can keep up with."""
        return self._model.max_rate

    def within(self, target: LatencyTarget) -> tuple[float, float]:
        """Requests per second that one replica can do within `target`, and what the fit makes of it."""
        analyzer = self._judge._analyzers[QUEUEING_MODEL]
        assert isinstance(analyzer, QueueingModelAnalyzer)
        learned = ReplicaModel(analyzer.fits["lab/m", "v"].times, self.workload, kv_tokens=self._kv)
        return self._model.largest_rate(target), learned.largest_rate(target)

    def run(self, seconds: float) -> list[tuple[float, int]]:
        """Cycle for so long; time and target after each cycle."""
        now = 0.0
        while now < seconds:
            now += self.interval
            self._cycle(now)
            self.history.append((now, self._target))
        return self.history

    def _cycle(self, now: float) -> None:
        ready = sum(1 for at in self._ready_at if at <= now)
        self.replica_seconds += len(self._ready_at) * self.interval
        rate = self.rate(now)
        names = [f"p{i}" for i in range(ready)]
        taken = self._spread(names, rate)
        variant = VariantState(
            name="v", cost=Decimal(10), current=len(self._ready_at), desired=self._target, reporting=ready,
            ready=ready, accelerator="L40S", gpus=1,
        )  # fmt: skip
        target = LatencyTarget(
            self.settings.ttft_target, self.settings.itl_target, self.settings.target_percentile
        )
        self._served = {name: self._served.get(name, []) for name in names}
        view = RoleView(
            model="lab/m",
            role=Role.BOTH,
            variants=(variant,),
            engines=tuple(self._engine(name, taken[name], self._backlog[name]) for name in names),
            rate_seconds=self.window,
            shape=RequestShape(
                input_tokens=self._about(self.workload.input_tokens, rate * self.window),
                output_tokens=self._about(self.workload.output_tokens, rate * self.window),
                hit_rate=Decimal(0),
            ),
            target=target if self.settings.has_latency_target else None,
        )
        need = self._judge.need(view, self.settings, now=now, lead=self.startup)
        found = allocation.allocate([need], UNLIMITED).replicas["lab/m", "v"]
        self._scale(found, now)

    def _spread(self, names: Sequence[str], rate: float) -> dict[str, float]:
        """Share the requests of one cycle out by shortest queue. Gives what each replica takes into its batch, per
        second; the rest stays in its queue."""
        queues = {name: self._backlog.get(name, 0.0) for name in names}
        arriving = rate * self.interval
        ordered = sorted(queues.values())
        level, taken = 0.0, 0.0
        for count, queue in enumerate(ordered, 1):
            taken += queue
            level = (arriving + taken) / count  # of those `count` when only they get any
            if count == len(ordered) or level <= ordered[count]:
                break
        most = self.capacity * self.interval
        inside = {name: max(queue, level) for name, queue in queues.items()}
        longest = self.patience * self.capacity
        self._backlog = {name: min(longest, max(0.0, held - most)) for name, held in inside.items()}
        return {name: min(held, most) / self.interval for name, held in inside.items()}

    def _scale(self, wanted: int, now: float) -> None:
        self._target = wanted
        while len(self._ready_at) < wanted:
            self._ready_at.append(now + self.startup)
        # Kubernetes takes those away first that are not ready.
        self._ready_at = sorted(self._ready_at)[:wanted]

    def _engine(self, name: str, rate: float, backlog: float) -> EngineLoad:
        """One replica at its share of the load, with what has piled up there."""
        full = backlog > 0 or rate > 0.98 * self.capacity
        served = self.capacity if full else rate
        seen = self._model.at(min(0.98 * self.capacity, max(1e-6, served)))
        context = self.workload.input_tokens + 0.75 * self.workload.output_tokens
        inside = self._model.batch if full else min(seen.inside, self._model.batch)
        # What is taken into the batch and does not stay there has finished.
        grown = (inside - self._inside.get(name, 0.0)) / self.interval
        finished = max(0.0, rate - grown)
        self._inside[name] = inside
        cycles = max(1, round(self.window / self.interval))
        # Those that are still inside have half of their tokens, on average.
        of_cycle = (finished, max(0.0, rate - grown / 2), seen.ttft + backlog / self.capacity, seen.itl)
        mine = self._served[name] = [*self._served[name], of_cycle][-cycles:]
        total = sum(rate for rate, _, _, _ in mine)
        lately = total / len(mine)
        generating = sum(rate for _, rate, _, _ in mine) / len(mine)
        ttft = sum(rate * ttft for rate, _, ttft, _ in mine) / total if total else seen.ttft
        itl = sum(rate * itl for rate, _, _, itl in mine) / total if total else seen.itl
        if self.noise:
            # The largest number inside over a minute of requests that stay for inside / rate seconds each.
            looks = max(1, int(60 / max(1.0, inside / max(served, 1e-6))))
            inside = max(self._rng.gauss(inside, math.sqrt(inside)) for _ in range(looks))
        in_batch = min(max(0.0, inside), self._model.batch)
        return EngineLoad(
            variant="v",
            replica=name,
            kv_usage=Decimal(repr(round(min(1.0, in_batch * context / self._kv), 4))),
            queue_length=Decimal(max(0, round(backlog))),
            kv_tokens=self._kv,
            running=in_batch,
            rate_seconds=min(self.window, len(self._served[name]) * self.interval),
            request_rate=float(self._about(lately, lately * self.window)),
            output_rate=float(self._about(generating * self.workload.output_tokens, lately * self.window)),
            ttft=float(self._about(ttft, lately * self.window)),
            # Over a whole answer the step times average out: requests differ by about a fifth.
            itl=float(self._about(itl, lately * self.window * 25)),
        )

    def _about(self, value: float, samples: float) -> Decimal:
        """A mean over so many samples, each spread as widely as its value."""
        if self.noise:
            value = max(0.0, self._rng.gauss(value, value / math.sqrt(max(1.0, samples))))
        return Decimal(repr(round(value, 6)))


def changes_after(history: Sequence[tuple[float, int]], seconds: float) -> list[tuple[float, int]]:
    """Cycles after `seconds` whose target differs from the one before."""
    return [now for before, now in pairwise(history) if now[0] > seconds and now[1] != before[1]]


def settings(**fields: object) -> SaturationSettings:
    return replace(SaturationSettings(analyzer_name="saturation"), **fields)  # type: ignore[arg-type]
