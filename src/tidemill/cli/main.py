"""`tidemill`: the entry point. Each command imports what it needs when it runs, so that all start fast."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from tidemill import __version__

if TYPE_CHECKING:
    from tidemill.picker.server import PickerOptions

CONTROLLER_NAMESPACE = "workload-variant-autoscaler-system"

# Options that several commands take.
Output = Annotated[str, typer.Option("--output", "-o", help="text or json.")]
Kubeconfig = Annotated[
    str | None,
    typer.Option(help="Kubeconfig file; without it $KUBECONFIG, the pod's own, then ~/.kube/config."),
]
KubeContext = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
ControllerNamespace = Annotated[str, typer.Option(help="Namespace of the autoscaler.")]

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


@contextlib.contextmanager
def _local_extra() -> Generator[None]:
    """Imports of what a production install leaves out."""
    try:
        yield
    except ModuleNotFoundError as error:
        typer.echo(f"tidemill: {error.name} is missing: pip install 'tidemill[local]'", err=True)
        raise typer.Exit(2) from None


@app.command()
def crd(
    kinds: Annotated[
        str,
        typer.Argument(
            help="variant: VariantAutoscaling; inference: what the picker reads; leaderworkerset: for local ones."
        ),
    ] = "variant",
) -> None:
    """Print CustomResourceDefinitions, for kubectl apply -f -."""
    import yaml

    from tidemill.api.crd import variant_autoscaling_crd
    from tidemill.api.inference_crd import inference_crds

    if kinds == "variant":
        documents = [variant_autoscaling_crd()]
    elif kinds == "inference":
        documents = inference_crds()
    elif kinds == "leaderworkerset":
        from tidemill.local.controllers.leaderworkerset import leader_worker_set_crd

        documents = [leader_worker_set_crd()]
    else:
        raise typer.BadParameter(
            f"{kinds!r} is not one of variant, inference, leaderworkerset", param_hint="KINDS"
        )
    typer.echo(yaml.safe_dump_all(documents, sort_keys=False), nl=False)


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
    startup: Annotated[
        str,
        typer.Option(help="Until ready: 2s, a kind (hot, snapshot, warm, cold) or a mixture (hot=3,cold=1)."),
    ] = "0s",
) -> None:
    """Serve a simulated model: OpenAI's API, vLLM's metrics, no GPU."""
    import os
    import random
    from dataclasses import replace

    from tidemill.sim.presets import parse_startup, presets
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
    try:
        seconds = parse_startup(startup, random.Random())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--startup") from None
    config = ServerConfig(
        model=model, parameters=parameters, host=host, port=port, startup_seconds=seconds,
        pod_name=os.environ.get("POD_NAME", ""),
    )  # fmt: skip
    run(serve(config))


@app.command()
def autoscaler(
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
    namespace: Annotated[
        str, typer.Option(envvar="POD_NAMESPACE", help="The controller's own namespace.")
    ] = CONTROLLER_NAMESPACE,
    watch_namespace: Annotated[
        str | None, typer.Option(envvar="WATCH_NAMESPACE", help="Watch this namespace only; all when absent.")
    ] = None,
    controller_instance: Annotated[
        str,
        typer.Option(envvar="CONTROLLER_INSTANCE", help="Look after objects labelled with this instance only."),
    ] = "",
    actuation: Annotated[
        str, typer.Option(help="metrics: export decisions for an HPA or KEDA; scale: also write the replicas.")
    ] = "metrics",
    metrics_source: Annotated[
        str, typer.Option(help="prometheus: query it; direct: scrape the pods.")
    ] = "prometheus",
    scrape_interval: Annotated[str, typer.Option(help="Between two direct scrapes of a pod.")] = "1s",
    scrape_window: Annotated[
        str, typer.Option(help="Directly scraped gauges count with their maximum over this.")
    ] = "15s",
    picker_metrics: Annotated[
        list[str],
        typer.Option(help="URL of an endpoint picker's /metrics; what waits there wakes models. Repeatable."),
    ] = [],  # noqa: B006
    picker: Annotated[
        str | None,
        typer.Option(
            metavar="FLAGS",
            help="Run an endpoint picker in this process too, with these flags of `tidemill picker`: what waits "
            "there wakes models without any metrics between.",
        ),
    ] = None,
    metrics_bind_address: Annotated[
        str, typer.Option(envvar="METRICS_BIND_ADDRESS", help="host:port of /metrics; 0 turns it off.")
    ] = ":8080",
    health_probe_bind_address: Annotated[
        str, typer.Option(envvar="HEALTH_PROBE_BIND_ADDRESS", help="host:port of /healthz, /readyz and /explain.")
    ] = ":8081",
    external_metrics_bind_address: Annotated[
        str,
        typer.Option(
            envvar="EXTERNAL_METRICS_BIND_ADDRESS",
            help="host:port of the external metrics API (external.metrics.k8s.io, TLS), for HPAs without "
            "Prometheus or an adapter; 0 turns it off.",
        ),
    ] = "0",
    external_metrics_cert_dir: Annotated[
        str | None,
        typer.Option(
            help="Directory with its tls.crt and tls.key, read again when they change; else self-signed."
        ),
    ] = None,
    keda_scaler_bind_address: Annotated[
        str,
        typer.Option(
            envvar="KEDA_SCALER_BIND_ADDRESS",
            help="host:port of the KEDA external scaler (gRPC), for triggers of type external; 0 turns it off.",
        ),
    ] = "0",
    leader_elect: Annotated[bool, typer.Option(help="Elect one leader among several replicas.")] = False,
    leader_election_lease_duration: Annotated[str, typer.Option(help="Others take over after this.")] = "60s",
    leader_election_renew_deadline: Annotated[str, typer.Option(help="A leader gives up after this.")] = "50s",
    leader_election_retry_period: Annotated[str, typer.Option(help="Between two tries.")] = "10s",
    dry_run: Annotated[bool, typer.Option(help="Decide and explain, but export and write nothing.")] = False,
) -> None:
    """Run the autoscaler."""
    from tidemill.cli.autoscaler import serve

    picker_options = None if picker is None else _picker_flags(picker)

    run(
        serve(
            kubeconfig=kubeconfig,
            context=context,
            namespace=namespace,
            watch_namespace=watch_namespace,
            instance=controller_instance,
            actuation=actuation,
            source=metrics_source,
            scrape_interval=scrape_interval,
            scrape_window=scrape_window,
            picker_metrics=picker_metrics,
            picker=picker_options,
            metrics_address=metrics_bind_address,
            health_address=health_probe_bind_address,
            external_metrics_address=external_metrics_bind_address,
            external_metrics_cert_dir=external_metrics_cert_dir,
            keda_scaler_address=keda_scaler_bind_address,
            leader_elect=leader_elect,
            lease=(
                leader_election_lease_duration,
                leader_election_renew_deadline,
                leader_election_retry_period,
            ),
            dry_run=dry_run,
        )
    )


class _GoFlags(TyperCommand):
    """Takes flags as the original picker does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from tidemill.cli.go_flags import translate

        switches = {
            name.lstrip("-")
            for p in self.params
            if getattr(p, "is_flag", False)
            for name in p.opts
            if p.name != "help"
        }
        kept, ctx.meta["without_effect"] = translate(args, switches=switches)
        return super().parse_args(ctx, kept)


