"""A picker without sockets: pools and their load in memory, time that tests move, messages as Envoy sends them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from prometheus_client import CollectorRegistry

from tidemill.api.inference import InferencePool
from tidemill.api.picker_config import EndpointPickerConfig
from tidemill.kube.resources import ObjectKey
from tidemill.picker.director import DirectorOptions, PickerDirector
from tidemill.picker.extproc.exchange import Exchange, StreamInfo
from tidemill.picker.extproc.protos import Mode, ProcessingRequest, ProcessingResponse
from tidemill.picker.instruments import Instruments
from tidemill.picker.load import LoadTable, Reading
from tidemill.picker.pools.endpoints import Endpoint, EndpointId, EndpointSet, PodView
from tidemill.picker.pools.pool import Pool, Pools
from tidemill.picker.saturation import SaturationDetector
from tidemill.picker.scheduling.cycle import Cycle, SchedulingRequest
from tidemill.picker.scheduling.prefix import Prompt
from tidemill.picker.scheduling.scheduler import DEFAULT_CONFIG, Scheduler

A, B, C = "10.0.0.11:8000", "10.0.0.12:8000", "10.0.0.13:8000"
DESTINATION = "x-gateway-destination-endpoint"
DROP_REASON = "x-llm-d-request-dropped-reason"
SMALL_BLOCKS = EndpointPickerConfig.model_validate(
    {
        "plugins": [
            {"type": "queue-scorer"},
            {"type": "kv-cache-utilization-scorer"},
            {"type": "prefix-cache-scorer", "parameters": {"blockSizeTokens": 16}},
        ],
        "schedulingProfiles": [
            {
                "name": "default",
                "plugins": [
                    {"pluginRef": "queue-scorer", "weight": 2},
                    {"pluginRef": "kv-cache-utilization-scorer", "weight": 2},
                    {"pluginRef": "prefix-cache-scorer", "weight": 3},
                ],
            }
        ],
    }
)


def endpoint(address: str, *, labels: Mapping[str, str] | None = None, pod: str = "", uid: str = "", **more: Any):
    port = int(address.rpartition(":")[2])
    name = pod or address
    return Endpoint(
        id=EndpointId(uid or name, port), address=address, pod=ObjectKey("ns", name), rank=0, labels=labels or {},
        **more,
    )  # fmt: skip


def inference_pool(ports: Iterable[int] = (8000,), labels: Mapping[str, str] | None = None) -> InferencePool:
    return InferencePool(namespace="ns", name="p", match_labels=labels or {"app": "m"}, target_ports=tuple(ports))


def pod_view(name: str, ip: str | tuple[str, ...], **more: Any) -> PodView:
    fields: dict[str, Any] = {
        "key": ObjectKey("ns", name), "uid": f"uid-{name}", "ips": (ip,) if isinstance(ip, str) else ip,
        "ready": True, "terminating": False, "restarts": 0, "declared_ports": (), "active_ports": None,
        "labels": {"app": "m"},
    }  # fmt: skip
    return PodView(**{**fields, **more})


def config(text: str) -> EndpointPickerConfig:
    return EndpointPickerConfig.parse(text, source="test")


@dataclass
class Rig:
    """A director over one pool `ns/p`, unless more are added."""

    config: EndpointPickerConfig = DEFAULT_CONFIG
    options: DirectorOptions = field(default_factory=DirectorOptions)
    now: float = 1000.0
    detector: SaturationDetector = field(default_factory=SaturationDetector)

    def __post_init__(self) -> None:
        self.rng = random.Random(7)
        self.registry = CollectorRegistry()
        self.instruments = Instruments(self.registry)
        self.pools = Pools()
        self.wakes: list[float] = []
        self.director = PickerDirector(
            self.pools, self.config, detector=self.detector, instruments=self.instruments,
            options=self.options, now=lambda: self.now, rng=self.rng,
            wake=lambda pool, when: self.wakes.append(when),
        )  # fmt: skip
        self.pool = self.add_pool("ns", "p")

    def add_pool(self, namespace: str, name: str, missing: str = "its pods have not been listed yet") -> Pool:
        load = LoadTable()
        pool = Pool(ObjectKey(namespace, name), Scheduler(self.config, load, self.rng), load, missing=missing)
        pool.on_change(lambda: self.director.tick(pool))
        self.pools.add(pool)
        return pool

    def endpoints(self, *found: str | Endpoint, pool: Pool | None = None) -> None:
        made = tuple(e if isinstance(e, Endpoint) else endpoint(e) for e in found)
        (pool or self.pool).replace(EndpointSet(made))

    def read(self, address: str, *, pool: Pool | None = None, **numbers: Any) -> None:
        """What a scrape of an endpoint says now."""
        pool = pool or self.pool
        seat = self.seat(address, pool)
        pool.load.record(seat, Reading(**numbers), mark=pool.load.mark, now=self.now)
        self.director.tick(pool)

    def seat(self, address: str, pool: Pool | None = None):
        pool = pool or self.pool
        index = pool.snapshot.by_address[address]
        seat = pool.load.seat(pool.snapshot.endpoints[index].id)
        assert seat is not None
        return seat

    def in_flight(self, address: str, pool: Pool | None = None) -> tuple[int, int]:
        """Requests and tokens in flight."""
        pool = pool or self.pool
        row = self.seat(address, pool).row
        return int(pool.load.in_flight[row]), int(pool.load.in_flight_tokens[row])

    def total_in_flight(self) -> tuple[int, int]:
        return int(self.pool.load.in_flight.sum()), int(self.pool.load.in_flight_tokens.sum())

    def cycle(self, prompt: bytes = b"", *, model: str = "m", **more: Any) -> Cycle:
        request = SchedulingRequest(model=model, prompt=Prompt((prompt,) if prompt else ()), **more)
        snapshot = self.pool.snapshot
        return self.pool.scheduler.cycle(request, snapshot.endpoints, snapshot.rows, self.now)

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that have these labels."""
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items())
        )

    def stream(self, **info: Any) -> Talk:
        return Talk(self, StreamInfo(**info))

    def ask(self, *messages: Any, **info: Any) -> Talk:
        """A stream on which all of `messages` have been sent."""
        talk = self.stream(**info)
        for message in messages:
            talk.send(message)
        return talk

    def complete(self, body: Any, path: str = "/v1/completions", *, status: int = 200, **more: Any) -> str:
        """A whole request, served; where it went."""
        talk = self.ask(*post(path, body, **more))
        destination = talk.destination
        assert destination is not None, talk.answers
        talk.send(response_headers(status))
        talk.send(response_body(b"{}", eos=True))
        talk.close()
        return destination


