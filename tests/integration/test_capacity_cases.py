"""The capacity engine on a cluster: configuration to exported decision, with the inputs of the public cases."""

from __future__ import annotations

import base64
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web
from tests import policy_lab
from tests.conftest import create_namespace
from tests.definitions import define, plain_crd, scaled_object_crd
from tests.integration.fleet import MODEL, NAMESPACE, SCALE, Fleet, Harness, running
from tests.polling import eventually

from tidemill.api.inference_crd import inference_crds
from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.api.saturation_config import AnalyzerEntry
from tidemill.autoscaler.accelerators import inventory
from tidemill.autoscaler.learned import LearnedStore
from tidemill.autoscaler.world import INFERENCE_POOLS, RESOURCE_CLAIMS, SCALED_OBJECTS
from tidemill.kube.resources import CONFIG_MAPS, DEPLOYMENTS, NODES, PODS
from tidemill.metrics.samples import PickerQueue, Quantity

TOKENS = {"default": "analyzerName: saturation"}
LIMITED = {"default": "analyzerName: saturation\nenableLimiter: true"}
BY_PERCENTAGE = {"default": "enableLimiter: true"}
CONFIG = "wva-saturation-scaling-config"
FULL = 100_000


def means(size_in: float, size_out: float, *, rate: float = 1.0) -> dict[Quantity, float]:
    return {
        Quantity.PROMPT_TOKENS: size_in * rate,
        Quantity.PROMPTS: rate,
        Quantity.OUTPUT_TOKENS: size_out * rate,
        Quantity.OUTPUTS: rate,
    }


@pytest.fixture
async def v2(fleet: Fleet, harness: Harness) -> Harness:
    """A controller that judges by tokens."""
    await fleet.config_map(CONFIG, TOKENS)
    return harness


def put(harness: Harness, pod: str, kv: float, queue: float, **more: Any) -> None:
    harness.source.put(pod, kv, queue, **{"kv_tokens": FULL, **more})


async def explanation(harness: Harness, name: str) -> dict[str, Any]:
    (decision,) = [d for d in harness.controller.decisions.all() if d.variant.name == name]
    return decision.explanation.as_dict()


