"""HorizontalPodAutoscaler by external metrics: what it recommends, limited as its behavior says.

Own code, because the cluster must show how a decision of the autoscaler reaches the replicas. The rules are those
of Kubernetes' documentation ("Horizontal Pod Autoscaling": algorithm details, configurable scaling behavior) for
metrics of type External; others are not read here, and the condition ScalingActive says so.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import orjson
import structlog

from tidemill.kube.client import KubeClient
from tidemill.kube.clock import rfc3339
from tidemill.kube.conditions import find_condition
from tidemill.kube.errors import ApiError, ConflictError, NotFoundError
from tidemill.kube.informer import Added, Informer, InformerEvent, Modified, identity
from tidemill.kube.queue import WorkQueue
from tidemill.kube.resources import DEPLOYMENTS, HORIZONTAL_POD_AUTOSCALERS, Json, ObjectKey
from tidemill.kube.selectors import selector_query

log = structlog.get_logger(__name__)

TOLERANCE = 0.1  # share of a metric's target within which nothing moves, unless the behavior has its own
DOWN_WINDOW = 300.0  # seconds of stabilisation when the behavior has none
_EXTERNAL = "/apis/external.metrics.k8s.io/v1beta1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """At most `value` pods, or per cent of them, in `period` seconds."""

    percent: bool
    value: int
    period: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Of one direction. Of several policies the one that allows most counts; with `most` False the one that allows
    least, with None nothing moves in this direction."""

    window: float
    policies: tuple[Policy, ...]
    most: bool | None = True
    tolerance: float = TOLERANCE


UP = Rules(
    window=0.0,
    policies=(Policy(percent=True, value=100, period=15), Policy(percent=False, value=4, period=15)),
)
DOWN = Rules(window=DOWN_WINDOW, policies=(Policy(percent=True, value=100, period=15),))


@dataclass(frozen=True, slots=True)
class Behavior:
    up: Rules = UP
    down: Rules = DOWN

    @classmethod
    def parse(cls, spec: Mapping[str, Any] | None) -> Behavior:
        found = spec or {}
        return cls(_rules(found.get("scaleUp"), UP), _rules(found.get("scaleDown"), DOWN))


@dataclass(frozen=True, slots=True)
class Reading:
    """One metric: the sum of its values, what is wanted of it, and whether that is per pod."""

    value: float
    target: float
    average: bool


@dataclass(slots=True)
class Memory:
    """Of one HPA: what was recommended when, and by how much it has scaled when."""

    recommended: list[tuple[float, int]] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)


def wanted(current: int, readings: Sequence[Reading], behavior: Behavior) -> int:
    """The largest of what each metric asks for; `current` where that is within the tolerance."""
    return max(_wanted(current, reading, behavior) for reading in readings)


def _wanted(current: int, reading: Reading, behavior: Behavior) -> int:
    ratio = reading.value / (reading.target * current if reading.average else reading.target)
    if 1 - behavior.down.tolerance <= ratio <= 1 + behavior.up.tolerance:
        return current
    # A quotient may be a hair above a whole number.
    return math.ceil((reading.value / reading.target if reading.average else ratio * current) - 1e-9)


def limited(
    current: int, recommendation: int, behavior: Behavior, memory: Memory, now: float, *, least: int, most: int
) -> int:
    """What stabilisation, policies and limits leave of a recommendation at `now` (seconds). Remembers it."""
    window = max(behavior.up.window, behavior.down.window)
    memory.recommended = [(at, value) for at, value in memory.recommended if at > now - window]
    memory.recommended.append((now, recommendation))
    # Up only as far as everything in its window asked for, down only as far as anything in its own did.
    up = min(value for at, value in memory.recommended if at >= now - behavior.up.window)
    down = max(value for at, value in memory.recommended if at >= now - behavior.down.window)
    if up > current:
        found = min(up, max(current, _bound(current, behavior.up, memory, now, sign=1)))
    elif down < current:
        found = max(down, min(current, _bound(current, behavior.down, memory, now, sign=-1)))
    else:
        found = current
    return min(max(found, least), most)


def _bound(current: int, rules: Rules, memory: Memory, now: float, *, sign: int) -> int:
    if rules.most is None:
        return current
    bounds: list[int] = []
    for policy in rules.policies:
        moved = sum(by for at, by in memory.changes if at > now - policy.period and by * sign > 0)
        begun = current - moved  # the replicas when the period began
        if policy.percent:
            scaled = begun * (1 + sign * policy.value / 100)
            bounds.append(math.ceil(scaled) if sign > 0 else int(scaled))
        else:
            bounds.append(begun + sign * policy.value)
    # For growth the largest allows most, for shrinking the smallest.
    return max(bounds) if (sign > 0) is rules.most else min(bounds)


def _rules(spec: Mapping[str, Any] | None, default: Rules) -> Rules:
    if spec is None:
        return default
    policies = tuple(
        Policy(percent=p["type"] == "Percent", value=p["value"], period=float(p["periodSeconds"]))
        for p in spec.get("policies") or ()
    )
    window, tolerance = spec.get("stabilizationWindowSeconds"), spec.get("tolerance")
    return Rules(
        window=default.window if window is None else float(window),
        policies=policies or default.policies,
        most={"Max": True, "Min": False, "Disabled": None}[spec.get("selectPolicy") or "Max"],
        tolerance=default.tolerance if tolerance is None else parse_quantity(tolerance),
    )


_UNITS = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}


def parse_quantity(value: object) -> float:
    """A number as Kubernetes writes it, as far as metrics have them. Raises ValueError."""
    text = str(value)
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)


