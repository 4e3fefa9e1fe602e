"""The Prometheus source against a real Prometheus, and against a fake one where the case is a fault."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from tests.integration.fleet import Fleet, running
from tests.integration.prometheus import prometheus, serving, static
from tests.polling import eventually

from tidemill.api.manager_config import FreshnessThresholds, PrometheusConfig
from tidemill.local.cluster import LocalCluster
from tidemill.metrics.direct import DirectSource
from tidemill.metrics.exporter import DecisionExporter, ExportedDecision
from tidemill.metrics.freshness import Freshness, freshness
from tidemill.metrics.pickers import PickerPoll
from tidemill.metrics.prometheus import PrometheusClient, PrometheusSource
from tidemill.metrics.promql import any_of
from tidemill.metrics.samples import (
    COUNT_OF,
    PickerQueue,
    Quantity,
    ScrapeTarget,
    SeriesSample,
    Snapshot,
)

ROOT = Path(__file__).parents[2]


def exposition(*rows: tuple[str, float, float]) -> str:
    """kv and queue by model name, as vLLM shows them."""

    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"')

    lines = ["# TYPE vllm:kv_cache_usage_perc gauge", "# TYPE vllm:num_requests_waiting gauge"]
    for model, kv, queue in rows:
        labels = f'{{model_name="{quoted(model)}",engine="0"}}'
        lines += [f"vllm:kv_cache_usage_perc{labels} {kv}", f"vllm:num_requests_waiting{labels} {queue}"]
    return "\n".join(lines) + "\n"


def client(url: str, **more: Any) -> PrometheusClient:
    return PrometheusClient(PrometheusConfig(base_url=url, **more))


@contextlib.asynccontextmanager
async def source_of(url: str, **more: Any) -> AsyncIterator[PrometheusSource]:
    source = PrometheusSource(client(url), **more)
    try:
        yield source
    finally:
        await source.close()


async def collected(source: PrometheusSource, models: set[str], count: int) -> Snapshot:
    async def enough() -> Snapshot | None:
        found = await source.collect(dict.fromkeys(models), deadline=8)
        whole = [s for s in found.series if s.kv_usage and s.queue_length]
        return found if len(whole) >= count else None

    return await eventually(enough, within=20)


@pytest.mark.prometheus
async def test_both_sources_give_the_same_samples(tmp_path: Path) -> None:
    content = exposition(("m1", 0.25, 3))
    older = 'vllm:gpu_cache_usage_perc{model_name="m2"} 0.5\nvllm:num_requests_waiting{model_name="m2"} 0\n'
    async with serving(lambda: content) as one, serving(lambda: older) as two:
        configs = [static("a", one, namespace="n", pod="p1"), static("b", two, namespace="n", pod="p2")]
        async with prometheus(tmp_path, configs) as url, source_of(url) as queried:
            direct = DirectSource(interval=0.1, window=60)
            direct.set_targets([ScrapeTarget("n", "p1", "u1", one), ScrapeTarget("n", "p2", "u2", two)])
            try:
                left = await collected(queried, {"m1", "m2"}, 2)

                async def scraped() -> Snapshot | None:
                    found = await direct.collect({"m1": None, "m2": None}, deadline=8)
                    return found if len(found.series) == 2 else None

                right = await eventually(scraped)
            finally:
                await direct.close()

    def ids(snapshot: Snapshot) -> list[SeriesSample]:
        return sorted(snapshot.series, key=lambda s: s.id.pod)

    assert [s.id for s in ids(left)] == [s.id for s in ids(right)]
    assert [(s.kv_usage.value, s.queue_length.value) for s in ids(left)] == [(0.25, 3), (0.5, 0)]
    assert [(s.kv_usage.value, s.queue_length.value) for s in ids(right)] == [(0.25, 3), (0.5, 0)]
    for sample in (*left.series, *right.series):
        assert sample.kv_usage.age < 5
    assert left.queries == 4


@pytest.mark.prometheus
async def test_gauges_count_with_their_maximum_over_the_window(tmp_path: Path) -> None:
    values = iter([0.9, *[0.1] * 10_000])
    async with serving(lambda: exposition(("m", next(values), 0))) as address:
        async with prometheus(tmp_path, [static("a", address, namespace="n", pod="p")]) as url:
            async with source_of(url, window=60) as source:
                await asyncio.sleep(1.5)
                (sample,) = (await collected(source, {"m"}, 1)).series
                assert sample.kv_usage.value == 0.9
            async with source_of(url, window=1) as source:

                async def low() -> bool:
                    (sample,) = (await collected(source, {"m"}, 1)).series
                    return sample.kv_usage.value == 0.1

                await eventually(low)


@pytest.mark.prometheus
async def test_a_target_that_is_gone_gives_no_value(tmp_path: Path) -> None:
    """Its window still holds samples; that must not pass for knowledge."""
    async with contextlib.AsyncExitStack() as stack:
        server = contextlib.AsyncExitStack()
        address = await server.enter_async_context(serving(lambda: exposition(("m", 0.5, 0))))
        url = await stack.enter_async_context(prometheus(tmp_path, [static("a", address, namespace="n", pod="p")]))
        source = await stack.enter_async_context(source_of(url))
        await collected(source, {"m"}, 1)
        await server.aclose()

        async def gone() -> bool:
            found = await source.collect({"m": None}, deadline=8)
            return all(s.kv_usage is None and s.queue_length is None for s in found.series)

        await eventually(gone, within=10)


@pytest.mark.prometheus
async def test_nan_is_no_value(tmp_path: Path) -> None:
    content = exposition(("m", float("nan"), 2))
    async with serving(lambda: content) as address:
        async with prometheus(tmp_path, [static("a", address, namespace="n", pod="p")]) as url:
            async with source_of(url) as source:

                async def seen() -> SeriesSample | None:
                    found = (await source.collect({"m": None}, deadline=8)).series
                    return found[0] if found and found[0].queue_length else None

                sample = await eventually(seen, within=20)
                assert sample.kv_usage is None
                assert sample.queue_length.value == 2


@pytest.mark.prometheus
@pytest.mark.parametrize(("interval", "state"), [("3s", Freshness.FRESH), ("5s", Freshness.STALE)])
async def test_a04_the_window_is_shorter_than_the_scrape_interval(
    tmp_path: Path, interval: str, state: Freshness
) -> None:
    """The case in one thirtieth of its time: scrapes of 90 s (and 150 s) are 3 s (5 s), the window of 60 s
    is 2 s, the stale bound of 2 m is 4 s, cycles of 60 s are 2 s."""
    thresholds = FreshnessThresholds(fresh=2, stale=4, unavailable=10)
    async with serving(lambda: exposition(("m", 0.5, 0))) as address:
        config = {**static("a", address, namespace="n", pod="p"), "scrape_interval": interval}
        async with prometheus(tmp_path, [config]) as url, source_of(url, window=2) as source:
            await collected(source, {"m"}, 1)
            states: list[Freshness] = []
            notes: set[str] = set()
            for _ in range(50):
                snapshot = await source.collect({"m": None}, deadline=8)
                (sample,) = snapshot.series
                # Through every cycle there is a value, whatever its age.
                assert sample.kv_usage.value == 0.5
                states.append(freshness(sample.kv_usage.age, thresholds))
                notes |= set(snapshot.notes)
                await asyncio.sleep(0.25)
            assert (Freshness.STALE in states) is (state is Freshness.STALE)
            assert len(notes) == 1
            (note,) = notes
            assert "window of 2s is shorter than the scrape interval of about" in note
            assert f"about {interval}" in note


@pytest.mark.prometheus
async def test_a09_names_inside_promql(tmp_path: Path) -> None:
    names = ['org/m"} or vector(1) #', "a\\b", "m😀", "m1.5", "m1x5", "a|b", "ü\n"]
    content = exposition(*[(n, i / 10, 0) for i, n in enumerate(names) if "\n" not in n])
    async with serving(lambda: content) as address:
        async with prometheus(tmp_path, [static("a", address, namespace="n", pod="p")]) as url:
            prom = client(url)
            try:

                async def matched(*wanted: str) -> set[str]:
                    rows = await prom.query(f"vllm:kv_cache_usage_perc{{{any_of('model_name', wanted)}}}", 5)
                    return {row.labels["model_name"] for row in rows}

                await eventually(lambda: matched("m1.5"), within=20)
                for name in names:
                    # Alone and in company, each name finds itself and nothing else.
                    present = {name} if "\n" not in name else set()
                    assert await matched(name) == present
                    assert await matched(name, "no-such") == present
                assert await matched("m1.5", "a|b") == {"m1.5", "a|b"}
            finally:
                await prom.close()


@pytest.mark.prometheus
async def test_a09_two_models_that_a_regex_would_confuse(tmp_path: Path, wva: LocalCluster) -> None:
    fleet = Fleet(wva.client)
    rows = {"m1.5": (0.10, 0), "m1x5": (0.95, 9)}
    async with contextlib.AsyncExitStack() as stack:
        configs = []
        for index, (model, (kv, queue)) in enumerate(rows.items()):
            await fleet.deployment(f"dep-{index}", 1)
            await fleet.variant(f"va-{index}", f"dep-{index}", modelID=model)
            text = exposition((model, kv, queue))
            address = await stack.enter_async_context(serving(lambda text=text: text))
            configs.append(static(f"j{index}", address, namespace="serving", pod=f"dep-{index}-0"))
        url = await stack.enter_async_context(prometheus(tmp_path, configs))
        source = await stack.enter_async_context(source_of(url))
        await collected(source, set(rows), 2)
        async with running(wva.client, source=source) as harness:
            await harness.cycle()
            assert (harness.desired("va-0"), harness.desired("va-1")) == (1, 2)


@pytest.mark.prometheus
async def test_w4_rendered_manifests_select_on_the_label_that_is_there(tmp_path: Path) -> None:
    exporter = DecisionExporter()
    exporter.publish(ExportedDecision("llama-8b", "llm-d", "A100", desired=3, current=2))
    registry = CollectorRegistry()
    registry.register(exporter)
    monitor = yaml.safe_load((ROOT / "src/tidemill/manifests/monitoring/servicemonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["endpoints"]
    hpa = yaml.safe_load((ROOT / "deploy/examples/hpa.yaml").read_text())
    external = hpa["spec"]["metrics"][0]["external"]
    labels = external["metric"]["selector"]["matchLabels"]
    by_hpa = f"{external['metric']['name']}{{{','.join(f'{k}={chr(34)}{v}{chr(34)}' for k, v in labels.items())}}}"
    keda = yaml.safe_load((ROOT / "deploy/examples/keda-scaledobject.yaml").read_text())
    trigger = keda["spec"]["triggers"][0]
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert external["target"] == {"type": "AverageValue", "averageValue": "1"}
    async with serving(lambda: generate_latest(registry).decode(), endpoint["path"]) as address:
        # What the operator makes of the ServiceMonitor: target labels namespace and pod of the controller.
        config = {
            **static("wva", address, namespace=monitor["metadata"]["namespace"], pod="controller-manager-1"),
            "metrics_path": endpoint["path"],
            "honor_labels": endpoint.get("honorLabels", False),
        }
        async with prometheus(tmp_path, [config]) as url:
            prom = client(url)
            try:
                await eventually(lambda: prom.query("wva_desired_replicas", 5), within=20)
                for query in (by_hpa, trigger["metadata"]["query"]):
                    (row,) = await prom.query(query, 5)
                    assert row.value == 3
            finally:
                await prom.close()


@pytest.mark.prometheus
async def test_both_sources_know_what_was_served(tmp_path: Path) -> None:
    """Use within a retention of 3 s: a model that serves, one that does not, one whose counter nobody has."""
    served = 0

    def content() -> str:
        lines = [exposition(("busy", 0.1, 0), ("idle", 0.0, 0), ("silent", 0.0, 0))]
        lines += [
            f'vllm:num_requests_running{{model_name="{m}",engine="0"}} {n}\n'
            for m, n in (("busy", 2), ("idle", 0))
        ]
        for model, count in (("busy", served), ("idle", 7)):
            for reason in ("stop", "length"):
                labels = f'{{model_name="{model}",engine="0",finished_reason="{reason}"}}'
                lines.append(f"vllm:request_success_total{labels} {count}\n")
        return "".join(lines)

    models: dict[str, float | None] = {"busy": 3.0, "idle": 3.0, "silent": 3.0, "other": None}
    async with serving(content) as address:
        async with prometheus(tmp_path, [static("a", address, namespace="n", pod="p")]) as url:
            async with source_of(url) as queried:
                direct = DirectSource(interval=0.1, window=60)
                direct.set_targets([ScrapeTarget("n", "p", "u", address)])

                async def agreed(want: dict[tuple[str, str], bool]) -> bool:
                    nonlocal served
                    served += 1 if want.get(("n", "busy")) else 0
                    found = [await source.collect(models, deadline=8) for source in (queried, direct)]
                    seen = [{key: value > 0 for key, value in snapshot.requests.items()} for snapshot in found]
                    return seen == [want, want]

                try:
                    # Until a whole retention has been watched, nothing is said to be unused.
                    first = await direct.collect(models, deadline=8)
                    assert first.requests.get(("n", "idle")) is None
                    await eventually(lambda: agreed({("n", "busy"): True, ("n", "idle"): False}), within=20)
                    for source in (queried, direct):
                        series = (await source.collect(models, deadline=8)).series
                        running = {s.id.model: s.running and s.running.value for s in series}
                        assert running == {"busy": 2, "idle": 0, "silent": None}
                    await eventually(lambda: agreed({("n", "busy"): False, ("n", "idle"): False}), within=20)
                finally:
                    await direct.close()


# A fake Prometheus, for what a real one cannot be made to do.

Answer = Callable[[str, web.Request], Any]


@contextlib.asynccontextmanager
async def fake_prometheus(answer: Answer) -> AsyncIterator[tuple[str, list[str]]]:
    """`answer` gets the query and gives a response; the URL and the queries seen so far."""
    seen: list[str] = []

    async def query(request: web.Request) -> web.Response:
        form = {**request.query, **(await request.post() if request.method == "POST" else {})}
        seen.append(str(form["query"]))
        found = answer(str(form["query"]), request)
        return await found if asyncio.iscoroutine(found) else found

    app = web.Application()
    app.router.add_route("*", "/api/v1/query", query)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


def vector(query: str, models: dict[str, tuple[float, float]]) -> web.Response:
    """What a healthy Prometheus answers for these models (only those that the query names)."""
    named = [
        m
        for m in models
        if f'"{m}"' in query or "model_name=" not in query or f"|{m}" in query or f'"{m}|' in query
    ]
    is_age, is_kv = query.startswith("time()"), "kv_cache" in query
    result = [
        {
            "metric": {"namespace": "serving", "pod": f"dep-{m}-0", "model_name": m},
            "value": [0, "1" if is_age else str(models[m][0 if is_kv else 1])],
        }
        for m in named
    ]
    return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})


class TestA05OneFailingQuery:
    MODELS = {"m1": (0.90, 9.0), "m2": (0.5, 0.0), "m3": (0.5, 0.0)}  # noqa: RUF012

    async def snapshot(self, answer: Answer) -> tuple[Snapshot, float, list[str]]:
        async with fake_prometheus(answer) as (url, seen), source_of(url) as source:
            clock = asyncio.get_running_loop().time
            start = clock()
            found = await source.collect(dict.fromkeys(self.MODELS), deadline=8)
            return found, clock() - start, seen

    def check(self, found: Snapshot, word: str) -> None:
        assert list(found.failures) == ["m2"]
        assert word in found.failures["m2"]
        by_model = {s.id.model: s for s in found.series}
        assert set(by_model) == {"m1", "m3"}
        assert (by_model["m1"].kv_usage.value, by_model["m1"].queue_length.value) == (0.90, 9)

    def refusing(self, status: int) -> Answer:
        def answer(query: str, request: web.Request) -> web.Response:
            if "model_name=" not in query or "m2" in query:
                error = {"status": "error", "errorType": "execution", "error": "m2 is broken"}
                return web.json_response(error, status=status)
            return vector(query, self.MODELS)

        return answer

    @pytest.mark.parametrize("status", [422, 503])
    async def test_refused(self, status: int) -> None:
        found, _, _ = await self.snapshot(self.refusing(status))
        self.check(found, "m2 is broken")

    async def test_hanging(self) -> None:
        async def answer(query: str, request: web.Request) -> web.Response:
            if "model_name=" not in query or "m2" in query:
                await asyncio.sleep(30)
            return vector(query, self.MODELS)

        found, took, _ = await self.snapshot(answer)
        self.check(found, "no answer")
        assert took < 10

    async def test_a_model_among_many(self) -> None:
        models = {f"m{n}": (0.5, 0.0) for n in range(200)}

        def answer(query: str, request: web.Request) -> web.Response:
            if (
                "model_name=" not in query
                or '"m7"' in query
                or "|m7|" in query
                or '"m7|' in query
                or '|m7"' in query
            ):
                return web.json_response({"status": "error", "errorType": "execution", "error": "bad"}, status=422)
            return vector(query, models)

        async with fake_prometheus(answer) as (url, seen), source_of(url) as source:
            found = await source.collect(dict.fromkeys(models), deadline=8)
            assert list(found.failures) == ["m7"]
            assert len(found.series) == 199
            assert len(seen) == found.queries <= 4 * 25
            # In the next cycle it is tried again.
            count = len(seen)
            await source.collect(dict.fromkeys(models), deadline=8)
            assert len(seen) > count


async def test_queries_do_not_grow_with_the_number_of_models() -> None:
    models = {f"m{n}": (0.5, 0.0) for n in range(500)}
    async with fake_prometheus(lambda query, request: vector(query, models)) as (url, seen):
        async with source_of(url) as source:
            found = await source.collect(dict.fromkeys(models), deadline=8)
            assert len(found.series) == 500
            assert len(seen) == found.queries == 4


async def test_w10_a_rotated_token_is_read_again(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    accepted = "old"

    def answer(query: str, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {accepted}":
            return web.Response(status=401, text="<html>Unauthorized</html>", content_type="text/html")
        return vector(query, {"m": (0.5, 0.0)})

    async with fake_prometheus(answer) as (url, _):
        prom = client(url, token_path=str(token))
        try:
            assert len(await prom.query("kv_cache", 5)) == 1
            accepted = "new"
            token.write_text("new\n")
            assert len(await prom.query("kv_cache", 5)) == 1
            accepted = "newer"
            with pytest.raises(Exception, match="401 with text/html, not JSON: check the token"):
                await prom.query("kv_cache", 5)
            token.write_text("newer\n")
            assert len(await prom.query("kv_cache", 5)) == 1
        finally:
            await prom.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda q, r: web.Response(text="<html>hello</html>", content_type="text/html"),
         ["answered 200 with text/html, not JSON", "is PROMETHEUS_BASE_URL right?"]),
        (lambda q, r: web.json_response({"status": "error", "errorType": "bad_data", "error": "no"}, status=400),
         ["answered 400", "bad_data: no"]),
        (lambda q, r: web.json_response({"status": "success", "data": {"resultType": "matrix", "result": []}}),
         ["answered a matrix, not a vector"]),
    ],
    ids=["html", "error", "matrix"],
)  # fmt: skip
async def test_answers_that_are_none_hold_and_say_so(answer: Answer, words: list[str]) -> None:
    async with fake_prometheus(answer) as (url, _), source_of(url) as source:
        found = await source.collect({"m": None}, deadline=8)
        assert not found.series
        for word in words:
            assert word in found.failures["m"]


@pytest.mark.parametrize(("status", "split"), [(200, False), (404, False), (504, True)])
async def test_what_is_no_prometheus_is_not_asked_again_in_the_same_cycle(status: int, split: bool) -> None:
    """A gateway's 5xx may be about one query only; any other answer that is not JSON is about all of them."""

    def answer(query: str, request: web.Request) -> web.Response:
        return web.Response(status=status, text="<html></html>", content_type="text/html")

    async with fake_prometheus(answer) as (url, seen), source_of(url) as source:
        found = await source.collect({"a": None, "b": None}, deadline=8)
        assert set(found.failures) == {"a", "b"}
        assert len(seen) == found.queries == (12 if split else 4)