@app.command(cls=_GoFlags)
def picker(
    context: typer.Context,
    pool_name: Annotated[str, typer.Option(help="InferencePool to serve; all of the namespace when absent.")] = "",
    pool_namespace: Annotated[
        str | None, typer.Option(envvar="NAMESPACE", help="Namespace of the pools; all when absent.")
    ] = None,
    endpoints: Annotated[
        str | None,
        typer.Option(help="Serve the endpoints of this file, without a cluster. Re-read when it changes."),
    ] = None,
    pool_port: Annotated[
        list[str] | None,
        typer.Option(help="[NAMESPACE/]NAME=PORT: what is asked at this port is for this pool. Repeatable."),
    ] = None,
    config_file: Annotated[str | None, typer.Option(help="EndpointPickerConfig, as a file.")] = None,
    config_text: Annotated[str | None, typer.Option(help="EndpointPickerConfig, as text.")] = None,
    bind_address: Annotated[str | None, typer.Option(help="Address to listen on; all when absent.")] = None,
    grpc_port: Annotated[int, typer.Option(help="Port for Envoy's external processing.")] = 9002,
    grpc_health_port: Annotated[int, typer.Option(help="Port for gRPC health checks.")] = 9003,
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics, /pools, /readyz and /healthz.")] = 9090,
    secure_serving: Annotated[bool, typer.Option(help="TLS at the gRPC port.")] = True,
    cert_path: Annotated[
        str | None, typer.Option(help="Directory with tls.crt and tls.key; a self-signed pair when absent.")
    ] = None,
    enable_cert_reload: Annotated[bool, typer.Option(help="Use a new pair when the files change.")] = False,
    drain_timeout: Annotated[str, typer.Option(help="From SIGTERM to the end.")] = "30s",
    refresh_metrics_interval: Annotated[str, typer.Option(help="Between two scrapes of an endpoint.")] = "50ms",
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body; a larger one gets 413.")] = 64 * 2**20,
    answer_models: Annotated[
        bool, typer.Option(help="Answer GET /v1/models here, with what all pools serve.")
    ] = False,
    emit_endpoint_scores: Annotated[bool, typer.Option(help="Add scores to the dynamic metadata.")] = False,
    ignore_subset_hint_when_empty: Annotated[
        bool, typer.Option(help="An empty subset hint allows every endpoint instead of none.")
    ] = False,
    transport: Annotated[str, typer.Option(help="lean, or grpc: the reference implementation.")] = "lean",
    workers: Annotated[
        int,
        typer.Option(min=1, max=64, help="Processes that share the ports; metrics at one port after the other."),
    ] = 1,
    kubeconfig: Kubeconfig = None,
    kube_context: KubeContext = None,
) -> None:
    """Run the endpoint picker: tell Envoy which endpoint serves each request."""
    from tidemill.cli.picker import Cluster, main, picker_options

    options = {name: value for name, value in context.params.items() if name not in _OF_THE_PROCESS}
    main(
        picker_options(**options),
        Cluster(kubeconfig, kube_context),
        workers=workers,
        without_effect=context.meta.get("without_effect", ()),
    )


