"""Start the cluster, install everything, send the load, watch, sum up."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import orjson
import structlog
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from tidemill.api.crd import variant_autoscaling_crd
from tidemill.api.inference_crd import inference_crds
from tidemill.api.names import DEFAULT_NAMESPACE
from tidemill.autoscaler.views import PodView, TargetView, deployment_view, pod_view
from tidemill.cli.autoscaler import configure_logging, seconds
from tidemill.cli.cluster import interrupted
from tidemill.cli.demo import manifests
from tidemill.cli.demo.gateway import PrefixCounter, gateway, serves
from tidemill.cli.demo.load import Load, LoadSummary, quantile
from tidemill.cli.explain import history
from tidemill.kube.client import KubeClient
from tidemill.kube.errors import ApiError
from tidemill.kube.informer import Informer
from tidemill.kube.resources import DEPLOYMENTS, PODS, ObjectKey, Resource
from tidemill.local.cluster import LocalCluster

CRDS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
SHORTEST = 40.0
START_TIMEOUT = 60.0
SETTLE = 15.0  # after the load has passed, for the last steps down


@dataclass(slots=True)
class Record:
    """What the demo saw, as its JSON output holds it. Times in seconds since the load began."""

    timeline: list[dict[str, Any]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    load: LoadSummary = field(default_factory=LoadSummary)
    prefix_hit_ratio: float | None = None  # of prompt tokens, as the engines count

    @property
    def ok(self) -> bool:
        """Whether the fleet grew and shrank again."""
        totals = self.totals()
        return bool(totals) and max(totals) > totals[0] and totals[-1] < max(totals)

    def totals(self) -> list[int]:
        """Replicas asked for, all variants together, in order of time."""
        by_time: dict[float, int] = {}
        for point in self.timeline:
            by_time[point["time"]] = by_time.get(point["time"], 0) + point["desired"]
        return [by_time[time] for time in sorted(by_time)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "timeline": self.timeline,
            "decisions": self.decisions,
            "requests": {
                "served": self.load.served,
                "failed": self.load.failed,
                "errors": dict(self.load.reasons),
                "by_endpoint": dict(self.load.by_endpoint),
            },
            "prefix_hit_ratio": self.prefix_hit_ratio,
            "latency_ms": {
                "with_picker": _latency(self.load.picked),
                "without_picker": _latency(self.load.unpicked),
            },
        }


def _latency(seconds: list[float]) -> dict[str, float | int | None]:
    def milliseconds(share: float) -> float | None:
        found = quantile(seconds, share)
        return None if found is None else round(found * 1000, 1)

    return {"count": len(seconds), "p50": milliseconds(0.5), "p95": milliseconds(0.95)}


Numbers: TypeAlias = dict[str, str]
"""What the controller's latest explanation shows of the model; empty before the first."""


class Screen(Protocol):
    """Where the demo shows itself."""

    def say(self, text: str) -> None: ...

    def state(self, elapsed: float, load: Load, rows: list[dict[str, Any]], numbers: Numbers) -> None: ...


async def demo(*, duration: str, output: str, keep: bool) -> None:
    length = seconds(duration, "--duration")
    if length < SHORTEST:
        raise typer.BadParameter(f"{duration!r} is shorter than {SHORTEST:g}s, too short to see anything")
    if output not in ("text", "json"):
        raise typer.BadParameter(f"{output!r} is not one of text, json", param_hint="--output")
    configure_logging()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    screen: Screen = _Silent() if output == "json" else _Terminal() if sys.stdout.isatty() else _Lines()
    async with LocalCluster() as cluster:
        record = await _play(cluster, length, screen)
        if output == "json":
            typer.echo(orjson.dumps(record.as_dict(), option=orjson.OPT_INDENT_2).decode())
        else:
            _sum_up(record, screen)
        if keep:
            typer.echo(f"the cluster stays up until Ctrl-C: export KUBECONFIG={cluster.kubeconfig}", err=True)
            await interrupted()
    if not record.ok:
        raise typer.Exit(1)


