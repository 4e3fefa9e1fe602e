"""A real control plane for tests: etcd, kube-apiserver and kube-controller-manager as processes, no node.

Usage: python -m tests.real.cluster PROGRAMS [--no-workloads] [PYTEST ARGUMENTS]. PROGRAMS is what `make apiserver`
has filled. Runs pytest with CONTRACT_KUBECONFIG set, and ends with its status. With --no-workloads nobody makes
ReplicaSets and pods, and INTEGRATION_KUBECONFIG is set, for tests that write them by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import yaml

from tests.conftest import free_port
from tidemill.kube.clock import utc_now
from tidemill.local.apiserver.tls import ServingFiles, issue

# No node is there: what would wait for one is left out, and so is what tests do by themselves.
CONTROLLERS = ("namespace-controller", "garbage-collector-controller", "serviceaccount-controller")
# What an HPA needs that may scale to zero.
FEATURES = "HPAScaleToZero=true"
WORKLOADS = ("deployment-controller", "replicaset-controller", "horizontal-pod-autoscaler-controller")


@asynccontextmanager
async def process(log: Path, *command: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        running = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield running
        finally:
            running.terminate()
            running.wait(20)


@asynccontextmanager
async def control_plane(programs: Path, directory: Path, controllers: Sequence[str]) -> AsyncIterator[Path]:
    """The kubeconfig of a cluster whose state lies in `directory`, with all rights."""
    etcd, peer, port = free_port(), free_port(), free_port()
    tls = issue(directory / "pki", names=["127.0.0.1", "localhost"], now=utc_now())
    token = secrets.token_hex(16)
    (directory / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    subprocess.run(
        ["openssl", "genrsa", "-out", str(directory / "accounts.key"), "2048"], check=True, capture_output=True
    )
    kubeconfig = write_kubeconfig(directory / "kubeconfig", port, token, tls)
    async with AsyncExitStack() as stack:
        start = stack.enter_async_context
        await start(
            process(
                directory / "etcd.log", shutil.which("etcd") or "etcd", "--data-dir", str(directory / "etcd"),
                "--listen-client-urls", f"http://127.0.0.1:{etcd}", "--advertise-client-urls",
                f"http://127.0.0.1:{etcd}", "--listen-peer-urls", f"http://127.0.0.1:{peer}",
                "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}", "--initial-cluster",
                f"default=http://127.0.0.1:{peer}", "--unsafe-no-fsync",
            )
        )  # fmt: skip
        api = await start(
            process(
                directory / "apiserver.log", str(programs / "kube-apiserver"),
                f"--etcd-servers=http://127.0.0.1:{etcd}", "--bind-address=127.0.0.1", f"--secure-port={port}",
                f"--tls-cert-file={tls.certificate}", f"--tls-private-key-file={tls.key}",
                f"--token-auth-file={directory / 'tokens.csv'}", "--authorization-mode=RBAC",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={directory / 'accounts.key'}",
                f"--service-account-signing-key-file={directory / 'accounts.key'}",
                "--service-cluster-ip-range=10.96.0.0/16", "--disable-admission-plugins=ServiceAccount",
                "--allow-privileged", "--endpoint-reconciler-type=none", f"--feature-gates={FEATURES}",
                # How the aggregation layer makes itself known to other API servers.
                f"--requestheader-client-ca-file={tls.ca}", "--requestheader-allowed-names=",
                "--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                f"--proxy-client-cert-file={tls.client_certificate}", f"--proxy-client-key-file={tls.client_key}",
            )
        )  # fmt: skip
        await ready(f"https://127.0.0.1:{port}/readyz", token, api, directory / "apiserver.log")
        await start(
            process(
                directory / "controllers.log", str(programs / "kube-controller-manager"),
                f"--kubeconfig={kubeconfig}", "--leader-elect=false",
                f"--feature-gates={FEATURES}", f"--controllers={','.join(controllers)}",
                f"--service-account-private-key-file={directory / 'accounts.key'}",
                "--horizontal-pod-autoscaler-sync-period=1s",
                "--horizontal-pod-autoscaler-downscale-stabilization=1s",
                f"--secure-port={free_port()}", "--bind-address=127.0.0.1",
                f"--authentication-kubeconfig={kubeconfig}", f"--authorization-kubeconfig={kubeconfig}",
            )
        )  # fmt: skip
        yield kubeconfig


def write_kubeconfig(path: Path, port: int, token: str, tls: ServingFiles) -> Path:
    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(tls.ca)}
    text = {
        "apiVersion": "v1", "kind": "Config", "current-context": "real",
        "clusters": [{"name": "real", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "real", "context": {"cluster": "real", "user": "admin"}}],
    }  # fmt: skip
    path.write_text(yaml.safe_dump(text))
    return path


async def ready(url: str, token: str, api: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
        while time.monotonic() < deadline:
            if api.poll() is not None:
                break
            try:
                async with session.get(url, ssl=False) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
    raise RuntimeError(f"kube-apiserver did not become ready; the end of its log:\n{log.read_text()[-3000:]}")


async def main(programs: Path, workloads: bool, arguments: Sequence[str]) -> int:
    controllers = (*CONTROLLERS, *(WORKLOADS if workloads else ()))
    with tempfile.TemporaryDirectory(prefix="control-plane-") as name:
        async with control_plane(programs, Path(name), controllers) as kubeconfig:
            variable = "CONTRACT_KUBECONFIG" if workloads else "INTEGRATION_KUBECONFIG"
            environment = {**os.environ, variable: str(kubeconfig)}
            command = (sys.executable, "-m", "pytest", *arguments)
            return await (await asyncio.create_subprocess_exec(*command, env=environment)).wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", type=Path)
    parser.add_argument("--no-workloads", action="store_false", dest="workloads")
    options, arguments = parser.parse_known_args()
    raise SystemExit(asyncio.run(main(options.programs, options.workloads, arguments)))
