"""The simulated model server: OpenAI's API and vLLM's metrics in front of one `Engine`."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tidemill.sim.engine import BLOCK_TOKENS, Engine, EngineParameters, Token

DEFAULT_OUTPUT_TOKENS = 128
CHARACTERS_PER_TOKEN = 4
_WORDS = (" the", " tide", " turns", " the", " mill", " and", " grain", " comes", " out")
_LATENCY_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """`startup_seconds`: /health refuses for so long, as a server does that still loads weights."""

    model: str
    parameters: EngineParameters
    host: str = "127.0.0.1"
    port: int = 8000
    startup_seconds: float = 0.0
    drain_seconds: float = 30.0
    pod_name: str = ""  # told in a header of each answer


@dataclass(slots=True)
class _Stream:
    """Tokens of one request on their way to its client."""

    queue: asyncio.Queue[Token]
    prompt_tokens: int
    started: float


class ModelServer:
    """Accepts requests, steps the engine in real time and hands out the tokens."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine = Engine(config.parameters)
        self._streams: dict[str, _Stream] = {}
        self._work = asyncio.Event()
        self._ready = False
        self._metrics = _Metrics(config.model, self.engine)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.cleanup_ctx.append(self._lifespan)
        app.on_response_prepare.append(self._say_who)
        return app

    async def _say_who(self, request: web.Request, response: web.StreamResponse) -> None:
        if self.config.pod_name:
            response.headers["x-inference-pod"] = self.config.pod_name

    async def _lifespan(self, app: web.Application) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._start()), asyncio.create_task(self._run_engine())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> None:
        await asyncio.sleep(self.config.startup_seconds)
        self._ready = True

    async def _run_engine(self) -> None:
        clock = time.monotonic
        due = clock()
        while True:
            if not self.engine.busy:
                self._work.clear()
                await self._work.wait()
                due = clock()
            # Steps follow each other on their own clock, so that late wake-ups do not slow the engine.
            step = self.engine.step(due)
            due += step.duration
            await asyncio.sleep(max(0.0, due - clock()))
            for token in step.tokens:
                stream = self._streams.get(token.id)
                if stream is not None:
                    self._metrics.token(token)
                    stream.queue.put_nowait(token)

    # Endpoints

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._ready else 503)

    async def _models(self, request: web.Request) -> web.Response:
        self._check_ready()
        limit = self.config.parameters.max_model_tokens
        card = {"id": self.config.model, "object": "model", "created": 0, "owned_by": "vllm",
                "root": self.config.model, "parent": None, "max_model_len": limit}  # fmt: skip
        return _json({"object": "list", "data": [card]})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        self._check_ready()
        return web.Response(
            body=generate_latest(self._metrics.registry),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and all(isinstance(t, int) for t in prompt):
            text = "".join(f"{token:04x}" for token in prompt)
        elif isinstance(prompt, list):
            text = "".join(str(part) for part in prompt)
        elif isinstance(prompt, str):
            text = prompt
        else:
            raise _refusal(400, "prompt: must be a string or a list", "BadRequestError")
        return await self._answer(request, body, text, int(body.get("max_tokens") or 16), chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _refusal(400, "messages: must be a list with at least one message", "BadRequestError")
        text = orjson.dumps(messages).decode()
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_OUTPUT_TOKENS
        return await self._answer(request, body, text, int(wanted), chat=True)

    async def _body(self, request: web.Request) -> dict[str, Any]:
        self._check_ready()
        try:
            body = orjson.loads(await request.read())
        except orjson.JSONDecodeError as error:
            raise _refusal(400, f"body: must be JSON: {error}", "BadRequestError") from None
        if not isinstance(body, dict):
            raise _refusal(400, "body: must be a JSON object", "BadRequestError")
        if body.get("model") != self.config.model:
            raise _refusal(404, f"The model `{body.get('model')}` does not exist.", "NotFoundError")
        return body

    def _check_ready(self) -> None:
        if not self._ready:
            raise web.HTTPServiceUnavailable(text="the model is still loading")

    async def _answer(
        self, request: web.Request, body: dict[str, Any], text: str, output_tokens: int, *, chat: bool
    ) -> web.StreamResponse:
        id_ = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        prompt_tokens = max(1, -(-len(text) // CHARACTERS_PER_TOKEN))
        stream = _Stream(asyncio.Queue(), prompt_tokens, time.monotonic())
        try:
            self.engine.submit(id_, prompt_tokens, output_tokens, time.monotonic(), _prefix_hashes(text))
        except ValueError as error:
            raise _refusal(400, str(error), "BadRequestError") from None
        self._streams[id_] = stream
        self._work.set()
        finished = False
        try:
            if body.get("stream"):
                response = await self._stream(request, body, id_, stream, chat=chat)
            else:
                response = await self._collect(body, id_, stream, chat=chat)
            finished = True
            return response
        finally:
            del self._streams[id_]
            if not finished:
                self.engine.abort(id_)
            self._metrics.done(stream, output_tokens, finished=finished)

    async def _collect(self, body: dict[str, Any], id_: str, stream: _Stream, *, chat: bool) -> web.Response:
        words: list[str] = []
        while True:
            token = await stream.queue.get()
            words.append(_word(token))
            if token.finished:
                break
        text = "".join(words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return _json(
            {
                "id": id_,
                "object": "chat.completion" if chat else "text_completion",
                "created": int(time.time()),
                "model": self.config.model,
                "choices": [choice],
                "usage": _usage(stream.prompt_tokens, len(words)),
            }
        )

    async def _stream(
        self, request: web.Request, body: dict[str, Any], id_: str, stream: _Stream, *, chat: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        base = {
            "id": id_,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.config.model,
        }
        count = 0
        while True:
            token = await stream.queue.get()
            count += 1
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if token.finished else None}
            if chat:
                role = {"role": "assistant"} if token.index == 0 else {}
                choice["delta"] = {**role, "content": _word(token)}
            else:
                choice["text"] = _word(token)
            await response.write(b"data: " + orjson.dumps({**base, "choices": [choice]}) + b"\n\n")
            if token.finished:
                break
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {**base, "choices": [], "usage": _usage(stream.prompt_tokens, count)}
            await response.write(b"data: " + orjson.dumps(usage) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


class _Metrics(Collector):
    """vLLM's series. Gauges and totals are read from the engine when somebody scrapes."""

    def __init__(self, model: str, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._labels = [model, "0"]
        self._engine = engine
        names = ["model_name", "engine"]

        def histogram(name: str, help_: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(f"vllm:{name}", help_, names, buckets=tuple(buckets), registry=self.registry)
            made.labels(*self._labels)
            return made

        self._ttft = histogram("time_to_first_token_seconds", "Time to first token.", _LATENCY_BUCKETS)
        self._itl = histogram("inter_token_latency_seconds", "Time between tokens.", _ITL_BUCKETS)
        self._e2e = histogram("e2e_request_latency_seconds", "Time of a request.", _LATENCY_BUCKETS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS)
        self._generation = histogram("request_generation_tokens", "Tokens generated.", _TOKEN_BUCKETS)
        self._success = Counter(
            "vllm:request_success", "Finished requests.", [*names, "finished_reason"], registry=self.registry
        )
        self._success.labels(*self._labels, "length")
        self.registry.register(self)

    def token(self, token: Token) -> None:
        (self._itl if token.index else self._ttft).labels(*self._labels).observe(token.since_previous)

    def done(self, stream: _Stream, output_tokens: int, *, finished: bool) -> None:
        self._success.labels(*self._labels, "length" if finished else "abort").inc()
        if finished:
            self._e2e.labels(*self._labels).observe(time.monotonic() - stream.started)
            self._prompt.labels(*self._labels).observe(stream.prompt_tokens)
            self._generation.labels(*self._labels).observe(output_tokens)

    def collect(self) -> Iterable[Metric]:
        names = ["model_name", "engine"]
        engine = self._engine
        for name, help_, value in (
            ("num_requests_running", "Requests in the batch.", len(engine.running)),
            ("num_requests_waiting", "Requests that wait for the batch.", len(engine.waiting)),
            ("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", engine.kv_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", help_, labels=names)
            gauge.add_metric(self._labels, float(value))
            yield gauge
        for name, help_, value in (
            ("prompt_tokens", "Prompt tokens processed.", engine.counters.prompt_tokens),
            ("generation_tokens", "Tokens generated.", engine.counters.generation_tokens),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                engine.counters.prefix_queries,
            ),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", engine.counters.prefix_hits),
            ("num_preemptions", "Preemptions.", engine.counters.preemptions),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", help_, labels=names)
            counter.add_metric(self._labels, float(value))
            yield counter
        # As in vLLM, this one does not say which model it belongs to.
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Configuration of the KV cache.",
            labels=["block_size", "num_gpu_blocks", "engine"],
        )
        info.add_metric([str(BLOCK_TOKENS), str(engine.parameters.kv_blocks), "0"], 1.0)
        yield info


def _prefix_hashes(text: str) -> list[int]:
    """One hash for each full block of the prompt, over everything up to its end."""
    size = BLOCK_TOKENS * CHARACTERS_PER_TOKEN
    hashes: list[int] = []
    previous = 0
    for start in range(0, len(text) - size + 1, size):
        previous = hash((previous, text[start : start + size]))
        hashes.append(previous)
    return hashes


def _word(token: Token) -> str:
    return _WORDS[token.index % len(_WORDS)]


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def _refusal(status: int, message: str, type_: str) -> web.HTTPException:
    body = orjson.dumps({"error": {"message": message, "type": type_, "param": None, "code": status}})
    cls = web.HTTPNotFound if status == 404 else web.HTTPBadRequest
    return cls(body=body, content_type="application/json")


async def serve(config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT; then requests under way may finish."""
    server = ModelServer(config)
    runner = web.AppRunner(
        server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=config.drain_seconds
    )
    await runner.setup()
    site = web.TCPSite(runner, config.host, config.port)
    await site.start()
    host, port = runner.addresses[0][:2]
    print(f"serving {config.model} on http://{host}:{port}", flush=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await stop.wait()
        print("draining", flush=True)
    finally:
        await runner.cleanup()
