"""From a report to targets: who grows, who shrinks, who waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tidemill.capacity import needs
from tidemill.capacity.allocation import Allocation, offer
from tidemill.capacity.inventory import Inventory
from tidemill.capacity.needs import Need
from tidemill.capacity.saturation import ANALYZER, SaturationReport, show
from tidemill.capacity.types import Cause, Direction, Explanation, Notice, Target, VariantState


def decide(report: SaturationReport | None, variants: Sequence[VariantState]) -> tuple[Target, ...]:
    """Targets of all variants of one model, in order of name: at most one step in all.

    While any variant is in transition nothing new is decided: a step that has not shown its effect yet
    must not be taken again. Bounds of a variant hold always, with or without numbers.
    """
    ordered = sorted(variants, key=lambda v: v.name)
    if report is None:
        return hold(ordered, Cause.NO_NUMBERS, "no replica reports numbers")
    if waiting := [text for variant in ordered if (text := _transition(variant))]:
        sentence = f"in transition, so nothing new is decided: {'; '.join(waiting)}"
        return hold(ordered, Cause.IN_TRANSITION, sentence, report)
    if report.up is not None:
        return _grow(report, report.up, ordered)
    if report.down_safe:
        return _shrink(report, ordered)
    sentence = f"{_spare(report)}: enough not to grow, too little to miss a replica"
    return hold(ordered, Cause.STEADY, sentence, report)


def allocated(need: Need, allocation: Allocation, unlimited: str = "") -> tuple[Target, ...]:
    """Targets of one role of a model as they were allocated, in order of name, with what led there. `unlimited`
    says why accelerators, which should limit growth, could not."""
    binding = need.binding
    if binding is None:
        return hold(need.variants, Cause.NO_NUMBERS, needs.sentence(need))
    why, found = needs.sentence(need), needs.numbers(need)
    place = (need.model, need.role.value)
    cut, note = allocation.short.get(place, ""), allocation.notes.get(place, "")
    moved = {v.name: allocation.replicas[need.model, v.name] - v.current for v in need.variants}
    steps = ", ".join(f"{change:+d} {name}" for name, change in sorted(moved.items()) if change)
    if note and not need.growing and any(change > 0 for change in moved.values()):
        cause = Cause.ROLE_RATIO
    elif need.growing:
        cause = Cause.DEMAND if steps else Cause.ACCELERATORS_SHORT if cut else Cause.NO_CANDIDATE
    elif need.may_shrink:
        cause = Cause.SPARE_CAPACITY if steps else Cause.STEADY
    else:
        shrinkers = [report for report in need.votes if report.spare > 0]
        held = bool(shrinkers) and (len(shrinkers) < len(need.votes) or any(s.holds for s in need.silent))
        filling = bool(shrinkers) and need.filling > 0
        cause = Cause.ANALYZERS_DISAGREE if held else Cause.IN_TRANSITION if filling else Cause.STEADY
    text = f"{why}: {steps} ({allocation.how})" if steps else f"{why}: no change"
    if need.growing and not steps and not cut:
        text += f", since no variant can grow: {'; '.join(need.why_not_grow(v) for v in need.variants)}"
    if note:
        text += f"; {note}"
    warnings: dict[Notice, str] = {}
    if cut:
        warnings[Notice.ACCELERATORS] = f"accelerators are short: {cut}"
    elif unlimited and need.growing:
        warnings[Notice.ACCELERATORS] = _not_limited(unlimited)
    if need.unreachable:
        warnings[Notice.LATENCY_TARGET] = need.unreachable
    if (limits := warnings.get(Notice.ACCELERATORS)) is not None:
        text += f"; {limits}"
    return tuple(
        _bounded(
            variant,
            allocation.replicas[need.model, variant.name],
            Explanation(
                binding.analyzer,
                cause if moved[variant.name] or not steps else Cause.OTHER_VARIANT,
                text,
                found,
                warnings,
            ),
        )
        for variant in sorted(need.variants, key=lambda v: v.name)
    )


def limited(
    targets: Sequence[Target], variants: Sequence[VariantState], inventory: Inventory, unlimited: str
) -> tuple[tuple[Target, ...], Inventory]:
    """Steps that were decided by themselves, one replica each, as far as there are accelerators for them; and what
    is left. `unlimited` is as for `allocated`."""
    by_name = {variant.name: variant for variant in variants}
    found: list[Target] = []
    for target in targets:
        variant, why = by_name[target.variant], target.explanation
        if target.direction is not Direction.UP or target.replicas <= variant.current:
            found.append(target)
            continue
        left = inventory.take(variant)
        if left is not None:
            inventory = left
            found.append(replace(target, explanation=_warned(why, _not_limited(unlimited) if unlimited else "")))
            continue
        limits = f"accelerators are short: 1 more wanted, 0 granted: {offer(variant, inventory)}"
        explanation = replace(_warned(why, limits), cause=Cause.ACCELERATORS_SHORT)
        found.append(replace(target, replicas=variant.current, direction=Direction.HOLD, explanation=explanation))
    return tuple(found), inventory


def _warned(why: Explanation, limits: str) -> Explanation:
    if not limits:
        return why
    return replace(why, sentence=f"{why.sentence}; {limits}", warnings={Notice.ACCELERATORS: limits})


def _not_limited(why: str) -> str:
    return f"which accelerators are free is not known, so growth is not limited: {why}"


def hold(
    variants: Sequence[VariantState], cause: Cause, sentence: str, report: SaturationReport | None = None
) -> tuple[Target, ...]:
    """Keep what was decided last, or what runs where nothing was; only bounds can change that."""
    numbers = {} if report is None else report.numbers
    return tuple(
        _bounded(variant, _last(variant), Explanation(ANALYZER, cause, sentence, numbers))
        for variant in sorted(variants, key=lambda v: v.name)
    )


def _grow(report: SaturationReport, cause: Cause, variants: Sequence[VariantState]) -> tuple[Target, ...]:
    why = {
        Cause.ALL_SATURATED: f"all {report.replicas} replicas are saturated",
        Cause.KV_SPARE: (
            f"average spare KV cache {show(report.average_spare_kv)} is below the trigger "
            f"{report.settings.kv_spare_trigger}"
        ),
        Cause.QUEUE_SPARE: (
            f"average spare queue {show(report.average_spare_queue)} is below the trigger "
            f"{report.settings.queue_spare_trigger}"
        ),
    }[cause]
    candidates = [
        v
        for v in variants
        if v.current > 0 and not v.pending and (v.max_replicas is None or v.current < v.max_replicas)
    ]
    if not candidates:
        blocked = "; ".join(_why_not_up(v) for v in variants)
        return hold(variants, Cause.NO_CANDIDATE, f"{why}, but no variant can grow: {blocked}", report)
    chosen = min(candidates, key=lambda v: (v.cost, v.name))
    sentence = f"{why}: one more of {chosen.name}, the cheapest that can grow (cost {chosen.cost})"
    return _step(report, cause, sentence, variants, chosen, +1)


def _shrink(report: SaturationReport, variants: Sequence[VariantState]) -> tuple[Target, ...]:
    why = f"{_spare(report)}: enough with one replica less"
    candidates = [v for v in variants if v.current > max(1, v.min_replicas or 0)]
    if not candidates:
        return hold(variants, Cause.NO_CANDIDATE, f"{why}, but every variant is at its minimum", report)
    chosen = max(candidates, key=lambda v: (v.cost, v.name))
    sentence = f"{why}: one less of {chosen.name}, the dearest that can shrink (cost {chosen.cost})"
    return _step(report, Cause.SPARE_CAPACITY, sentence, variants, chosen, -1)


def _step(
    report: SaturationReport,
    cause: Cause,
    sentence: str,
    variants: Sequence[VariantState],
    chosen: VariantState,
    change: int,
) -> tuple[Target, ...]:
    return tuple(
        _bounded(
            variant,
            variant.current + (change if variant is chosen else 0),
            Explanation(ANALYZER, cause if variant is chosen else Cause.OTHER_VARIANT, sentence, report.numbers),
        )
        for variant in variants
    )


def _bounded(variant: VariantState, replicas: int, explanation: Explanation) -> Target:
    """The target within the variant's bounds. A target at 0 was put there on purpose and stays."""
    low, high = variant.min_replicas, variant.max_replicas
    if variant.current == 0 and (variant.at_rest or not replicas):
        sentence = "the target was set to 0 replicas, and stays there until somebody sets it to more"
        explanation, replicas = Explanation(ANALYZER, Cause.AT_ZERO, sentence, explanation.numbers), 0
    elif low is not None and replicas < low:
        sentence = f"{explanation.sentence}; raised from {replicas} to minReplicas {low}"
        explanation = Explanation(ANALYZER, Cause.BELOW_MINIMUM, sentence, explanation.numbers)
        replicas = low
    elif high is not None and replicas > high:
        sentence = f"{explanation.sentence}; cut from {replicas} to maxReplicas {high}"
        explanation = Explanation(ANALYZER, Cause.ABOVE_MAXIMUM, sentence, explanation.numbers)
        replicas = high
    before = _last(variant)
    direction = Direction.UP if replicas > before else Direction.DOWN if replicas < before else Direction.HOLD
    return Target(variant.name, replicas, direction, explanation)


def _last(variant: VariantState) -> int:
    return variant.current if variant.desired is None else variant.desired


def _transition(variant: VariantState) -> str | None:
    """What the variant waits for, if anything."""
    if variant.current == 0:
        return None
    if variant.desired is not None and variant.desired != variant.current:
        return f"{variant.name} goes from {variant.current} to {variant.desired}"
    if variant.reporting != variant.current and not variant.stalled:
        return f"{variant.name} has {variant.current} replicas and {variant.reporting} report"
    return None


def _why_not_up(variant: VariantState) -> str:
    if variant.current == 0:
        return f"{variant.name} has 0 replicas"
    if variant.pending:
        stalled = ", which did not start in time" if variant.stalled else ""
        return f"{variant.name} has {variant.pending} pending{stalled}"
    return f"{variant.name} is at maxReplicas {variant.max_replicas}"


def _spare(report: SaturationReport) -> str:
    return (
        f"average spare is {show(report.average_spare_kv)} of the KV cache and "
        f"{show(report.average_spare_queue)} of the queue over "
        f"{report.replicas - len(report.saturated)} of {report.replicas} replicas"
    )