async def _play(cluster: LocalCluster, length: float, screen: Screen) -> Record:
    client = cluster.client
    screen.say(f"cluster up: export KUBECONFIG={cluster.kubeconfig}")
    for crd in (variant_autoscaling_crd(), *inference_crds()):
        await client.create(CRDS, crd)
    await _create(client, manifests.variants())
    await _create(client, manifests.picker())
    await _create(client, manifests.controller())
    pods: Informer[PodView] = Informer(client, PODS, decode=pod_view)
    deployments: Informer[TargetView] = Informer(client, DEPLOYMENTS, decode=deployment_view)
    tasks = [asyncio.create_task(pods.run()), asyncio.create_task(deployments.run())]
    try:
        screen.say("waiting for the controller, the picker and one replica of each variant")
        await _until_ready(deployments)
        async with gateway(cluster.directory / "gateway", pods) as envoy:
            screen.say(f"gateway up: {envoy.url}/v1/chat/completions")
            return await _send_load(client, length, screen, pods, deployments, envoy.url)
    finally:
        if isinstance(screen, _Terminal):
            screen.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send_load(
    client: KubeClient,
    length: float,
    screen: Screen,
    pods: Informer[PodView],
    deployments: Informer[TargetView],
    url: str,
) -> Record:
    """The load, and what is seen while it lasts and the fleet settles."""
    names = list(manifests.VARIANTS)
    load = Load(manifests.MODEL, url, random.Random(7))
    record = Record(load=load.summary)
    clock = asyncio.get_running_loop().time
    start = clock()
    seen: set[tuple[str, str]] = set()
    async with PrefixCounter() as prefixes:
        sending = asyncio.create_task(load.run(length))
        while not (sending.done() and (_settled(deployments, names) or clock() - start > length + SETTLE)):
            tick = clock()
            elapsed = round(tick - start, 1)
            rows = [_row(deployments, name, elapsed) for name in names]
            record.timeline += rows
            fresh, numbers = await _ask_controller(client, names, seen)
            await prefixes.look(pod for pod in pods.store if serves(pod))
            screen.state(elapsed, load, rows, numbers)
            for entry in fresh:
                entry = {"time": elapsed, **entry}
                record.decisions.append(entry)
                screen.say(
                    f"{elapsed:5.1f}s  {entry['variant']} {entry['from']} -> {entry['to']}: {entry['explanation']}"
                )
            await asyncio.wait({sending}, timeout=max(0.05, 1.0 - (clock() - tick)))
        await sending
        record.timeline += [_row(deployments, name, round(clock() - start, 1)) for name in names]
        record.prefix_hit_ratio = prefixes.ratio
    return record


async def _create(client: KubeClient, objects: Iterable[manifests.Manifest]) -> None:
    for resource, namespace, body in objects:
        await client.create(resource, body, namespace)


async def _until_ready(deployments: Informer[TargetView]) -> None:
    """Wait for every Deployment, told by the informer. Raises typer.Exit when that takes too long."""
    changed = asyncio.Event()
    deployments.add_handler(lambda event: changed.set())
    try:
        async with asyncio.timeout(START_TIMEOUT):
            while len(deployments.store) < 4 or any(not d.ready for d in deployments.store):
                changed.clear()
                await changed.wait()
    except TimeoutError:
        waiting = [str(d.key) for d in deployments.store if not d.ready]
        typer.echo(f"tidemill demo: not ready after {START_TIMEOUT:g}s: {', '.join(waiting)}", err=True)
        raise typer.Exit(1) from None


def _settled(deployments: Informer[TargetView], names: list[str]) -> bool:
    return all(_row(deployments, name, 0.0)["desired"] == 1 for name in names)


def _row(deployments: Informer[TargetView], name: str, elapsed: float) -> dict[str, Any]:
    found = deployments.store.get(ObjectKey(manifests.NAMESPACE, name))
    ready, desired = (0, 0) if found is None else (found.ready, found.replicas)
    return {"time": elapsed, "variant": name, "ready": ready, "desired": desired}


