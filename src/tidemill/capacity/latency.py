"""Capacity in requests per second within latency targets, by the queueing model.

A replica's capacity is the largest rate at which it keeps the targets for requests as they are now. What is asked
for is what comes to the replicas, and what waits before them, which must be worked off within `DRAIN` seconds.
(What waits at a replica is worked off by that one: others take what comes meanwhile.)
"""

from __future__ import annotations

from decimal import Decimal

from tidemill.api.saturation_config import QUEUEING_MODEL
from tidemill.capacity.calibration import ENOUGH, Calibration, Observation
from tidemill.capacity.engine_flags import EngineFlags
from tidemill.capacity.queueing import LatencyTarget, ReplicaModel, Workload
from tidemill.capacity.report import CapacityReport, Json, NoReport
from tidemill.capacity.saturation import show
from tidemill.capacity.view import ZERO, EngineLoad, RoleView

UNIT = "requests/s within the latency target"
DRAIN = 60.0


class QueueingModelAnalyzer:
    """Fits each variant's engines as they run, and sizes by them."""

    name = QUEUEING_MODEL

    def __init__(self) -> None:
        self.fits: dict[tuple[str, str], Calibration] = {}
        self._kv_tokens: dict[tuple[str, str], tuple[int, int]] = {}  # of a replica, and its engines

    def report(self, view: RoleView) -> CapacityReport | NoReport:
        if view.target is None:
            return NoReport(self.name, "no latency target is set (ttftTarget, itlTarget)", holds=False)
        self._learn(view)
        shape = view.shape
        if shape.input_tokens is None or shape.output_tokens is None:
            return NoReport(self.name, "no request has finished yet, so their size is not known", holds=False)
        cached = shape.input_tokens * (shape.hit_rate or ZERO)
        workload = Workload(
            input_tokens=float(shape.input_tokens - cached),
            output_tokens=float(shape.output_tokens),
            cached_tokens=float(cached),
        )
        capacities: dict[str, Decimal] = {}
        told: dict[str, str] = {}
        impossible: list[str] = []
        for variant in view.variants:
            place = (view.model, variant.name)
            fit = self._fit(view, variant.name)
            if not fit.known or place not in self._kv_tokens:
                continue
            tokens, engines = self._kv_tokens[place]
            model = ReplicaModel(
                fit.times, workload, kv_tokens=tokens,
                max_sequences=view.flags.get(variant.name, EngineFlags()).max_num_seqs,
            )  # fmt: skip
            rate = model.largest_rate(view.target)
            if rate <= 0:
                impossible.append(_impossible(variant.name, model, view.target))
                continue
            capacities[variant.name] = _rounded(rate * engines)
            at_limit = model.at(rate)
            told |= {
                f"capacityPerReplica/{variant.name}": show(capacities[variant.name]),
                f"atThatRate/{variant.name}": (
                    f"TTFT {at_limit.ttft_at(view.target.percentile) * 1e3:.0f} ms, "
                    f"ITL {at_limit.itl_at(view.target.percentile) * 1e3:.1f} ms"
                ),
            }
        demand = _demand(view)
        if not capacities:
            unreachable = "; ".join(impossible)
            serving = {engine.variant for engine in view.engines if engine.itl and engine.request_rate}
            unsized = sorted(name for name in serving if (view.model, name) not in self._kv_tokens)
            if unsized:
                unknown = (
                    f"the size of the KV cache is not known (vllm:cache_config_info) for {', '.join(unsized)}"
                )
            else:
                unknown = f"fewer than {ENOUGH} windows with requests were seen: their times are not known yet"
            return NoReport(
                self.name, unreachable or unknown, unreachable=unreachable, demand=demand,
                # What serves will be known soon: until then nobody else knows whether less would keep the target.
                holds=len(serving) > len(unsized) and not unreachable,
            )  # fmt: skip
        if demand is None:
            return NoReport(self.name, "the rate of requests is not known for every engine", holds=False)
        supply, anticipated = view.supply(capacities)
        return CapacityReport(
            analyzer=self.name,
            unit=UNIT,
            per_replica=capacities,
            supply=supply,
            anticipated=anticipated,
            demand=demand,
            thresholds=view.thresholds,
            window=view.window,
            numbers={
                "ttftTarget": _milliseconds(view.target.ttft),
                "itlTarget": _milliseconds(view.target.itl),
                "targetPercentile": f"{view.target.percentile:g}" if view.target.percentile else "mean",
                **told,
            },
            unreachable="; ".join(impossible),
        )

    def dump(self) -> Json:
        return {
            "fits": [[*key, *fit.dump()] for key, fit in self.fits.items()],
            "caches": [[*key, *cache] for key, cache in self._kv_tokens.items()],
        }

    def load(self, state: Json) -> None:
        for model, variant, *fit in state["fits"]:
            self.fits.setdefault((model, variant), Calibration()).load(fit)
        for model, variant, tokens, engines in state["caches"]:
            self._kv_tokens[model, variant] = (int(tokens), int(engines))

    def _learn(self, view: RoleView) -> None:
        by_replica: dict[tuple[str, str], list[EngineLoad]] = {}
        by_variant: dict[str, tuple[list[Observation], list[Observation]]] = {}
        for engine in view.engines:
            by_replica.setdefault((engine.variant, engine.replica), []).append(engine)
            if (seen := _observation(engine, view)) is not None:
                settled, unsettled = by_variant.setdefault(engine.variant, ([], []))
                (unsettled if engine.replica_id in view.unsettled else settled).append(seen)
        for variant, (settled, unsettled) in by_variant.items():
            self._fit(view, variant).observe(settled, unsettled)
        for (variant, _), engines in by_replica.items():
            tokens = [engine.kv_tokens for engine in engines if engine.kv_tokens is not None]
            if tokens and len(tokens) == len(engines):
                self._kv_tokens[view.model, variant] = (min(tokens), len(tokens))

    def _fit(self, view: RoleView, variant: str) -> Calibration:
        place = (view.model, variant)
        if place not in self.fits:
            self.fits[place] = Calibration(view.presets.get(variant))
        return self.fits[place]


