"""Cases from public reports (W..., A..., AS...), with their inputs and right outcomes."""

from __future__ import annotations

import asyncio
import datetime as dt
from dataclasses import replace
from typing import Any

import pytest
from tests.conftest import create_namespace
from tests.definitions import define, scaled_object_crd
from tests.integration.fleet import (
    MODEL,
    NAMESPACE,
    OPTIONS,
    SCALE,
    Fleet,
    Harness,
    ScriptedSource,
    external_metric,
    running,
)
from tests.polling import eventually

from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.autoscaler.world import VARIANT_AUTOSCALINGS
from tidemill.kube.client import KubeClient
from tidemill.kube.clock import utc_now
from tidemill.kube.errors import ApiError
from tidemill.kube.resources import CONFIG_MAPS, DEPLOYMENTS, NAMESPACES, PODS, Json
from tidemill.local.cluster import LocalCluster
from tidemill.metrics.samples import Gauge, SeriesId, SeriesSample

KV = "vllm:kv_cache_usage_perc"


@pytest.mark.parametrize(
    ("numbers", "lacking"),
    [
        ([(0.60, 1), (0.60, 1), (None, 1)], ["dep-a-2"]),
        ([(0.20, 0), (0.20, 0), (None, 0)], ["dep-a-2"]),
        ([(None, 0), (None, 0), (None, 0)], ["dep-a-0", "dep-a-1", "dep-a-2"]),
    ],
    ids="abc",
)
async def test_a01_one_gauge_of_two_is_missing(
    fleet: Fleet, harness: Harness, numbers: list[tuple[float | None, float]], lacking: list[str]
) -> None:
    pods = await fleet.deployment("dep-a", 3)
    await fleet.variant("va-a", "dep-a")
    for pod, (kv, queue) in zip(pods, numbers, strict=True):
        harness.source.put(pod, kv, queue)
    for _ in range(5):
        await harness.cycle()
        assert harness.desired("va-a") == 3
    found = await fleet.condition("va-a", "MetricsAvailable")
    assert (found["status"], found["reason"]) == ("False", "MetricsMissing")
    for pod in lacking:
        assert f"{pod} ({KV})" in found["message"]
    optimization = await fleet.condition("va-a", "OptimizationReady")
    assert (optimization["status"], optimization["reason"]) == ("False", "MetricsUnavailable")


async def test_w5_pending_replicas_do_not_make_it_grow_again(fleet: Fleet, harness: Harness) -> None:
    pods = await fleet.deployment("dep", 2)
    await fleet.variant("va", "dep")
    harness.source.put_all(pods, 0.95, 9)
    await harness.cycle()
    assert harness.desired("va") == 3
    await fleet.scale("dep", 3)
    await fleet.pod("dep-2", "dep", ready=False)
    for _ in range(5):
        await harness.cycle()
        assert harness.desired("va") == 3
    # A pod that starts is no lost scrape.
    assert (await fleet.condition("va", "MetricsAvailable"))["status"] == "True"
    await fleet.set_ready("dep-2", True)
    harness.source.put("dep-2", 0.95, 9)
    await harness.cycle()
    assert harness.desired("va") == 4


async def test_w6_a_lost_scrape_is_not_idleness(fleet: Fleet, harness: Harness) -> None:
    pods = await fleet.deployment("dep", 4)
    await fleet.variant("va", "dep")
    harness.source.put_all(pods, 0.60, 0)
    await harness.cycle()
    harness.source.put_all(pods[:2], 0.10, 0)
    for pod in pods[2:]:
        harness.source.lose(pod)
    for _ in range(5):
        await harness.cycle()
        assert harness.desired("va") == 4
    found = await fleet.condition("va", "MetricsAvailable")
    assert found["status"] == "False"
    assert "dep-2" in found["message"]
    assert "dep-3" in found["message"]
    (event,) = await fleet.events("MetricsUnavailable")
    assert event["count"] == 1


async def test_stale_numbers_hold_and_recover(fleet: Fleet, harness: Harness) -> None:
    pods = await fleet.deployment("dep", 2)
    await fleet.variant("va", "dep")
    for age, status, reason in [
        (90, "True", "MetricsFound"), (150, "False", "MetricsStale"), (400, "False", "MetricsMissing"),
        (5, "True", "MetricsFound"),
    ]:  # fmt: skip
        harness.source.put_all(pods, 0.50, 0, age=age)
        await harness.cycle()
        found = await fleet.condition("va", "MetricsAvailable")
        assert (found["status"], found["reason"]) == (status, reason)
        assert harness.desired("va") == 2


async def test_a05_a_failing_query_holds_its_own_model_only(fleet: Fleet, harness: Harness) -> None:
    for name in ("m1", "m2", "m3"):
        pods = await fleet.deployment(f"dep-{name}", 1)
        await fleet.variant(f"va-{name}", f"dep-{name}", modelID=name)
        harness.source.put_all(pods, 0.5, 0, model=name)
    await harness.cycle()
    harness.source.put("dep-m1-0", 0.90, 9, model="m1")
    harness.source.failures = {"m2": "http://p answered 503: server_error: overloaded"}
    await harness.cycle()
    assert [harness.desired(f"va-m{n}") for n in (1, 2, 3)] == [2, 1, 1]
    found = await fleet.condition("va-m2", "MetricsAvailable")
    assert (found["status"], found["reason"]) == ("False", "PrometheusError")
    assert "503" in found["message"]
    assert (await fleet.condition("va-m3", "MetricsAvailable"))["status"] == "True"