_OF_THE_PROCESS = ("workers", "kubeconfig", "kube_context")


def _picker_flags(text: str) -> PickerOptions:
    """Flags of `tidemill picker` for one that runs in the autoscaler's process."""
    import shlex

    from tidemill.cli.picker import picker_options

    command = cast("TyperGroup", typer.main.get_command(app)).commands["picker"]
    try:
        args = shlex.split(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint="--picker") from None
    context = command.make_context("tidemill autoscaler --picker", args)
    options = dict(context.params)
    for parameter in command.params:
        if parameter.name in _OF_THE_PROCESS and options.pop(parameter.name) != parameter.default:
            flag = parameter.opts[0]
            raise typer.BadParameter(
                f"{flag} is a matter of the whole process and not taken here", param_hint="--picker"
            )
    return picker_options(**options)


@app.command()
def explain(
    target: Annotated[str, typer.Argument(metavar="va/NAME", help="The VariantAutoscaling to explain.")],
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Its namespace.")] = "default",
    output: Output = "text",
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
    controller_namespace: ControllerNamespace = CONTROLLER_NAMESPACE,
) -> None:
    """Say why a variant has the replicas that it has."""
    from tidemill.cli.explain import explain as main

    run(
        main(
            target=target,
            namespace=namespace,
            output=output,
            kubeconfig=kubeconfig,
            context=context,
            controller_namespace=controller_namespace,
        )
    )


@app.command()
def install(
    part: Annotated[
        str, typer.Argument(help="autoscaler, picker, or monitoring (for the Prometheus operator).")
    ] = "autoscaler",
    image: Annotated[str, typer.Option(help="Image that has `tidemill`; monitoring needs none.")] = "",
    namespace: Annotated[
        str, typer.Option(help="Where to; of the picker: that of its pools.", show_default="the usual one")
    ] = "",
    watch_namespace: Annotated[
        str, typer.Option(help="Autoscaler: look after this namespace only, with rights there; all when absent.")
    ] = "",
    external_metrics: Annotated[
        bool,
        typer.Option(help="Autoscaler: serve external.metrics.k8s.io; not where KEDA or prometheus-adapter does."),
    ] = True,
) -> None:
    """Print manifests: tidemill install --image IMAGE | kubectl apply -f -"""
    import yaml

    from tidemill.manifests import Part, manifests

    if part not in tuple(Part):
        raise typer.BadParameter(f"{part!r} is not one of {', '.join(Part)}", param_hint="PART")
    if not image and part != Part.MONITORING:
        raise typer.BadParameter("the image that has `tidemill` must be given", param_hint="--image")
    if part != Part.AUTOSCALER and (watch_namespace or not external_metrics):
        raise typer.BadParameter("is the autoscaler's own", param_hint="--watch-namespace, --no-external-metrics")
    objects = manifests(
        Part(part), image=image, namespace=namespace, watch_namespace=watch_namespace,
        external_metrics=external_metrics,
    )  # fmt: skip
    typer.echo(yaml.safe_dump_all(objects, sort_keys=False), nl=False)


@app.command()
def doctor(
    output: Output = "text",
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
    controller_namespace: ControllerNamespace = CONTROLLER_NAMESPACE,
    prometheus: Annotated[
        str, typer.Option(help="URL of Prometheus, as of kubectl port-forward, to look at its series too.")
    ] = "",
) -> None:
    """Say what is wrong with a fleet that does not scale, and what mends it."""
    from tidemill.cli.doctor.main import doctor as main

    run(
        main(
            output=output,
            kubeconfig=kubeconfig,
            context=context,
            controller_namespace=controller_namespace,
            prometheus=prometheus,
        )
    )


@app.command()
def demo(
    duration: Annotated[str, typer.Option(help="How long the load lasts, from 40s on.")] = "90s",
    output: Output = "text",
    keep: Annotated[bool, typer.Option(help="Leave the cluster up afterwards, until Ctrl-C.")] = False,
) -> None:
    """Show it all on this machine: a cluster, two variants of a model, a load that comes and goes."""
    with _local_extra():
        from tidemill.cli.demo.run import demo as main

    run(main(duration=duration, output=output, keep=keep))


@app.command()
def cluster(
    directory: Annotated[
        str | None, typer.Option(help="Keep objects here, so that they survive a restart; else all is temporary.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the API server; 0 takes a free one.")] = 0,
) -> None:
    """Run a local Kubernetes-compatible cluster: pods are processes of this machine."""
    with _local_extra():
        from tidemill.cli.cluster import serve

    run(serve(directory=directory, port=port))
