"""The command: read, examine, say. Exit status 0 when nothing is wrong, 1 when something is, 2 for no answer."""

from __future__ import annotations

import dataclasses

import aiohttp
import orjson
import typer
from kubernetes.aio.config import ConfigException
from rich.console import Console

from tidemill.cli.doctor.checks import Check, examine, needed_rights
from tidemill.cli.doctor.fleet import read
from tidemill.kube.client import KubeClient
from tidemill.kube.clock import utc_now
from tidemill.kube.errors import ApiError


async def doctor(
    *, output: str, kubeconfig: str | None, context: str | None, controller_namespace: str, prometheus: str
) -> None:
    if output not in ("text", "json"):
        raise typer.BadParameter(f"{output!r} is not one of text, json", param_hint="--output")
    try:
        async with await KubeClient.connect(kubeconfig, context) as client:
            fleet = await read(client, controller_namespace, needed_rights, prometheus=prometheus)
    except ConfigException as error:
        _fail(f"no cluster: {error}; give --kubeconfig")
    except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
        _fail(f"the API server could not be asked: {error}")
    else:
        checks = examine(fleet, utc_now())
        if output == "json":
            body = {"ok": not any(c.wrong for c in checks), "checks": [dataclasses.asdict(c) for c in checks]}
            typer.echo(orjson.dumps(body, option=orjson.OPT_INDENT_2).decode())
        else:
            _print(checks)
        if any(check.wrong for check in checks):
            raise typer.Exit(1)


def _print(checks: list[Check]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for check in checks:
        if check.skipped:
            console.print(f"--    {check.name}: not looked at: {check.skipped}", markup=False)
            continue
        if not check.wrong:
            console.print(f"[green]ok   [/]{check.name}: {check.looked_at}", markup=True)
            continue
        console.print(f"[red]wrong[/] {check.name}: {check.looked_at}", markup=True)
        for wrong in check.wrong:
            console.print(f"      {wrong.about}: {wrong.found}", markup=False)
            console.print(f"        mend: {wrong.mend}", markup=False)


def _fail(message: str) -> None:
    typer.echo(f"tidemill doctor: {message}", err=True)
    raise typer.Exit(2)