async def test_a06_start_and_floor_while_prometheus_is_away(wva: LocalCluster, fleet: Fleet) -> None:
    await fleet.config_map("wva-model-scale-to-zero-config", {"b": "model_id: b\nenable_scale_to_zero: true"})
    pods = await fleet.deployment("dep-a", 4)
    await fleet.variant("va-a", "dep-a", minReplicas=1)
    await fleet.deployment("dep-b", 0)
    await fleet.variant("va-b", "dep-b", modelID="b")
    await fleet.deployment("dep-c", 5)
    await fleet.hpa("hpa-c", "dep-c", model="c", minReplicas=1)
    source = ScriptedSource()
    source.put_all(pods, 0.6, 1)
    async with running(wva.client, source=source) as before:
        await before.cycle()
        assert before.desired("va-a") == 4
    away = ScriptedSource()
    away.failures = dict.fromkeys((MODEL, "b", "c"), "http://p cannot be reached: connection refused")
    async with running(wva.client, source=away) as harness:
        names = ("va-a", "va-b", "hpa-c")
        exported: set[tuple[int | None, ...]] = {tuple(harness.desired(n) for n in names)}
        for _ in range(4):
            await harness.cycle()
            exported.add(tuple(harness.desired(n) for n in names))
        assert exported == {(4, 0, 5)}
        await fleet.client.patch(VARIANT_AUTOSCALINGS, "va-a", {"spec": {"minReplicas": 6}}, NAMESPACE)
        await harness.cycle()
        assert tuple(harness.desired(n) for n in names) == (6, 0, 5)
        assert (await fleet.condition("va-a", "MetricsAvailable"))["reason"] == "PrometheusError"


async def test_a08_the_model_id_is_not_the_served_name(fleet: Fleet, harness: Harness) -> None:
    pods = await fleet.deployment("dep", 2)
    await fleet.variant("va", "dep", modelID="llm-8b")
    harness.source.put_all(pods, 0.90, 9, model="food/llm-8b")
    await fleet.pod("stranger", None)
    harness.source.put("stranger", 0.0, 0, model="other/llm-8b")
    for _ in range(3):
        await harness.cycle()
        assert harness.desired("va") == 2
    found = await fleet.condition("va", "MetricsAvailable")
    assert found["status"] == "False"
    assert "'llm-8b'" in found["message"]
    assert "'food/llm-8b'" in found["message"]
    assert "other/llm-8b" not in found["message"]
    (event,) = await fleet.events("MetricsUnavailable")
    assert (event["type"], event["count"]) == ("Warning", 1)
    await fleet.client.patch(VARIANT_AUTOSCALINGS, "va", {"spec": {"modelID": "food/llm-8b"}}, NAMESPACE)
    await harness.cycle()
    assert harness.desired("va") == 3


class TestA10WhoseNumbers:
    def series(
        self, pod: str = "", instance: str = "", queue: float = 0.0, namespace: str = NAMESPACE
    ) -> SeriesSample:
        return SeriesSample(SeriesId(namespace, pod, instance, MODEL), Gauge(0.5, 1), Gauge(queue, 1))

    async def attributed(self, fleet: Fleet, harness: Harness, *series: SeriesSample) -> Any:
        from tidemill.autoscaler.attribution import attribute

        await fleet.deployment("dep-a", 0)
        await fleet.variant("va-a", "dep-a")
        await fleet.pod("dep-a-7d9f8-x2x4q", "dep-a", ip="10.0.0.11")
        await fleet.pod("job-rank-0", None, ip="10.0.0.12")
        await harness.caught_up()
        found = attribute(harness.controller.world, series)
        return {key.name: sample for key, sample in found.samples.items()}, found.unattributed

    async def test_by_address(self, fleet: Fleet, harness: Harness) -> None:
        samples, lost = await self.attributed(fleet, harness, self.series(instance="10.0.0.11:8000"))
        assert list(samples) == ["dep-a-7d9f8-x2x4q"]
        assert not lost

    async def test_ranks_of_one_pod_add_up(self, fleet: Fleet, harness: Harness) -> None:
        name = "dep-a-7d9f8-x2x4q"
        samples, lost = await self.attributed(
            fleet, harness, self.series(f"{name}-rank-0", queue=3), self.series(f"{name}-rank-1", queue=4)
        )
        assert samples[name].queue_length.value == 7
        assert samples[name].engines == 2
        assert not lost

    async def test_an_exact_name_comes_first(self, fleet: Fleet, harness: Harness) -> None:
        samples, _ = await self.attributed(fleet, harness, self.series("job-rank-0"))
        assert list(samples) == ["job-rank-0"]

    async def test_nobodys_series_are_counted_and_decide_nothing(self, fleet: Fleet, harness: Harness) -> None:
        samples, lost = await self.attributed(fleet, harness, self.series(instance="10.0.9.9:8000"))
        assert not samples
        assert lost == {(NAMESPACE, "no such pod"): 1}
        harness.source.numbers["x"] = self.series(instance="10.0.9.9:8000")
        await harness.cycle()
        assert f'wva_unattributed_series{{namespace="{NAMESPACE}",reason="no such pod"}} 1.0' in harness.series()

    async def test_several_series_of_one_engine_count_once(self, fleet: Fleet, harness: Harness) -> None:
        base = self.series("dep-a-7d9f8-x2x4q", "10.0.0.11:8000", queue=4)
        adapter = replace(base, id=base.id._replace(model="adapter"))
        samples, _ = await self.attributed(fleet, harness, base, adapter)
        sample = samples["dep-a-7d9f8-x2x4q"]
        assert (sample.engines, sample.queue_length.value) == (1, 4)
        assert sample.models == {MODEL, "adapter"}


