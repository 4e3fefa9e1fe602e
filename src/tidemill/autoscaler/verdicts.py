"""Whether the numbers of a variant can decide, and if not, which pod lacks what."""

from __future__ import annotations

import datetime as dt

from tidemill.api.manager_config import FreshnessThresholds
from tidemill.api.variant import Reason
from tidemill.autoscaler.attribution import PodSample
from tidemill.autoscaler.decisions import Verdict
from tidemill.autoscaler.members import Member
from tidemill.autoscaler.views import PodView
from tidemill.metrics.freshness import Freshness, freshness
from tidemill.metrics.samples import KV_USAGE, QUEUE_LENGTH, Gauge, Snapshot

NOT_STARTED = "no replica is ready and reporting yet"
NAMED = 5  # pods named in a message; the rest is counted


def metrics_verdict(
    member: Member, snapshot: Snapshot, thresholds: FreshnessThresholds, now: dt.datetime
) -> Verdict:
    """True when every serving replica of the variant has numbers that can decide."""
    model = member.model
    if (failure := snapshot.failures.get(model)) is not None:
        return Verdict(False, Reason.PROMETHEUS_ERROR, f"model {model!r}: {failure}")
    serving = [r for r in member.ready if r.sample is not None or not _is_new(r.pod, thresholds, now)]
    if not serving:
        return Verdict(False, Reason.METRICS_MISSING, NOT_STARTED)
    names = {name for r in serving if r.sample is not None for name in r.sample.models}
    if names and model not in names:
        listed = ", ".join(repr(name) for name in sorted(names))
        message = (
            f"no series of the target's own pods carries modelID {model!r}; they carry {listed}: "
            "set spec.modelID to the name under which the model is served"
        )
        return Verdict(False, Reason.METRICS_MISSING, message)
    stale: list[str] = []
    missing: list[str] = []
    for replica in serving:
        for metric, gauge in _gauges(replica.sample):
            state = freshness(None if gauge is None else gauge.age, thresholds)
            if state is Freshness.UNAVAILABLE:
                missing.append(f"{replica.pod.key.name} ({metric})")
            elif state is Freshness.STALE:
                stale.append(f"{replica.pod.key.name} ({metric})")
    if missing:
        return Verdict(False, Reason.METRICS_MISSING, f"no numbers from {_listed(missing)}")
    if stale:
        message = f"numbers older than {thresholds.stale:g}s from {_listed(stale)}"
        return Verdict(False, Reason.METRICS_STALE, message)
    notes = "".join(f"; {note}" for note in snapshot.notes)
    return Verdict(True, Reason.METRICS_FOUND, f"numbers from all serving replicas{notes}")


def _is_new(pod: PodView, thresholds: FreshnessThresholds, now: dt.datetime) -> bool:
    """Whether `pod` became ready so lately that nobody can have scraped it yet."""
    if pod.ready_since is None:
        return True
    return (now - pod.ready_since).total_seconds() < thresholds.fresh


def _gauges(sample: PodSample | None) -> list[tuple[str, Gauge | None]]:
    return [
        (KV_USAGE, None if sample is None else sample.kv_usage),
        (QUEUE_LENGTH, None if sample is None else sample.queue_length),
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"