class TestByTokens:
    async def test_several_steps_at_once(self, fleet: Fleet, v2: Harness) -> None:
        (pod,) = await fleet.deployment("dep-a", 1)
        await fleet.variant("va-a", "dep-a")
        put(v2, pod, 0.95, 100, rates=means(1000, 200))
        await v2.cycle()
        assert v2.source.in_depth
        # 95,000 held and 100,000 waiting: 229,411.8 wanted where there are 80,000.
        assert v2.desired("va-a") == 3
        found = await explanation(v2, "va-a")
        assert (found["analyzer"], found["cause"]) == ("saturation", "DemandAboveCapacity")
        assert "+2 va-a (exact)" in found["sentence"]
        assert found["numbers"]["saturation/demand"] == "195000"

    async def test_percentages_stay_the_default(self, fleet: Fleet, harness: Harness) -> None:
        (pod,) = await fleet.deployment("dep-a", 1)
        await fleet.variant("va-a", "dep-a")
        put(harness, pod, 0.95, 100, rates=means(1000, 200))
        await harness.cycle()
        assert not harness.source.in_depth
        assert harness.desired("va-a") == 2

    async def test_one_model_may_be_judged_otherwise(self, fleet: Fleet, harness: Harness) -> None:
        await fleet.config_map(CONFIG, {"mine": f"model_id: {MODEL}\nanalyzerName: saturation"})
        for name, model in (("a", MODEL), ("b", "other")):
            (pod,) = await fleet.deployment(f"dep-{name}", 1)
            await fleet.variant(f"va-{name}", f"dep-{name}", modelID=model)
            put(harness, pod, 0.95, 100, rates=means(1000, 200), model=model)
        await harness.cycle()
        assert (harness.desired("va-a"), harness.desired("va-b")) == (3, 2)

    async def test_a01_a_missing_gauge_holds(self, fleet: Fleet, v2: Harness) -> None:
        pods = await fleet.deployment("dep-a", 3)
        await fleet.variant("va-a", "dep-a")
        for pod, kv in zip(pods, (0.1, 0.1, None), strict=True):
            v2.source.put(pod, kv, 0, kv_tokens=FULL)
        for _ in range(3):
            await v2.cycle()
            assert v2.desired("va-a") == 3

    async def test_a03_averages_of_nothing(self, fleet: Fleet, v2: Harness) -> None:
        pods = await fleet.deployment("dep-a", 4)
        await fleet.variant("va-a", "dep-a")
        for pod in pods:
            put(v2, pod, 0.02, 0, rates={Quantity.PROMPT_TOKENS: 0.0, Quantity.PROMPTS: 0.0})
        await v2.cycle()
        assert v2.desired("va-a") == 1
        assert "nan" not in v2.series().lower()

    async def test_a13_ranks_of_a_pod(self, fleet: Fleet, v2: Harness) -> None:
        pods = await fleet.deployment("dep-a", 7)
        await fleet.variant("va-a", "dep-a")
        for pod in pods:
            for rank in range(8):
                put(v2, pod, 0.6, 0, engine=str(rank))
        await v2.cycle()
        assert v2.desired("va-a") == 7
        assert (await explanation(v2, "va-a"))["numbers"]["saturation/supply"] == "4480000"

    @pytest.mark.parametrize(("queue", "desired"), [(40, 2), (80, 3)])
    async def test_a19_an_unready_pod_does_not_hide_a_ready_one(
        self, fleet: Fleet, v2: Harness, queue: int, desired: int
    ) -> None:
        pods = await fleet.deployment("dep-a", 2, ready=1)
        await fleet.variant("va-a", "dep-a")
        put(v2, pods[0], 0.95, queue, rates=means(1000, 0))
        await v2.cycle()
        assert v2.desired("va-a") == desired
        assert (await fleet.condition("va-a", "MetricsAvailable"))["status"] == "True"

    async def test_a_cache_of_unknown_size_holds_and_says_so(self, fleet: Fleet, v2: Harness) -> None:
        (pod,) = await fleet.deployment("dep-a", 1)
        await fleet.variant("va-a", "dep-a")
        v2.source.put(pod, 0.95, 9)
        await v2.cycle()
        assert v2.desired("va-a") == 1
        found = await fleet.condition("va-a", "OptimizationReady")
        assert (found["status"], found["reason"]) == ("False", "MetricsUnavailable")
        assert "vllm:cache_config_info" in found["message"]

    async def test_a_target_at_0_stays_there(self, fleet: Fleet, v2: Harness) -> None:
        await fleet.deployment("dep-b", 0)
        await fleet.variant("va-b", "dep-b", variantCost="1.0")
        (pod,) = await fleet.deployment("dep-a", 1)
        await fleet.variant("va-a", "dep-a")
        put(v2, pod, 0.95, 50, rates=means(1000, 200))
        await v2.cycle()
        assert (v2.desired("va-a"), v2.desired("va-b")) == (3, 0)

    async def test_what_was_taken_to_0_may_come_back(self, fleet: Fleet) -> None:
        await fleet.config_map(CONFIG, TOKENS)
        pods = {name: (await fleet.deployment(f"dep-{name}", 1))[0] for name in "ab"}
        await fleet.variant("va-a", "dep-a", maxReplicas=1)
        await fleet.variant("va-b", "dep-b", variantCost="20.0")
        async with running(fleet.client) as harness:
            for pod in pods.values():
                put(harness, pod, 0.05, 0, rates=means(1000, 200))
            await harness.cycle()
            assert (harness.desired("va-a"), harness.desired("va-b")) == (1, 0)
            await fleet.scale("dep-b", 0)
            await fleet.client.delete(PODS, pods["b"], NAMESPACE)
            harness.source.lose(pods["b"])
            await harness.cycle()
            put(harness, pods["a"], 0.95, 50, rates=means(1000, 200))
            await harness.cycle()
            assert (harness.desired("va-a"), harness.desired("va-b")) == (1, 2)
            # An HPA rests while its target has no replicas: the scale is written, whoever moves it otherwise.
            target = await fleet.client.get(DEPLOYMENTS, "dep-b", NAMESPACE)
            assert target["spec"]["replicas"] == 2

    async def test_a_constant_load_decides_once(self, fleet: Fleet, v2: Harness) -> None:
        (pod,) = await fleet.deployment("dep-a", 1)
        await fleet.variant("va-a", "dep-a")
        put(v2, pod, 0.75, 0, rates=means(1000, 200))
        for _ in range(5):
            await v2.cycle()
        assert v2.desired("va-a") == 2
        assert len(v2.controller.decisions.history(v2.controller.decisions.all()[0].variant)) == 1