class HorizontalPodAutoscalerController:
    """Looks at every HPA each `period` seconds (15 in Kubernetes)."""

    def __init__(self, client: KubeClient, *, now: Callable[[], dt.datetime], period: float = 15.0) -> None:
        self._client = client
        self._now = now
        self._period = period
        self._memories: dict[str, Memory] = {}  # by uid
        self._queue: WorkQueue[ObjectKey] = WorkQueue(first_delay=0.1, max_delay=period)
        self._hpas = Informer(client, HORIZONTAL_POD_AUTOSCALERS, decode=identity)
        self._hpas.add_handler(self._on_event)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hpas.run())
            group.create_task(self._queue.work(self._work, self._on_error))

    def _on_event(self, event: InformerEvent[Json]) -> None:
        if isinstance(event, Added):
            self._queue.add(event.key)
        elif not isinstance(event, Modified):
            self._memories.pop(event.old["metadata"]["uid"], None)

    async def _work(self, key: ObjectKey) -> None:
        if await self.reconcile(key):
            self._queue.add_after(key, self._period)

    def _on_error(self, key: ObjectKey, error: Exception) -> None:
        if not isinstance(error, ConflictError):
            log.warning("reconcile failed", kind="HorizontalPodAutoscaler", key=str(key), error=str(error))

    async def reconcile(self, key: ObjectKey) -> bool:
        """One look. False when the HPA is gone."""
        try:
            hpa = await self._client.get(HORIZONTAL_POD_AUTOSCALERS, key.name, key.namespace)
        except NotFoundError:
            return False
        spec, target = hpa["spec"], hpa["spec"]["scaleTargetRef"]
        if target["kind"] != "Deployment":
            await self._write(hpa, inactive=("FailedGetScale", f"kind {target['kind']} cannot be scaled here"))
            return True
        try:
            scale = await self._client.get(DEPLOYMENTS, f"{target['name']}/scale", key.namespace)
        except NotFoundError as error:
            await self._write(hpa, inactive=("FailedGetScale", error.message))
            return True
        current: int = scale["spec"].get("replicas", 0)
        if current == 0:
            why = "scaling is disabled since the replica count of the target is zero"
            await self._write(hpa, (0, 0), inactive=("ScalingDisabled", why))
            return True
        try:
            readings = [await self._read(metric, key.namespace) for metric in spec.get("metrics") or ()]
        except ValueError as error:
            await self._write(hpa, (current, current), inactive=("FailedGetExternalMetric", str(error)))
            return True
        behavior = Behavior.parse(spec.get("behavior"))
        memory = self._memories.setdefault(hpa["metadata"]["uid"], Memory())
        now = self._now().timestamp()
        found = limited(
            current, wanted(current, readings, behavior), behavior, memory, now,
            least=spec.get("minReplicas", 1), most=spec["maxReplicas"],
        )  # fmt: skip
        if found != current:
            await self._client.scale(DEPLOYMENTS, target["name"], key.namespace, found)
            memory.changes = [*(c for c in memory.changes if c[0] > now - 1800), (now, found - current)]
        await self._write(hpa, (current, found))
        return True

    async def _read(self, metric: Json, namespace: str) -> Reading:
        """Raises ValueError, in the words of Kubernetes."""
        if metric["type"] != "External":
            raise ValueError(f"metrics of type {metric['type']} are not read here")
        about, target = metric["external"]["metric"], metric["external"]["target"]
        query = {"labelSelector": selector_query(about["selector"])} if about.get("selector") else {}
        path = f"{_EXTERNAL}/namespaces/{namespace}/{quote(about['name'])}"
        try:
            items = orjson.loads(await self._client.get_raw(path, query))["items"]
        except ApiError as error:
            raise ValueError(
                f"unable to get external metric {namespace}/{about['name']}: unable to fetch metrics from "
                f"external metrics API: {error.message}"
            ) from None
        if not items:
            raise ValueError("no metrics returned from external metrics API")
        average = target["type"] == "AverageValue"
        limit = parse_quantity(target["averageValue" if average else "value"])
        return Reading(sum(parse_quantity(item["value"]) for item in items), limit, average)

    async def _write(
        self, hpa: Json, replicas: tuple[int, int] | None = None, *, inactive: tuple[str, str] | None = None
    ) -> None:
        """Status, where it changed: replicas as they are and as they should be, and the reason and message why
        nothing can be scaled."""
        now, metadata = rfc3339(self._now()), hpa["metadata"]
        old = hpa.get("status") or {}

        def condition(kind: str, reason: str, message: str, *, holds: bool) -> Json:
            status = "True" if holds else "False"
            before = find_condition(old.get("conditions") or (), kind)
            since = before["lastTransitionTime"] if before and before["status"] == status else now
            return {
                "type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since,
            }  # fmt: skip

        reason, message = inactive or ("ValidMetricFound", "the HPA was able to calculate a replica count")
        scales = reason != "FailedGetScale"
        able = ("SucceededGetScale", "the HPA controller was able to get the target's current scale")
        status: Json = {
            "conditions": [
                condition("AbleToScale", *(able if scales else (reason, message)), holds=scales),
                condition("ScalingActive", reason, message, holds=inactive is None),
            ]
        }
        if replicas is not None:
            status |= {"currentReplicas": replicas[0], "desiredReplicas": replicas[1]}
        if replicas is not None and replicas[0] != replicas[1]:
            status["lastScaleTime"] = now
        elif "lastScaleTime" in old:
            status["lastScaleTime"] = old["lastScaleTime"]
        if old != status:
            await self._client.patch(
                HORIZONTAL_POD_AUTOSCALERS,
                metadata["name"],
                {"status": status},
                metadata["namespace"],
                sub="status",
            )
