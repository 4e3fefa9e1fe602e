"""KEDA's side of the external scaler: a real gRPC client that asks as KEDA does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.conftest import free_port
from tests.definitions import define, scaled_object_crd
from tests.integration.fleet import NAMESPACE, SCALE, Fleet, Harness, running
from tests.polling import eventually

from tidemill.autoscaler.keda_scaler import (
    METRIC,
    SERVICE,
    GetMetricSpecResponse,
    GetMetricsRequest,
    GetMetricsResponse,
    IsActiveResponse,
    ScaledObjectRef,
)
from tidemill.autoscaler.world import SCALED_OBJECTS
from tidemill.kube.resources import DEPLOYMENTS, HORIZONTAL_POD_AUTOSCALERS
from tidemill.local.cluster import LocalCluster


@dataclass
class Keda:
    """What KEDA's operator does with a trigger."""

    channel: grpc.aio.Channel
    harness: Harness

    def ref(self, name: str, **metadata: str) -> Any:
        return ScaledObjectRef(name=name, namespace=NAMESPACE, scalerMetadata=metadata)

    async def call(self, method: str, request: Any, answer: Any) -> Any:
        ask = self.channel.unary_unary(f"/{SERVICE}/{method}", type(request).SerializeToString, answer.FromString)
        return await ask(request, timeout=5)

    async def active(self, ref: Any) -> bool:
        return (await self.call("IsActive", ref, IsActiveResponse)).result

    async def value(self, ref: Any) -> int:
        request = GetMetricsRequest(scaledObjectRef=ref, metricName=METRIC)
        (found,) = (await self.call("GetMetrics", request, GetMetricsResponse)).metricValues
        assert found.metricName == METRIC
        assert found.metricValue == found.metricValueFloat
        return found.metricValue


