"""One request through ext_proc, as a state machine without I/O: messages in, messages out.

In FULL_DUPLEX_STREAMED mode nothing is answered until the request is complete; then, in this order, the headers
with the pick, the body, the trailers. In BUFFERED mode headers are answered at once and the pick comes with the
body; in the other modes bodies pass by, and the pick is made on the headers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple, Protocol

from tidemill.picker.extproc import incoming, messages
from tidemill.picker.extproc.incoming import Incoming
from tidemill.picker.extproc.protos import Mode
from tidemill.picker.usage import NO_USAGE, Usage, UsageReader


class Headers:
    """Header fields by lower-case name, decoded when they are asked for: most never are."""

    __slots__ = ("_raw",)

    def __init__(self, raw: Mapping[str, bytes]) -> None:
        self._raw = raw

    def get(self, name: str, default: str = "") -> str:
        value = self._raw.get(name)
        return default if value is None else value.decode("utf-8", "replace")


NO_HEADERS = Headers({})
_FORBIDDEN = frozenset(messages.CLIENT_MAY_NOT_SEND)


class GatewayRequest(NamedTuple):
    """A complete request as the gateway gave it. Header names are lower case. `subset` are the addresses that the
    gateway allows, as they were written, None for all. `pool` is what the gateway said of the pool, if anything;
    `port` where it asked."""

    headers: Headers
    body: bytes = b""
    subset: tuple[str, ...] | None = None
    pool: str = ""
    port: int = 0

    @property
    def path(self) -> str:
        return self.headers.get(":path")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request is answered here. `reason` is what batch clients read in the reason header."""

    status: int
    message: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """A good answer that needs no server."""

    body: bytes


class Flight(Protocol):
    """A request that has been sent to an endpoint, until it is over."""

    @property
    def response_headers(self) -> tuple[tuple[str, str], ...]: ...

    def responded(self, status: int, served: str) -> None:
        """Response headers are there, from `served` if the gateway says so."""

    def first_token(self) -> None: ...

    def finished(self, usage: Usage, malformed: str) -> None:
        """The answer is complete."""

    def aborted(self) -> None:
        """The stream ended before the answer did."""


class Pick(NamedTuple):
    """Where a request goes: `destination` is one address or several, the best first. `body` replaces the
    request's when it is not None; `streaming` says that the client asked for an event stream."""

    destination: str
    flight: Flight
    headers: tuple[tuple[str, str], ...] = ()
    remove: tuple[str, ...] = ()
    body: bytes | None = None
    scores: bytes = b""
    streaming: bool = False


Decision = Pick | Refusal | OwnAnswer


class Director(Protocol):
    """Who decides. `admit` calls `decided` once, at once or later, and returns how to call the wait off."""

    @property
    def max_body(self) -> int: ...

    def admit(self, request: GatewayRequest, decided: Callable[[Decision], None]) -> Callable[[], None] | None: ...

    def refused(self, status: int) -> None:
        """The exchange itself refused a request."""


class State(Enum):
    HEADERS = auto()  # nothing has come
    BODY = auto()  # collecting it
    DECIDING = auto()
    PICKED = auto()  # the request is on its way
    RESPONSE = auto()
    DONE = auto()


# The same by themselves: members of enumerations are slow to look up, and these are compared at every message.
_HEADERS, _BODY, _DECIDING, _PICKED, _RESPONSE, _DONE = State
_DUPLEX = int(Mode.FULL_DUPLEX_STREAMED)


class StreamInfo(NamedTuple):
    """What the transport knows of a stream: gRPC metadata by name, the port it came to."""

    metadata: Mapping[str, str] = MappingProxyType({})
    port: int = 0


POOL_METADATA = "x-inference-pool"
SERVED_ATTRIBUTE = "upstream.address"
POOL_ATTRIBUTE = "inference_pool"  # what the expression of an attribute must contain


