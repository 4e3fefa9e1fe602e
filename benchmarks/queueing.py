"""The queueing model against the discrete-event engine: prints the table of docs/capacity.md.

Not a measure of time: how far the model's means are from those of an engine that schedules real batches.
"""

from __future__ import annotations

import random
import sys

from tests.policy_lab import times_of

from tidemill.capacity.queueing import ReplicaModel, Workload
from tidemill.sim.presets import presets
from tidemill.sim.replay import Lengths, replay

PRESETS = ("llama-3.1-8b/l40s", "llama-3.1-8b/h100", "qwen3-32b/h100")
SHAPES = ((256, 256), (1024, 128), (1024, 1024), (2048, 512), (4096, 256), (4096, 64))
LOADS = (0.2, 0.5, 0.8)
REQUESTS = 2000


def main() -> None:
    print("| engine | tokens in, out | load | TTFT, engine | model | ITL, engine | model |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in PRESETS:
        times, kv_tokens = times_of(name)
        for size_in, size_out in SHAPES:
            workload = Workload(input_tokens=size_in, output_tokens=size_out)
            model = ReplicaModel(times, workload, kv_tokens=kv_tokens)
            for load in LOADS:
                rate = load * model.max_rate
                met = replay(
                    presets()[name].parameters, Lengths(size_in, size_out), rate=rate,
                    seconds=max(60.0, REQUESTS / rate), rng=random.Random(1),
                )  # fmt: skip
                said = model.at(rate)
                print(
                    f"| {name} | {size_in}, {size_out} | {load:.0%} "
                    f"| {met.mean_ttft * 1e3:.0f} ms | {said.ttft / met.mean_ttft - 1:+.0%} "
                    f"| {met.mean_itl * 1e3:.1f} ms | {said.itl / met.mean_itl - 1:+.0%} |",
                    flush=True,
                )
            print(name, size_in, size_out, file=sys.stderr)


if __name__ == "__main__":
    main()
