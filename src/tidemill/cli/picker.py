"""`tidemill picker`: flags and environment to options, signals to a clean end, workers beside each other."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import structlog
import typer
from kubernetes.aio.config import ConfigException

from tidemill.api.picker_config import EndpointPickerConfig
from tidemill.api.problem import InvalidObjectError
from tidemill.cli.autoscaler import configure_logging, seconds
from tidemill.cli.collector import spare_the_collector
from tidemill.cli.main import run
from tidemill.kube.client import KubeClient
from tidemill.kube.resources import ObjectKey
from tidemill.picker.director import DirectorOptions
from tidemill.picker.scheduling.scheduler import DEFAULT_CONFIG
from tidemill.picker.server import PickerOptions, TransportKind, serve

log = structlog.get_logger(__name__)

_RESTART_PAUSE = 1.0  # seconds before a worker that died is started again


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the cluster is; None for both looks in the usual places."""

    kubeconfig: str | None
    context: str | None


def read_config(file: str | None, text: str | None) -> tuple[EndpointPickerConfig, str]:
    """The configuration and what to call it in errors."""
    if file is not None and text is not None:
        raise typer.BadParameter("give either a file or a text", param_hint="--config-file, --config-text")
    try:
        if file is not None:
            return EndpointPickerConfig.parse(Path(file).read_text(), source=file), file
        if text is not None:
            return EndpointPickerConfig.parse(text, source="--config-text"), "--config-text"
    except (InvalidObjectError, OSError) as error:
        fail(error)
    return DEFAULT_CONFIG, "(default)"


def pool_ports(entries: Sequence[str], namespace: str | None) -> tuple[tuple[int, ObjectKey], ...]:
    """`[namespace/]name=port`, as --pool-port takes it."""
    found: list[tuple[int, ObjectKey]] = []
    for entry in entries:
        name, equals, port = entry.partition("=")
        if not equals or not name or not port.isdigit() or not 0 < int(port) < 65536:
            raise typer.BadParameter(f"{entry!r} must be [NAMESPACE/]NAME=PORT", param_hint="--pool-port")
        space, slash, name = name.rpartition("/")
        found.append((int(port), ObjectKey(space if slash else namespace or "default", name)))
    return tuple(found)


def picker_options(
    *, pool_name: str, pool_namespace: str | None, endpoints: str | None, pool_port: Sequence[str] | None,
    config_file: str | None, config_text: str | None, bind_address: str | None, grpc_port: int,
    grpc_health_port: int, metrics_port: int, secure_serving: bool, cert_path: str | None,
    enable_cert_reload: bool, drain_timeout: str, refresh_metrics_interval: str, max_body_bytes: int,
    answer_models: bool, emit_endpoint_scores: bool, ignore_subset_hint_when_empty: bool, transport: str,
) -> PickerOptions:  # fmt: skip
    """Options from the flags of `tidemill picker`. Raises BadParameter, or exits with what is wrong in a file."""
    if transport not in tuple(TransportKind):
        raise typer.BadParameter(
            f"{transport!r} is not one of {', '.join(TransportKind)}", param_hint="--transport"
        )
    if endpoints is not None and pool_name:
        raise typer.BadParameter(
            "give either a pool of the cluster or a file", param_hint="--pool-name, --endpoints"
        )
    if pool_name and pool_namespace is None:
        pool_namespace = "default"
    config, source = read_config(config_file, config_text)
    return PickerOptions(
        config=config,
        config_source=source,
        endpoints_file=None if endpoints is None else Path(endpoints),
        pool_name=pool_name,
        pool_namespace=pool_namespace,
        pool_ports=pool_ports(pool_port or (), pool_namespace),
        host=bind_address,
        grpc_port=grpc_port,
        health_port=grpc_health_port,
        metrics_port=metrics_port,
        transport=TransportKind(transport),
        secure=secure_serving,
        cert_path=None if cert_path is None else Path(cert_path),
        cert_reload=enable_cert_reload,
        drain_seconds=seconds(drain_timeout, "--drain-timeout"),
        scrape_interval=seconds(refresh_metrics_interval, "--refresh-metrics-interval"),
        director=DirectorOptions(
            max_body=max_body_bytes,
            ignore_empty_subset=ignore_subset_hint_when_empty,
            emit_scores=emit_endpoint_scores,
            answer_models=answer_models,
        ),
    )


def main(options: PickerOptions, cluster: Cluster, *, workers: int, without_effect: Sequence[str]) -> None:
    """Serve until SIGTERM or SIGINT."""
    configure_logging()
    if without_effect:
        log.info("flags without effect here", flags=" ".join(without_effect))
    if workers == 1:
        _worker(options, cluster)
        return
    _supervise(replace(options, reuse_port=True), cluster, workers)


def fail(error: BaseException) -> None:
    """Say what is wrong, one line for each problem, and exit."""
    problems = error.problems if isinstance(error, InvalidObjectError) else [error]
    for problem in problems:
        typer.echo(f"tidemill picker: {problem}", err=True)
    raise typer.Exit(2)


def _worker(options: PickerOptions, cluster: Cluster) -> None:
    try:
        run(_serve(options, cluster))
    except (InvalidObjectError, ValueError, OSError) as error:
        fail(error)
    except ConfigException as error:
        typer.echo(f"tidemill picker: no cluster: {error}; give --kubeconfig or --endpoints", err=True)
        raise typer.Exit(2) from None


async def _serve(options: PickerOptions, cluster: Cluster) -> None:
    spare_the_collector()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if options.endpoints_file is not None:
        await serve(options, None, stop)
        return
    async with await KubeClient.connect(cluster.kubeconfig, cluster.context) as client:
        await serve(options, client, stop)


def _spawned(options: PickerOptions, cluster: Cluster) -> None:
    configure_logging()
    _worker(options, cluster)


def _supervise(options: PickerOptions, cluster: Cluster, count: int) -> None:
    """Start `count` workers on the same ports, each with metrics at a port of its own (the given one and those
    after it); start one again that dies, and end them all together."""
    context = multiprocessing.get_context("spawn")
    stopping = False

    def start(index: int) -> SpawnProcess:
        mine = replace(options, metrics_port=options.metrics_port + index if options.metrics_port > 0 else 0)
        process = context.Process(target=_spawned, args=(mine, cluster), name=f"worker-{index}")
        process.start()
        return process

    workers = [start(index) for index in range(count)]

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        for process in workers:
            process.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while not stopping:
        wait([process.sentinel for process in workers])
        for index, process in enumerate(workers):
            if stopping or process.is_alive():
                continue
            process.join()
            if process.exitcode == 2:
                # What it was told to do cannot be done; another try would not help.
                stop()
                raise typer.Exit(2)
            log.warning("worker ended and is started again", worker=index, exit_status=process.exitcode)
            time.sleep(_RESTART_PAUSE)
            workers[index] = start(index)
    for process in workers:
        process.join()
