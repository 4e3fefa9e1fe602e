"""`tidemill`: the entry point. Each command imports what it needs when it runs, so that all start fast."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from tidemill import __version__

app = typer.Typer(
    name="tidemill",
    help="Control plane for fleets of LLM model servers on Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidemill {__version__}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


@app.command()
def crd() -> None:
    """Print the CustomResourceDefinition of VariantAutoscaling, for kubectl apply -f -."""
    import yaml

    from tidemill.api.crd import variant_autoscaling_crd

    typer.echo(yaml.safe_dump(variant_autoscaling_crd(), sort_keys=False), nl=False)


@app.command("model-server")
def model_server(
    model: Annotated[str, typer.Option(help="Name under which the model is served.")],
    preset: Annotated[
        str, typer.Option(help="Engine to simulate, such as llama-3.1-8b/l40s; 'list' prints them all.")
    ] = "llama-3.1-8b/l40s",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    kv_blocks: Annotated[
        int | None, typer.Option(help="Blocks of 16 tokens in the KV cache; the preset's when absent.")
    ] = None,
    startup_seconds: Annotated[float, typer.Option(help="Seconds until the server is ready.")] = 0.0,
) -> None:
    """Serve a simulated model: OpenAI's API, vLLM's metrics, no GPU."""
    from dataclasses import replace

    from tidemill.sim.presets import presets
    from tidemill.sim.server import ServerConfig, serve

    known = presets()
    if preset == "list":
        for item in known.values():
            typer.echo(f"{item.name}\t{item.gpus} x {item.accelerator}\t{item.parameters.kv_blocks} blocks")
        return
    if preset not in known:
        raise typer.BadParameter(f"{preset!r} is not one of {', '.join(known)}", param_hint="--preset")
    parameters = known[preset].parameters
    if kv_blocks is not None:
        if kv_blocks < 1:
            raise typer.BadParameter(f"{kv_blocks} must be at least 1", param_hint="--kv-blocks")
        parameters = replace(parameters, kv_blocks=kv_blocks)
    run(
        serve(
            ServerConfig(model=model, parameters=parameters, host=host, port=port, startup_seconds=startup_seconds)
        )
    )
