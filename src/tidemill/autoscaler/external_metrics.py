"""The external metrics API, so that a plain HPA needs neither Prometheus nor an adapter.

`external.metrics.k8s.io/v1beta1` has one list per namespace and metric: of all variants there whose labels the
selector of the HPA takes. Every replica of the autoscaler answers: the one that leads from its decisions, the
others from what it has written to the objects.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

import orjson
from aiohttp import web

from tidemill.kube.delegated import Access, Delegated
from tidemill.kube.errors import ApiError
from tidemill.kube.selectors import label_selector
from tidemill.metrics.exporter import GAUGES, ExportedDecision

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
_ROOT = f"/apis/{GROUP}/{VERSION}"

Json = dict[str, Any]
Numbers = Callable[[str], Iterable[ExportedDecision]]
"""What is decided for the variants of a namespace."""


class Refusal(ApiError):
    """What this API answers when it does not give a list."""

    def body(self) -> Json:
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": self.code,
            "reason": self.reason, "message": self.message,
        }  # fmt: skip


def metric_values(
    numbers: Iterable[ExportedDecision], *, namespace: str, metric: str, selector: str, now: str
) -> Json:
    """An ExternalMetricValueList; `now` is its time. Raises Refusal for what is not there: an HPA
    repeats the message in its conditions and events, where people look first."""
    gauge = GAUGES.get(metric)
    if gauge is None:
        known = ", ".join(GAUGES)
        raise Refusal(404, "NotFound", f"metric {metric!r}: must be one of {known}")
    try:
        takes = label_selector(selector)
    except ValueError as error:
        raise Refusal(400, "BadRequest", f"labelSelector: {error}") from None
    all_ = sorted(numbers, key=lambda d: d.variant)
    taken = [decision for decision in all_ if takes(_labels(decision))]
    if not taken:
        there = f"there are {', '.join(d.variant for d in all_)}" if all_ else "none is decided for there"
        raise Refusal(
            404, "NotFound", f"metric {metric}: no variant in namespace {namespace} matches {selector!r}; {there}"
        )
    return {
        "kind": "ExternalMetricValueList",
        "apiVersion": f"{GROUP}/{VERSION}",
        "metadata": {},
        "items": [
            {
                "metricName": metric,
                "metricLabels": _labels(decision),
                "timestamp": now,
                "value": quantity(gauge.value(decision)),
            }
            for decision in taken
        ],
    }


def quantity(value: float) -> str:
    """As Kubernetes writes numbers: whole, or in thousandths."""
    thousandths = int((Decimal(repr(value)) * 1000).to_integral_value())
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)


def _labels(decision: ExportedDecision) -> dict[str, str]:
    """As the series have them; the namespace also by the name that Prometheus gives it without honorLabels, so
    that an HPA that was written for an adapter selects the same."""
    return {
        "variant_name": decision.variant,
        "namespace": decision.namespace,
        "exported_namespace": decision.namespace,
        "accelerator_type": decision.accelerator,
    }


def discovery(path: str) -> Json | None:
    """What there is, for whoever looks around; None for any other path."""
    version = {"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}
    group = {"name": GROUP, "versions": [version], "preferredVersion": version}
    match path.strip("/").split("/"):
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
        case ["apis", name] if name == GROUP:
            return {"kind": "APIGroup", "apiVersion": "v1", **group}
        case ["apis", name, wanted] if (name, wanted) == (GROUP, VERSION):
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{GROUP}/{VERSION}",
                "resources": [
                    {
                        "name": metric, "singularName": "", "namespaced": True,
                        "kind": "ExternalMetricValueList", "verbs": ["get"],
                    }
                    for metric in GAUGES
                ],
            }  # fmt: skip
        case _:
            return None


def external_metrics_app(numbers: Numbers, delegated: Delegated, *, now: Callable[[], str]) -> web.Application:
    """The API for TLS: everybody must be known, and be allowed to list a metric."""

    async def found(request: web.Request) -> Json:
        user = await delegated.user(_peer(request), request.headers)
        if user is None:
            raise Refusal(401, "Unauthorized", "Unauthorized")
        if (described := discovery(request.path)) is not None:
            return described
        match request.path.removeprefix(_ROOT).strip("/").split("/"):
            case ["namespaces", namespace, metric] if request.path.startswith(_ROOT):
                access = Access(verb="list", group=GROUP, resource=metric, namespace=namespace)
                if why := await delegated.denied(user, access):
                    raise Refusal(403, "Forbidden", why)
                selector = request.query.get("labelSelector", "")
                return metric_values(
                    numbers(namespace), namespace=namespace, metric=metric, selector=selector, now=now()
                )
            case _:
                raise Refusal(404, "NotFound", f"{request.path}: not found")

    async def answer(request: web.Request) -> web.Response:
        try:
            return _json(await found(request))
        except Refusal as error:
            return _json(error.body(), error.code)
        except ApiError as error:
            failure = Refusal(503, "ServiceUnavailable", f"the API server could not be asked: {error}")
            return _json(failure.body(), failure.code)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    return app


def _peer(request: web.Request) -> Mapping[str, Any] | None:
    transport = request.transport
    tls: ssl.SSLObject | None = None if transport is None else transport.get_extra_info("ssl_object")
    return None if tls is None else tls.getpeercert()


def _json(body: Json, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")
