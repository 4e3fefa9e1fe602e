"""What the controller answers over HTTP: health, readiness, metrics, explanations."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from tidemill.autoscaler.decisions import DecisionStore
from tidemill.kube.resources import ObjectKey


def health_app(
    *, ready: Callable[[], list[str]], is_leader: Callable[[], bool], decisions: DecisionStore
) -> web.Application:
    """/healthz, /readyz, /explain and /explain/NAMESPACE/NAME. `ready` lists what readiness waits for."""

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def readyz(request: web.Request) -> web.Response:
        waiting = ready()
        return web.Response(status=503 if waiting else 200, text="\n".join(waiting) or "ok")

    async def explain_all(request: web.Request) -> web.Response:
        return _json({"leader": is_leader(), "decisions": [d.as_dict() for d in decisions.all()]})

    async def explain_one(request: web.Request) -> web.Response:
        key = ObjectKey(request.match_info["namespace"], request.match_info["name"])
        found = decisions.history(key)
        body = {"leader": is_leader(), "decisions": [d.as_dict() for d in found]}
        return _json(body, 200 if found else 404)

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/explain", explain_all)
    app.router.add_get("/explain/{namespace}/{name}", explain_one)
    return app


def metrics_app(registry: CollectorRegistry) -> web.Application:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    return app


async def listen(
    app: web.Application, address: str, *, flag: str, tls: ssl.SSLContext | None = None
) -> web.AppRunner:
    """Serve `app` on host:port (no host is all). Raises ValueError naming `flag` for another form."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{flag}: invalid value {address!r}: must be host:port or :port")
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host.strip("[]") or None, int(port), ssl_context=tls).start()
    return runner


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")