def _observation(engine: EngineLoad, view: RoleView) -> Observation | None:
    shape = view.shape
    if engine.itl is None or engine.request_rate is None or shape.input_tokens is None:
        return None
    output = float(shape.output_tokens or 0)
    return Observation(
        itl=engine.itl,
        ttft=None if engine.queue_length or engine.replica_id in view.queued else engine.ttft,
        # By Little's law over the same window as the rates; a gauge is one moment of it.
        decoding=engine.request_rate * max(0.0, output - 1) * engine.itl,
        context=float(shape.input_tokens) + output * 0.75,
        request_rate=engine.request_rate,
        prompt_tokens=float(shape.input_tokens * (1 - (shape.hit_rate or ZERO))),
    )


def _demand(view: RoleView) -> Decimal | None:
    """Requests per second that come, and what waits before the replicas, spread over the time in which it is to be
    worked off."""
    rate = view.arrival_rate
    return None if rate is None else _rounded(rate) + view.upstream.requests / Decimal(int(DRAIN))


def _impossible(variant: str, model: ReplicaModel, target: LatencyTarget) -> str:
    best = model.floor
    misses: list[str] = []
    if target.ttft is not None and best.ttft_at(target.percentile) > target.ttft:
        misses.append(f"TTFT {_milliseconds(best.ttft_at(target.percentile))} of {_milliseconds(target.ttft)}")
    if target.itl is not None and best.itl_at(target.percentile) > target.itl:
        misses.append(f"ITL {_milliseconds(best.itl_at(target.percentile))} of {_milliseconds(target.itl)}")
    return f"{variant} cannot meet the target at any size: with a single request at a time {' and '.join(misses)}"


def _rounded(rate: float) -> Decimal:
    return Decimal(repr(round(rate, 6)))


def _milliseconds(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1e3:.0f} ms"
