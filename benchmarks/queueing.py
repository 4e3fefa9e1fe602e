"""The queueing model against the discrete-event engine: prints the table of docs/capacity.md.

Not a measure of time: how far the model's means are from those of an engine that schedules real batches. The load
is a share of what the engine finishes when far more comes than it can do. Takes a quarter of an hour.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ProcessPoolExecutor
from itertools import product

from tests.policy_lab import times_of

from tidemill.capacity.queueing import ReplicaModel, Workload
from tidemill.sim.presets import presets
from tidemill.sim.replay import Lengths, Met, replay

PRESETS = ("llama-3.1-8b/l40s", "llama-3.1-8b/h100", "qwen3-32b/h100")
SHAPES = ((256, 256), (1024, 128), (1024, 1024), (2048, 512), (4096, 256), (4096, 64))
LOADS = (0.2, 0.5, 0.8)
REQUESTS = 20_000  # with fewer the engine's own means differ by a tenth from one seed to the next
OVERLOAD = 1.6
COLUMNS = ("engine", "tokens in, out", "at most", "model", "load", "TTFT", "model", "ITL", "model")


def rows(case: tuple[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    """One engine under requests of one shape: a row for each load."""
    name, (size_in, size_out) = case
    times, kv_tokens = times_of(name)
    workload = Workload(input_tokens=size_in, output_tokens=size_out)
    model = ReplicaModel(times, workload, kv_tokens=kv_tokens)

    def met_at(rate: float, requests: int) -> Met:
        return replay(
            presets()[name].parameters, Lengths(size_in, size_out), rate=rate, seconds=requests / rate,
            rng=random.Random(1),
        )  # fmt: skip

    most = met_at(OVERLOAD * model.max_rate, REQUESTS // 5).rate
    found: list[tuple[str, ...]] = []
    for load in LOADS:
        met, said = met_at(load * most, REQUESTS), model.at(load * most)
        found.append(
            (
                name, f"{size_in}, {size_out}", f"{most:.2f}/s", f"{model.max_rate / most - 1:+.0%}",
                f"{load:.0%}",
                f"{met.mean_ttft * 1e3:.0f} ms", f"{said.ttft / met.mean_ttft - 1:+.0%}",
                f"{met.mean_itl * 1e3:.1f} ms", f"{said.itl / met.mean_itl - 1:+.0%}",
            )
        )  # fmt: skip
    return found


def main() -> None:
    for cells in (COLUMNS, ["---"] * len(COLUMNS)):
        print(f"| {' | '.join(cells)} |")
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        for found in workers.map(rows, product(PRESETS, SHAPES)):
            for cells in found:
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
