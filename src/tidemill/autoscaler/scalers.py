"""What is wrong with variants and with HPAs and ScaledObjects, said on them rather than passed over in silence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidemill.api.names import ACCELERATOR_LABEL, UNKNOWN_ACCELERATOR
from tidemill.api.variant import TargetRef
from tidemill.autoscaler.accelerators import accelerator_of, products_of
from tidemill.autoscaler.views import ScalerView, ValidVariant, usable
from tidemill.autoscaler.world import VARIANT_AUTOSCALINGS, World, scaler_ref
from tidemill.kube.resources import ObjectKey, ObjectRef


@dataclass(frozen=True, slots=True)
class Finding:
    about: ObjectRef
    reason: str
    message: str


def findings(world: World, *, writes: bool) -> Iterator[Finding]:
    """Everything that is wrong at present. `writes` says that this autoscaler moves replicas itself."""
    yield from _movers(world, writes=writes)
    for informer in (world.scaled_objects, world.hpas):
        for scaler in informer.store:
            yield from _annotations(scaler)
            yield from _rivals(world, scaler)
            yield from _mismatch(world, scaler)
    products = products_of(world)
    if len(products) > 1:
        for variant in world.our_variants():
            target = world.target_of(variant)
            if target is not None and accelerator_of(world, variant, target) == UNKNOWN_ACCELERATOR:
                yield Finding(
                    _ref_of(variant),
                    "AcceleratorNotResolved",
                    f"no label {ACCELERATOR_LABEL}, and {variant.spec.target} selects none of the products that "
                    f"nodes have ({', '.join(products)}): it is reported as {UNKNOWN_ACCELERATOR!r}",
                )


def _movers(world: World, *, writes: bool) -> Iterator[Finding]:
    """Targets that more than one moves: each undoes what the other does."""
    movers: dict[TargetRef, list[ScalerView]] = {}
    for informer in (world.scaled_objects, world.hpas):
        for scaler in informer.store:
            if scaler.target is not None and not scaler.made and not scaler.paused:
                movers.setdefault(scaler.target, []).append(scaler)
    for target, scalers in movers.items():
        names = [f"{scaler.kind} {scaler.key.name}" for scaler in scalers]
        decider = world.decider(target) if writes else None
        if decider is not None:
            names.append(f"this autoscaler for {_word(decider)} {decider.key.name} (--actuation scale)")
        if len(names) > 1:
            message = f"{target} is moved by {' and by '.join(names)}, which undo each other: leave one of them"
            for scaler in scalers:
                yield Finding(_ref(scaler), "SeveralScalers", message)


def _annotations(scaler: ScalerView) -> Iterator[Finding]:
    if scaler.problems:
        message = "; ".join(str(problem) for problem in scaler.problems)
        yield Finding(_ref(scaler), "InvalidConfiguration", f"{message}; the scaler is not managed")


def _rivals(world: World, scaler: ScalerView) -> Iterator[Finding]:
    """A managed scaler that does not decide for its target, and who does in its place."""
    variant = scaler.variant
    if variant is None or not world.is_ours(variant) or world.variants.store.get(variant.key) is not None:
        return
    target = variant.spec.target
    decider = world.decider(target)
    if decider is not None and decider.uid == variant.uid:
        return
    if decider is not None:
        message = (
            f"{target} is already scaled by {_word(decider)} {decider.key.name}; {scaler.key.name} decides nothing"
        )
    else:
        scaled_objects, hpas = world.scalers_of(target)
        names = " and ".join(v.key.name for v in (scaled_objects if len(scaled_objects) > 1 else hpas))
        message = f"{target} has several managed scalers of kind {scaler.kind}: {names}; none of them decides"
    yield Finding(_ref(scaler), "TargetConflict", message)


def _mismatch(world: World, scaler: ScalerView) -> Iterator[Finding]:
    """An HPA that follows the number of one variant and moves the target of another."""
    for name in scaler.follows:
        view = world.variants.store.get(ObjectKey(scaler.key.namespace, name))
        variant = usable(view) if view is not None and world.is_ours(view) else None
        if variant is not None and scaler.target is not None and variant.spec.target != scaler.target:
            message = (
                f"it follows wva_desired_replicas of VariantAutoscaling {name}, which is for "
                f"{variant.spec.target}, but it scales {scaler.target}"
            )
            yield Finding(_ref(scaler), "ScaleTargetMismatch", message)


def _ref_of(variant: ValidVariant) -> ObjectRef:
    if variant.scaler is not None:
        return scaler_ref(variant.scaler, variant.key, variant.uid)
    resource = VARIANT_AUTOSCALINGS
    return ObjectRef(resource.api_version, resource.kind, variant.key.namespace, variant.key.name, variant.uid)


def _word(variant: ValidVariant) -> str:
    return variant.scaler or "VariantAutoscaling"


def _ref(scaler: ScalerView) -> ObjectRef:
    return scaler_ref(scaler.kind, scaler.key, scaler.uid)
