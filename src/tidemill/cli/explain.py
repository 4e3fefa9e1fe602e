"""`tidemill explain`: ask the leading autoscaler, through the API server, why a variant is as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import typer
from kubernetes.aio.config import ConfigException
from rich.console import Console

from tidemill.api.names import DEFAULT_LEADER_ELECTION_ID
from tidemill.api.variant import ConditionType
from tidemill.autoscaler.world import VARIANT_AUTOSCALINGS
from tidemill.kube.client import KubeClient
from tidemill.kube.conditions import find_condition
from tidemill.kube.errors import ApiError, NotFoundError
from tidemill.kube.resources import LEASES, PODS, Json

POD_SELECTOR = "control-plane=controller-manager"
HEALTH_PORT = 8081


async def explain(
    *,
    target: str,
    namespace: str,
    output: str,
    kubeconfig: str | None,
    context: str | None,
    controller_namespace: str,
) -> None:
    kind, _, name = target.rpartition("/")
    if kind not in ("va", "variantautoscaling", "variantautoscalings", "") or not name:
        raise typer.BadParameter(f"{target!r} must be va/NAME")
    if output not in ("text", "json"):
        raise typer.BadParameter(f"{output!r} is not one of text, json", param_hint="--output")
    try:
        async with await KubeClient.connect(kubeconfig, context) as client:
            variant = await client.get(VARIANT_AUTOSCALINGS, name, namespace)
            decisions = await history(client, namespace, name, controller_namespace)
    except NotFoundError:
        _fail(f'VariantAutoscaling "{name}" not found in namespace "{namespace}"')
    except ConfigException as error:
        _fail(f"no cluster: {error}; give --kubeconfig")
    except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
        _fail(f"the API server could not be asked: {error}")
    else:
        if output == "json":
            conditions = (variant.get("status") or {}).get("conditions") or []
            body = {"variant": f"{namespace}/{name}", "conditions": conditions, "decisions": decisions}
            typer.echo(orjson.dumps(body, option=orjson.OPT_INDENT_2).decode())
        else:
            _print(variant, decisions)


async def history(
    client: KubeClient, namespace: str, name: str, controller_namespace: str
) -> list[dict[str, Any]] | None:
    """Decisions of a variant, oldest first; None when no autoscaler that leads could be reached."""
    async for pod in _candidates(client, controller_namespace):
        port = _health_port(pod)
        pod_name = pod["metadata"]["name"]
        path = PODS.path(controller_namespace, f"{pod_name}:{port}", "proxy")
        try:
            body = orjson.loads(await client.get_raw(f"{path}/explain/{namespace}/{name}"))
        except NotFoundError as error:
            body = _not_decided(error)
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError):
            continue
        if body.get("leader"):
            return body["decisions"]
    return None


def _not_decided(error: NotFoundError) -> dict[str, Any]:
    """The controller answers 404 with a body of its own for a variant that it has not decided for."""
    try:
        body = orjson.loads(error.message)
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


async def _candidates(client: KubeClient, namespace: str) -> AsyncIterator[Json]:
    """The pod that holds the lease, then every other pod of the controller."""
    holder = ""
    try:
        lease = await client.get(LEASES, DEFAULT_LEADER_ELECTION_ID, namespace)
        holder = (lease.get("spec") or {}).get("holderIdentity") or ""
    except NotFoundError:
        pass  # it runs without election
    pods = (await client.list(PODS, namespace, label_selector=POD_SELECTOR)).items
    for pod in sorted(pods, key=lambda p: p["metadata"]["name"] != holder):
        yield pod


def _health_port(pod: Json) -> int:
    for container in pod["spec"].get("containers") or ():
        for port in container.get("ports") or ():
            if port.get("name") == "health":
                return int(port["containerPort"])
    return HEALTH_PORT


def _print(variant: Json, decisions: list[dict[str, Any]] | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    metadata, status = variant["metadata"], variant.get("status") or {}
    spec = variant["spec"]
    alloc = status.get("desiredOptimizedAlloc") or {}
    console.print(f"VariantAutoscaling {metadata['namespace']}/{metadata['name']}")
    target = (spec.get("scaleTargetRef") or {}).get("name") or metadata["name"]
    console.print(f"  model {spec.get('modelID')}, target {target}, cost {spec.get('variantCost', '10.0')}")
    console.print(f"  desired {alloc.get('numReplicas', '-')} on {alloc.get('accelerator', '-')}")
    for condition in status.get("conditions") or ():
        console.print(
            f"  {condition['type']} {condition['status']} ({condition['reason']}): {condition['message']}"
        )
    if decisions is None:
        console.print(
            "\nNo leading autoscaler could be asked for its numbers (no pod labelled "
            f"{POD_SELECTOR} answers); the conditions above are its last words."
        )
        return
    if not decisions:
        ready = find_condition(status.get("conditions") or (), ConditionType.READY)
        why = f": {ready['message']}" if ready and ready["status"] != "True" else " yet"
        console.print(f"\nNothing was decided for it{why}")
        return
    console.print("\nDecisions, the latest last:")
    for decision in decisions[-10:]:
        explanation = decision["explanation"]
        arrow = f"{decision['current']} -> {decision['desired']}"
        console.print(f"  {decision['at'][11:19]}  {arrow:9} {explanation['cause']}: {explanation['sentence']}")
    numbers = decisions[-1]["explanation"]["numbers"]
    if numbers:
        console.print("\nNumbers of the latest:")
        for name, value in numbers.items():
            console.print(f"  {name:22} {value}")


def _fail(message: str) -> None:
    typer.echo(f"tidemill explain: {message}", err=True)
    raise typer.Exit(1)