async def test_nobody_there() -> None:
    async with source_of("http://127.0.0.1:1") as source:
        found = await source.collect({"a": None, "b": None}, deadline=8)
        assert set(found.failures) == {"a", "b"}
        assert "cannot be reached" in found.failures["a"]
        assert found.queries == 4


async def test_a_prometheus_that_comes_back(wva: LocalCluster) -> None:
    fleet = Fleet(wva.client)
    await fleet.deployment("dep-m1", 2)
    await fleet.variant("va", "dep-m1", modelID="m1")
    broken = True
    rows = [{"metric": {"namespace": "serving", "pod": f"dep-m1-{n}", "model_name": "m1"}} for n in (0, 1)]

    def answer(query: str, request: web.Request) -> web.Response:
        if broken:
            return web.Response(status=502, text="<html>Bad Gateway</html>", content_type="text/html")
        value = "1" if query.startswith("time()") else "0.9" if "kv_cache" in query else "9"
        result = [{**row, "value": [0, value]} for row in rows]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})

    async with fake_prometheus(answer) as (url, _), source_of(url) as source:
        async with running(wva.client, source=source) as harness:
            for _ in range(3):
                await harness.cycle()
                assert harness.desired("va") == 2
            found = await fleet.condition("va", "MetricsAvailable")
            assert (found["status"], found["reason"]) == ("False", "PrometheusError")
            assert "502 with text/html" in found["message"]
            broken = False
            await harness.cycle()
            assert harness.desired("va") == 3
            assert (await fleet.condition("va", "MetricsAvailable"))["status"] == "True"


