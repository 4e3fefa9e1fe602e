"""`tidemill cluster`: a local cluster until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import typer

from tidemill.cli.autoscaler import configure_logging
from tidemill.local.cluster import LocalCluster


async def serve(*, directory: str | None, port: int) -> None:
    configure_logging()
    path = None if directory is None else Path(directory).absolute()
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    try:
        async with LocalCluster(path, port=port, keep_data=path is not None) as cluster:
            typer.echo(f"export KUBECONFIG={cluster.kubeconfig}")
            await interrupted()
    except OSError as error:
        typer.echo(f"tidemill cluster: {error}", err=True)
        raise typer.Exit(1) from None


async def interrupted() -> None:
    """Until somebody sends SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
