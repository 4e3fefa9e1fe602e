"""The prefix index: whose cache, which blocks, and how much memory."""

from __future__ import annotations

import os
import random
import struct
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.picker_rig import SMALL_BLOCKS, A, B, Rig, endpoint, headers_of, post, response_body, response_headers

from tidemill.picker.scheduling.prefix import DEFAULT_CAPACITY, PrefixIndex, Prompt


def serve(rig: Rig, prompt: Any, *, to: str, model: str = "m", **body: Any) -> None:
    """A request that the gateway's hint sends to an endpoint, served there."""
    talk = rig.ask(*post("/v1/completions", {"model": model, "prompt": prompt, **body}, subset=[to]))
    assert talk.destination == to
    talk.send(response_headers())
    talk.send(response_body(b"{}", eos=True))
    talk.close()


def matched(rig: Rig, prompt: list[int], *, model: str = "m", salt: str = "") -> dict[str, int]:
    prefix = rig.pool.scheduler.prefix
    blocks = prefix.blocks(Prompt((struct.pack(f"<{len(prompt)}I", *prompt),)), model=model, salt=salt)
    counts = prefix.matched(blocks, 64)
    return {address: 0 if counts is None else int(counts[rig.seat(address).row]) for address in (A, B)}


@pytest.fixture
def rig() -> Rig:
    made = Rig(config=SMALL_BLOCKS)
    made.endpoints(A, B)
    for address in (A, B):
        made.read(address, waiting=0, kv_usage=0.0)
    return made


TOKENS = list(range(1, 65))


class TestP32:
    def test_isolation(self, rig: Rig) -> None:
        serve(rig, TOKENS, to=A)
        assert matched(rig, TOKENS) == {A: 4, B: 0}
        assert matched(rig, TOKENS, model="lora-1") == {A: 0, B: 0}
        assert matched(rig, TOKENS, salt="t1") == {A: 0, B: 0}
        serve(rig, TOKENS, to=B, cache_salt="t1")
        assert matched(rig, TOKENS, salt="t1") == {A: 0, B: 4}
        assert matched(rig, [99, *TOKENS[1:]]) == {A: 0, B: 0}
        assert matched(rig, [*TOKENS[:63], 99]) == {A: 3, B: 0}

    @pytest.mark.parametrize("prompt", [TOKENS[:15], [], ""])
    def test_under_one_block_the_score_is_0_and_load_decides(self, rig: Rig, prompt: Any) -> None:
        serve(rig, TOKENS, to=A)
        rig.read(A, waiting=3, kv_usage=0.5)
        assert rig.complete({"model": "m", "prompt": prompt}) == B

    def test_a_million_tokens(self, rig: Rig) -> None:
        prompt = Prompt((os.urandom(4_000_000),))
        begun = time.perf_counter()
        blocks = rig.pool.scheduler.prefix.blocks(prompt, model="m", salt="")
        assert blocks.total == 131_072 // 16
        assert time.perf_counter() - begun < 1.0  # bounded work; the benchmark measures it

    def test_memory_is_bounded(self) -> None:
        index = PrefixIndex(block_tokens=16)
        for _ in range(100):
            index.served(index.blocks(Prompt((os.urandom(64 * 2000),)), model="m", salt=""), 3)
        assert index.size_of(3) == DEFAULT_CAPACITY
        assert len(index._holders) == DEFAULT_CAPACITY
        index.forget(3)
        assert len(index) == 0
        assert not index._holders

    def test_e8_all_endpoints_together_are_bounded_too(self) -> None:
        index = PrefixIndex(block_tokens=1, capacity=1000, most=5000)
        for _ in range(3):
            for row in range(20):
                index.served(index.blocks(Prompt((os.urandom(4 * 800),)), model="m", salt=""), row)
        assert len(index) <= 5000
        assert all(index.size_of(row) == 250 for row in range(20))

    def test_the_engines_own_capacity_counts(self, rig: Rig) -> None:
        rig.read(A, waiting=0, kv_usage=0.0, kv_tokens=32)
        serve(rig, TOKENS, to=A)
        # What is kept is the front of the prompt: it is of use without the rest.
        assert matched(rig, TOKENS) == {A: 2, B: 0}