async def test_long_queries_go_by_post_and_quoting_survives_the_wire() -> None:
    methods: set[str] = set()

    def answer(query: str, request: web.Request) -> web.Response:
        methods.add(request.method)
        assert urllib.parse.unquote(query) is not None
        return vector(query, {})

    async with fake_prometheus(answer) as (url, seen):
        prom = client(url)
        try:
            for query in ('x{a="é😀\\"+ %41"}', "y" * 5000):
                await prom.query(query, 5)
            assert seen == ['x{a="é😀\\"+ %41"}', "y" * 5000]
            assert methods == {"GET", "POST"}
        finally:
            await prom.close()


def test_certificate_files_are_checked_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="PROMETHEUS_CA_CERT_PATH: invalid value '/no/such': no such file"):
        client("https://p:9090", ca_cert_path="/no/such")
    key = tmp_path / "key"
    key.write_text("x")
    with pytest.raises(ValueError, match="one is set and the other is not"):
        client("https://p:9090", client_key_path=str(key))


class Counters:
    """A server whose counters climb with every scrape: requests of 1,000 tokens in and 200 out, a fifth of the
    prompts cached, first tokens after 0.4 s, the others every 30 ms."""

    def __init__(self) -> None:
        self.scrapes = 0

    def __call__(self) -> str:
        self.scrapes += 1
        n = 10 * self.scrapes
        model = '{model_name="m",engine="0"}'
        return "".join(
            f"{name}{labels} {value}\n"
            for name, labels, value in (
                ("vllm:kv_cache_usage_perc", model, 0.4),
                ("vllm:num_requests_waiting", model, 2),
                ("vllm:num_requests_running", model, 7),
                ("vllm:request_prompt_tokens_sum", model, 1000 * n),
                ("vllm:request_prompt_tokens_count", model, n),
                ("vllm:request_generation_tokens_sum", model, 200 * n),
                ("vllm:request_generation_tokens_count", model, n),
                ("vllm:prefix_cache_hits_total", model, 200 * n),
                ("vllm:prefix_cache_queries_total", model, 1000 * n),
                ("vllm:time_to_first_token_seconds_sum", model, 0.4 * n),
                ("vllm:time_to_first_token_seconds_count", model, n),
                ("vllm:time_per_output_token_seconds_sum", model, 0.03 * 199 * n),
                ("vllm:time_per_output_token_seconds_count", model, 199 * n),
                ("vllm:cache_config_info", '{num_gpu_blocks="6250",block_size="16",engine="0"}', 1),
            )
        )