async def test_shadow_pods_are_found_by_their_label(fleet: Fleet, harness: Harness) -> None:
    await fleet.deployment("dep", 0)
    await fleet.scale("dep", 1)
    await fleet.variant("va", "dep")
    await fleet.pod("shadow", None, labels={"llm-d.ai/variant": "va"})
    harness.source.put("shadow", 0.95, 9)
    await harness.cycle()
    assert harness.desired("va") == 2


async def test_a_replica_set_of_a_namesake_does_not_attribute(fleet: Fleet, harness: Harness) -> None:
    await fleet.deployment("dep", 1)
    await fleet.variant("va", "dep")
    # The Deployment is replaced by another of the same name; garbage collection has not come by yet.
    await fleet.client._json("DELETE", DEPLOYMENTS.path(NAMESPACE, "dep"), body={"propagationPolicy": "Orphan"})

    async def gone() -> bool:
        return not (await fleet.client.list(DEPLOYMENTS, NAMESPACE)).items

    await eventually(gone)
    await fleet.client.create(
        DEPLOYMENTS,
        {"metadata": {"name": "dep"}, "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "dep"}},
         "template": {"metadata": {"labels": {"app": "dep"}},
                      "spec": {"containers": [{"name": "c", "image": "none"}]}}}},
        NAMESPACE,
    )  # fmt: skip
    harness.source.put("dep-0", 0.95, 9)
    await harness.cycle()
    assert harness.desired("va") == 1


class TestA24AMinimumOfZero:
    RETENTION = 600

    async def desired(
        self, wva: LocalCluster, fleet: Fleet, kind: str, spec: Json, *, current: int = 1, zero: bool = True,
        requests: float | None = 0, running_requests: float = 0, ready_minutes: float = 60,
    ) -> int | None:  # fmt: skip
        """What is decided for a managed scaler of an idle model."""
        await define(wva.client, scaled_object_crd())
        await fleet.config_map(
            "wva-model-scale-to-zero-config", {"default": f"enable_scale_to_zero: {str(zero).lower()}"}
        )
        pods = await fleet.deployment("dep", current)
        for pod in pods:
            await fleet.set_ready(pod, True, since=utc_now() - dt.timedelta(minutes=ready_minutes))
        await fleet.scaler(kind, "scaler", "dep", **spec)
        source = ScriptedSource()
        for pod in pods:
            source.put(pod, 0.0, 0, running=running_requests)
        if requests is not None:
            source.requests = {(NAMESPACE, MODEL): requests}
        async with running(wva.client, source=source) as harness:
            for _ in range(3):
                await harness.cycle()
            assert source.retentions == {MODEL: self.RETENTION if zero else None}
            return harness.desired("scaler")

    @pytest.mark.parametrize(
        ("kind", "spec", "want"),
        [
            ("ScaledObject", {"minReplicaCount": 0}, 0),
            ("ScaledObject", {}, 0),
            ("ScaledObject", {"minReplicaCount": 1}, 1),
            ("ScaledObject", {"minReplicaCount": 3}, 3),
            ("HorizontalPodAutoscaler", {"maxReplicas": 9}, 1),
            (
                "HorizontalPodAutoscaler",
                {"minReplicas": 0, "maxReplicas": 9, "metrics": [external_metric("scaler")]},
                0,
            ),
            ("HorizontalPodAutoscaler", {"minReplicas": 2, "maxReplicas": 9}, 2),
        ],
    )
    async def test_idle_past_retention(
        self, wva: LocalCluster, fleet: Fleet, kind: str, spec: Json, want: int
    ) -> None:
        assert await self.desired(wva, fleet, kind, spec) == want

    async def test_zero_stays_zero(self, wva: LocalCluster, fleet: Fleet) -> None:
        assert await self.desired(wva, fleet, "ScaledObject", {"minReplicaCount": 0}, current=0) == 0

    async def test_not_when_it_is_off(self, wva: LocalCluster, fleet: Fleet) -> None:
        assert await self.desired(wva, fleet, "ScaledObject", {"minReplicaCount": 0}, zero=False) == 1

    @pytest.mark.parametrize(
        "known",
        [{"requests": 1}, {"requests": None}, {"running_requests": 1}, {"ready_minutes": 9}],
        ids=["used", "unknown", "running", "just-woken"],
    )
    async def test_not_unless_it_is_known_to_be_idle(self, wva: LocalCluster, fleet: Fleet, known: Json) -> None:
        assert await self.desired(wva, fleet, "ScaledObject", {}, **known) == 1


async def test_in_use_again_before_it_slept(fleet: Fleet, harness: Harness) -> None:
    await fleet.config_map("wva-model-scale-to-zero-config", {"default": "enable_scale_to_zero: true"})
    (pod,) = await fleet.deployment("dep", 1)
    await fleet.variant("va", "dep")
    harness.source.put(pod, 0.0, 0, running=0)
    harness.source.requests = {(NAMESPACE, MODEL): 0}
    await harness.cycle()
    assert harness.desired("va") == 0
    # Nobody has moved the replicas yet, and a request comes.
    harness.source.put(pod, 0.1, 0, running=1)
    await harness.cycle()
    assert harness.desired("va") == 1
    # Nor does a lost scrape put it to sleep.
    harness.source.put(pod, 0.0, 0, running=0)
    await harness.cycle()
    assert harness.desired("va") == 0
    harness.source.lose(pod)
    await harness.cycle()
    assert harness.desired("va") == 1


