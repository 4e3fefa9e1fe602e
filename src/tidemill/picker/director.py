"""From a complete request to a decision: its pool, its body, its priority, whether it may go, who serves it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import orjson
import structlog

from tidemill.api.inference import rule_for
from tidemill.api.picker_config import EndpointPickerConfig
from tidemill.picker.address import canonical
from tidemill.picker.body import NO_BODY, BodyError, ParsedBody, api_of, parse_body, replace_model
from tidemill.picker.extproc.exchange import Decision, GatewayRequest, OwnAnswer, Pick, Refusal
from tidemill.picker.flow import Drop, FlowController, Waiting
from tidemill.picker.instruments import Instruments, RequestSeries
from tidemill.picker.load import Seat, Ticket
from tidemill.picker.pools.endpoints import Endpoint
from tidemill.picker.pools.pool import Pool, Pools
from tidemill.picker.saturation import SaturationDetector
from tidemill.picker.scheduling.cycle import Cycle, HeaderLookup, SchedulingRequest
from tidemill.picker.scheduling.plugin import Outcome
from tidemill.picker.scheduling.prefix import Blocks
from tidemill.picker.scheduling.scorers import SESSION_HEADER, SessionAffinityScorer, session_token
from tidemill.picker.usage import Usage

log = structlog.get_logger(__name__)

DEFAULT_FAIRNESS_ID = "default-flow"
_OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
_FAIRNESS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
_REWRITE = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")


class DirectorOptions(NamedTuple):
    """`max_body` in bytes. `answer_models`: GET /v1/models is answered here with what all pools serve. (A tuple,
    because it is sent to worker processes, and a compiled frozen dataclass cannot be.)"""

    max_body: int = 64 * 2**20
    ignore_empty_subset: bool = False
    emit_scores: bool = False
    answer_models: bool = False


class PickerDirector:
    """Decides for all pools of one process.

    `now` is the clock of the tables, in seconds. `wake` has `tick` called at a time of it.
    """

    def __init__(
        self,
        pools: Pools,
        config: EndpointPickerConfig,
        *,
        detector: SaturationDetector,
        instruments: Instruments,
        options: DirectorOptions,
        now: Callable[[], float],
        rng: random.Random,
        wake: Callable[[Pool, float], None],
    ) -> None:
        self.pools = pools
        self._config = config
        self._detector = detector
        self.instruments = instruments
        self.options = options
        self.now = now
        self.rng = rng
        self._wake = wake
        self._flow_control = config.enabled("flowControl")
        self._flows: dict[Pool, FlowController] = {}
        self._session: dict[Pool, bool] = {}
        self._malformed: set[tuple[str, str]] = set()
        self._draining = False
        self._cycles = 0
        instruments.model_label.configured = lambda name: any(name in p.configured_models for p in pools.all())

    @property
    def max_body(self) -> int:
        return self.options.max_body

    def refused(self, status: int) -> None:
        self.instruments.request("", "", DEFAULT_FAIRNESS_ID, 0).errors(str(status))

    # A request in

    def admit(self, request: GatewayRequest, decided: Callable[[Decision], None]) -> Callable[[], None] | None:
        """Decide at once, or later when flow control has it wait. The result calls the wait off."""
        job = _Job(self, request, decided, self.now())
        try:
            return job.admit()
        except Exception:
            # Our own fault, and only this request's.
            log.exception("a request could not be decided")
            job.refuse(Refusal(500, "internal error of the endpoint picker"))
            return None

    def flow(self, pool: Pool) -> FlowController | None:
        """The waiting room of a pool; None without flow control."""
        if not self._flow_control:
            return None
        found = self._flows.get(pool)
        if found is None:
            found = self._flows[pool] = FlowController(
                self._config.flow_control,
                saturation=lambda now: self.saturation(pool, now),
                has_endpoints=lambda: bool(pool.snapshot.endpoints),
            )
            if self._draining:
                found.drain()
        return found

    def saturation(self, pool: Pool, now: float) -> float:
        return self._detector.saturation(pool.load, pool.snapshot.rows, now)

    def tick(self, pool: Pool) -> None:
        """Something changed that may let a request of this pool go, or time has passed."""
        flow = self._flows.get(pool)
        if flow is None or not flow.requests:
            return
        flow.pump(self.now())
        if (deadline := flow.deadline()) is not None:
            self._wake(pool, deadline)

    def drain(self) -> None:
        """Whoever waits is told that this picker ends."""
        self._draining = True
        for flow in self._flows.values():
            flow.drain()

    def uses_sessions(self, pool: Pool) -> bool:
        found = self._session.get(pool)
        if found is None:
            plugins = pool.scheduler.plugins.values()
            found = self._session[pool] = any(isinstance(p, SessionAffinityScorer) for p in plugins)
        return found

    def sample(self, pool: Pool, cycle: Cycle) -> None:
        """Now and then, time each plugin by itself: always would cost more than the plugins do."""
        self._cycles += 1
        if self._cycles % 1000 == 1:
            for profile in pool.scheduler.profiles.values():
                for point, kind, name, seconds in profile.timed(cycle, self.now):
                    self.instruments.plugin_duration.of(point, kind, name).observe(seconds)

    def note_malformed(self, endpoint: Endpoint, field: str) -> None:
        if (endpoint.address, field) not in self._malformed and len(self._malformed) < 10_000:
            self._malformed.add((endpoint.address, field))
            log.warning("answer with a usage that is no count", endpoint=endpoint.address, field=field)


class _Job:
    """One request on its way through the director."""

    def __init__(
        self, director: PickerDirector, request: GatewayRequest, decided: Callable[[Decision], None], now: float
    ) -> None:
        self.director = director
        self.request = request
        self.decided = decided
        self.started = now
        self.body: ParsedBody = NO_BODY
        self.model = ""
        self.target = ""
        self.fairness_id = DEFAULT_FAIRNESS_ID
        self.priority = 0

    def admit(self) -> Callable[[], None] | None:
        director, request, headers = self.director, self.request, self.request.headers
        options = director.options
        if (
            options.answer_models
            and headers.get(":method") == "GET"
            and request.path.partition("?")[0] == "/v1/models"
        ):
            self.decided(OwnAnswer(models_answer(director.pools.all())))
            return None
        try:
            self.body = parse_body(request.body, api_of(request.path), headers)
        except BodyError as error:
            self.refuse(Refusal(400, str(error)))
            return None
        self.model = self.target = self.body.model
        pool = director.pools.resolve(named=request.pool, port=request.port, model=lambda: self.model)
        if isinstance(pool, str):
            self.refuse(Refusal(404, pool))
            return None
        self.fairness_id = _first(headers, _FAIRNESS) or DEFAULT_FAIRNESS_ID
        if (objective := _first(headers, _OBJECTIVE)) and (found := pool.objectives.get(objective)) is not None:
            self.priority = found.priority
        self._rewrite(pool)

        subset = request.subset
        if subset is not None and not subset:
            if not options.ignore_empty_subset:
                self.drop(Drop.NO_ENDPOINTS, "the gateway's subset of endpoints is empty")
                return None
            subset = None

        flow = director.flow(pool)
        if flow is None:
            if self.priority < 0 and pool.snapshot.endpoints and director.saturation(pool, self.started) >= 1.0:
                self.drop(Drop.SATURATED, "the pool is saturated, and requests of this priority are shed")
                return None
            self._go(pool, subset)
            return None
        waiting = Waiting(
            self.priority,
            self.fairness_id,
            len(request.body),
            go=lambda: self._left(pool, subset, None),
            drop=lambda drop: self._left(pool, subset, drop),
            model=self.model,
            target_model=self.target,
        )
        flow.submit(waiting, self.started)
        if waiting.gone:
            return None
        director.tick(pool)

        def cancel() -> None:
            flow.cancel(waiting)
            self._count_drop(Drop.CONTEXT_CANCELLED)
            director.tick(pool)

        return cancel

    def refuse(self, refusal: Refusal) -> None:
        series = self.director.instruments.request(self.model, self.target, self.fairness_id, self.priority)
        series.errors(str(refusal.status))
        self.decided(refusal)

    def drop(self, drop: Drop, message: str) -> None:
        self._count_drop(drop)
        self.refuse(Refusal(drop.status, message, drop.value))

    def _count_drop(self, drop: Drop) -> None:
        self.director.instruments.dropped.of(drop.value).value += 1

    def _rewrite(self, pool: Pool) -> None:
        """What the model is called on the server: by header, else by rule."""
        wanted = _first(self.request.headers, _REWRITE)
        if not wanted and pool.rewrites and (rule := rule_for(pool.rewrites, self.model)) is not None:
            wanted = rule[1].choose(self.director.rng.random())
        # Without a model in a body that we can change there is nothing to put it into.
        if wanted and self.model and self.body.raw is not None:
            self.target = wanted

    def _left(self, pool: Pool, subset: tuple[str, ...] | None, drop: Drop | None) -> None:
        """The waiting room has let it go, or dropped it."""
        director = self.director
        waited = director.now() - self.started
        fairness = director.instruments.fairness_label(self.fairness_id)
        outcome = "dispatched" if drop is None else drop.value
        director.instruments.queue_duration.of(fairness, str(self.priority), outcome).observe(waited)
        if drop is not None:
            self.drop(drop, _DROP_MESSAGES[drop].format(waited=waited))
            return
        try:
            self._go(pool, subset)
        except Exception:
            log.exception("a request could not be decided")
            self.refuse(Refusal(500, "internal error of the endpoint picker"))

    def _go(self, pool: Pool, subset: tuple[str, ...] | None) -> None:
        """Pick, and count the pick at once."""
        director, body, instruments = self.director, self.body, self.director.instruments
        snapshot = pool.snapshot
        scheduler = pool.scheduler
        begun = director.now()
        request = SchedulingRequest(
            self.target, body.prompt, body.salt, self.request.headers, body.multimodal
        )  # fmt: skip
        if subset is None:
            cycle = scheduler.cycle(
                request, snapshot.endpoints, snapshot.rows, begun, select=snapshot.select
            )  # fmt: skip
        else:
            endpoints, rows = snapshot.subset(subset)
            cycle = scheduler.cycle(request, endpoints, rows, begun)
        outcome = scheduler.schedule(cycle)
        instruments.scheduling.observe(director.now() - begun)
        if not isinstance(outcome, Outcome):
            instruments.failures.value += 1
            self.drop(Drop.NO_ENDPOINTS, self._nobody(pool, subset, outcome))
            return
        instruments.successes.value += 1
        chosen = outcome.primary
        blocks = cycle.blocks
        uncached = body.prompt.tokens
        if blocks.chains:
            cached = cycle.match.of(chosen.rows[0])
            uncached = max(0, uncached - cached * scheduler.prefix.block_tokens)
            instruments.hit_ratio.observe(cached / blocks.total)
        seat = pool.load.seat(chosen.endpoints[0].id)
        assert seat is not None, "a snapshot and its table change together"
        prefill = None if outcome.prefill is None else pool.load.seat(outcome.prefill.endpoints[0].id)
        flight = _Flight(
            director, pool, chosen.endpoints[0], pool.load.take(seat, uncached), blocks, prefill,
            instruments.request(self.model, self.target, self.fairness_id, self.priority), self.started,
        )  # fmt: skip
        changed, remove = self._changed_body()
        scores = b""
        if director.options.emit_scores:
            scores = orjson.dumps(
                {e.address: round(s, 6) for e, s in zip(chosen.endpoints, chosen.scores, strict=True)}
            )
        self.decided(
            Pick(
                ",".join([endpoint.address for endpoint in chosen.endpoints]), flight, outcome.headers, remove,
                changed, scores, body.stream,
            )
        )  # fmt: skip
        instruments.processing.observe(director.now() - begun)
        director.sample(pool, cycle)

    def _changed_body(self) -> tuple[bytes | None, tuple[str, ...]]:
        """The body with its model replaced, and headers that are then no longer true of it."""
        if self.target == self.model or self.body.raw is None:
            return None, ()
        return replace_model(self.body.raw, self.target), ("content-encoding",) if self.body.decoded else ()

    def _nobody(self, pool: Pool, subset: tuple[str, ...] | None, outcome: Any) -> str:
        if pool.snapshot.missing:
            return f"{pool}: {pool.snapshot.missing}"
        if subset is not None and pool.snapshot.endpoints and not pool.snapshot.subset(subset)[0]:
            return f"{pool}: none of the {len(subset)} endpoints that the gateway allows is ready"
        if hasattr(outcome, "plugin"):
            return f"{pool}: every ready endpoint was taken out by {outcome.plugin}"
        return f"{pool}: {outcome.reason}"


_DROP_MESSAGES = {
    Drop.NO_ENDPOINTS: "no endpoint became ready within {waited:.0f} s, or too many requests wait for one",
    Drop.SATURATED: "too many requests wait already",
    Drop.TTL_EXPIRED: "the pool stayed saturated for {waited:.0f} s",
    Drop.SHUTTING_DOWN: "this endpoint picker is shutting down",
    Drop.CONTEXT_CANCELLED: "the client left",
}


class _Flight:
    """A picked request until it is over. Every way to end it leads through `_end`, which acts once."""

    def __init__(
        self,
        director: PickerDirector,
        pool: Pool,
        endpoint: Endpoint,
        ticket: Ticket,
        blocks: Blocks,
        prefill: Seat | None,
        series: RequestSeries,
        started: float,
    ) -> None:
        self._director = director
        self._pool = pool
        self._endpoint = endpoint
        self._ticket = ticket
        self._blocks = blocks
        self._prefill = prefill
        self._series = series
        self._started = started
        self._open = True
        self._status = 0
        series.total.value += 1
        series.running.value += 1

    @property
    def response_headers(self) -> tuple[tuple[str, str], ...]:
        if not self._director.uses_sessions(self._pool):
            return ()
        return ((SESSION_HEADER, session_token(self._endpoint)),)

    def responded(self, status: int, served: str) -> None:
        self._status = status
        load = self._pool.load
        address = canonical(served) if served else None
        if address is not None and address != self._endpoint.address:
            # The gateway went on to another endpoint of the list: the request is in flight there.
            snapshot = self._pool.snapshot
            index = snapshot.by_address.get(address)
            seat = None if index is None else load.seat(snapshot.endpoints[index].id)
            if seat is not None:
                tokens = self._ticket.tokens
                load.release(self._ticket)
                self._endpoint, self._ticket = seat.endpoint, load.take(seat, tokens)
        if 200 <= status < 300 and self._blocks.chains:
            prefix = self._pool.scheduler.prefix
            for seat in (self._ticket.seat, self._prefill):
                if seat is not None and seat.alive:
                    cache = None if seat.reading is None else seat.reading.kv_tokens
                    prefix.served(self._blocks, seat.row, None if cache is None else cache // prefix.block_tokens)

    def first_token(self) -> None:
        self._pool.load.release_tokens(self._ticket)
        self._series.ttft.observe(self._director.now() - self._started)

    def finished(self, usage: Usage, malformed: str) -> None:
        if malformed:
            self._director.note_malformed(self._endpoint, malformed)
        if usage.input is not None:
            self._series.input_tokens.observe(usage.input)
        if usage.output is not None:
            self._series.output_tokens.observe(usage.output)
        self._series.duration.observe(self._director.now() - self._started)
        if self._status >= 400:
            self._series.errors(str(self._status))
        self._end()

    def aborted(self) -> None:
        if self._open:
            self._series.errors("cancelled")
        self._end()

    def _end(self) -> None:
        if not self._open:
            return
        self._open = False
        self._pool.load.release(self._ticket)
        self._series.running.value -= 1
        self._director.tick(self._pool)


def models_answer(pools: Iterable[Pool]) -> bytes:
    """What GET /v1/models says: every model of every pool once."""
    owners: dict[str, str] = {}
    for pool in pools:
        for model in sorted(pool.models):
            owners.setdefault(model, str(pool.key))
    data = [{"id": model, "object": "model", "created": 0, "owned_by": owner} for model, owner in owners.items()]
    return orjson.dumps({"object": "list", "data": data})


def _first(headers: HeaderLookup, names: tuple[str, str]) -> str:
    """Today's name of a header before its older one."""
    return headers.get(names[0]) or headers.get(names[1])