class Talk:
    """Envoy's end of one stream."""

    def __init__(self, rig: Rig, info: StreamInfo) -> None:
        self.raw: list[bytes] = []
        self.finished = False
        self.exchange = Exchange(rig.director, info, self.raw.append, self._finish)

    def _finish(self) -> None:
        self.finished = True

    def send(self, message: Any) -> list[Any]:
        """Send a message; the answers that it brought at once."""
        before = len(self.raw)
        self.exchange.receive(message.SerializeToString())
        return [ProcessingResponse.FromString(raw) for raw in self.raw[before:]]

    def close(self) -> None:
        self.exchange.closed()

    @property
    def answers(self) -> list[Any]:
        return [ProcessingResponse.FromString(raw) for raw in self.raw]

    @property
    def kinds(self) -> list[str]:
        return [answer.WhichOneof("choice") for answer in self.answers]

    @property
    def destination(self) -> str | None:
        return next((found for a in self.answers if (found := destination_of(a)) is not None), None)

    @property
    def refusal(self) -> Any:
        return next(
            (a.immediate_response for a in self.answers if a.WhichOneof("choice") == "immediate_response"), None
        )

    @property
    def status(self) -> int:
        """200 for a pick, else the status of the refusal."""
        return 200 if self.refusal is None and self.destination is not None else self.refusal.status.code

    @property
    def reason(self) -> str:
        return headers_of(self.refusal.headers).get(DROP_REASON, "")

    @property
    def request_body(self) -> bytes:
        return b"".join(a.request_body.response.body_mutation.streamed_response.body for a in self.answers)