async def test_a31_two_variants_of_one_target(fleet: Fleet, harness: Harness) -> None:
    pods = await fleet.deployment("dep-a", 2)
    await fleet.variant("va-1", "dep-a")
    await fleet.variant("va-2", "dep-a")
    harness.source.put_all(pods, 0.90, 9)
    await harness.cycle()
    assert (harness.desired("va-1"), harness.desired("va-2")) == (3, None)
    assert 'variant_name="va-2"' not in harness.series()
    found = await fleet.condition("va-2", "Ready")
    assert (found["status"], found["reason"]) == ("False", "TargetConflict")
    (event,) = await fleet.events("TargetConflict")
    assert "va-1" in event["message"]
    assert event["involvedObject"]["name"] == "va-2"
    await fleet.client.delete(VARIANT_AUTOSCALINGS, "va-1", NAMESPACE)
    await harness.cycle()
    assert harness.desired("va-1") is None
    assert harness.desired("va-2") == 3


async def test_a31_an_hpa_that_follows_one_and_moves_another(fleet: Fleet, harness: Harness) -> None:
    await fleet.deployment("dep-b", 1)
    await fleet.deployment("dep-c", 1)
    await fleet.variant("va-3", "dep-b")
    metric = {"type": "External", "external": {
        "metric": {"name": "wva_desired_replicas", "selector": {"matchLabels": {"variant_name": "va-3"}}},
        "target": {"type": "AverageValue", "averageValue": "1"},
    }}  # fmt: skip
    await fleet.scaler("HorizontalPodAutoscaler", "hpa", "dep-c", managed=False, maxReplicas=5, metrics=[metric])
    for _ in range(3):
        await harness.cycle()
        harness.controller._periodic_pass()
        await harness.settle()
    (event,) = await fleet.events("ScaleTargetMismatch")
    assert event["count"] == 1
    for word in ("va-3", "dep-b", "dep-c"):
        assert word in event["message"]


class TestManagedScalers:
    @pytest.fixture
    async def keda(self, wva: LocalCluster) -> None:
        await define(wva.client, scaled_object_crd())

    async def said(self, harness: Harness, fleet: Fleet, reason: str) -> list[tuple[str, str]]:
        await harness.cycle()
        harness.controller._periodic_pass()
        await harness.settle()
        return sorted((e["involvedObject"]["name"], e["message"]) for e in await fleet.events(reason))

    async def test_an_annotated_hpa_is_a_variant(self, fleet: Fleet, harness: Harness) -> None:
        pods = await fleet.deployment("dep", 2)
        await fleet.hpa(
            "hpa", "dep", cost="2.5", minReplicas=1, labels={"inference.optimization/acceleratorName": "H100"}
        )
        harness.source.put_all(pods, 0.9, 9)
        await harness.cycle()
        assert harness.desired("hpa") == 3
        assert 'accelerator_type="H100"' in harness.series()
        (event,) = await fleet.events("ScaledUp")
        assert (event["involvedObject"]["kind"], event["involvedObject"]["name"]) == (
            "HorizontalPodAutoscaler",
            "hpa",
        )
        assert not (await fleet.client.list(VARIANT_AUTOSCALINGS, NAMESPACE)).items

    async def test_it_is_decided_for_at_once(self, fleet: Fleet, harness: Harness) -> None:
        await fleet.deployment("dep", 2)
        await fleet.hpa("hpa", "dep")
        await eventually(lambda: harness.desired("hpa") == 2, within=5)

    @pytest.mark.usefixtures("keda")
    async def test_a_scaled_object_wins_over_an_hpa(self, wva: LocalCluster, fleet: Fleet) -> None:
        await fleet.deployment("dep", 2)
        await fleet.hpa("hpa", "dep")
        await fleet.scaler("ScaledObject", "so", "dep")
        async with running(wva.client) as harness:
            ((about, message),) = await self.said(harness, fleet, "TargetConflict")
            assert about == "hpa"
            assert "ScaledObject so" in message
            assert (harness.desired("so"), harness.desired("hpa")) == (2, None)

    async def test_two_of_one_kind_are_an_error_that_names_both(self, fleet: Fleet, harness: Harness) -> None:
        await fleet.deployment("dep", 2)
        await fleet.hpa("one", "dep")
        await fleet.hpa("two", "dep")
        found = await self.said(harness, fleet, "TargetConflict")
        assert [about for about, _ in found] == ["one", "two"]
        assert all("one and two" in message for _, message in found)
        assert (harness.desired("one"), harness.desired("two")) == (None, None)

    @pytest.mark.parametrize(
        ("annotations", "words"),
        [
            ({"llm-d.ai/model-id": ""}, "metadata.annotations[llm-d.ai/model-id]: invalid value '': is required"),
            ({"llm-d.ai/variant-cost": "-1"}, "metadata.annotations[llm-d.ai/variant-cost]: invalid value '-1'"),
        ],
    )
    async def test_bad_annotations_are_said_on_the_scaler(
        self, fleet: Fleet, harness: Harness, annotations: dict[str, str], words: str
    ) -> None:
        await fleet.deployment("dep", 1)
        await fleet.hpa("hpa", "dep", annotations=annotations)
        ((about, message),) = await self.said(harness, fleet, "InvalidConfiguration")
        assert about == "hpa"
        assert words in message
        assert harness.desired("hpa") is None


