"""Continuous batching, as vLLM schedules it, in steps of simulated time.

One `Engine` serves two uses: the live server sleeps through each step, a simulation adds it to its clock.
The engine itself reads no clock and draws no randomness.

Each step runs one iteration of the model. Running sequences come first: one token for each that decodes,
a chunk of the prompt for each that is still being read, within the token budget. Then waiting requests
are admitted, first come first served, while the batch, the budget and the KV cache have room. When a
running sequence needs a block and none is free, the youngest one is preempted: it loses its blocks and
waits at the head of the queue to be computed again.

Time of a step (fits of decode and prefill, see api/data):
    base + per_sequence * decoding + per_sequence_token * (KV tokens of the decoding) + per_prefill * (prompt tokens read)
where base is that of decode, or of prefill when nothing decodes.
"""  # noqa: E501

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParameters:
    """What an engine can do. Times in seconds, cache in blocks of 16 tokens."""

    decode_base: float
    decode_per_sequence: float
    decode_per_sequence_token: float
    prefill_base: float
    prefill_per_token: float
    kv_blocks: int
    max_sequences: int = 256
    max_batched_tokens: int = 8192
    max_model_tokens: int = 131_072


@dataclass(slots=True)
class Request:
    """One request inside the engine, whether it runs or waits."""

    id: str
    prompt_tokens: int
    output_tokens: int
    prompt_hashes: Sequence[int]  # of each full block of the prompt, each covering all before it
    arrived: float
    computed: int = 0  # tokens whose KV entries exist
    produced: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    shared: list[int] = field(default_factory=list)  # hashes of cached blocks that it holds
    private: int = 0  # blocks of its own
    first_token: float | None = None
    last_token: float | None = None
    preemptions: int = 0

    @property
    def to_compute(self) -> int:
        """Tokens that must be in the cache before the next one can come out."""
        return self.prompt_tokens + self.produced - self.computed