@pytest.fixture
async def keda(wva: LocalCluster) -> AsyncIterator[Keda]:
    await define(wva.client, scaled_object_crd())
    port = free_port()
    async with (
        running(wva.client, keda_scaler_address=f"127.0.0.1:{port}") as harness,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield Keda(channel, harness)


async def scaled_object(fleet: Fleet, name: str, target: str, kind: str = "external", **metadata: str) -> None:
    spec = {
        "scaleTargetRef": {"name": target},
        "triggers": [{"type": kind, "metadata": {"scalerAddress": "wva:9443", **metadata}}],
    }
    await fleet.client.create(SCALED_OBJECTS, {"metadata": {"name": name}, "spec": spec}, NAMESPACE)


async def test_a_scaled_object_that_names_a_model_is_a_variant(fleet: Fleet, keda: Keda) -> None:
    """No VariantAutoscaling, no annotation: the trigger says what a variant is."""
    pods = await fleet.deployment("dep", 2)
    metadata = {"modelID": "food/llm-8b", "variantCost": "4.5"}
    await scaled_object(fleet, "so", "dep", **metadata)
    keda.harness.source.put_all(pods, 0.95, 9)
    await keda.harness.cycle()
    ref = keda.ref("so", **metadata)
    spec = await keda.call("GetMetricSpec", ref, GetMetricSpecResponse)
    assert [(s.metricName, s.targetSize, s.targetSizeFloat) for s in spec.metricSpecs] == [(METRIC, 1, 1.0)]
    assert await keda.active(ref)
    assert await keda.value(ref) == 3
    variant = keda.harness.controller.world.our_variants()[0]
    assert (variant.key.name, str(variant.spec.cost)) == ("so", "4.5")


async def test_a_variant_of_its_own_is_found_by_target_or_by_name(fleet: Fleet, keda: Keda) -> None:
    pods = await fleet.deployment("dep", 2)
    await fleet.variant("va", "dep")
    await scaled_object(fleet, "so", "dep")
    keda.harness.source.put_all(pods, 0.69, 0)
    await keda.harness.cycle()
    assert await keda.value(keda.ref("so")) == 2
    assert await keda.value(keda.ref("not known here", variantName="va")) == 2


@pytest.mark.parametrize(
    ("name", "metadata", "words"),
    [
        ("stranger", {}, "ScaledObject serving/stranger: no variant decides for its target: give the trigger"),
        ("so", {"variantName": "typo"}, "nothing is decided yet for variant serving/typo"),
    ],
)
async def test_what_is_not_decided_is_an_error_and_no_number(
    fleet: Fleet, keda: Keda, name: str, metadata: dict[str, str], words: str
) -> None:
    """KEDA then does what its fallback says; a zero would take the fleet away."""
    for ask in (keda.value, keda.active):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(keda.ref(name, **metadata))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert words in (caught.value.details() or "")


async def test_a_push_trigger_hears_of_sleep_and_of_waking(fleet: Fleet, keda: Keda) -> None:
    await fleet.config_map("wva-model-scale-to-zero-config", {"default": "enable_scale_to_zero: true"})
    pods = await fleet.deployment("dep", 1)
    await scaled_object(fleet, "so", "dep", "external-push", modelID="food/llm-8b")
    harness = keda.harness
    harness.source.put_all(pods, 0.3, 0, running=1.0)
    harness.source.requests = {(NAMESPACE, "food/llm-8b"): 5.0}
    heard: list[bool] = []
    stream = keda.channel.unary_stream(
        f"/{SERVICE}/StreamIsActive", ScaledObjectRef.SerializeToString, IsActiveResponse.FromString
    )(keda.ref("so"))

    async def listen() -> None:
        async for answer in stream:
            heard.append(answer.result)

    task = asyncio.create_task(listen())
    try:
        await harness.cycle()
        await eventually(lambda: heard == [True])
        harness.source.put_all(pods, 0.0, 0, running=0.0)
        harness.source.requests = {(NAMESPACE, "food/llm-8b"): 0.0}
        await harness.cycle()
        await eventually(lambda: heard == [True, False])
    finally:
        stream.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not harness.controller.exporter._observers or await _gone(harness)


async def _gone(harness: Harness) -> bool:
    """A client that leaves is forgotten."""
    await eventually(lambda: not harness.controller.exporter._observers)
    return True


class TestSeveralScalers:
    """Two that move one target undo each other: it is said on both."""

    async def test_an_hpa_beside_a_scaled_object(self, fleet: Fleet, keda: Keda) -> None:
        await fleet.deployment("dep", 1)
        await scaled_object(fleet, "so", "dep", modelID="food/llm-8b")
        await fleet.hpa("hpa", "dep")
        await keda.harness.caught_up()
        keda.harness.controller._periodic_pass()
        await keda.harness.settle()

        async def said_on_both() -> bool:
            events = await fleet.events("SeveralScalers")
            return {event["involvedObject"]["name"] for event in events} == {"so", "hpa"}

        await eventually(said_on_both)
        events = await fleet.events("SeveralScalers")
        words = "is moved by ScaledObject so and by HorizontalPodAutoscaler hpa, which undo each other"
        assert all(words in event["message"] for event in events)

    async def test_an_hpa_beside_our_own_writes(self, wva: LocalCluster, fleet: Fleet) -> None:
        async with running(wva.client, **SCALE) as harness:
            await fleet.deployment("dep", 1)
            await fleet.variant("va", "dep")
            await fleet.hpa("hpa", "dep", managed=False)
            await harness.caught_up()
            harness.controller._periodic_pass()

            async def said() -> bool:
                return bool(await fleet.events("SeveralScalers"))

            await eventually(said)
            (event,) = await fleet.events("SeveralScalers")
            assert event["involvedObject"]["name"] == "hpa"
            assert "this autoscaler for VariantAutoscaling va (--actuation scale)" in event["message"]

    async def test_keda_s_own_hpa_is_no_rival(self, fleet: Fleet, keda: Keda) -> None:
        await fleet.deployment("dep", 1)
        await scaled_object(fleet, "so", "dep", modelID="food/llm-8b")
        made = await fleet.client.get(SCALED_OBJECTS, "so", NAMESPACE)
        owner = {
            "apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "name": "so",
            "uid": made["metadata"]["uid"], "controller": True,
        }  # fmt: skip
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "dep"}
        hpa = {
            "metadata": {"name": "keda-hpa-so", "ownerReferences": [owner]},
            "spec": {"scaleTargetRef": target, "maxReplicas": 5},
        }
        await fleet.client.create(HORIZONTAL_POD_AUTOSCALERS, hpa, NAMESPACE)
        await keda.harness.caught_up()
        keda.harness.controller._periodic_pass()
        await keda.harness.settle()
        assert await fleet.events("SeveralScalers") == []
        assert (await fleet.client.get(DEPLOYMENTS, "dep", NAMESPACE))["spec"]["replicas"] == 1
