"""A KEDA external scaler: KEDA asks over gRPC how many replicas a ScaledObject should have.

The service and its messages are those of KEDA's externalscaler.proto. A trigger of type `external` (or
`external-push`, which hears of a change at once) names this server; its metadata may name the model (`modelID`,
`variantCost`: the ScaledObject is then a variant of its own) or a VariantAutoscaling (`variantName`).
What is not decided is an error, never a number: KEDA then does what its fallback says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog

from tidemill.api.managed_scaler import TRIGGER_VARIANT
from tidemill.api.protos import Fields, Message, declare
from tidemill.metrics.exporter import DecisionExporter, ExportedDecision

log = structlog.get_logger(__name__)

METRIC = "wva_desired_replicas"
SERVICE = "externalscaler.ExternalScaler"
_MESSAGES: Mapping[str, Fields] = {
    "ScaledObjectRef": {
        "name": (1, "string"), "namespace": (2, "string"), "scalerMetadata": (3, "map:string"),
    },
    "IsActiveResponse": {"result": (1, "bool")},
    # Whole numbers beside floating ones: older releases of KEDA read no others.
    "MetricSpec": {"metricName": (1, "string"), "targetSize": (2, "int64"), "targetSizeFloat": (3, "double")},
    "GetMetricSpecResponse": {"metricSpecs": (1, "many:MetricSpec")},
    "GetMetricsRequest": {"scaledObjectRef": (1, "ScaledObjectRef"), "metricName": (2, "string")},
    "MetricValue": {"metricName": (1, "string"), "metricValue": (2, "int64"), "metricValueFloat": (3, "double")},
    "GetMetricsResponse": {"metricValues": (1, "many:MetricValue")},
}  # fmt: skip
_class = declare("tidemill.externalscaler", _MESSAGES)
ScaledObjectRef, IsActiveResponse = _class("ScaledObjectRef"), _class("IsActiveResponse")
GetMetricSpecResponse, MetricSpec = _class("GetMetricSpecResponse"), _class("MetricSpec")
GetMetricsRequest, GetMetricsResponse = _class("GetMetricsRequest"), _class("GetMetricsResponse")
MetricValue = _class("MetricValue")

Context = grpc.aio.ServicerContext[Any, Any]


class KedaScaler:
    """`numbers` gives what is decided for a namespace; `variant_of` which variant decides for the target of a
    ScaledObject, by namespace and name."""

    def __init__(
        self, *, exporter: DecisionExporter, numbers: Callable[[str], Iterable[ExportedDecision]],
        variant_of: Callable[[str, str], str | None],
    ) -> None:  # fmt: skip
        self._exporter = exporter
        self._numbers = numbers
        self._variant_of = variant_of
        self._server: grpc.aio.Server | None = None

    async def listen(self, address: str, *, flag: str) -> int:
        """Serve on host:port; gives the port. Raises ValueError naming `flag`, or OSError."""
        host, colon, port = address.rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{flag}: invalid value {address!r}: must be host:port or :port")
        server = grpc.aio.server()
        handlers = {
            "IsActive": grpc.unary_unary_rpc_method_handler(
                self._is_active, ScaledObjectRef.FromString, IsActiveResponse.SerializeToString
            ),
            "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                self._stream_is_active, ScaledObjectRef.FromString, IsActiveResponse.SerializeToString
            ),
            "GetMetricSpec": grpc.unary_unary_rpc_method_handler(
                self._metric_spec, ScaledObjectRef.FromString, GetMetricSpecResponse.SerializeToString
            ),
            "GetMetrics": grpc.unary_unary_rpc_method_handler(
                self._metrics, GetMetricsRequest.FromString, GetMetricsResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            bound = server.add_insecure_port(f"{host or '[::]'}:{port}")
        except RuntimeError as error:
            raise OSError(f"{flag}: cannot listen on {address}: {error}") from None
        await server.start()
        self._server = server
        return bound

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.5)

    def decision(self, ref: Message) -> ExportedDecision:
        """What is decided for a ScaledObject. Raises LookupError, in words for whoever reads KEDA's log."""
        name = ref.scalerMetadata.get(TRIGGER_VARIANT, "") or self._variant_of(ref.namespace, ref.name)
        about = f"ScaledObject {ref.namespace}/{ref.name}"
        if name is None:
            raise LookupError(
                f"{about}: no variant decides for its target: give the trigger metadata modelID or variantName, "
                "or create a VariantAutoscaling for the target"
            )
        found = next((d for d in self._numbers(ref.namespace) if d.variant == name), None)
        if found is None:
            raise LookupError(f"{about}: nothing is decided yet for variant {ref.namespace}/{name}")
        return found

    async def _decision(self, ref: Message, context: Context) -> ExportedDecision:
        try:
            return self.decision(ref)
        except LookupError as error:
            await _abort(context, error)

    async def _is_active(self, ref: Message, context: Context) -> Message:
        return IsActiveResponse(result=(await self._decision(ref, context)).desired > 0)

    async def _stream_is_active(self, ref: Message, context: Context) -> AsyncIterator[Message]:
        """Now, and at every change."""
        changed = asyncio.Event()
        forget = self._exporter.observe(changed.set)
        try:
            told: bool | None = None
            while True:
                changed.clear()
                try:
                    active = self.decision(ref).desired > 0
                except LookupError:
                    active = told  # nothing to say of it now
                if active is not None and active != told:
                    told = active
                    yield IsActiveResponse(result=active)
                await changed.wait()
        finally:
            forget()

    async def _metric_spec(self, ref: Message, context: Context) -> Message:
        """One replica for each one that is wanted."""
        return GetMetricSpecResponse(
            metricSpecs=[MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)]
        )

    async def _metrics(self, request: Message, context: Context) -> Message:
        desired = (await self._decision(request.scaledObjectRef, context)).desired
        value = MetricValue(metricName=METRIC, metricValue=desired, metricValueFloat=float(desired))
        return GetMetricsResponse(metricValues=[value])


async def _abort(context: Context, error: LookupError) -> NoReturn:
    await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
    raise AssertionError("abort raises")
