from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.sim.engine import BLOCK_TOKENS, Engine, EngineParameters
from tidemill.sim.presets import StartKind, StartupMixture, parse_startup, presets, start_seconds


def parameters(**changes: object) -> EngineParameters:
    base = {
        "decode_base": 0.01, "decode_per_sequence": 0.001, "decode_per_sequence_token": 1e-5,
        "prefill_base": 0.005, "prefill_per_token": 1e-4, "kv_blocks": 100,
    }  # fmt: skip
    return EngineParameters(**{**base, **changes})


def drain(engine: Engine, now: float = 0.0) -> tuple[float, list]:
    tokens = []
    for _ in range(100_000):
        if not engine.busy:
            return now, tokens
        step = engine.step(now)
        now += step.duration
        tokens += step.tokens
    raise AssertionError("the engine does not come to an end")


def test_times_of_one_request_by_hand() -> None:
    engine = Engine(parameters())
    engine.submit("a", 100, 3, 0.0)
    first = engine.step(0.0)
    assert first.duration == pytest.approx(0.005 + 100 * 1e-4)
    assert [(t.index, t.finished) for t in first.tokens] == [(0, False)]
    second = engine.step(first.duration)
    assert second.duration == pytest.approx(0.01 + 0.001 + 100 * 1e-5)
    assert (second.decoding, second.prefill_tokens) == (1, 0)
    third = engine.step(first.duration + second.duration)
    assert third.tokens[0].finished
    assert not engine.busy
    assert engine.kv_usage == 0


def test_a_long_prompt_is_read_in_chunks() -> None:
    engine = Engine(parameters(max_batched_tokens=64))
    engine.submit("a", 150, 1, 0.0)
    assert [len(engine.step(0.0).tokens) for _ in range(3)] == [0, 0, 1]


def test_waiting_counts_what_does_not_fit() -> None:
    engine = Engine(parameters(kv_blocks=20))
    for name in "abc":
        engine.submit(name, 8 * BLOCK_TOKENS, 8, 0.0)
    engine.step(0.0)
    assert (len(engine.running), len(engine.waiting)) == (2, 1)
    assert engine.kv_usage == pytest.approx(16 / 20)


def test_preemption_gives_everybody_their_tokens() -> None:
    engine = Engine(parameters(kv_blocks=10))
    engine.submit("a", 60, 60, 0.0)
    engine.submit("b", 60, 60, 0.0)
    _, tokens = drain(engine)
    assert engine.counters.preemptions > 0
    for name in "ab":
        assert [t.index for t in tokens if t.id == name] == list(range(60))


def test_a_shared_prefix_is_computed_once() -> None:
    engine = Engine(parameters())
    hashes = list(range(6))
    engine.submit("a", 6 * BLOCK_TOKENS + 5, 2, 0.0, hashes)
    now, _ = drain(engine)
    engine.submit("b", 6 * BLOCK_TOKENS + 5, 2, now, hashes)
    step = engine.step(now)
    assert step.prefill_tokens == 5
    assert engine.counters.prefix_hits == 6 * BLOCK_TOKENS
    drain(engine, now)
    assert engine.kv_usage == 0


def test_what_can_never_fit_is_refused() -> None:
    engine = Engine(parameters(kv_blocks=4))
    with pytest.raises(ValueError, match="maximum context length is 64 tokens"):
        engine.submit("a", 60, 10, 0.0)


def test_abort_frees_everything() -> None:
    engine = Engine(parameters())
    engine.submit("a", 100, 50, 0.0, list(range(6)))
    engine.submit("b", 100, 50, 0.0)
    engine.step(0.0)
    assert engine.abort("a")
    assert engine.abort("b")
    assert not engine.abort("b")
    assert (engine.kv_usage, engine.busy) == (0, False)


requests = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 40), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
)


@settings(max_examples=60)
@given(requests, st.integers(20, 60), st.integers(16, 300), st.randoms(use_true_random=False))
def test_blocks_are_never_lost_nor_overdrawn(items, blocks: int, budget: int, rng: random.Random) -> None:
    engine = Engine(parameters(kv_blocks=blocks, max_batched_tokens=budget))
    want: dict[str, int] = {}
    for number, (prompt, output, family, _) in enumerate(items):
        if prompt + output > blocks * BLOCK_TOKENS:
            continue
        hashes = [hash((family, i)) for i in range(prompt // BLOCK_TOKENS)]
        engine.submit(str(number), prompt, output, 0.0, hashes)
        want[str(number)] = output
    got: dict[str, int] = dict.fromkeys(want, 0)
    now = 0.0
    for _ in range(20_000):
        if not engine.busy:
            break
        step = engine.step(now)
        assert 0 <= engine.kv_usage <= 1
        now += step.duration
        for token in step.tokens:
            got[token.id] += 1
        if rng.random() < 0.02 and engine.running:
            victim = rng.choice(engine.running).id
            engine.abort(victim)
            want[victim] = got[victim]
    assert not engine.busy
    assert got == want
    assert engine.kv_usage == 0


def test_presets_hold_the_fits() -> None:
    known = presets()
    assert "llama-3.1-70b/l40s" not in known  # the fit that is no prediction
    h100 = known["llama-3.1-8b/h100"].parameters
    assert h100.decode_base == pytest.approx(6.3694994e-3)
    assert h100.prefill_per_token == pytest.approx(0.01957e-3)
    assert {p.accelerator for p in known.values()} == {"H100", "A100", "L40S", "H200"}


def test_start_up_times_are_a_mixture() -> None:
    assert start_seconds() == {
        StartKind.HOT: 4.0, StartKind.SNAPSHOT: 18.0, StartKind.WARM: 85.3, StartKind.COLD: 277.8,
    }  # fmt: skip
    mixture = StartupMixture({StartKind.HOT: 3, StartKind.COLD: 1})
    rng = random.Random(1)
    drawn = [mixture.draw(rng) for _ in range(2000)]
    hot = sum(d < 20 for d in drawn) / len(drawn)
    assert hot == pytest.approx(0.75, abs=0.05)
    assert mixture.draw(random.Random(5)) == mixture.draw(random.Random(5))


@pytest.mark.parametrize(("text", "low", "high"), [("2s", 2, 2), ("warm", 30, 150), ("hot=1,cold=0", 0.4, 10)])
def test_start_up_times_as_users_write_them(text: str, low: float, high: float) -> None:
    assert low <= parse_startup(text, random.Random(3)) <= high


@pytest.mark.parametrize("text", ["tepid", "hot=x", "hot=0", "hot=-1,cold=1", ""])
def test_start_up_times_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        parse_startup(text, random.Random(3))
