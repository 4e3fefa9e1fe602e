"""The demo, as a user runs it."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from tests.conftest import program


@pytest.mark.timeout(180)
async def test_the_fleet_grows_and_shrinks() -> None:
    process = await asyncio.create_subprocess_exec(
        program("tidemill"), "demo", "--duration", "60s", "--output", "json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found = orjson.loads(out)
    assert found["ok"] is True
    totals: dict[float, int] = {}
    for point in found["timeline"]:
        assert set(point) == {"time", "variant", "ready", "desired"}
        totals[point["time"]] = totals.get(point["time"], 0) + point["desired"]
    ordered = [totals[time] for time in sorted(totals)]
    assert ordered[0] == 2
    assert max(ordered) > 2
    assert ordered[-1] < max(ordered)
    grown = [d for d in found["decisions"] if d["to"] > d["from"]]
    shrunk = [d for d in found["decisions"] if d["to"] < d["from"]]
    # The cheap variant grows, and every step says why.
    assert {d["variant"] for d in grown} == {"llama-8b-l40s"}
    assert shrunk
    assert all(abs(d["to"] - d["from"]) == 1 and d["explanation"] for d in found["decisions"])
    requests = found["requests"]
    assert requests["served"] > 100
    assert (requests["failed"], requests["errors"]) == (0, {})
    # Through Envoy and the picker, to the pods of both variants.
    assert sum(requests["by_endpoint"].values()) == requests["served"]
    assert {name[:13] for name in requests["by_endpoint"]} == {"llama-8b-l40s", "llama-8b-a100"}
    assert 0 < found["prefix_hit_ratio"] <= 1
    for way in ("with_picker", "without_picker"):
        latency = found["latency_ms"][way]
        assert latency["count"] > 20
        assert 0 < latency["p50"] <= latency["p95"]


async def test_a_demo_that_is_too_short_is_refused() -> None:
    process = await asyncio.create_subprocess_exec(
        program("tidemill"), "demo", "--duration", "5s", stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"shorter than 40s" in err
