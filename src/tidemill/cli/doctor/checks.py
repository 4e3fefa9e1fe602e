"""The checks: pure, each from one reading of the cluster to what is wrong with it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from tidemill.api.names import LEARNED_CONFIG, SERVICE_MONITOR, VARIANT_LABEL
from tidemill.api.variant import ConditionType, TargetRef
from tidemill.autoscaler.views import InvalidVariant, ScalerView
from tidemill.cli.doctor.fleet import EXTERNAL_METRICS, Fleet, Right
from tidemill.kube.clock import parse_time
from tidemill.kube.conditions import find_condition
from tidemill.kube.resources import Json, ObjectKey
from tidemill.metrics.samples import QUEUE_LENGTH

INSTALL = "tidemill install --image IMAGE | kubectl apply -f -"
POD_LABEL, SERIES_LABEL = "__meta_kubernetes_pod_label_llm_d_ai_variant", "llm_d_ai_variant"
COUNTS = ("wva_desired_replicas", "wva_optimized_replicas")  # metrics that are a number of replicas
BAND = 0.1  # tolerance of an HPA that says nothing else
# From here on a step of one is within the band: 11/10 is not above 1 + BAND.
STEPS_LOST_FROM = 10


@dataclass(frozen=True, slots=True)
class Wrong:
    """One thing that is wrong: with what, what was found, and the command (or the edit) that mends it."""

    about: str
    found: str
    mend: str


@dataclass(frozen=True, slots=True)
class Check:
    """A question, what was looked at for it, and the answer; or why it was not asked."""

    name: str
    looked_at: str
    wrong: tuple[Wrong, ...] = ()
    skipped: str = ""


def examine(fleet: Fleet, now: dt.datetime) -> list[Check]:
    """All checks, in the order in which one would look."""
    scalers, variants = len(fleet.scalers), len(fleet.variants or ())
    count = f"{variants} VariantAutoscalings, {scalers} HPAs and ScaledObjects"
    place = fleet.namespace
    away = "" if fleet.controllers else "no autoscaler is there"
    nothing = "" if variants or scalers else "there are none"
    hpas = "" if any(any(_external_metrics(hpa)) for hpa in fleet.hpas) else "no HPA reads a wva_ metric"
    return [
        _check("installed", f"CRD, pods labelled control-plane=controller-manager in {place}", _installed(fleet)),
        _check("leader", f"lease in {place}", _leader(fleet, now), away or _unelected(fleet)),
        _check("rights", f"access reviews for the service account in {place}", _rights(fleet), away),
        _check("valid", count, _valid(fleet), nothing),
        _check("targets", count, _targets(fleet), nothing),
        _check("numbers", "conditions of the VariantAutoscalings", _numbers(fleet), nothing),
        _check("one scaler", count, _one_scaler(fleet), nothing),
        _check("manifests", "who applies replicas of the targets", _manifests(fleet), nothing),
        _check("follows", "selectors of the HPAs' metrics", _follows(fleet), hpas),
        _check("external metrics", f"APIService {EXTERNAL_METRICS}", _external(fleet), hpas),
        _check("own monitor", f"ServiceMonitor {place}/{SERVICE_MONITOR}", _own_monitor(fleet), hpas),
        _check(
            "relabelling", f"{len(fleet.monitored)} ServiceMonitors and PodMonitors", _relabelling(fleet),
            away or ("" if fleet.asks_prometheus else "the autoscaler scrapes pods itself"),
        ),
        _check(
            "prometheus", fleet.seen.url if fleet.seen else "series", _series(fleet),
            "" if fleet.seen else "give --prometheus URL to have it asked",
        ),
        _check(
            "shadow pods", "pods of those series, their labels and owners", _shadow_pods(fleet),
            "" if fleet.seen else "give --prometheus URL to have it asked who serves",
        ),
        _check("limits", "minimum and maximum of scalers and decisions", _limits(fleet), hpas),
        _check("target type", "metric targets of the HPAs", _target_type(fleet), hpas),
        _check("single steps", "behavior of the HPAs", _single_steps(fleet), hpas),
    ]  # fmt: skip


def _check(name: str, looked_at: str, wrong: Iterable[Wrong], skipped: str = "") -> Check:
    found = tuple(wrong)
    return Check(name, looked_at, found, "" if found else skipped)


def _unelected(fleet: Fleet) -> str:
    return "" if fleet.lease else "it runs without election"


def needed_rights(namespace: str, watched: str = "") -> list[Right]:
    """What the autoscaler does with the API server; manifests/autoscaler/rbac.yaml grants just this. `watched` is
    the only namespace that it looks after, "" for all."""
    read = {
        "": ("pods", "nodes", "namespaces", "configmaps"),
        "apps": ("deployments", "replicasets", "statefulsets"),
        "leaderworkerset.x-k8s.io": ("leaderworkersets",),
        "llmd.ai": ("variantautoscalings",),
        "autoscaling": ("horizontalpodautoscalers",),
        "keda.sh": ("scaledobjects",),
        "inference.networking.k8s.io": ("inferencepools",),
        "inference.networking.x-k8s.io": ("inferencepools",),
        "resource.k8s.io": ("resourceclaims",),
    }
    # Its own ConfigMaps and events about itself are elsewhere when it looks after one other namespace.
    home = tuple(dict.fromkeys((watched, namespace))) if watched else ("",)
    return [
        *(
            Right(verb, group, resource, "" if resource in ("nodes", "namespaces") else watched)
            for group, resources in read.items()
            for resource in resources
            for verb in ("list", "watch")
        ),
        Right("patch", "llmd.ai", "variantautoscalings/status", watched),
        *(Right(verb, "", "events", place) for place in home for verb in ("create", "patch")),
        *(Right(verb, "", "configmaps", place) for place in home[1:] for verb in ("list", "watch")),
        Right("patch", "apps", "deployments/scale", watched),
        Right("patch", "leaderworkerset.x-k8s.io", "leaderworkersets/scale", watched),
        Right("create", "authentication.k8s.io", "tokenreviews"),
        Right("create", "authorization.k8s.io", "subjectaccessreviews"),
        *(Right(verb, "coordination.k8s.io", "leases", namespace) for verb in ("get", "create", "update")),
        *(
            Right(verb, "monitoring.coreos.com", "servicemonitors", namespace, SERVICE_MONITOR)
            for verb in ("list", "watch")
        ),
        Right("create", "", "configmaps", namespace),
        *(Right(verb, "", "configmaps", namespace, LEARNED_CONFIG) for verb in ("get", "patch")),
    ]


def _installed(fleet: Fleet) -> Iterator[Wrong]:
    if fleet.variants is None:
        yield Wrong(
            "CRD variantautoscalings.llmd.ai", "the cluster does not serve it", "tidemill crd | kubectl apply -f -"
        )
    if not fleet.controllers:
        yield Wrong(
            f"namespace {fleet.namespace}", "no pod of the autoscaler is there",
            f"{INSTALL}; or say where it is: --controller-namespace NAMESPACE",
        )  # fmt: skip
    for pod in fleet.controllers:
        ready = find_condition((pod.get("status") or {}).get("conditions") or (), "Ready") or {}
        if ready.get("status") != "True":
            name = pod["metadata"]["name"]
            yield Wrong(
                f"pod {fleet.namespace}/{name}", ready.get("message") or "it is not ready",
                f"kubectl logs -n {fleet.namespace} {name}; kubectl get --raw "
                f"/api/v1/namespaces/{fleet.namespace}/pods/{name}:8081/proxy/readyz",
            )  # fmt: skip


def _leader(fleet: Fleet, now: dt.datetime) -> Iterator[Wrong]:
    if fleet.lease is None or not fleet.controllers:
        return  # it runs without election, or not at all
    spec = fleet.lease.get("spec") or {}
    holder, renewed = spec.get("holderIdentity") or "", spec.get("renewTime")
    duration = spec.get("leaseDurationSeconds") or 60
    age = None if renewed is None else (now - parse_time(renewed)).total_seconds()
    look = f"kubectl logs -n {fleet.namespace} -l control-plane=controller-manager --tail=50"
    about = f"lease {fleet.namespace}/{fleet.lease['metadata']['name']}"
    if not holder:
        yield Wrong(about, "nobody leads: no decision is made", look)
    elif age is None or age > duration:
        since = "never" if age is None else f"{age:.0f}s ago, longer than {duration}s"
        yield Wrong(about, f"{holder} leads and has renewed {since}: no decision is made", look)


def _rights(fleet: Fleet) -> Iterator[Wrong]:
    for right in fleet.missing_rights:
        yield Wrong("service account of the autoscaler", f"may not {right}", INSTALL)


def _valid(fleet: Fleet) -> Iterator[Wrong]:
    for variant in fleet.variants or ():
        if isinstance(variant, InvalidVariant):
            for problem in variant.problems:
                yield Wrong(_va(variant.key), str(problem), _edit("va", variant.key))
    for scaler in fleet.scalers:
        for problem in scaler.problems:
            kind = "hpa" if scaler.kind == "HorizontalPodAutoscaler" else "scaledobject"
            yield Wrong(_scaler(scaler), str(problem), _edit(kind, scaler.key))


def _targets(fleet: Fleet) -> Iterator[Wrong]:
    """A target name that does not match is the first thing to look at (the seed's Troubleshooting)."""
    for variant in fleet.valid:
        target = variant.spec.target
        if target in fleet.targets:
            continue
        there = sorted(
            ref.name for ref in fleet.targets if (ref.namespace, ref.kind) == (target.namespace, target.kind)
        )
        close = get_close_matches(target.name, there, n=1)
        patch = f'{{"spec":{{"scaleTargetRef":{{"name":"{close[0] if close else "NAME"}"}}}}}}'
        yield Wrong(
            _va(variant.key),
            f"spec.scaleTargetRef.name {target.name!r}: no such {target.kind} in namespace {target.namespace}; "
            f"there are {', '.join(there) or 'none'}",
            f"kubectl patch va {variant.key.name} -n {variant.key.namespace} --type=merge -p '{patch}'",
        )


def _numbers(fleet: Fleet) -> Iterator[Wrong]:
    for variant in fleet.valid:
        found = find_condition(variant.status.get("conditions") or (), ConditionType.METRICS_AVAILABLE)
        if found is not None and found["status"] == "False":
            yield Wrong(
                _va(variant.key), f"{found.get('reason')}: {found.get('message')}",
                f"tidemill explain va/{variant.key.name} -n {variant.key.namespace}",
            )  # fmt: skip


def _one_scaler(fleet: Fleet) -> Iterator[Wrong]:
    movers: dict[TargetRef, list[str]] = {}
    for scaler in fleet.scalers:
        if scaler.target is not None and not scaler.made and not scaler.paused:
            movers.setdefault(scaler.target, []).append(_scaler(scaler))
    decided = {v.spec.target for v in fleet.valid} | {
        s.variant.spec.target for s in fleet.scalers if s.variant is not None
    }
    for target, names in movers.items():
        if fleet.writes_replicas and target in decided:
            names.append("the autoscaler (--actuation scale)")
        if len(names) > 1:
            yield Wrong(str(target), f"it is moved by {' and by '.join(names)}", "delete all of them but one")


def _follows(fleet: Fleet) -> Iterator[Wrong]:
    known = {v.key: v.spec.target for v in fleet.valid}
    known |= {s.key: s.variant.spec.target for s in fleet.scalers if s.variant is not None}
    for scaler in fleet.scalers:
        for name in scaler.follows:
            target = known.get(ObjectKey(scaler.key.namespace, name))
            if target is None:
                there = sorted(key.name for key in known if key.namespace == scaler.key.namespace)
                yield Wrong(
                    _scaler(scaler),
                    f"its metric selects variant_name {name!r}, which is no variant of namespace "
                    f"{scaler.key.namespace}; there are {', '.join(there) or 'none'}",
                    _edit("hpa", scaler.key),
                )
            elif target != scaler.target:
                yield Wrong(
                    _scaler(scaler), f"it follows variant {name} of {target}, and scales {scaler.target}",
                    _edit("hpa", scaler.key),
                )  # fmt: skip


def _external(fleet: Fleet) -> Iterator[Wrong]:
    users = [hpa for hpa in fleet.hpas if any(_external_metrics(hpa))]
    if not users:
        return
    about = f"APIService {EXTERNAL_METRICS}"
    if fleet.external_metrics is None:
        names = ", ".join(hpa["metadata"]["name"] for hpa in users)
        yield Wrong(
            about, f"nobody serves it, and HPAs ask for it: {names}",
            f"{INSTALL}, or install prometheus-adapter",
        )  # fmt: skip
        return
    status = fleet.external_metrics.get("status") or {}
    available = find_condition(status.get("conditions") or (), "Available")
    if available is not None and available["status"] != "True":
        service = fleet.external_metrics["spec"].get("service") or {}
        place = f"{service.get('namespace')}/{service.get('name')}"
        yield Wrong(
            about, f"{place} serves it, and is not available: {available.get('message')}",
            f"kubectl get endpoints -n {service.get('namespace')} {service.get('name')}",
        )  # fmt: skip


def _own_monitor(fleet: Fleet) -> Iterator[Wrong]:
    """Without it Prometheus knows no wva_ series, and whoever reads them there moves nothing."""
    service = ((fleet.external_metrics or {}).get("spec") or {}).get("service") or {}
    ours = service.get("namespace") == fleet.namespace
    readers = [hpa for hpa in fleet.hpas if any(_external_metrics(hpa))] if not ours else []
    if fleet.service_monitors is None or not readers:
        return
    names = {
        m["metadata"]["name"] for m in fleet.service_monitors if m["metadata"]["namespace"] == fleet.namespace
    }
    if SERVICE_MONITOR not in names:
        yield Wrong(
            f"ServiceMonitor {fleet.namespace}/{SERVICE_MONITOR}",
            f"it is gone, and HPAs read what it has scraped: {', '.join(h['metadata']['name'] for h in readers)}",
            "tidemill install monitoring | kubectl apply -f -",
        )


def _relabelling(fleet: Fleet) -> Iterator[Wrong]:
    """Pods that only their label ties to a variant: it must come into their series."""
    if not fleet.asks_prometheus:
        return
    for monitor, pods in fleet.monitored:
        if not pods:
            continue
        kind, metadata = monitor["kind"], monitor["metadata"]
        field = "podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"
        endpoints: list[Json] = monitor["spec"].get(field) or []
        for index, endpoint in enumerate(endpoints):
            if any(_carries_label(rule) for rule in endpoint.get("relabelings") or ()):
                continue
            late = any(_carries_label(rule) for rule in endpoint.get("metricRelabelings") or ())
            rule = f'{{"sourceLabels":["{POD_LABEL}"],"targetLabel":"{SERIES_LABEL}","action":"replace"}}'
            path, value = f"/spec/{field}/{index}/relabelings", f"[{rule}]"
            if endpoint.get("relabelings"):
                path, value = f"{path}/-", rule
            yield Wrong(
                f"{kind} {metadata['namespace']}/{metadata['name']}",
                f"{field}[{index}] scrapes {', '.join(pods[:3])} with the label {VARIANT_LABEL}, and "
                + (
                    f"has the rule for {SERIES_LABEL} under metricRelabelings, where pod labels are gone already"
                    if late
                    else f"no rule under relabelings brings it into the series as {SERIES_LABEL}"
                ),
                f"kubectl patch {kind.lower()} {metadata['name']} -n {metadata['namespace']} --type=json "
                f'-p \'[{{"op":"add","path":"{path}","value":{value}}}]\'',
            )


def _carries_label(rule: Json) -> bool:
    return POD_LABEL in (rule.get("sourceLabels") or ()) and rule.get("targetLabel") == SERIES_LABEL


def _series(fleet: Fleet) -> Iterator[Wrong]:
    """What Prometheus has scraped, and under which labels."""
    seen = fleet.seen
    if seen is None:
        return
    if seen.problem:
        yield Wrong(
            seen.url, seen.problem,
            "kubectl get svc -A | grep prometheus; then PROMETHEUS_BASE_URL in the autoscaler's environment or in "
            f"ConfigMap {fleet.namespace}/wva-manager-config, or --metrics-source direct without any",
        )  # fmt: skip
        return
    if not seen.engines:
        yield Wrong(
            seen.url, f"it answers, and has no series {QUEUE_LENGTH}: nobody scrapes the model servers",
            "kubectl get podmonitor,servicemonitor -A; docs/autoscaler.md has one for vLLM",
        )  # fmt: skip
    for label in ("namespace", "pod"):
        bare = [labels for labels in seen.engines if not labels.get(label)]
        if bare:
            where = ", ".join(sorted({labels.get("instance", "?") for labels in bare})[:3])
            source = f"__meta_kubernetes_{'namespace' if label == 'namespace' else 'pod_name'}"
            yield Wrong(
                seen.url, f"{len(bare)} series of model servers have no label {label} (instances {where})",
                f'add {{"sourceLabels":["{source}"],"targetLabel":"{label}"}} to the relabelings of their monitor',
            )  # fmt: skip
    renamed = any(labels.get("exported_namespace") for labels in seen.decisions)
    for hpa in fleet.hpas if seen.decisions else ():
        for external in _external_metrics(hpa):
            chosen = (external["metric"].get("selector") or {}).get("matchLabels") or {}
            wrong, right = ("namespace", "exported_namespace") if renamed else ("exported_namespace", "namespace")
            if wrong in chosen and not any(labels.get(wrong) == chosen[wrong] for labels in seen.decisions):
                yield Wrong(
                    f"HorizontalPodAutoscaler {ObjectKey.of(hpa)}",
                    f"it selects {wrong}={chosen[wrong]}, and Prometheus has the namespace of variants as {right}",
                    f"{_edit('hpa', ObjectKey.of(hpa))}: {right} in place of {wrong}",
                )


def _manifests(fleet: Fleet) -> Iterator[Wrong]:
    """Manifests that set the replicas of a target: each time they are applied, the decision is undone."""
    moved = {scaler.target for scaler in fleet.scalers} | {
        variant.spec.target for variant in fleet.valid if fleet.writes_replicas
    }
    for target, who in sorted(fleet.appliers.items(), key=lambda item: str(item[0])):
        if target in moved:
            yield Wrong(
                str(target),
                f"{' and '.join(who)} sets spec.replicas, and a scaler does: each time the manifest is applied, "
                "the decision is undone",
                f"take replicas out of the manifest of {target.kind.lower()} {target.name} -n {target.namespace} "
                "and apply it",
            )


def _shadow_pods(fleet: Fleet) -> Iterator[Wrong]:
    """Pods that serve the model of a variant in its namespace, and that no label and no owner ties to one."""
    decided = {v.spec.target for v in fleet.valid} | {s.target for s in fleet.scalers if s.variant is not None}
    targets = {target.uid for ref, target in fleet.targets.items() if ref in decided}
    for shadow in fleet.shadows:
        pod, owner = shadow.pod, shadow.owner
        mine = [
            v.key.name
            for v in fleet.valid
            if (v.key.namespace, v.spec.spec.model_id) == (pod.namespace, shadow.model)
        ]
        if not mine or (owner is not None and owner.uid in targets):
            continue
        label = f'{{"{VARIANT_LABEL}":"{mine[0] if len(mine) == 1 else "NAME"}"}}'
        patch = f'{{"metadata":{{"labels":{label}}}}}'
        if owner is not None:
            template = f'{{"template":{patch}}}'
            if owner.kind == "LeaderWorkerSet":
                template = f'{{"leaderWorkerTemplate":{{"workerTemplate":{patch}}}}}'
            patch = f'{{"spec":{template}}}'
        kind, name = ("pod", pod.name) if owner is None else (owner.kind.lower(), owner.name)
        yield Wrong(
            f"pod {pod}",
            f"it serves {shadow.model} and counts for nobody: its owners end at {kind} {name}, which is no "
            f"target, and it has no label {VARIANT_LABEL} (variants of the model: {', '.join(mine)})",
            f"kubectl patch {kind} {name} -n {pod.namespace} --type=merge -p '{patch}'",
        )


def _limits(fleet: Fleet) -> Iterator[Wrong]:
    """Limits of an HPA that hide what is decided."""
    decided = {
        v.key: alloc.num_replicas
        for v in fleet.valid
        if (alloc := v.spec.status.desired_optimized_alloc) is not None
    }
    for hpa in fleet.hpas:
        key, spec = ObjectKey.of(hpa), hpa["spec"]
        low, high = spec.get("minReplicas", 1), spec["maxReplicas"]
        for name in _followed(hpa):
            wanted = decided.get(ObjectKey(key.namespace, name))
            if wanted and not low <= wanted <= high:
                field, limit = ("maxReplicas", high) if wanted > high else ("minReplicas", low)
                yield Wrong(
                    f"HorizontalPodAutoscaler {key}",
                    f"{wanted} replicas are decided for variant {name}, and {field} {limit} hides it",
                    f"kubectl patch hpa {key.name} -n {key.namespace} --type=merge "
                    f'-p \'{{"spec":{{"{field}":{wanted}}}}}\'',
                )


def _target_type(fleet: Fleet) -> Iterator[Wrong]:
    for hpa in fleet.hpas:
        for external in _external_metrics(hpa):
            name, target = external["metric"]["name"], external["target"]
            if name in COUNTS and target["type"] != "AverageValue":
                yield Wrong(
                    f"HorizontalPodAutoscaler {ObjectKey.of(hpa)}",
                    f"target type {target['type']} multiplies {name} by the current replicas: 3, 9, 27",
                    f'{_edit("hpa", ObjectKey.of(hpa))}: type AverageValue, averageValue "1"',
                )


def _single_steps(fleet: Fleet) -> Iterator[Wrong]:
    for hpa in fleet.hpas:
        key, spec = ObjectKey.of(hpa), hpa["spec"]
        scaled = spec["scaleTargetRef"]
        target = fleet.targets.get(TargetRef(namespace=key.namespace, kind=scaled["kind"], name=scaled["name"]))
        counts = any(e["metric"]["name"] in COUNTS for e in _external_metrics(hpa))
        if target is None or not counts or target.replicas < STEPS_LOST_FROM:
            continue
        behavior = spec.get("behavior") or {}
        if all((behavior.get(way) or {}).get("tolerance") is not None for way in ("scaleUp", "scaleDown")):
            continue
        lost = int(target.replicas * BAND + 1e-9)
        yield Wrong(
            f"HorizontalPodAutoscaler {key}",
            f"at {target.replicas} replicas, changes of up to {lost} are within its tolerance and never happen",
            f"kubectl patch hpa {key.name} -n {key.namespace} --type=merge -p "
            '\'{"spec":{"behavior":{"scaleUp":{"tolerance":"0"},"scaleDown":{"tolerance":"0"}}}}\'; on Kubernetes '
            "before 1.35 without the gate HPAConfigurableTolerance: --actuation scale in its place",
        )


def _external_metrics(hpa: Json) -> Iterator[Json]:
    for metric in hpa["spec"].get("metrics") or ():
        external = metric.get("external") or {}
        if (external.get("metric") or {}).get("name", "").startswith("wva_"):
            yield external


def _followed(hpa: Json) -> Iterator[str]:
    for external in _external_metrics(hpa):
        selector = external["metric"].get("selector") or {}
        if external["metric"]["name"] in COUNTS and (
            name := (selector.get("matchLabels") or {}).get("variant_name")
        ):
            yield name


def _va(key: ObjectKey) -> str:
    return f"VariantAutoscaling {key}"


def _scaler(scaler: ScalerView) -> str:
    return f"{scaler.kind} {scaler.key}"


def _edit(kind: str, key: ObjectKey) -> str:
    return f"kubectl edit {kind} {key.name} -n {key.namespace}"
