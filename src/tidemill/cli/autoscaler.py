"""`tidemill autoscaler`: flags and environment to options, signals to a clean end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog
import typer
from kubernetes.aio.config import ConfigException

from tidemill.api.durations import parse_duration
from tidemill.autoscaler.controller import (
    ActuationMode,
    Controller,
    ControllerOptions,
    SourceKind,
    lease_config,
    run_controller,
)
from tidemill.cli.collector import spare_the_collector
from tidemill.kube.client import KubeClient

if TYPE_CHECKING:
    from tidemill.picker.server import PickerOptions

E = TypeVar("E", ActuationMode, SourceKind)


async def serve(
    *,
    kubeconfig: str | None,
    context: str | None,
    namespace: str,
    watch_namespace: str | None,
    instance: str,
    actuation: str,
    source: str,
    scrape_interval: str,
    scrape_window: str,
    metrics_address: str,
    health_address: str,
    external_metrics_address: str,
    external_metrics_cert_dir: str | None,
    keda_scaler_address: str,
    leader_elect: bool,
    lease: tuple[str, str, str],
    picker_metrics: list[str],
    picker: PickerOptions | None,
    dry_run: bool,
) -> None:
    configure_logging()
    identity = os.environ.get("POD_NAME") or os.environ.get("HOSTNAME") or "tidemill"
    duration, renew, retry = (
        seconds(text, f"--leader-election-{name}")
        for text, name in zip(lease, ("lease-duration", "renew-deadline", "retry-period"), strict=True)
    )
    try:
        options = ControllerOptions(
            namespace=namespace,
            watch_namespace=watch_namespace or None,
            instance=instance,
            identity=identity,
            actuation=_choice(ActuationMode, actuation, "--actuation"),
            source=_choice(SourceKind, source, "--metrics-source"),
            scrape_interval=seconds(scrape_interval, "--scrape-interval"),
            scrape_window=seconds(scrape_window, "--scrape-window"),
            overrides=os.environ,
            metrics_address=metrics_address,
            health_address=health_address,
            external_metrics_address=external_metrics_address,
            external_metrics_cert_dir=Path(external_metrics_cert_dir) if external_metrics_cert_dir else None,
            keda_scaler_address=keda_scaler_address,
            lease=lease_config(namespace, identity, duration=duration, renew_deadline=renew, retry_period=retry)
            if leader_elect
            else None,
            picker_metrics=tuple(_url(text, "--picker-metrics") for text in picker_metrics),
            dry_run=dry_run,
        )
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        spare_the_collector()
        async with await KubeClient.connect(kubeconfig, context) as client:
            if picker is None:
                await run_controller(Controller(client, options), stop)
            else:
                await _with_picker(client, options, picker, stop)
    except* (ValueError, OSError) as group:
        for error in _leaves(group):
            typer.echo(f"tidemill autoscaler: {error}", err=True)
        raise typer.Exit(2) from None
    except* ConfigException as group:
        typer.echo(f"tidemill autoscaler: no cluster: {_leaves(group)[0]}; give --kubeconfig", err=True)
        raise typer.Exit(2) from None


async def _with_picker(
    client: KubeClient, options: ControllerOptions, picker_options: PickerOptions, stop: asyncio.Event
) -> None:
    """Autoscaler and endpoint picker in one process. The picker drains before the autoscaler ends."""
    from tidemill.picker.server import Picker

    drained = asyncio.Event()
    async with Picker(picker_options, client) as picker, asyncio.TaskGroup() as group:
        group.create_task(run_controller(Controller(client, options, picker=picker), drained))
        await picker.run(stop)
        drained.set()


def configure_logging() -> None:
    """Lines of key=value, in colour on a terminal."""
    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            # Without local variables: they may hold what a user sent.
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
            if terminal
            else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def seconds(text: str, flag: str) -> float:
    """A positive duration, or an error that names the flag."""
    try:
        value = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint=flag) from None
    if value <= 0:
        raise typer.BadParameter(f"{text!r} must be above 0", param_hint=flag)
    return value


def _url(text: str, flag: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{text!r} must be a URL that starts with http:// or https://", param_hint=flag)
    return text


def _choice(kind: type[E], text: str, flag: str) -> E:
    try:
        return kind(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(kind)}", param_hint=flag) from None


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