PICKER = """
llm_d_epp_flow_control_queue_size{inference_pool="pa",namespace="a",model_name="x",target_model_name="m",priority="0"} 3
llm_d_epp_flow_control_queue_size{inference_pool="pa",namespace="a",model_name="x",target_model_name="m",priority="1"} 4
inference_extension_flow_control_queue_size{inference_pool="pa",namespace="a",model_name="x",target_model_name="m",priority="0"} 3
inference_extension_flow_control_queue_size{inference_pool="pa",namespace="a",model_name="x",target_model_name="m",priority="1"} 4
llm_d_epp_flow_control_queue_bytes{inference_pool="pa",namespace="a",model_name="x",target_model_name="m",priority="0"} 9000
llm_d_epp_flow_control_queue_size{inference_pool="pb",namespace="b",model_name="y"} 1
"""  # noqa: E501


def in_depth(snapshot: Snapshot) -> tuple[int | None, list[float | None], list[PickerQueue]]:
    """Cache size, means and queues."""
    (sample,) = snapshot.series
    rates = sample.rates

    def over(quantity: Quantity) -> float | None:
        count = rates.get(COUNT_OF[quantity])
        return round(rates[quantity] / count, 3) if count else None

    return sample.kv_tokens, [over(q) for q in COUNT_OF], sorted(snapshot.picker_queues, key=str)