async def _ask_controller(
    client: KubeClient, names: list[str], seen: set[tuple[str, str]]
) -> tuple[list[dict[str, Any]], Numbers]:
    """Steps that the controller took since the last look, and the numbers that it sees now."""
    fresh: list[dict[str, Any]] = []
    numbers: Numbers = {}
    for name in names:
        try:
            found = await history(client, manifests.NAMESPACE, name, DEFAULT_NAMESPACE)
        except ApiError:
            continue  # the controller is being replaced: its successor will tell
        if found:
            numbers = found[-1]["explanation"]["numbers"] or numbers
        for decision in found or ():
            mark = (name, decision["at"])
            if decision["direction"] == "hold" or mark in seen:
                continue
            seen.add(mark)
            fresh.append(
                {
                    "variant": name,
                    "from": decision["current"],
                    "to": decision["desired"],
                    "explanation": decision["explanation"]["sentence"],
                }
            )
    return fresh, numbers


def _sum_up(record: Record, screen: Screen) -> None:
    totals = record.totals()
    load = record.load
    screen.say("requests by endpoint:")
    for endpoint, count in load.by_endpoint.most_common():
        screen.say(f"  {count:5d}  {endpoint}")
    for reason, count in sorted(load.reasons.items()):
        screen.say(f"failed: {count} ({reason})")
    if record.prefix_hit_ratio is not None:
        screen.say(f"prompt tokens found in a prefix cache: {record.prefix_hit_ratio:.0%}")
    for what, latencies in (("with the picker", load.picked), ("without (round robin)", load.unpicked)):
        found = _latency(latencies)
        screen.say(f"latency {what}: p50 {found['p50']} ms, p95 {found['p95']} ms of {found['count']}")
    screen.say(
        f"requests: {load.served} served, {load.failed} failed; replicas: from {totals[0]} to "
        f"{max(totals)} and back to {totals[-1]}; {len(record.decisions)} steps"
    )
    screen.say("the fleet grew and shrank" if record.ok else "the fleet did not both grow and shrink")


def _spare(numbers: Numbers) -> str:
    """Saturation in a line: spare against its triggers."""
    return (
        f"spare KV cache {float(numbers['averageSpareKv']):.2f} (grows below {numbers['kvSpareTrigger']}), "
        f"spare queue {float(numbers['averageSpareQueue']):.1f} (below {numbers['queueSpareTrigger']}), "
        f"saturated {numbers['saturatedReplicas']} of {numbers['replicas']}"
    )


class _Silent:
    def say(self, text: str) -> None:
        pass

    def state(self, elapsed: float, load: Load, rows: list[dict[str, Any]], numbers: Numbers) -> None:
        pass


class _Lines:
    """Plain lines, a state every five seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def say(self, text: str) -> None:
        typer.echo(text)

    def state(self, elapsed: float, load: Load, rows: list[dict[str, Any]], numbers: Numbers) -> None:
        if elapsed < self._next:
            return
        self._next = elapsed + 5
        fleet = "  ".join(f"{row['variant']} {row['ready']}/{row['desired']}" for row in rows)
        spare = f"  {_spare(numbers)}" if numbers else ""
        typer.echo(f"{elapsed:5.1f}s  {load.rate:4.1f} requests/s, {load.in_flight} in flight  {fleet}{spare}")


class _Terminal:
    """A table that stays in place, with the decisions scrolling above it."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4)
        self._live.start()

    def say(self, text: str) -> None:
        self._live.console.print(text)

    def state(self, elapsed: float, load: Load, rows: list[dict[str, Any]], numbers: Numbers) -> None:
        title = (
            f"{elapsed:.0f}s   {load.rate:.1f} requests/s   {load.in_flight} in flight   "
            f"{load.summary.served} served   {load.summary.failed} failed"
        )
        caption = _spare(numbers) if numbers else None
        table = Table(title=title, caption=caption, min_width=96, title_justify="left", caption_justify="left")
        table.add_column("variant")
        table.add_column("cost", justify="right")
        table.add_column("ready", justify="right")
        table.add_column("desired", justify="right")
        table.add_column("", min_width=14)
        for row in rows:
            cost = manifests.VARIANTS[row["variant"]][2]
            starting = row["desired"] - row["ready"]
            bar = (
                "[green]"
                + "■" * min(row["ready"], row["desired"])
                + "[/][yellow]"
                + "□" * max(0, starting)
                + "[/]"
            )
            table.add_row(row["variant"], cost, str(row["ready"]), str(row["desired"]), bar)
        self._live.update(table)

    def stop(self) -> None:
        self._live.stop()