class TestA35Scope:
    LOCAL = {"default": "kvCacheThreshold: 0.50"}  # noqa: RUF012
    NAME = "wva-saturation-scaling-config"

    def threshold(self, harness: Harness, namespace: str = "x") -> float:
        settings = harness.controller.configuration.saturation(
            model=MODEL, namespace=namespace, accelerator="A100",
            tracked=namespace in harness.controller.world.tracked_namespaces(),
        )  # fmt: skip
        return float(settings.kv_cache_threshold)

    async def test_the_order_of_things_does_not_matter(self, wva: LocalCluster, fleet: Fleet) -> None:
        await create_namespace(wva.client, "x")
        other = Fleet(wva.client, "x")
        # Map, controller, variant.
        await fleet.config_map(self.NAME, self.LOCAL, "x")
        async with running(wva.client) as harness:
            assert self.threshold(harness) == 0.8
            await other.deployment("dep", 1)
            await other.variant("va", "dep")
            await harness.cycle()
            assert self.threshold(harness) == 0.5
        await wva.client.delete(CONFIG_MAPS, self.NAME, "x")
        await wva.client.delete(VARIANT_AUTOSCALINGS, "va", "x")
        # Controller, map, variant.
        async with running(wva.client) as harness:
            await fleet.config_map(self.NAME, self.LOCAL, "x")
            await harness.cycle()
            assert self.threshold(harness) == 0.8
            await other.variant("va", "dep")
            await harness.cycle()
            assert self.threshold(harness) == 0.5
            # An excluded namespace counts never; a deleted map falls back to the global one.
            await wva.client.patch(NAMESPACES, "x", {"metadata": {"annotations": {"wva.llmd.ai/exclude": "true"}}})
            await harness.cycle()
            assert self.threshold(harness) == 0.8
            await wva.client.patch(NAMESPACES, "x", {"metadata": {"annotations": None}})
            await harness.cycle()
            assert self.threshold(harness) == 0.5
            await wva.client.delete(CONFIG_MAPS, self.NAME, "x")
            await harness.cycle()
            assert self.threshold(harness) == 0.8

    async def test_a_labelled_namespace_counts_before_it_has_a_variant(
        self, wva: LocalCluster, fleet: Fleet, harness: Harness
    ) -> None:
        await create_namespace(wva.client, "x", labels={"wva.llmd.ai/config-enabled": "true"})
        await fleet.config_map(self.NAME, self.LOCAL, "x")
        await harness.caught_up()
        assert self.threshold(harness) == 0.5

    async def test_a_map_that_cannot_be_read_leaves_the_last_one(
        self, wva: LocalCluster, fleet: Fleet, harness: Harness
    ) -> None:
        pods = await fleet.deployment("dep", 1)
        await fleet.variant("va", "dep")
        await fleet.config_map(self.NAME, {"default": "kvCacheThreshold: 0.60"})
        await harness.caught_up()
        # The server answers for nothing, which includes the map, for three cycles.
        await wva.server.stop()
        harness.source.put_all(pods, 0.65, 0)
        assert harness.controller.engine is not None
        for _ in range(3):
            await harness.controller.engine.cycle()
        assert harness.desired("va") == 2
        await wva.server.start()


async def test_as4_idle_cycles_write_nothing(wva: LocalCluster, fleet: Fleet) -> None:
    for number in range(100):
        await fleet.deployment(f"dep-{number}", 1)
        await fleet.variant(f"va-{number}", f"dep-{number}", modelID=f"m{number}")
    async with running(wva.client) as harness:
        for number in range(100):
            harness.source.put(f"dep-{number}-0", 0.3, 0, model=f"m{number}")
        await harness.cycle()
        await harness.caught_up()
        before = {n: await fleet.client.get(VARIANT_AUTOSCALINGS, f"va-{n}", NAMESPACE) for n in (0, 99)}
        version = wva.server.store.version
        count = harness.reconciles
        for cycle in range(10):
            # Numbers move a little all the time; that alone is nothing to write about.
            for number in range(100):
                harness.source.put(f"dep-{number}-0", 0.3 + cycle / 1000, 0, model=f"m{number}")
            await harness.cycle()
            harness.controller._periodic_pass()
            await harness.settle()
        assert harness.reconciles == count + 10 * 100
        assert wva.server.store.version == version
        for number, old in before.items():
            assert await fleet.client.get(VARIANT_AUTOSCALINGS, f"va-{number}", NAMESPACE) == old