@pytest.mark.prometheus
async def test_both_sources_look_in_depth_alike(tmp_path: Path) -> None:
    counters = Counters()
    async with serving(counters) as one, serving(lambda: PICKER) as picker:
        configs = [static("a", one, namespace="n", pod="p1"), static("e", picker, namespace="gateway")]
        pickers = PickerPoll([f"http://{picker}/metrics"])
        direct = DirectSource(interval=0.1, window=60, pickers=pickers)
        direct.set_targets([ScrapeTarget("n", "p1", "u1", one)])
        try:
            async with prometheus(tmp_path, configs) as url, source_of(url) as queried:
                for source in (queried, direct):

                    async def whole(source: PrometheusSource | DirectSource = source) -> Snapshot | None:
                        found = await source.collect({"m": None}, deadline=8, in_depth=True)
                        counted = found.series and len(found.series[0].rates) == len(Quantity)
                        return found if counted and len(found.picker_queues) == 2 else None

                    found = await eventually(whole, within=20)
                    tokens, means, queues = in_depth(found)
                    assert found.failures == {}
                    assert tokens == 100_000
                    assert means == pytest.approx([1000, 200, 0.2, 0.4, 0.03], rel=0.01)
                    assert [(q.model, q.pool, q.namespace, q.requests, q.bytes) for q in queues] == [
                        ("m", "pa", "a", 7, 9000), ("y", "pb", "b", 1, 0),
                    ]  # fmt: skip
                    assert found.series[0].running is not None
                    assert found.series[0].running.value == 7
        finally:
            await direct.close()
            await pickers.close()


@pytest.mark.prometheus
async def test_averages_of_nothing_are_unknown(tmp_path: Path) -> None:
    """0/0: counters that stand still give rates of 0, and no mean."""
    text = Counters()()
    async with serving(lambda: text) as one:
        async with prometheus(tmp_path, [static("a", one, namespace="n", pod="p1")]) as url:
            async with source_of(url) as source:

                async def whole() -> Snapshot | None:
                    found = await source.collect({"m": None}, deadline=8, in_depth=True)
                    return found if found.series and found.series[0].rates else None

                found = await eventually(whole, within=20)
                assert in_depth(found)[1] == [None] * len(COUNT_OF)