class TestP03:
    @pytest.mark.parametrize(
        "prompt", ["hi", ["hi", "ho"], TOKENS, [TOKENS[:32], TOKENS[32:]], "", [], [[]], None, 7]
    )
    def test_every_shape_is_picked_for(self, rig: Rig, prompt: Any) -> None:
        assert rig.complete({"model": "m", "prompt": prompt}) in (A, B)

    def test_prompts_of_one_request_are_chains_of_their_own(self, rig: Rig) -> None:
        serve(rig, TOKENS, to=A)
        assert rig.complete({"model": "m", "prompt": TOKENS}) == A
        prefix = rig.pool.scheduler.prefix
        two = tuple(struct.pack("<32I", *half) for half in (TOKENS[:32], TOKENS[32:]))
        blocks = prefix.blocks(Prompt(two), model="m", salt="")
        assert blocks.total == 4
        counts = prefix.matched(blocks, 64)
        assert counts is not None
        assert counts[rig.seat(A).row] == 2


@pytest.mark.parametrize("said_by", ["metadata", "attribute"])
def test_affinity_is_credited_where_it_was_served(rig: Rig, said_by: str) -> None:
    """The gateway went on to the second endpoint of the list."""
    headers = response_headers(served=B if said_by == "metadata" else "")
    if said_by == "attribute":
        fields = headers.attributes["envoy.filters.http.ext_proc"].fields
        fields["upstream.address_of_another"].string_value = A
        fields["upstream.address"].string_value = B
    talk = rig.ask(*post("/v1/completions", {"model": "m", "prompt": TOKENS}, subset=[A]))
    assert rig.in_flight(A)[0] == 1
    talk.send(headers)
    assert (rig.in_flight(A)[0], rig.in_flight(B)[0]) == (0, 1)
    talk.send(response_body(b"{}", eos=True))
    assert rig.total_in_flight() == (0, 0)
    assert matched(rig, TOKENS) == {A: 0, B: 4}


def test_a_failed_answer_is_credited_to_nobody(rig: Rig) -> None:
    rig.complete({"model": "m", "prompt": TOKENS}, status=500)
    assert matched(rig, TOKENS) == {A: 0, B: 0}


def test_the_hit_ratio_is_observed(rig: Rig) -> None:
    serve(rig, TOKENS, to=A)
    rig.complete({"model": "m", "prompt": TOKENS})
    assert rig.value("llm_d_epp_prefix_indexer_hit_ratio_sum") == 1.0
    assert rig.value("inference_extension_prefix_indexer_hit_ratio_count") == 2


def test_p22_a_restart_in_place_empties_the_rows(rig: Rig) -> None:
    serve(rig, TOKENS, to=A)
    rig.endpoints(endpoint(A, restarts=1), B)
    assert matched(rig, TOKENS) == {A: 0, B: 0}
    serve(rig, TOKENS, to=A)
    rig.read(A, waiting=0, started=100.0)
    assert matched(rig, TOKENS)[A] == 4
    rig.read(A, waiting=0, started=200.0)
    assert matched(rig, TOKENS)[A] == 0


def test_a_namesake_inherits_nothing(rig: Rig) -> None:
    serve(rig, TOKENS, to=A)
    rig.endpoints(endpoint(A, uid="another"), B)
    assert matched(rig, TOKENS) == {A: 0, B: 0}


def test_no_session_header_unless_asked_for(rig: Rig) -> None:
    talk = rig.ask(*post("/v1/completions", {"model": "m", "prompt": "x"}))
    (answer,) = talk.send(response_headers())
    assert headers_of(answer.response_headers.response.header_mutation) == {}


@settings(max_examples=60)
@given(st.integers(0, 10_000))
def test_the_index_agrees_with_a_plain_model(seed: int) -> None:
    """Random prompts of few distinct blocks, served by random rows, some of them forgotten."""
    rng = random.Random(seed)
    index = PrefixIndex(block_tokens=1, capacity=10_000)
    model: dict[int, set[tuple[bytes, ...]]] = {}
    rows = rng.sample(range(200), 30)
    for _ in range(60):
        prompt = [bytes([rng.randrange(2)]) * 4 for _ in range(rng.randrange(8))]
        blocks = index.blocks(Prompt((b"".join(prompt),)), model="m", salt="")
        expected = np.zeros(200, dtype=np.int64)
        for row, held in model.items():
            while expected[row] < len(prompt) and tuple(prompt[: expected[row] + 1]) in held:
                expected[row] += 1
        found = index.matched(blocks, 200)
        assert (np.zeros(200) if found is None else found).tolist() == expected.tolist()
        row = rng.choice(rows)
        if rng.random() < 0.1:
            index.forget(row)
            model.pop(row, None)
        else:
            for served_row in rng.sample(rows, rng.choice((1, 1, 20))):
                index.served(blocks, served_row)
                held = model.setdefault(served_row, set())
                held.update(tuple(prompt[: i + 1]) for i in range(len(prompt)))