def headers_of(mutation: Any) -> dict[str, str]:
    return {o.header.key: o.header.raw_value.decode() for o in mutation.set_headers}


def mutation_of(answer: Any) -> Any:
    kind = answer.WhichOneof("choice")
    if kind in ("request_headers", "request_body"):
        return getattr(answer, kind).response.header_mutation
    return None


def destination_of(answer: Any) -> str | None:
    mutation = mutation_of(answer)
    return None if mutation is None else headers_of(mutation).get(DESTINATION)


# Messages as Envoy sends them


def request_headers(
    path: str = "/v1/chat/completions",
    *,
    method: str = "POST",
    eos: bool = False,
    headers: Iterable[tuple[str, str]] = (),
    subset: Any = None,
    mode: int | None = None,
    raw: bool = True,
) -> Any:
    message = ProcessingRequest()
    pairs = [(":method", method), (":path", path), (":authority", "gateway"), ("content-type", "application/json")]
    for key, value in [*pairs, *headers]:
        header = message.request_headers.headers.headers.add(key=key)
        setattr(header, "raw_value" if raw else "value", value.encode())
    message.request_headers.end_of_stream = eos
    if subset is not None:
        add_subset(message, subset)
    if mode is not None:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = mode
    return message


def add_subset(message: Any, subset: Any) -> None:
    fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
    value = fields["x-gateway-destination-endpoint-subset"]
    if isinstance(subset, str):
        value.string_value = subset
    elif isinstance(subset, list):
        value.list_value.SetInParent()
        for one in subset:
            if isinstance(one, str):
                value.list_value.values.add(string_value=one)
            elif isinstance(one, list):
                value.list_value.values.add().list_value.SetInParent()
            else:
                value.list_value.values.add(number_value=one)
    else:
        value.number_value = subset


def request_body(data: bytes, *, eos: bool = False) -> Any:
    message = ProcessingRequest()
    message.request_body.body = data
    message.request_body.end_of_stream = eos
    return message


def request_trailers() -> Any:
    message = ProcessingRequest()
    message.request_trailers.trailers.headers.add(key="x-checksum", raw_value=b"abc")
    return message


def response_headers(
    status: int = 200,
    *,
    eos: bool = False,
    content_type: str = "application/json",
    served: str = "",
    encoding: str = "",
) -> Any:
    message = ProcessingRequest()
    found = message.response_headers.headers.headers
    found.add(key=":status", raw_value=str(status).encode())
    found.add(key="content-type", raw_value=content_type.encode())
    if encoding:
        found.add(key="content-encoding", raw_value=encoding.encode())
    message.response_headers.end_of_stream = eos
    if served:
        fields = message.metadata_context.filter_metadata["envoy.lb"].fields
        fields["x-gateway-destination-endpoint-served"].string_value = served
    return message


def response_body(data: bytes, *, eos: bool = False) -> Any:
    message = ProcessingRequest()
    message.response_body.body = data
    message.response_body.end_of_stream = eos
    return message


def response_trailers() -> Any:
    message = ProcessingRequest()
    message.response_trailers.trailers.headers.add(key="grpc-status", raw_value=b"0")
    return message


def post(path: str, body: Any, **more: Any) -> list[Any]:
    """Headers and body of a request, in one chunk each."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    return [request_headers(path, **more), request_body(data, eos=True)]


def chat(text: Any = "hi", model: str = "m1", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


FULL_DUPLEX, BUFFERED, STREAMED = Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED, Mode.STREAMED
