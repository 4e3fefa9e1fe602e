"""`wva-manager-config`: settings of the whole controller, by flag, environment, ConfigMap or default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import yaml

from tidemill.api.durations import parse_duration
from tidemill.api.layers import yaml_problem
from tidemill.api.problem import Problem

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessThresholds:
    """Ages in seconds: under `fresh` a sample is fresh, from `stale` on it decides nothing any more."""

    fresh: float = 60.0
    stale: float = 120.0
    unavailable: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusConfig:
    base_url: str = ""
    tls_insecure_skip_verify: bool = False
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""
    server_name: str = ""
    bearer_token: str = ""
    token_path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerConfig:
    """Durations in seconds."""

    interval: float = 60.0
    freshness: FreshnessThresholds = FreshnessThresholds()
    prometheus: PrometheusConfig = PrometheusConfig()
    scale_to_zero: bool = False  # for models that no entry of the scale-to-zero map speaks of
    limited_mode: bool = False  # no more than the nodes have accelerators for
    node_selector: tuple[tuple[str, str], ...] = ()  # labels of the nodes that count


def _boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered not in ("true", "false"):
        raise ValueError('must be "true" or "false"')
    return lowered == "true"


def _interval(text: str) -> float:
    seconds = parse_duration(text)
    if seconds < 1:
        raise ValueError("must be at least 1s")
    return seconds


def _positive(text: str) -> float:
    seconds = parse_duration(text)
    if seconds <= 0:
        raise ValueError("must be above 0")
    return seconds


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if any(not key or not equals for key, equals, _ in pairs):
        raise ValueError("must be labels, as in key=value,other=value")
    return tuple((key.strip(), value.strip()) for key, _, value in pairs)


def _url(text: str) -> str:
    if text and not text.startswith(("http://", "https://")):
        raise ValueError("must be a URL that starts with http:// or https://")
    return text.rstrip("/")


@dataclass(frozen=True, slots=True)
class _Key:
    part: str  # "" for ManagerConfig itself, else the name of its field
    field: str
    read: Callable[[str], Any]
    needs_restart: bool = False


KEYS: Mapping[str, _Key] = {
    "GLOBAL_OPT_INTERVAL": _Key("", "interval", _interval),
    "WVA_SCALE_TO_ZERO": _Key("", "scale_to_zero", _boolean),
    "WVA_LIMITED_MODE": _Key("", "limited_mode", _boolean),
    "WVA_NODE_SELECTOR": _Key("", "node_selector", _labels),
    "PROMETHEUS_BASE_URL": _Key("prometheus", "base_url", _url, True),
    "PROMETHEUS_TLS_INSECURE_SKIP_VERIFY": _Key("prometheus", "tls_insecure_skip_verify", _boolean, True),
    "PROMETHEUS_CA_CERT_PATH": _Key("prometheus", "ca_cert_path", str, True),
    "PROMETHEUS_CLIENT_CERT_PATH": _Key("prometheus", "client_cert_path", str, True),
    "PROMETHEUS_CLIENT_KEY_PATH": _Key("prometheus", "client_key_path", str, True),
    "PROMETHEUS_SERVER_NAME": _Key("prometheus", "server_name", str, True),
    "PROMETHEUS_BEARER_TOKEN": _Key("prometheus", "bearer_token", str, True),
    "PROMETHEUS_TOKEN_PATH": _Key("prometheus", "token_path", str, True),
    "PROMETHEUS_METRICS_CACHE_FRESH_THRESHOLD": _Key("freshness", "fresh", _positive),
    "PROMETHEUS_METRICS_CACHE_STALE_THRESHOLD": _Key("freshness", "stale", _positive),
    "PROMETHEUS_METRICS_CACHE_UNAVAILABLE_THRESHOLD": _Key("freshness", "unavailable", _positive),
}


def flatten_config_map(data: Mapping[str, str], object_name: str) -> tuple[dict[str, str], list[Problem]]:
    """Keys of a manager ConfigMap: written one by one, or together as YAML under `config.yaml`.

    A key of its own wins over the same key inside the document.
    """
    flat: dict[str, str] = {}
    document = data.get("config.yaml")
    problems: list[Problem] = []
    if document is not None:
        try:
            content: Any = yaml.safe_load(document) or {}
        except yaml.YAMLError as error:
            content = {}
            problems.append(yaml_problem(object_name, "config.yaml", document, error))
        if isinstance(content, dict):
            flat.update((str(k), _scalar(v)) for k, v in content.items() if not isinstance(v, dict | list))
        else:
            problems.append(Problem(object_name, "config.yaml", document, "must be a mapping of keys"))
    flat.update({k: v for k, v in data.items() if k != "config.yaml"})
    return flat, problems


def read_manager_config(
    data: Mapping[str, str], *, object_name: str, base: ManagerConfig, last_good: ManagerConfig
) -> tuple[ManagerConfig, list[Problem]]:
    """Lay the keys of `data` over `base`. A bad value is a Problem, and that of `last_good` stays in force."""
    changes: dict[str, dict[str, Any]] = {"": {}, "freshness": {}, "prometheus": {}}
    flat, problems = flatten_config_map(data, object_name)
    for name, key in KEYS.items():
        if (text := flat.get(name)) is None:
            continue
        try:
            changes[key.part][key.field] = key.read(text)
        except ValueError as error:
            problems.append(Problem(object_name, name, text, str(error)))
            changes[key.part][key.field] = _value(last_good, key)
    freshness = replace(base.freshness, **changes["freshness"])
    if not freshness.fresh <= freshness.stale <= freshness.unavailable:
        problems.append(
            Problem(
                object_name,
                "PROMETHEUS_METRICS_CACHE_*_THRESHOLD",
                f"{freshness.fresh:g}s, {freshness.stale:g}s, {freshness.unavailable:g}s",
                "must not decrease in the order fresh, stale, unavailable",
            )
        )
        freshness = last_good.freshness
    prometheus = replace(base.prometheus, **changes["prometheus"])
    return replace(base, freshness=freshness, prometheus=prometheus, **changes[""]), problems


def restart_needed(old: ManagerConfig, new: ManagerConfig) -> list[str]:
    """Names of changed keys that only a restart can apply."""

    return [name for name, key in KEYS.items() if key.needs_restart and _value(old, key) != _value(new, key)]


def with_immutable_of(new: ManagerConfig, running: ManagerConfig) -> ManagerConfig:
    """`new`, but with everything that needs a restart as it is in `running`."""
    assert {f.name for f in fields(PrometheusConfig)} == {k.field for k in KEYS.values() if k.needs_restart}
    return replace(new, prometheus=running.prometheus)


def _value(config: ManagerConfig, key: _Key) -> Any:
    return getattr(getattr(config, key.part) if key.part else config, key.field)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