class TestLatencyTarget:
    async def test_a_target_that_no_size_meets_is_said_once(self, fleet: Fleet, harness: Harness) -> None:
        await fleet.config_map(CONFIG, {"default": "ttftTarget: 1"})
        (pod,) = await fleet.deployment("dep-a", 1)
        await fleet.variant("va-a", "dep-a")
        timed = {
            **means(1000, 200),
            Quantity.TTFT: 0.2,
            Quantity.TTFTS: 1.0,
            Quantity.ITL: 0.03 * 199,
            Quantity.ITLS: 199.0,
        }
        for _ in range(6):
            put(harness, pod, 0.3, 0, rates=timed)
            await harness.cycle()
        (event,) = await fleet.events("LatencyTargetUnreachable")
        assert event.get("count", 1) == 1
        assert "va-a cannot meet the target at any size" in event["message"]
        assert "of 1 ms" in event["message"]
        assert "LatencyTargetUnreachable" in (await explanation(harness, "va-a"))["warnings"]


class TestRoles:
    async def pair(self, fleet: Fleet, **decode: Any) -> tuple[list[str], list[str]]:
        prefill = await fleet.deployment("prefill", 2, labels={"llm-d.ai/role": "prefill"})
        decode_pods = await fleet.deployment("decode", 2, labels={"llm-d.ai/role": "decode"}, **decode)
        await fleet.variant("va-prefill", "prefill")
        await fleet.variant("va-decode", "decode")
        return prefill, decode_pods

    @pytest.mark.parametrize("config", [{}, TOKENS], ids=["percentages", "tokens"])
    async def test_w2_roles_are_not_pooled(self, fleet: Fleet, harness: Harness, config: dict[str, str]) -> None:
        await fleet.config_map(CONFIG, config)
        prefill, decode = await self.pair(fleet)
        for pod in prefill:
            put(harness, pod, 0.05, 0, rates=means(1000, 200))
        for pod in decode:
            put(harness, pod, 0.92, 0, rates=means(1000, 200))
        await harness.cycle()
        assert harness.desired("va-decode") == 3
        assert harness.desired("va-prefill") in (1, 2)

    async def test_a_ratio_is_held_when_asked(self, fleet: Fleet, harness: Harness) -> None:
        ratio = {"default": "analyzerName: saturation\nroleRatio: {prefill: 1, decode: 3}"}
        await fleet.config_map(CONFIG, ratio)
        for pod in [*(await self.pair(fleet))[0], "decode-0", "decode-1"]:
            put(harness, pod, 0.6, 0, rates=means(1000, 200))
        await harness.cycle()
        assert (harness.desired("va-prefill"), harness.desired("va-decode")) == (2, 6)
        found = await explanation(harness, "va-decode")
        assert found["cause"] == "RoleRatio"
        assert "4 of 4 more to hold the ratio decode 3 : prefill 1" in found["sentence"]

    @pytest.mark.parametrize("config", [{}, TOKENS], ids=["percentages", "tokens"])
    async def test_w3_a_pending_decode_pod_does_not_block_prefill(
        self, fleet: Fleet, harness: Harness, config: dict[str, str]
    ) -> None:
        await fleet.config_map(CONFIG, config)
        prefill, decode = await self.pair(fleet)
        await fleet.set_ready(decode[1], False)
        for pod in prefill:
            put(harness, pod, 0.5, 40, rates=means(4000, 200))
        put(harness, decode[0], 0.3, 0, rates=means(4000, 200))
        await harness.cycle()
        assert (harness.desired("va-prefill") or 0) > 2
        assert harness.desired("va-decode") == 2


