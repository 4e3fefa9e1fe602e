"""Configuration in force: flags, environment, ConfigMaps, defaults, and the last good value of each.

What is in force is a function of the ConfigMaps that exist and the namespaces that are tracked now, not of
the order in which they came. Memory comes in at one place only: a value that cannot be used leaves the one
that was in force before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal

import structlog

from tidemill.api.layers import LayerMap
from tidemill.api.manager_config import (
    KEYS,
    ManagerConfig,
    read_manager_config,
    restart_needed,
    with_immutable_of,
)
from tidemill.api.names import (
    MANAGER_CONFIG,
    MANAGER_CONFIG_OLDER,
    SATURATION_CONFIG,
    SCALE_TO_ZERO_CONFIG,
)
from tidemill.api.problem import Problem
from tidemill.api.saturation_config import (
    FleetSettings,
    SaturationSettings,
    read_saturation_map,
    resolve_fleet,
    resolve_saturation,
)
from tidemill.api.scale_to_zero_config import (
    ScaleToZeroSettings,
    read_scale_to_zero_map,
    resolve_scale_to_zero,
)
from tidemill.autoscaler.views import ConfigMapView
from tidemill.kube.resources import ObjectKey

log = structlog.get_logger(__name__)

Report = Callable[[ConfigMapView, Literal["Normal", "Warning"], str, str], None]
"""Tell the user something about a ConfigMap: type, reason, message of an event."""


_READERS: Mapping[str, Callable[..., tuple[LayerMap[Any], list[Problem]]]] = {
    SATURATION_CONFIG: read_saturation_map,
    SCALE_TO_ZERO_CONFIG: read_scale_to_zero_map,
}


class Configuration:
    """Reads ConfigMaps as they come and answers what is in force.

    `overrides` are keys of the manager config set by flag or environment; they win over every ConfigMap.
    Raises ValueError when one of them is wrong, because a process must not start on half of its flags.
    """

    def __init__(self, namespace: str, overrides: Mapping[str, str], report: Report) -> None:
        self._namespace = namespace
        self._report = report
        self._overrides = {name: value for name, value in overrides.items() if name in KEYS}
        default = ManagerConfig()
        self.manager, problems = read_manager_config(
            self._overrides, object_name="flags and environment", base=default, last_good=default
        )
        if problems:
            raise ValueError("; ".join(str(problem) for problem in problems))
        self._manager_maps: dict[str, ConfigMapView] = {}
        # Maps of layers by name and namespace.
        self._layers: dict[tuple[str, str], tuple[ConfigMapView, LayerMap[Any]]] = {}
        self._problems: dict[tuple[ObjectKey, str], tuple[ConfigMapView, list[Problem]]] = {}
        self._told: set[Problem] = set()
        self._running: ManagerConfig | None = None
        self.changed = asyncio.Event()

    def freeze(self) -> None:
        """From here on, what needs a restart does not change any more."""
        self._running = self.manager

    def apply(self, view: ConfigMapView) -> None:
        """A well-known ConfigMap was created or changed."""
        if (read := _READERS.get(view.key.name)) is not None:
            slot = (view.key.name, view.key.namespace)
            known = self._layers.get(slot)
            layers, problems = read(
                view.data, object_name=_name(view.key), last_good=None if known is None else known[1]
            )
            self._layers[slot] = (view, layers)
            self._tell(view, problems)
        elif view.key.namespace == self._namespace:
            self._manager_maps[view.key.name] = view
            self._read_manager(view)
        log.info("configuration read", config_map=str(view.key))

    def remove(self, view: ConfigMapView) -> None:
        """A well-known ConfigMap is gone: a local one falls back to the global one, a global one stays in
        force until there is another."""
        if view.key.namespace != self._namespace:
            self._layers.pop((view.key.name, view.key.namespace), None)
            return
        message = f"{_name(view.key)} was deleted: its last good values stay in force"
        log.warning(message)
        self._report(view, "Warning", "GlobalConfigMapDeleted", message)

    def saturation(self, *, model: str, namespace: str, accelerator: str, tracked: bool) -> SaturationSettings:
        """Thresholds for one model. Layers that break a rule after merging are reported, once."""
        found = self._maps(SATURATION_CONFIG, namespace, tracked)
        settings, problems = resolve_saturation(
            [layers for _, layers in found], model=model, namespace=namespace, accelerator=accelerator
        )
        for view, _ in found:
            self._tell(view, [p for p in problems if p.object == _name(view.key)], f"{namespace}/{model}")
        return settings

    def fleet(self) -> FleetSettings:
        """What holds for all models at once."""
        found = self._layers.get((SATURATION_CONFIG, self._namespace))
        return resolve_fleet(None if found is None else found[1], limited=self.manager.limited_mode)

    def scale_to_zero(self, *, model: str, namespace: str, tracked: bool) -> ScaleToZeroSettings:
        """Whether one model may sleep, and after how long."""
        return resolve_scale_to_zero(
            [layers for _, layers in self._maps(SCALE_TO_ZERO_CONFIG, namespace, tracked)],
            model=model,
            enabled=self.manager.scale_to_zero,
        )

    def _maps(self, name: str, namespace: str, tracked: bool) -> list[tuple[ConfigMapView, LayerMap[Any]]]:
        """The maps that count for a model in `namespace`: the global one, then the local one over it."""
        local = tracked and namespace != self._namespace
        places = [self._namespace, namespace] if local else [self._namespace]
        return [self._layers[name, place] for place in places if (name, place) in self._layers]

    def _read_manager(self, view: ConfigMapView) -> None:
        config, problems = ManagerConfig(), list[Problem]()
        for name in (MANAGER_CONFIG_OLDER, MANAGER_CONFIG):
            if (found := self._manager_maps.get(name)) is not None:
                config, wrong = read_manager_config(
                    found.data, object_name=_name(found.key), base=config, last_good=self.manager
                )
                problems += wrong if found is view else []
        config, _ = read_manager_config(self._overrides, object_name="flags", base=config, last_good=self.manager)
        self._tell(view, problems)
        if self._running is not None:
            if names := restart_needed(self._running, config):
                message = f"{', '.join(names)}: a change takes effect only after a restart of the controller"
                log.warning(message, config_map=str(view.key))
                self._report(view, "Warning", "ImmutableConfigChangeRejected", message)
            config = with_immutable_of(config, self._running)
        if config != self.manager:
            self.manager = config
            self.changed.set()

    def report_again(self) -> None:
        """Say once more what is wrong: whoever said it before may not have been the one to speak."""
        for view, problems in self._problems.values():
            self._report_all(view, problems)

    def _tell(self, view: ConfigMapView, problems: list[Problem], slot: str = "") -> None:
        """Report problems that were not reported yet. Once mended, they would be news again. Problems of
        merging belong to the `slot` of one model, those of reading to the map."""
        place = (view.key, slot)
        if not problems and place not in self._problems:
            return  # as for nearly every model in every cycle
        self._problems[place] = (view, problems)
        if not problems:
            del self._problems[place]
        self._report_all(view, [problem for problem in problems if problem not in self._told])
        self._told = {p for _, found in self._problems.values() for p in found}

    def _report_all(self, view: ConfigMapView, problems: list[Problem]) -> None:
        for problem in problems:
            log.warning("configuration refused", problem=str(problem))
            self._report(view, "Warning", "InvalidConfiguration", f"{problem}; last good value in force")


def _name(key: ObjectKey) -> str:
    return f"ConfigMap {key}"
