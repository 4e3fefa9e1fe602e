"""When the engine cycles: each interval, when woken, and with a changed interval at once."""

from __future__ import annotations

import asyncio

from tests.integration.fleet import Fleet, Harness, running
from tests.polling import eventually

from tidemill.local.cluster import LocalCluster


def cycles(harness: Harness) -> int:
    (line,) = [x for x in harness.series().splitlines() if x.startswith("wva_optimization_duration_seconds_count")]
    return int(float(line.split()[1]))


async def test_each_interval_and_each_variant_each_pass(wva: LocalCluster, fleet: Fleet) -> None:
    await fleet.deployment("dep", 1)
    await fleet.variant("va", "dep")
    async with running(wva.client, overrides={"GLOBAL_OPT_INTERVAL": "1s"}) as harness:
        await harness.settle()
        clock = asyncio.get_running_loop().time
        begun, before, reconciled = clock(), cycles(harness), harness.reconciles
        await eventually(lambda: cycles(harness) >= before + 3 and harness.reconciles >= reconciled + 3)
        passed = cycles(harness) - before
        # One may have been due already; a late one is not made up for.
        assert passed <= clock() - begun + 1
        assert harness.reconciles - reconciled <= passed + 1  # a cycle is counted at its end


async def test_a_shorter_interval_counts_at_once(fleet: Fleet, harness: Harness) -> None:
    before = cycles(harness)
    await fleet.config_map("wva-manager-config", {"GLOBAL_OPT_INTERVAL": "1s"})
    await eventually(lambda: cycles(harness) >= before + 2)


async def test_a_longer_interval_runs_no_cycle(wva: LocalCluster, fleet: Fleet) -> None:
    async with running(wva.client) as harness:
        before = cycles(harness)
        await fleet.config_map("wva-manager-config", {"GLOBAL_OPT_INTERVAL": "90s"})
        await harness.caught_up()
        await asyncio.sleep(0.3)
        assert harness.controller.configuration.manager.interval == 90
        assert cycles(harness) == before


async def test_a_cycle_that_fails_is_followed_by_another(wva: LocalCluster) -> None:
    class Broken:
        name = "broken"
        asked = 0

        def set_targets(self, targets: object) -> None:
            pass

        async def collect(self, *_: object, **__: object) -> object:
            self.asked += 1
            raise RuntimeError("a source that breaks its promise")

        async def close(self) -> None:
            pass

    source = Broken()
    async with running(wva.client, source=source, overrides={"GLOBAL_OPT_INTERVAL": "1s"}) as harness:
        await eventually(lambda: source.asked >= 3)
        assert 'wva_errors_total{component="engine",error_type="CycleFailed"}' in harness.series()