class TestQueuesAtPickers:
    async def two_tenants(self, fleet: Fleet) -> Fleet:
        await define(fleet.client, *inference_crds())
        other = Fleet(fleet.client, "b")
        await create_namespace(fleet.client, "b")
        for place, name in ((fleet, "pa"), (other, "pb")):
            await place.deployment("dep", 1, labels={"pool": name})
            await place.variant("va", "dep", modelID="m")
            pool = {
                "metadata": {"name": name},
                "spec": {
                    "selector": {"matchLabels": {"pool": name}},
                    "targetPorts": [{"number": 8000}],
                    "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
                },
            }
            await fleet.client.create(INFERENCE_POOLS[1], pool, place.namespace)
        return other

    async def test_a11_each_pool_has_its_own(self, fleet: Fleet) -> None:
        await self.two_tenants(fleet)
        await fleet.config_map(CONFIG, TOKENS)
        async with running(fleet.client) as harness:
            for namespace in (NAMESPACE, "b"):
                put(harness, "dep-0", 0.4, 0, model="m", namespace=namespace, rates=means(1000, 200))
            harness.source.picker_queues = [PickerQueue("m", "pa", "", 30, 0), PickerQueue("m", "pb", "", 0, 0)]
            await harness.cycle()
            assert (harness.desired("va"), harness.desired("va", "b")) == (2, 1)

    async def test_a11_what_nothing_tells_apart_counts_once(self, fleet: Fleet, capsys: Any) -> None:
        await self.two_tenants(fleet)
        await fleet.config_map(CONFIG, TOKENS)
        async with running(fleet.client) as harness:
            for namespace in (NAMESPACE, "b"):
                put(harness, "dep-0", 0.4, 0, model="m", namespace=namespace, rates=means(1000, 200))
            harness.source.picker_queues = [PickerQueue("m", "", "", 30, 0)]
            await harness.cycle()
            assert (harness.desired("va"), harness.desired("va", "b")) == (1, 2)
            assert "counted once, for b" in capsys.readouterr().out


