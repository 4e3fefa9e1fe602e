"""Command lines of the original picker start this one."""

from __future__ import annotations

import pytest

from tidemill.cli.go_flags import translate

SWITCHES = {"secure-serving", "enable-cert-reload"}


@pytest.mark.parametrize(
    ("given", "kept", "dropped"),
    [
        (["--pool-name", "p", "--grpc-port=9002"], ["--pool-name", "p", "--grpc-port=9002"], []),
        (["-pool-name=p", "-pool-namespace", "ns"], ["--pool-name=p", "--pool-namespace", "ns"], []),
        (["--secure-serving=false"], ["--no-secure-serving"], []),
        (["--secure-serving=true", "--enable-cert-reload"], ["--secure-serving", "--enable-cert-reload"], []),
        (["-v", "4", "--zap-encoder", "json"], [], ["-v", "4", "--zap-encoder", "json"]),
        (["--v=4", "--tracing=false", "--pool-name", "p"], ["--pool-name", "p"], ["--v=4", "--tracing=false"]),
        (["--config-text", "plugins: []"], ["--config-text", "plugins: []"], []),
        (["-h"], ["-h"], []),
    ],
)
def test_flags(given: list[str], kept: list[str], dropped: list[str]) -> None:
    assert translate(given, switches=SWITCHES) == (kept, dropped)