async def test_as6_a_decision_that_cannot_be_carried_out_is_said(
    wva: LocalCluster, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = await fleet.deployment("dep", 1)
    await fleet.variant("va", "dep")
    scale = KubeClient.scale

    async def refuse(*_: Any) -> Json:
        raise ApiError(403, "Forbidden", "cannot patch deployments/scale")

    async with running(wva.client, **SCALE) as harness:
        monkeypatch.setattr(KubeClient, "scale", refuse)
        harness.source.put_all(pods, 0.95, 9)
        await harness.cycle()
        status = await fleet.status("va")
        assert status["actuation"] == {"applied": False}
        assert status["desiredOptimizedAlloc"]["numReplicas"] == 2
        assert "cannot patch deployments/scale" in (await fleet.condition("va", "OptimizationReady"))["message"]
        monkeypatch.setattr(KubeClient, "scale", scale)
        await harness.cycle()
        assert (await fleet.status("va"))["actuation"] == {"applied": True}
        assert (await fleet.client.get(DEPLOYMENTS, "dep", NAMESPACE))["spec"]["replicas"] == 2


class TestBadInput:
    @pytest.fixture
    async def lax(self, api_only: LocalCluster) -> LocalCluster:
        """A cluster whose CRD checks nothing, as an older one might."""
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        crd = {
            "metadata": {"name": "variantautoscalings.llmd.ai"},
            "spec": {
                "group": "llmd.ai", "scope": "Namespaced",
                "names": {"plural": "variantautoscalings", "kind": "VariantAutoscaling"},
                "versions": [{"name": "v1alpha1", "served": True, "storage": True,
                              "subresources": {"status": {}}, "schema": {"openAPIV3Schema": schema}}],
            },
        }  # fmt: skip
        await define(api_only.client, crd)
        for name in (NAMESPACE, DEFAULT_NAMESPACE):
            await create_namespace(api_only.client, name)
        return api_only

    @pytest.mark.parametrize(
        ("spec", "words"),
        [
            ({"variantCost": "abc"}, ["serving/va", "spec.variantCost", "'abc'", "pattern"]),
            ({"scaleTargetRef": {"kind": "StatefulSet", "name": "dep"}},
             ["serving/va", "spec.scaleTargetRef.kind", "'StatefulSet'", "'Deployment' or 'LeaderWorkerSet'"]),
            ({"minReplicas": 5, "maxReplicas": 2}, ["minReplicas 5 must not be above maxReplicas 2"]),
        ],
    )  # fmt: skip
    async def test_a_variant(self, lax: LocalCluster, spec: Json, words: list[str]) -> None:
        fleet = Fleet(lax.client)
        pods = await fleet.deployment("dep", 1)
        await fleet.variant("va", "dep", **spec)
        async with running(lax.client) as harness:
            await harness.settle()
            found = await fleet.condition("va", "Ready")
            assert (found["status"], found["reason"]) == ("False", "InvalidConfiguration")
            for word in words:
                assert word in found["message"]
            assert await fleet.events("InvalidConfiguration")
            assert harness.desired("va") is None
            # Mended, it works.
            good = {"variantCost": "10.0", "minReplicas": None, "maxReplicas": None, "scaleTargetRef": {
                "kind": "Deployment", "name": "dep"}}  # fmt: skip
            await lax.client.patch(VARIANT_AUTOSCALINGS, "va", {"spec": good}, NAMESPACE)
            harness.source.put_all(pods, 0.9, 9)
            await harness.cycle()
            assert harness.desired("va") == 2
            # Broken again, its last good state stays in force.
            await lax.client.patch(VARIANT_AUTOSCALINGS, "va", {"spec": spec}, NAMESPACE)
            await harness.cycle()
            harness.controller._periodic_pass()
            await harness.settle()
            assert harness.desired("va") == 2
            optimization = await fleet.condition("va", "OptimizationReady")
            assert optimization["reason"] == "InvalidConfiguration"
            assert "last good spec stays in force" in optimization["message"]

    @pytest.mark.parametrize(
        ("name", "key", "bad", "rule"),
        [
            ("wva-manager-config", "GLOBAL_OPT_INTERVAL", "0", "at least 1s"),
            ("wva-manager-config", "GLOBAL_OPT_INTERVAL", "soon", "duration with a unit"),
            ("wva-saturation-scaling-config", "default", "kvCacheThreshold: 7", "less than or equal to 1"),
            ("wva-saturation-scaling-config", "default", "kvCacheThreshold: [", "must be YAML"),
        ],
    )
    async def test_a_config_map(
        self, fleet: Fleet, harness: Harness, name: str, key: str, bad: str, rule: str
    ) -> None:
        good = {"GLOBAL_OPT_INTERVAL": "30s", "default": "kvCacheThreshold: 0.60"}
        await fleet.config_map(name, {key: good[key]})
        await harness.caught_up()
        await fleet.config_map(name, {key: bad})
        await harness.caught_up()
        await harness.settle()
        (event,) = await fleet.events("InvalidConfiguration", DEFAULT_NAMESPACE)
        assert event["involvedObject"]["name"] == name
        for word in (name, key, rule, "last good value in force"):
            assert word in event["message"]
        configuration = harness.controller.configuration
        settings = configuration.saturation(model="m", namespace="n", accelerator="x", tracked=False)
        assert configuration.manager.interval == (30 if name == "wva-manager-config" else 60)
        assert float(settings.kv_cache_threshold) == (0.8 if name == "wva-manager-config" else 0.6)

    async def test_what_needs_a_restart_is_refused(self, fleet: Fleet, harness: Harness) -> None:
        await fleet.config_map(
            "wva-manager-config", {"PROMETHEUS_BASE_URL": "http://new:9090", "GLOBAL_OPT_INTERVAL": "9s"}
        )
        await harness.caught_up()
        await harness.settle()
        (event,) = await fleet.events("ImmutableConfigChangeRejected", DEFAULT_NAMESPACE)
        assert "PROMETHEUS_BASE_URL" in event["message"]
        assert harness.controller.configuration.manager.prometheus.base_url == ""
        assert harness.controller.configuration.manager.interval == 9

    async def test_a_deleted_global_map_stays_in_force(self, fleet: Fleet, harness: Harness) -> None:
        await fleet.config_map("wva-manager-config", {"GLOBAL_OPT_INTERVAL": "9s"})
        await harness.caught_up()
        await fleet.client.delete(CONFIG_MAPS, "wva-manager-config", DEFAULT_NAMESPACE)
        await harness.caught_up()
        await harness.settle()
        assert harness.controller.configuration.manager.interval == 9
        assert await fleet.events("GlobalConfigMapDeleted", DEFAULT_NAMESPACE)


async def test_w1_a_crd_that_refuses_partial_and_empty_allocations(api_only: LocalCluster) -> None:
    """The original's CRD: accelerator and numReplicas are required whenever the allocation is there."""
    from tidemill.api.crd import variant_autoscaling_crd

    crd = variant_autoscaling_crd()
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    schema["desiredOptimizedAlloc"] |= {"required": ["accelerator", "numReplicas"]}
    await define(api_only.client, crd)
    for name in (NAMESPACE, DEFAULT_NAMESPACE):
        await create_namespace(api_only.client, name)
    fleet = Fleet(api_only.client)
    pods = await fleet.deployment("dep", 1)
    await fleet.variant("va", "dep")
    async with running(api_only.client) as harness:
        for kv, replicas in ((0.5, 1), (0.95, 2)):
            harness.source.put_all(pods, kv, 0)
            await harness.cycle()
            alloc = (await fleet.status("va"))["desiredOptimizedAlloc"]
            assert (alloc["numReplicas"], alloc["accelerator"]) == (replicas, "A100")
        await fleet.client.delete(DEPLOYMENTS, "dep", NAMESPACE)

        async def cleared() -> bool:
            status = await fleet.status("va")
            return "desiredOptimizedAlloc" not in status and bool(status.get("conditions"))

        await eventually(cleared, within=5)


class TestRestart:
    STORY = ((0.3, 0), (0.9, 9), (0.9, 9), (0.85, 2), (0.75, 1), (0.6, 0), (0.2, 0), (0.1, 0), (0.1, 0))

    @pytest.mark.parametrize("restart_before", [None, *range(9)])
    async def test_at_any_point(self, wva: LocalCluster, fleet: Fleet, restart_before: int | None) -> None:
        """The same story, whole and with a restart before any of its cycles."""
        await fleet.deployment("dep", 1)
        await fleet.variant("va", "dep")
        source = ScriptedSource()
        told: list[int | None] = []
        context = running(wva.client, source=source, **SCALE)
        harness = await context.__aenter__()
        for number, (kv, queue) in enumerate(self.STORY):
            replicas = (await fleet.client.get(DEPLOYMENTS, "dep", NAMESPACE))["spec"]["replicas"]
            await fleet.has_pods("dep", replicas)
            source.numbers.clear()
            source.put_all([f"dep-{i}" for i in range(replicas)], kv, queue)
            if number == restart_before:
                await context.__aexit__(None, None, None)
                context = running(wva.client, source=source, **SCALE)
                harness = await context.__aenter__()
                # Its first cycle was this one.
            else:
                await harness.cycle()
            told.append(harness.desired("va"))
        await context.__aexit__(None, None, None)
        assert told == [1, 2, 3, 4, 5, 5, 4, 3, 2]

    async def test_a_successor_comes_to_the_same_decision(self, wva: LocalCluster, fleet: Fleet) -> None:
        pods = await fleet.deployment("dep", 2)
        await fleet.variant("va", "dep")
        source = ScriptedSource()
        source.put_all(pods, 0.95, 9)
        async with running(wva.client, source=source) as first:
            await first.cycle()
            assert first.desired("va") == 3
        # Nothing has moved the replicas yet. A successor must neither take the step twice nor forget it, also
        # when what it sees by now would not call for it.
        source.put_all(pods, 0.6, 0)
        async with running(wva.client, source=source) as second:
            assert second.desired("va") == 3
            for _ in range(3):
                await second.cycle()
                assert second.desired("va") == 3
            assert (await fleet.status("va"))["desiredOptimizedAlloc"]["numReplicas"] == 3

    async def test_a_target_replaced_while_nobody_looked_inherits_nothing(
        self, wva: LocalCluster, fleet: Fleet
    ) -> None:
        pods = await fleet.deployment("dep", 2)
        await fleet.variant("va", "dep")
        alloc = {"accelerator": "A100", "numReplicas": 7, "lastRunTime": "2026-01-01T00:00:00Z"}
        status = {"status": {"desiredOptimizedAlloc": alloc}}
        await fleet.client.patch(VARIANT_AUTOSCALINGS, "va", status, NAMESPACE, sub="status")
        source = ScriptedSource()
        source.put_all(pods, 0.6, 0)
        async with running(wva.client, source=source) as harness:
            assert harness.desired("va") == 2

    async def test_a_recreated_variant_inherits_nothing(self, fleet: Fleet, harness: Harness) -> None:
        pods = await fleet.deployment("dep", 2)
        await fleet.variant("va", "dep")
        harness.source.put_all(pods, 0.95, 9)
        await harness.cycle()
        assert harness.desired("va") == 3
        await fleet.client.delete(VARIANT_AUTOSCALINGS, "va", NAMESPACE)
        await fleet.variant("va", "dep")
        harness.source.put_all(pods, 0.5, 0)
        await harness.cycle()
        assert harness.desired("va") == 2

    async def test_the_api_server_may_be_away_for_ten_seconds(self, wva: LocalCluster, fleet: Fleet) -> None:
        pods = await fleet.deployment("dep", 2)
        await fleet.variant("va", "dep")
        async with running(wva.client) as harness:
            harness.source.put_all(pods, 0.5, 0)
            await harness.cycle()
            await wva.server.stop()
            harness.source.put_all(pods, 0.95, 9)
            assert harness.controller.engine is not None
            started = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() < started + 10:
                await harness.controller.engine.cycle()
                assert harness.desired("va") == 3
                await asyncio.sleep(0.5)
            await wva.server.start()

            async def written() -> bool:
                alloc = (await fleet.status("va")).get("desiredOptimizedAlloc") or {}
                return alloc.get("numReplicas") == 3

            await eventually(written, within=20)
            await fleet.deployment("late", 1)
            await fleet.variant("va-late", "late")
            await eventually(lambda: harness.desired("va-late") == 1, within=30)


class TestActuation:
    async def test_scale_mode_writes_and_metrics_mode_does_not(self, wva: LocalCluster, fleet: Fleet) -> None:
        for mode, replicas in ((OPTIONS.actuation, 1), (SCALE["actuation"], 2)):
            name = f"dep-{mode}"
            pods = await fleet.deployment(name, 1)
            await fleet.variant(f"va-{mode}", name, modelID=mode)
            async with running(wva.client, actuation=mode) as harness:
                harness.source.put_all(pods, 0.95, 9, model=mode)
                await harness.cycle()
                assert harness.desired(f"va-{mode}") == 2
            found = await fleet.client.get(DEPLOYMENTS, name, NAMESPACE)
            assert found["spec"]["replicas"] == replicas

    async def test_a_dry_run_only_explains(self, wva: LocalCluster, fleet: Fleet) -> None:
        pods = await fleet.deployment("dep", 1)
        await fleet.variant("va", "dep")
        async with running(wva.client, dry_run=True, **SCALE) as harness:
            version = wva.server.store.version
            harness.source.put_all(pods, 0.95, 9)
            await harness.cycle()
            assert harness.desired("va") is None
            (decision,) = harness.controller.decisions.all()
            assert (decision.replicas, decision.not_applied) == (2, "dry run")
            assert wva.server.store.version == version

    async def test_only_the_leader_exports(self, wva: LocalCluster, fleet: Fleet) -> None:
        from tidemill.autoscaler.controller import lease_config

        pods = await fleet.deployment("dep", 1)
        await fleet.variant("va", "dep")
        lease = lease_config(DEFAULT_NAMESPACE, "one", duration=1.5, renew_deadline=1.0, retry_period=0.1)
        async with running(wva.client, lease=lease) as leader:
            leader.source.put_all(pods, 0.5, 0)
            await leader.cycle()
            assert leader.desired("va") == 1
            await wva.server.stop()
            await eventually(lambda: leader.controller.engine is None)
            assert leader.desired("va") is None
            await wva.server.start()
            await eventually(lambda: leader.desired("va") == 1, within=20)


async def test_new_pods_are_scraped_and_terminating_ones_are_not(fleet: Fleet, harness: Harness) -> None:
    await fleet.deployment("dep", 2)
    await fleet.variant("va", "dep")
    await fleet.client.patch(PODS, "dep-1", {"metadata": {"finalizers": ["test/hold"]}}, NAMESPACE)
    await fleet.client.delete(PODS, "dep-1", NAMESPACE)
    await fleet.pod("dep-2", "dep", ip="fd00::7")
    await harness.cycle()
    assert [(t.pod, t.address) for t in harness.source.targets] == [
        ("dep-0", "10.0.0.1:8000"), ("dep-2", "[fd00::7]:8000"),
    ]  # fmt: skip


async def test_a_pod_that_just_became_ready_is_given_time_to_report(fleet: Fleet, harness: Harness) -> None:
    pods = await fleet.deployment("dep", 1)
    await fleet.variant("va", "dep")
    harness.source.put_all(pods, 0.5, 0)
    await fleet.scale("dep", 2)
    await fleet.pod("dep-1", "dep", since=utc_now() - dt.timedelta(seconds=5))
    await harness.cycle()
    assert (await fleet.condition("va", "MetricsAvailable"))["status"] == "True"
    assert harness.desired("va") == 1


async def test_a_kind_of_target_that_the_cluster_does_not_serve_is_said(fleet: Fleet, harness: Harness) -> None:
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "group"}
    await fleet.variant("va", scaleTargetRef=target)
    await harness.caught_up()
    await harness.settle()
    found = await fleet.condition("va", "TargetResolved")
    assert (found["status"], found["reason"]) == ("False", "TargetNotFound")
    assert "the cluster serves no LeaderWorkerSets" in found["message"]


async def test_two_engines_of_a_mixed_model_share_one_average(fleet: Fleet, harness: Harness) -> None:
    """Averages run over all variants together, the cheapest grows, and only it."""
    cheap = await fleet.deployment("cheap", 1)
    dear = await fleet.deployment("dear", 1)
    await fleet.variant("va-cheap", "cheap", variantCost="5")
    await fleet.variant("va-dear", "dear", variantCost="20")
    harness.source.put_all(cheap, 0.79, 0)
    harness.source.put_all(dear, 0.70, 0)
    await harness.cycle()
    assert (harness.desired("va-cheap"), harness.desired("va-dear")) == (2, 1)
