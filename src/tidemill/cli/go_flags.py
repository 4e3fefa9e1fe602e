"""Flags as the original picker takes them, so that its Deployments start this one unchanged.

Go's flags are written with one dash or two, and a switch takes its value after an equals sign.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

# Flags of the original that mean nothing here, and whether they take a value.
WITHOUT_EFFECT = {
    "v": True,
    "zap-encoder": True,
    "zap-log-level": True,
    "zap-stacktrace-level": True,
    "zap-time-encoding": True,
    "zap-devel": False,
    "tracing": False,
    "enable-pprof": False,
    "health-checking": False,
    "ha-enable-leader-election": False,
    "metrics-endpoint-auth": False,
    "metrics-cert-dir": True,
    "metrics-client-ca-file": True,
    "pool-group": True,
    "allow-experimental-plugins": False,
    "enable-grpc-stream-metrics": False,
    "refresh-prometheus-metrics-interval": True,
    "metrics-staleness-threshold": True,
    "grpc-max-recv-msg-size": True,
    "grpc-max-send-msg-size": True,
    "model-server-metrics-scheme": True,
    "model-server-metrics-https-insecure-skip-verify": False,
}


def translate(args: Sequence[str], *, switches: Collection[str]) -> tuple[list[str], list[str]]:
    """Arguments as click reads them, and those that have no effect here. `switches` are the names of our own flags
    that take no value."""
    kept: list[str] = []
    dropped: list[str] = []
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.lstrip("-").partition("=")
        if not arg.startswith("-") or len(name) == 0:
            kept.append(arg)
        elif name in WITHOUT_EFFECT:
            dropped.append(arg)
            if WITHOUT_EFFECT[name] and not equals:
                dropped.append(next(rest, ""))
        elif name in switches and equals:
            kept.append(f"--{name}" if value.lower() in ("true", "1", "t") else f"--no-{name}")
        elif len(name) > 1:
            kept.append(f"--{name}{equals}{value}")
        else:
            kept.append(arg)
    return kept, dropped
