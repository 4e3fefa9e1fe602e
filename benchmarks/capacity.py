"""Benchmark of the capacity engine; prints JSON and writes build/bench/capacity.json.

One decision for 1,000 models of 3 variants each: analysis of every replica's numbers, the needs, and the
allocation, greedy and exact; and 100 variants of mixed accelerators under caps, where the proven optimum is what
the others are measured by. Medians of several runs; quote them with the load average.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson

from tidemill.api.saturation_config import SaturationSettings
from tidemill.capacity import allocation, exact
from tidemill.capacity.allocation import Allocation
from tidemill.capacity.inventory import UNLIMITED, Inventory
from tidemill.capacity.judgement import Judge
from tidemill.capacity.needs import Need
from tidemill.capacity.targets import allocated
from tidemill.capacity.types import Role, VariantState
from tidemill.capacity.view import EngineLoad, RequestShape, RoleView

OUT = Path("build/bench/capacity.json")
KINDS = (("A100", 3.0, 1.0), ("H100", 8.0, 2.4), ("L40S", 1.2, 0.4))  # product, cost, capacity
SETTINGS = SaturationSettings(analyzer_name="saturation")


def view(model: int, rng: random.Random, variants: int = 3) -> RoleView:
    """A model whose load is anything from idle to twice what it can take."""
    states: list[VariantState] = []
    engines: list[EngineLoad] = []
    pressure = rng.random() * 1.3
    for i in range(variants):
        product, cost, capacity = KINDS[i % len(KINDS)]
        current = rng.randint(0 if i else 1, 4)
        name = f"v{i}"
        states.append(
            VariantState(
                name=name,
                cost=Decimal(str(round(cost * rng.uniform(0.8, 1.2), 2))),
                current=current,
                desired=current,
                reporting=current,
                ready=current,
                max_replicas=12,
                accelerator=product,
                gpus=rng.choice((1, 2, 4)),
            )
        )
        for replica in range(max(1, current)):
            engines.append(
                EngineLoad(
                    variant=name,
                    replica=f"{name}-{replica}",
                    kv_usage=Decimal(str(round(min(1.0, pressure), 3))),
                    queue_length=Decimal(rng.randrange(10) if pressure > 1 else 0),
                    kv_tokens=int(200_000 * capacity),
                    request_rate=2.0,
                )
            )
    shape = RequestShape(input_tokens=Decimal(1024), output_tokens=Decimal(256), hit_rate=Decimal("0.2"))
    return RoleView(
        model=f"ns/m{model:04}", role=Role.BOTH, variants=tuple(states), engines=tuple(engines), shape=shape
    )


def needs_of(views: list[RoleView], judge: Judge, now: float) -> list[Need]:
    return [judge.need(one, SETTINGS, now=now, lead=60.0) for one in views]


def decided(needs: list[Need], found: Allocation) -> int:
    """The targets with their explanations; how many differ from what there is."""
    targets = [target for need in needs for target in allocated(need, found)]
    current = {(need.model, v.name): v.current for need in needs for v in need.variants}
    return sum(1 for key, replicas in found.replicas.items() if replicas != current[key]) if targets else 0


def timed(call: Callable[[], Any], runs: int) -> tuple[float, Any]:
    """Median seconds, and the last result."""
    seconds: list[float] = []
    result: Any = None
    for _ in range(runs):
        begun = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), result


def fleet(runs: int) -> dict[str, Any]:
    rng = random.Random(1)
    views = [view(i, rng) for i in range(1000)]
    judge = Judge()
    clock = iter(range(0, 10**6, 60))

    def whole(allocate: Callable[[list[Need]], Allocation]) -> tuple[Allocation, int]:
        needs = needs_of(views, judge, float(next(clock)))
        found = allocate(needs)
        return found, decided(needs, found)

    greedy_s, (greedy, moved) = timed(lambda: whole(lambda n: allocation.allocate(n, UNLIMITED)), runs)
    exact_s, (best, best_moved) = timed(lambda: whole(lambda n: exact.allocate(n, UNLIMITED, time_limit=10)), runs)
    costs = {(v.model, s.name): s.cost for v in views for s in v.variants}
    return {
        "models": 1000,
        "variants": 3000,
        "greedy_s": round(greedy_s, 3),
        "exact_s": round(exact_s, 3),
        "exact_by": best.how,
        "changes_greedy": moved,
        "changes_exact": best_moved,
        "cost_of_exact_by_greedy": round(float(bill(best, costs) / bill(greedy, costs)), 4),
        "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def bill(found: Allocation, costs: dict[tuple[str, str], Decimal]) -> Decimal:
    return sum((replicas * costs[key] for key, replicas in found.replicas.items()), Decimal())


def capped(runs: int) -> dict[str, Any]:
    """100 variants of mixed accelerators, with fewer of the cheap ones than the greedy way would like, and enough
    of the dear ones."""
    rng = random.Random(7)
    views = [view(i, rng, variants=4) for i in range(25)]
    needs = needs_of(views, Judge(), 0.0)
    wanted: dict[str, int] = {}
    for need in needs:
        for name, count in allocation.grow(need).items() if need.growing else ():
            variant = next(v for v in need.variants if v.name == name)
            wanted[variant.accelerator] = wanted.get(variant.accelerator, 0) + count * (variant.gpus or 1)
    caps = Inventory(total={"A100": int(wanted["A100"] * 0.7), "L40S": int(wanted["L40S"] * 0.7), "H100": 400})
    costs = {(v.model, s.name): s.cost for v in views for s in v.variants}
    default_s, default = timed(lambda: exact.allocate(needs, caps, time_limit=0.1), runs)
    best = exact.allocate(needs, caps, time_limit=60)
    greedy_s, greedy = timed(lambda: allocation.allocate(needs, caps), runs)
    return {
        "variants": 100,
        "caps": dict(caps.total),
        "default_ms": round(default_s * 1e3, 1),
        "default_by": default.how,
        "cost_by_optimum": round(float(bill(default, costs) / bill(best, costs)), 4),
        "greedy_ms": round(greedy_s * 1e3, 1),
        "greedy_cost_by_optimum": round(float(bill(greedy, costs) / bill(best, costs)), 4),
        "short_greedy": len(greedy.short),
        "short_optimum": len(best.short),
    }


def main() -> None:
    result: dict[str, Any] = {"load_average": os.getloadavg()[0], "cpus": os.cpu_count()}
    result |= fleet(5)
    result["capped"] = capped(9)
    wanted = [
        ("whole decision for 1,000 models, greedy, s", result["greedy_s"], 0.5),
        ("the same, exact, s", result["exact_s"], 10),
        ("100 variants under caps, ms", result["capped"]["default_ms"], 100),
        ("their cost as a share of the optimum", result["capped"]["cost_by_optimum"], 1.05),
    ]
    result["targets"] = [{"what": w, "value": v, "at_most": m, "met": v <= m} for w, v, m in wanted]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    print(OUT.read_text())


if __name__ == "__main__":
    main()