@dataclass(frozen=True, slots=True)
class Token:
    """An output token that a step brought forth. Times in seconds."""

    id: str
    index: int  # 0 is the first
    since_previous: float  # since arrival for the first token
    finished: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What one iteration did, and how long it took; tokens come out at its end."""

    duration: float
    tokens: tuple[Token, ...]
    prefill_tokens: int
    decoding: int
    preempted: int


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


class Engine:
    """The state of one engine: who waits, who runs, what the KV cache holds."""

    def __init__(self, parameters: EngineParameters) -> None:
        self.parameters = parameters
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counters = Counters()
        self._private = 0
        self._held: dict[int, int] = {}  # cached block in use: holders
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached block that nobody holds, oldest first

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that running sequences hold; cached blocks that nobody holds are free."""
        return (self._private + len(self._held)) / self.parameters.kv_blocks

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(
        self, id: str, prompt_tokens: int, output_tokens: int, now: float, prompt_hashes: Sequence[int] = ()
    ) -> None:
        """Queue a request. Raises ValueError for one that can never fit."""
        needed = prompt_tokens + output_tokens
        parameters = self.parameters
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        if needed > parameters.max_model_tokens or _blocks(needed) > parameters.kv_blocks:
            limit = min(parameters.max_model_tokens, parameters.kv_blocks * BLOCK_TOKENS)
            raise ValueError(
                f"this model's maximum context length is {limit} tokens; {prompt_tokens} in the prompt and "
                f"{output_tokens} for the completion were requested"
            )
        self.waiting.append(Request(id, prompt_tokens, output_tokens, prompt_hashes, now))

    def abort(self, id: str) -> bool:
        """Forget a request whose client left; False when it is not here."""
        for sequence in self.running:
            if sequence.id == id:
                self._release(sequence)
                self.running.remove(sequence)
                return True
        for sequence in self.waiting:
            if sequence.id == id:
                self.waiting.remove(sequence)
                return True
        return False

    def step(self, now: float) -> Step:
        """Run one iteration that begins at `now`. With nothing to do it takes no time."""
        parameters = self.parameters
        budget = parameters.max_batched_tokens
        prefill = decoding = decode_tokens = preempted = 0
        advanced: list[tuple[Request, int]] = []
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            amount = min(budget, sequence.to_compute)
            while not self._reserve(sequence, amount):
                victim = self.running[-1]
                self._preempt(victim)
                preempted += 1
                if victim is sequence:
                    break
            else:
                advanced.append((sequence, amount))
                budget -= amount
                index += 1
                continue
            break
        while self.waiting and not preempted and budget > 0 and len(self.running) < parameters.max_sequences:
            sequence = self.waiting[0]
            self._find_prefix(sequence)
            amount = min(budget, sequence.to_compute)
            if not self._reserve(sequence, amount):
                self._release(sequence)
                break
            self.waiting.popleft()
            self.running.append(sequence)
            self.counters.prefix_queries += sequence.prompt_tokens
            self.counters.prefix_hits += sequence.cached_tokens
            advanced.append((sequence, amount))
            budget -= amount
        for sequence, amount in advanced:
            if sequence.produced and amount == 1:
                decoding += 1
                decode_tokens += sequence.computed
            else:
                prefill += amount
        if not advanced:
            return Step(0.0, (), 0, 0, preempted)
        duration = (
            (parameters.decode_base if decoding else parameters.prefill_base)
            + parameters.decode_per_sequence * decoding
            + parameters.decode_per_sequence_token * decode_tokens
            + parameters.prefill_per_token * prefill
        )
        tokens = tuple(
            token
            for sequence, amount in advanced
            if (token := self._advance(sequence, amount, now + duration)) is not None
        )
        self.counters.preemptions += preempted
        self.counters.generation_tokens += len(tokens)
        return Step(duration, tokens, prefill, decoding, preempted)

    def _advance(self, sequence: Request, amount: int, end: float) -> Token | None:
        """Account for computed tokens; the token that comes out when all are computed."""
        before = sequence.computed
        sequence.computed += amount
        self._share_full_blocks(sequence, before)
        if sequence.to_compute > 0:
            return None
        since = end - (sequence.arrived if sequence.last_token is None else sequence.last_token)
        if sequence.first_token is None:
            sequence.first_token = end
            self.counters.prompt_tokens += sequence.prompt_tokens
        sequence.last_token = end
        sequence.produced += 1
        finished = sequence.produced >= sequence.output_tokens
        if finished:
            self._release(sequence)
            self.running.remove(sequence)
        return Token(sequence.id, sequence.produced - 1, since, finished)

    def _find_prefix(self, sequence: Request) -> None:
        """Take the longest cached prefix; at least one token is always computed."""
        hits = 0
        for hash_ in sequence.prompt_hashes[: (sequence.prompt_tokens - 1) // BLOCK_TOKENS]:
            if hash_ in self._held:
                self._held[hash_] += 1
            elif hash_ in self._idle:
                del self._idle[hash_]
                self._held[hash_] = 1
            else:
                break
            sequence.shared.append(hash_)
            hits += 1
        sequence.cached_tokens = sequence.computed = hits * BLOCK_TOKENS

    def _reserve(self, sequence: Request, amount: int) -> bool:
        """Blocks for `amount` more tokens; False when there are not enough."""
        more = _blocks(sequence.computed + amount) - len(sequence.shared) - sequence.private
        if more <= 0:
            return True
        used = self._private + len(self._held)
        if used + more > self.parameters.kv_blocks:
            return False
        while used + more + len(self._idle) > self.parameters.kv_blocks:
            self._idle.popitem(last=False)
        self._private += more
        sequence.private += more
        return True

    def _share_full_blocks(self, sequence: Request, before: int) -> None:
        """Blocks of the prompt that are full now can serve others."""
        end = min(sequence.computed // BLOCK_TOKENS, len(sequence.prompt_hashes))
        for index in range(max(before // BLOCK_TOKENS, len(sequence.shared)), end):
            hash_ = sequence.prompt_hashes[index]
            if hash_ in self._held or len(sequence.shared) != index:
                return  # somebody else computed the same at the same time: the copy stays private
            self._idle.pop(hash_, None)
            self._held[hash_] = 1
            sequence.shared.append(hash_)
            sequence.private -= 1
            self._private -= 1

    def _release(self, sequence: Request) -> None:
        self._private -= sequence.private
        sequence.private = 0
        # The end of a prefix is of use only together with its beginning: it is evicted first.
        for hash_ in reversed(sequence.shared):
            self._held[hash_] -= 1
            if not self._held[hash_]:
                del self._held[hash_]
                self._idle[hash_] = None
        sequence.shared.clear()
        sequence.computed = 0

    def _preempt(self, sequence: Request) -> None:
        self._release(sequence)
        sequence.preemptions += 1
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