class TestInventory:
    """Two A100 are asked for (by tokens), or one (by percentages); both fit on one node or not at all."""

    async def node(
        self, fleet: Fleet, name: str, devices: int, *, product: str = "A100", vendor: str = "nvidia.com",
        labels: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        body = {"metadata": {"name": name, "labels": {f"{vendor}/gpu.product": product, **(labels or {})}}}
        await fleet.client.create(NODES, body)
        status = {"allocatable": {f"{vendor}/gpu": str(devices)}}
        await fleet.client.patch(NODES, name, {"status": status}, sub="status")

    async def serving(self, fleet: Fleet, harness: Harness, **pod_spec: Any) -> None:
        gpu = {"name": "vllm", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        (pod,) = await fleet.deployment("dep-a", 1, containers=[gpu], **pod_spec)
        await fleet.variant("va-a", "dep-a")
        put(harness, pod, 0.95, 100, rates=means(1000, 200))

    @pytest.mark.parametrize(("config", "desired"), [(LIMITED, 3), (BY_PERCENTAGE, 2)], ids=["tokens", "percent"])
    async def test_a20_enough(self, fleet: Fleet, harness: Harness, config: dict[str, str], desired: int) -> None:
        await fleet.config_map(CONFIG, config)
        await self.node(fleet, "n", 8)
        await self.serving(fleet, harness)
        await harness.cycle()
        assert harness.desired("va-a") == desired

    @pytest.mark.parametrize("config", [LIMITED, BY_PERCENTAGE], ids=["tokens", "percent"])
    async def test_a20_really_empty(self, fleet: Fleet, harness: Harness, config: dict[str, str]) -> None:
        await fleet.config_map(CONFIG, config)
        await self.node(fleet, "n", 8)
        await fleet.pod("other", None, node="n", gpus=8)
        await self.serving(fleet, harness)
        await harness.cycle()
        assert harness.desired("va-a") == 1
        found = await explanation(harness, "va-a")
        assert found["cause"] == "AcceleratorsShort"
        assert "0 granted" in found["warnings"]["ResourceConstrained"]
        assert "0 of 8 free" in found["warnings"]["ResourceConstrained"]
        (event,) = await fleet.events("ResourceConstrained")
        assert "0 of 8 free" in event["message"]

    @pytest.mark.parametrize(("config", "desired"), [(LIMITED, 3), (BY_PERCENTAGE, 2)], ids=["tokens", "percent"])
    async def test_a20_unknown_grants_and_says_which_verb_is_missing(
        self, fleet: Fleet, harness: Harness, config: dict[str, str], desired: int
    ) -> None:
        await fleet.config_map(CONFIG, config)
        harness.controller.world.nodes._kind_is_absent("nodes is forbidden")
        await self.serving(fleet, harness)
        await harness.cycle()
        assert harness.desired("va-a") == desired
        (event,) = await fleet.events("ResourceConstrained")
        assert "verbs list and watch on nodes" in event["message"]

    async def test_a20_amd(self, fleet: Fleet, harness: Harness) -> None:
        await fleet.config_map(CONFIG, LIMITED)
        await self.node(fleet, "n", 8, product="MI300X", vendor="amd.com")
        gpu = {"name": "vllm", "image": "none", "resources": {"limits": {"amd.com/gpu": "1"}}}
        (pod,) = await fleet.deployment(
            "dep-a", 1, containers=[gpu], nodeSelector={"amd.com/gpu.product": "MI300X"}
        )
        await fleet.variant("va-a", "dep-a", labels={})
        put(harness, pod, 0.95, 100, rates=means(1000, 200))
        await harness.cycle()
        assert harness.desired("va-a") == 3

    async def test_as5_nothing_from_the_nodes_of_another_team(self, fleet: Fleet, harness: Harness) -> None:
        await fleet.config_map(CONFIG, LIMITED)
        await self.node(fleet, "n-a", 4, labels={"team": "a"})
        await self.node(fleet, "n-b", 4, labels={"team": "b"})
        await fleet.pod("other", None, node="n-a", gpus=4)
        await self.serving(fleet, harness, nodeSelector={"team": "a", "nvidia.com/gpu.product": "A100"})
        await harness.cycle()
        assert harness.desired("va-a") == 1
        assert "A100 on team=a each, 0 of 4 free" in str((await explanation(harness, "va-a"))["warnings"])

    async def test_a21_a_shared_claim_counts_once(self, fleet: Fleet, harness: Harness) -> None:
        for version in ("v1", "v1beta1"):
            crd = plain_crd("resource.k8s.io", version, "resourceclaims", "ResourceClaim")
            if version == "v1":
                await define(fleet.client, crd)
        await self.node(fleet, "n", 8)
        request = {"name": "gpu", "exactly": {"deviceClassName": "gpu", "count": 4}}
        claim = {"metadata": {"name": "four"}, "spec": {"devices": {"requests": [request]}}}
        await fleet.client.create(RESOURCE_CLAIMS[1], claim, NAMESPACE)
        for i in range(4):
            await fleet.pod(f"group-{i}", None, node="n", claim="four")
        async with running(fleet.client) as controller:
            await controller.caught_up()
            found = inventory(controller.controller.world, ())
            assert found.free() == {"A100": 4}

    async def test_a22_the_only_product_is_meant(self, fleet: Fleet, harness: Harness) -> None:
        await self.node(fleet, "n", 8)
        (pod,) = await fleet.deployment("dep-a", 1)
        await fleet.variant("va-a", "dep-a", labels={})
        put(harness, pod, 0.9, 9)
        await harness.cycle()
        assert harness.desired("va-a") == 2
        assert (await fleet.status("va-a"))["desiredOptimizedAlloc"]["accelerator"] == "A100"

    async def test_a22_of_two_products_neither_is_guessed(self, fleet: Fleet, harness: Harness) -> None:
        await self.node(fleet, "n1", 2)
        await self.node(fleet, "n2", 2, product="H100")
        (pod,) = await fleet.deployment("dep-a", 1)
        await fleet.variant("va-a", "dep-a", labels={})
        put(harness, pod, 0.9, 9)
        for _ in range(2):
            await harness.cycle()
            harness.controller._periodic_pass()
        await harness.settle()
        assert harness.desired("va-a") == 2
        assert (await fleet.status("va-a"))["desiredOptimizedAlloc"]["accelerator"] == "unknown"
        (event,) = await fleet.events("AcceleratorNotResolved")
        assert event.get("count", 1) == 1
        assert "A100, H100" in event["message"]


class TestFromZero:
    ENABLED = "enable_scale_to_zero: true\nretention_period: 10m"

    async def asleep(self, fleet: Fleet, **costs: str) -> None:
        await fleet.config_map("wva-model-scale-to-zero-config", {"default": self.ENABLED})
        for name, cost in costs.items():
            await fleet.deployment(f"dep-{name}", 0)
            await fleet.variant(f"va-{name}", f"dep-{name}", variantCost=cost)

    async def replicas(self, fleet: Fleet, *names: str) -> list[int]:
        return [(await fleet.client.get(DEPLOYMENTS, f"dep-{n}", NAMESPACE))["spec"]["replicas"] for n in names]

    async def test_a25_one_variant_is_woken_at_once_and_stays(self, fleet: Fleet, harness: Harness) -> None:
        await self.asleep(fleet, c="10.0", b="5.0", a="5.0")
        await harness.cycle()
        harness.source.picker_queues = [PickerQueue(MODEL, "", "", 1, 900)]
        await harness.cycle()
        assert await self.replicas(fleet, "a", "b", "c") == [1, 0, 0]
        assert harness.desired("va-a") == 1
        harness.source.picker_queues = [PickerQueue(MODEL, "", "", 2, 1800)]
        for _ in range(3):
            await harness.cycle()
            assert await self.replicas(fleet, "a", "b", "c") == [1, 0, 0]
            assert [harness.desired(f"va-{n}") for n in "abc"] == [1, 0, 0]
        (event,) = await fleet.events("ScaledUp")
        assert "waiting at the endpoint picker" in event["message"]

    async def test_a25_within_a_second_by_the_pickers_own_metrics(self, fleet: Fleet) -> None:
        await self.asleep(fleet, a="5.0")
        waiting = 0.0

        async def metrics(request: web.Request) -> web.Response:
            name, labels = "llm_d_epp_flow_control_queue_size", f'target_model_name="{MODEL}",model_name="x"'
            return web.Response(text=f"{name}{{{labels}}} {waiting:g}\n")

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        async with serving(app) as url, running(fleet.client, picker_metrics=(f"{url}/metrics",)) as harness:
            await harness.caught_up()
            assert await self.replicas(fleet, "a") == [0]
            waiting = 1.0

            async def woken() -> bool:
                return await self.replicas(fleet, "a") == [1]

            await eventually(woken, within=5)  # a second on an idle machine; the next pass is 60 s away
            await harness.cycle()
            assert harness.desired("va-a") == 1

    @pytest.mark.parametrize(("requests", "left"), [(3.0, 1), (0.0, 0)], ids=["prefill used", "both unused"])
    async def test_a26_roles_sleep_together(
        self, fleet: Fleet, harness: Harness, requests: float, left: int
    ) -> None:
        await fleet.config_map("wva-model-scale-to-zero-config", {"default": self.ENABLED})
        for role in ("prefill", "decode"):
            (pod,) = await fleet.deployment(f"dep-{role}", 1, labels={"llm-d.ai/role": role})
            await fleet.variant(f"va-{role}", f"dep-{role}")
            harness.source.put(pod, 0.0, 0, running=0.0)
        harness.source.requests = {(NAMESPACE, MODEL): requests}
        await harness.cycle()
        assert (harness.desired("va-prefill"), harness.desired("va-decode")) == (left, left)

    async def test_a26_roles_wake_together(self, fleet: Fleet, harness: Harness) -> None:
        await fleet.config_map("wva-model-scale-to-zero-config", {"default": self.ENABLED})
        for role in ("prefill", "decode"):
            await fleet.deployment(f"dep-{role}", 0, labels={"llm-d.ai/role": role})
            await fleet.variant(f"va-{role}", f"dep-{role}")
        harness.source.picker_queues = [PickerQueue(MODEL, "", "", 1, 900)]
        await harness.cycle()
        assert await self.replicas(fleet, "prefill", "decode") == [1, 1]

    async def test_who_may_not_sleep_was_stopped_by_hand(self, fleet: Fleet, harness: Harness) -> None:
        await fleet.deployment("dep-a", 0)
        await fleet.variant("va-a", "dep-a")
        harness.source.picker_queues = [PickerQueue(MODEL, "", "", 5, 900)]
        await harness.cycle()
        assert await self.replicas(fleet, "a") == [0]

    async def test_a27_who_is_paused_stays_as_it_is(self, fleet: Fleet) -> None:
        await define(fleet.client, scaled_object_crd())
        await fleet.config_map("wva-model-scale-to-zero-config", {"default": self.ENABLED})
        await fleet.deployment("dep-a", 0)
        marks = {"autoscaling.keda.sh/paused-replicas": "0"}
        await fleet.scaler("ScaledObject", "so-a", "dep-a", annotations=marks, minReplicaCount=0)
        pods = await fleet.deployment("dep-b", 3)
        marks = {"autoscaling.keda.sh/paused": "true"}
        await fleet.scaler("ScaledObject", "so-b", "dep-b", model="b", annotations=marks, minReplicaCount=0)
        async with running(fleet.client, **SCALE) as harness:
            harness.source.put_all(pods, 0.95, 9, model="b")
            harness.source.picker_queues = [PickerQueue(MODEL, "", "", 5, 900)]
            for _ in range(5):
                await harness.cycle()
                assert await self.replicas(fleet, "a", "b") == [0, 3]
            decision = next(d for d in harness.controller.decisions.all() if d.variant.name == "so-b")
            assert (decision.replicas, decision.applied) == (4, False)
            assert decision.not_applied == (
                "paused: ScaledObject so-b is annotated autoscaling.keda.sh/paused=true"
            )
            for name in ("so-a", "so-b"):
                nothing = {"autoscaling.keda.sh/paused-replicas": None, "autoscaling.keda.sh/paused": None}
                await fleet.client.patch(SCALED_OBJECTS, name, {"metadata": {"annotations": nothing}}, NAMESPACE)
            await harness.cycle()
            assert await self.replicas(fleet, "a", "b") == [1, 4]


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """`app` on a port of its own; its URL."""
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


EMPTY = base64.b64encode(gzip.compress(b'{"version": 1, "state": {}}', mtime=0)).decode()


class TestRestart:
    """Kill the process at any time: the successor comes to the same decision."""

    async def test_the_compute_bound_is_still_known(self, fleet: Fleet) -> None:
        """A14, with a restart between the queue and the quiet after it."""
        await fleet.config_map(CONFIG, TOKENS)
        pods = await fleet.deployment("dep-a", 10)
        await fleet.variant("va-a", "dep-a")
        async with running(fleet.client) as before:
            for pod in pods:
                put(before, pod, 0.16, 8, rates=means(1000, 250))
            await before.cycle()
            assert (before.desired("va-a") or 0) > 10
            assert before.controller.engine is not None
            # As it is done once a minute.
            store = LearnedStore(fleet.client, DEFAULT_NAMESPACE)
            await store.write(before.controller.engine._planner.dump())
        source = before.source
        for pod in pods:
            put(before, pod, 0.13, 0, rates=means(1000, 250))
        async with running(fleet.client, source=source) as after:
            await after.cycle()
            assert after.desired("va-a") == 10
            assert "capacityPerReplica/va-a" in str(await explanation(after, "va-a"))
            numbers = (await explanation(after, "va-a"))["numbers"]
            assert numbers["saturation/capacityPerReplica/va-a"] == "16000 (compute)"

    @pytest.mark.parametrize(
        "content", ["aa==", base64.b64encode(gzip.compress(b'{"version": 1, "state": {}}', mtime=0)).decode()]
    )
    async def test_what_is_not_understood_is_left_out(self, fleet: Fleet, content: str) -> None:
        body = {"metadata": {"name": "wva-capacity-learned"}, "binaryData": {"learned": content}}
        await fleet.client.create(CONFIG_MAPS, body, DEFAULT_NAMESPACE)
        await fleet.config_map(CONFIG, TOKENS)
        (pod,) = await fleet.deployment("dep-a", 1)
        await fleet.variant("va-a", "dep-a")
        async with running(fleet.client) as harness:
            put(harness, pod, 0.95, 100, rates=means(1000, 200))
            await harness.cycle()
            assert harness.desired("va-a") == 3


def test_everything_learned_is_handed_on() -> None:
    """What a judge has seen over an hour, through JSON and into another one, gives the same need."""
    chosen = policy_lab.settings(
        analyzers=(AnalyzerEntry(name="saturation"), AnalyzerEntry(name="throughput")), ttft_target=0.6
    )
    lab = policy_lab.Lab(rate=lambda now: 14.0, settings=chosen)
    lab.run(1800)
    successor = policy_lab.Lab(rate=lambda now: 14.0, settings=chosen, replicas=lab.history[-1][1])
    state = orjson.loads(orjson.dumps(lab._judge.dump()))
    successor._judge.load(state)
    assert orjson.loads(orjson.dumps(successor._judge.dump())) == state
    successor.run(300)
    assert {target for _, target in successor.history} == {lab.history[-1][1]}