class Exchange:
    """`receive` takes each message of Envoy in order, `closed` the end of the stream, whatever ended it. Answers
    go to `send`, serialised; `finish` is called when no more will come."""

    def __init__(
        self, director: Director, info: StreamInfo, send: Callable[[bytes], None], finish: Callable[[], None]
    ) -> None:
        self._director = director
        self._info = info
        self._send = send
        self._finish = finish
        self._chunks: list[bytes] = []
        self.state = _HEADERS
        self._request_mode = _DUPLEX
        self._response_mode = _DUPLEX
        self._headers = NO_HEADERS
        self._remove: tuple[str, ...] = ()
        self._size = 0
        self._has_body = False
        self._trailers = False  # the request ended by trailers
        self._subset: tuple[str, ...] | None = None
        self._pool = ""
        self._cancel: Callable[[], None] | None = None
        self._body = b""
        self._streaming = False
        self._flight: Flight | None = None
        self._reader: UsageReader | None = None
        self._begun = False

    # Messages in

    def receive(self, data: bytes) -> None:
        """One serialised ProcessingRequest. Raises ValueError when it is none."""
        message = incoming.read(data)
        if self.state is _DONE:
            return
        about = message.about
        if about == incoming.RESPONSE_BODY:
            self._response_body(message.body, message.ends)
        elif about == incoming.REQUEST_BODY:
            self._look_at_metadata(message)
            self._request_body(message.body, message.ends)
        elif about == incoming.REQUEST_HEADERS:
            self._request_headers(message)
        elif about == incoming.RESPONSE_HEADERS:
            self._response_headers(message)
        elif about == incoming.REQUEST_TRAILERS:
            self._request_trailers()
        elif about == incoming.RESPONSE_TRAILERS:
            self._response_trailers()

    def closed(self) -> None:
        """The stream is gone. Everything that the request holds is given back."""
        state, self.state = self.state, _DONE
        self._chunks.clear()
        if self._cancel is not None:
            cancel, self._cancel = self._cancel, None
            cancel()
        if self._flight is not None and state is not _DONE:
            self._flight.aborted()
        self._flight = None

    # The request

    def _request_headers(self, message: Incoming) -> None:
        if self.state is not _HEADERS:
            return
        if message.modes is not None:
            self._request_mode, self._response_mode = message.modes
        raw = message.headers
        self._headers = Headers(raw)
        if not _FORBIDDEN.isdisjoint(raw):
            self._remove = tuple([name for name in messages.CLIENT_MAY_NOT_SEND if name in raw])
        self._pool = self._info.metadata.get(POOL_METADATA, "") or _pool_attribute(message)
        self._look_at_metadata(message)
        self.state = _BODY
        if message.ends:
            self._decide()
        elif self._request_mode == _DUPLEX:
            self._has_body = True
        elif self._request_mode in (Mode.BUFFERED, Mode.BUFFERED_PARTIAL):
            self._has_body = True
            self._send(messages.REQUEST_HEADERS)
        else:
            self._decide()  # the body passes by

    def _look_at_metadata(self, message: Incoming) -> None:
        """The subset hint; a later message's replaces an earlier one's."""
        if message.metadata:
            subset = incoming.addresses_in(message.metadata, messages.SUBSET_METADATA, messages.SUBSET)
            if subset is not None:
                self._subset = subset

    def _request_body(self, chunk: bytes, ends: bool) -> None:
        if self.state is not _BODY:
            if not self._has_body:  # it passes by
                self._send(messages.REQUEST_BODY)
            return
        self._size += len(chunk)
        if self._size > self._director.max_body:
            self.too_large()
            return
        if chunk:
            self._chunks.append(chunk)
        if ends or self._request_mode != _DUPLEX:
            # A buffered body is one message, whole (in partial mode: what fitted).
            self._decide()

    def too_large(self) -> bool:
        """The request's body is over the limit, or a message that holds it is. What a server answers has none:
        in buffered mode it is one message, whatever its size."""
        if self.state not in (_HEADERS, _BODY):
            return False
        self._director.refused(413)
        self._answer(messages.immediate(413, f"body: must be at most {self._director.max_body} bytes"))
        return True

    def _request_trailers(self) -> None:
        if self.state is _BODY:
            self._trailers = True
            self._decide()
        elif not self._has_body or self._request_mode != _DUPLEX:
            self._send(messages.REQUEST_TRAILERS)

    def _decide(self) -> None:
        self.state = _DECIDING
        self._body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        request = GatewayRequest(self._headers, self._body, self._subset, self._pool, self._info.port)
        cancel = self._director.admit(request, self._decided)
        if self.state is _DECIDING:
            self._cancel = cancel

    def _decided(self, decision: Decision) -> None:
        self._cancel = None
        if self.state is not _DECIDING:
            if isinstance(decision, Pick):
                decision.flight.aborted()
            return
        if isinstance(decision, Refusal):
            self._answer(messages.immediate(decision.status, decision.message, reason=decision.reason))
            return
        if isinstance(decision, OwnAnswer):
            self._answer(messages.immediate_json(decision.body))
            return
        self._flight = decision.flight
        self._streaming = decision.streaming
        self.state = _PICKED
        remove = (*self._remove, *decision.remove) if decision.remove else self._remove
        if self._has_body and self._request_mode != _DUPLEX:
            if self._trailers and not self._body:
                # Buffered, without any body: the headers have gone, and only trailers are left to answer.
                self._send(messages.REQUEST_TRAILERS)
                return
            self._send(
                messages.pick_on_body(
                    decision.destination, decision.headers, remove, decision.body, decision.scores
                )
            )
            if self._trailers:
                self._send(messages.REQUEST_TRAILERS)
        else:
            self._send(messages.pick_on_headers(decision.destination, decision.headers, remove, decision.scores))
            if self._has_body:
                body = self._body if decision.body is None else decision.body
                if body or not self._trailers:
                    for message in messages.streamed_request_body(body, end_of_stream=not self._trailers):
                        self._send(message)
                if self._trailers:
                    self._send(messages.REQUEST_TRAILERS)
        self._body = b""
        self._headers = NO_HEADERS

    def _answer(self, message: bytes) -> None:
        self._send(message)
        self.state = _DONE
        self._chunks.clear()
        self._body = b""
        self._finish()

    # The response

    def _response_headers(self, message: Incoming) -> None:
        flight = self._flight
        if flight is None:
            self._send(messages.RESPONSE_HEADERS)
            return
        self.state = _RESPONSE
        headers = Headers(message.headers)
        text = headers.get(":status")
        status = int(text) if text.isdigit() else 0
        content_type = headers.get("content-type").lower()
        encoding = headers.get("content-encoding").strip().lower()
        flight.responded(status, _served(message))
        extra = flight.response_headers
        self._send(messages.response_headers(extra) if extra else messages.RESPONSE_HEADERS)
        self._reader = UsageReader(content_type=content_type, content_encoding=encoding, streaming=self._streaming)
        if message.ends:
            self._over()

    def _response_body(self, chunk: bytes, end: bool) -> None:
        # First pass it on, then look at it.
        if self._response_mode == _DUPLEX:
            for message in messages.streamed_response_body(chunk, end_of_stream=end):
                self._send(message)
        else:
            self._send(messages.RESPONSE_BODY)
        reader = self._reader
        if reader is not None:
            reader.feed(chunk)
            if reader.begun and not self._begun and self._flight is not None:
                self._begun = True
                self._flight.first_token()
        if end:
            self._over()

    def _response_trailers(self) -> None:
        self._send(messages.RESPONSE_TRAILERS)
        self._over()

    def _over(self) -> None:
        """The answer is complete. Trailers may still come after it; they count for nothing more."""
        flight, self._flight = self._flight, None
        reader, self._reader = self._reader, None
        if flight is not None:
            usage = NO_USAGE if reader is None else reader.finish()
            flight.finished(usage, "" if reader is None else reader.malformed)


def _served(message: Incoming) -> str:
    """Who answered: by the protocol's metadata, else by the attribute that Envoy itself can send."""
    said = incoming.text_in(message.metadata, messages.METADATA, messages.SERVED) if message.metadata else ""
    return said or next((text for name, text in message.attributes() if name == SERVED_ATTRIBUTE), "")


def _pool_attribute(message: Incoming) -> str:
    """What an attribute that the gateway was told to send says of the pool."""
    return next((text for name, text in message.attributes() if POOL_ATTRIBUTE in name and text), "")
