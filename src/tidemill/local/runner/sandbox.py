"""What a container finds around it: environment, files of its volumes, its command line.

A process has no mount namespace of its own here. Its volumes lie below the directory that the variable
CONTAINER_SANDBOX_MOUNT_POINT names, as Windows host-process containers know it, at the path where the
container wants them mounted.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tidemill.kube.client import SANDBOX_ENV, SERVICE_ACCOUNT_DIR
from tidemill.kube.resources import Json

_REFERENCE = re.compile(r"\$(\$|\(([-._a-zA-Z][-._a-zA-Z0-9]*)\))")

Lookup = Callable[[str, str], Mapping[str, str] | None]
"""Data of a ConfigMap or Secret (given its kind and name) in the pod's namespace; None when absent."""


class ConfigError(Exception):
    """The pod refers to something that is not there (yet)."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes expands it: unknown names stay, `$$` is a dollar sign."""

    def replace(match: re.Match[str]) -> str:
        name = match[2]
        return "$" if name is None else variables.get(name, match[0])

    return _REFERENCE.sub(replace, text)


def environment(
    pod: Json, container: Json, *, ip: str, root: Path, server: tuple[str, int], lookup: Lookup
) -> dict[str, str]:
    """The variables of a container. Raises ConfigError for a reference that leads nowhere."""
    env = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "HOME": os.environ.get("HOME", "/"),
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "PYTHONUNBUFFERED": "1",
        "HOSTNAME": pod["metadata"]["name"],
        SANDBOX_ENV: str(root),
        "KUBERNETES_SERVICE_HOST": server[0],
        "KUBERNETES_SERVICE_PORT": str(server[1]),
    }
    if "PYTHONPATH" in os.environ:
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    for source in container.get("envFrom") or ():
        for field, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
            if (reference := source.get(field)) is not None:
                found = _data(lookup, kind, reference)
                env.update({source.get("prefix", "") + k: v for k, v in found.items()})
    for item in container.get("env") or ():
        name = item["name"]
        if "value" in item:
            env[name] = expand(str(item["value"]), env)
        else:
            env[name] = _value_from(pod, name, item.get("valueFrom") or {}, ip, lookup)
    return env


def _data(lookup: Lookup, kind: str, reference: Json) -> Mapping[str, str]:
    found = lookup(kind, reference["name"])
    if found is None and not reference.get("optional"):
        raise ConfigError(f'{kind.lower()} "{reference["name"]}" not found')
    return found or {}


def _value_from(pod: Json, name: str, source: Json, ip: str, lookup: Lookup) -> str:
    metadata = pod["metadata"]
    for field, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if (reference := source.get(field)) is not None:
            found = _data(lookup, kind, reference)
            if reference["key"] not in found and not reference.get("optional"):
                raise ConfigError(f"couldn't find key {reference['key']} in {kind} {reference['name']}")
            return found.get(reference["key"], "")
    path = (source.get("fieldRef") or {}).get("fieldPath", "")
    keyed = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if keyed:
        return str((metadata.get(keyed[1]) or {}).get(keyed[2], ""))
    fields: dict[str, str] = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": pod["spec"].get("nodeName", ""),
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", ""),
        "status.podIP": ip,
        "status.hostIP": "127.0.0.1",
    }
    if path not in fields:
        raise ConfigError(f"env {name}: fieldPath {path!r} is not supported")
    return fields[path]


def write_volumes(pod: Json, container: Json, root: Path, lookup: Lookup) -> None:
    """Write the files of the container's volumes below `root`. Raises ConfigError."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
    for mount in container.get("volumeMounts") or ():
        volume = volumes.get(mount["name"])
        if volume is None:
            raise ConfigError(f"volumeMount {mount['name']!r} names no volume of the pod")
        target = root / mount["mountPath"].lstrip("/")
        if "emptyDir" in volume:
            target.mkdir(parents=True, exist_ok=True)
        elif "configMap" in volume:
            _write_files(target, _data(lookup, "ConfigMap", volume["configMap"]))
        elif "secret" in volume:
            source = volume["secret"]
            _write_files(target, _data(lookup, "Secret", {**source, "name": source["secretName"]}))
        elif "hostPath" in volume:
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_symlink():
                target.symlink_to(volume["hostPath"]["path"])
        else:
            kinds = ", ".join(key for key in volume if key != "name")
            raise ConfigError(f"volume {volume['name']!r}: {kinds or 'no source'} is not supported locally")


def write_service_account(root: Path, *, token: str, authority: bytes, namespace: str) -> None:
    directory = root / SERVICE_ACCOUNT_DIR
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "token").write_text(token)
    (directory / "ca.crt").write_bytes(authority)
    (directory / "namespace").write_text(namespace)


def _write_files(directory: Path, data: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in data.items():
        # Replaced whole, so that a reader never sees half a file.
        temporary = directory / f".{name}.tmp"
        temporary.write_text(text)
        temporary.replace(directory / name)


def secret_text(secret: Json) -> dict[str, str]:
    decoded = {k: base64.b64decode(v).decode() for k, v in (secret.get("data") or {}).items()}
    return decoded | (secret.get("stringData") or {})


def command_line(container: Json, env: Mapping[str, str]) -> list[str]:
    """Command and arguments. Raises ConfigError without a command: there is no image to ask."""
    command = [expand(str(part), env) for part in container.get("command") or ()]
    if not command:
        raise ConfigError(
            f'container "{container["name"]}": spec.containers[].command is needed, because the local runner '
            "starts processes, not images"
        )
    return command + [expand(str(part), env) for part in container.get("args") or ()]
