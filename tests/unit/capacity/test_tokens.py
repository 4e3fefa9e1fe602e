"""Capacity in tokens: the contract's worked numbers, and what users of comparable autoscalers ran into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal

import pytest

from tidemill.capacity.allocation import allocate
from tidemill.capacity.engine_flags import EngineFlags, engine_flags
from tidemill.capacity.inventory import UNLIMITED
from tidemill.capacity.needs import Need
from tidemill.capacity.report import CapacityReport, NoReport, Thresholds
from tidemill.capacity.tokens import BoundKey, CapacityMemory, TokenAnalysis, analyze
from tidemill.capacity.types import Role, VariantState
from tidemill.capacity.view import EngineLoad, RequestShape, RoleView, UpstreamQueue

MODEL = "serving/m"
TOKENS = 100_000


def D(value: float | str) -> Decimal:
    return Decimal(str(value))


def variant(
    name: str = "a", current: int = 1, ready: int | None = None, *, role: Role = Role.BOTH, gpus: int = 1
) -> VariantState:
    ready = current if ready is None else ready
    return VariantState(
        name=name, cost=D(10), current=current, desired=current, reporting=ready, ready=ready, role=role,
        accelerator="A100", gpus=gpus,
    )  # fmt: skip


def load(kv: float, queue: float, replica: str = "p", *, of: str = "a", tokens: int = TOKENS) -> EngineLoad:
    return EngineLoad(variant=of, replica=replica, kv_usage=D(kv), queue_length=D(queue), kv_tokens=tokens)


def look(
    loads: Sequence[EngineLoad],
    *variants: VariantState,
    shape: RequestShape | None = None,
    upstream: UpstreamQueue | None = None,
    memory: CapacityMemory | None = None,
    flags: EngineFlags | None = None,
    role: Role = Role.BOTH,
) -> TokenAnalysis:
    view = RoleView(
        model=MODEL, role=role, variants=variants, engines=tuple(loads), shape=shape or RequestShape(),
        upstream=upstream or UpstreamQueue(), flags={} if flags is None else {v.name: flags for v in variants},
    )  # fmt: skip
    return analyze(view, memory or CapacityMemory())


def report(analysis: TokenAnalysis) -> CapacityReport:
    assert isinstance(analysis.report, CapacityReport)
    return analysis.report


def desired(analysis: TokenAnalysis, *variants: VariantState, role: Role = Role.BOTH) -> list[int]:
    need = Need(model=MODEL, role=role, variants=variants, votes=(report(analysis),))
    found = allocate([need], UNLIMITED).replicas
    return [found[MODEL, v.name] for v in variants]


def near(value: Decimal) -> object:
    return pytest.approx(value, abs=D(0.05))


class TestWorkedNumbers:
    """contract/autoscaler.md, V2."""

    def test_demand_and_memory_bound_of_a_replica(self) -> None:
        found = report(look([load(0.5, 2)], variant(), shape=RequestShape(input_tokens=D(1000))))
        assert (found.demand, found.per_replica["a"]) == (52_000, 80_000)

    def test_compute_bound_derived_from_flags(self) -> None:
        shape = RequestShape(input_tokens=D(1000), output_tokens=D(200))
        found = report(look([load(0.1, 0, tokens=1_000_000)], variant(), shape=shape, flags=EngineFlags()))
        assert found.per_replica["a"] == 256 * 1100

    def test_the_derived_bound_counts_batched_tokens(self) -> None:
        """I 512, O 256, B 8192: n is 256 (of 2730.7), k2 163,840."""
        shape = RequestShape(input_tokens=D(512), output_tokens=D(256))
        found = report(look([load(0.1, 0, tokens=1_000_000)], variant(), shape=shape, flags=EngineFlags()))
        assert found.per_replica["a"] == 163_840

    def test_up_by_one(self) -> None:
        two = variant(current=2)
        found = report(look([load(0.75, 0, "p1"), load(0.75, 0, "p2")], two))
        assert (found.supply, found.demand) == (160_000, 150_000)
        assert found.required == near(D(16470.6))
        assert desired(look([load(0.75, 0, "p1"), load(0.75, 0, "p2")], two), two) == [3]

    def test_down_by_one(self) -> None:
        two = variant(current=2)
        found = look([load(0.2, 0, "p1"), load(0.2, 0, "p2")], two)
        assert report(found).spare == near(D(102857.1))
        assert desired(found, two) == [1]

    def test_a_demand_that_just_fits_needs_nothing(self) -> None:
        """0.85 of 80,000 is 68,000: at the threshold is not above it."""
        assert report(look([load(0.68, 0)], variant())).required == 0

    def test_queue_upstream_counts_bytes_and_hits(self) -> None:
        """Size 10, 40,000 bytes, hit rate 0.25, I 1,000, O 256: 7,500 in and 2,560 out."""
        shape = RequestShape(input_tokens=D(1000), output_tokens=D(256), hit_rate=D(0.25))
        queue = UpstreamQueue(D(10), D(40_000))
        assert report(look([load(0, 0)], variant(), shape=shape, upstream=queue)).demand == 10_060
        prefill = variant(role=Role.PREFILL)
        found = look([load(0, 0)], prefill, shape=shape, upstream=queue, role=Role.PREFILL)
        assert report(found).demand == 7_500

    def test_pending_replicas_are_anticipated(self) -> None:
        """1 ready and 1 pending of 12,800, demand 20,000: nothing is missing; without the pending one 10,729.4."""
        tokens = 16_000
        both, alone = variant(current=2, ready=1), variant(current=1)
        loads = [
            load(1, 0, tokens=tokens),
        ]
        thresholds = Thresholds()
        assert report(look(loads, both)).required == 0
        found = replace(report(look(loads, alone)), demand=D(20_000), thresholds=thresholds)
        assert found.required == near(D(10729.4))


class TestCases:
    @pytest.mark.parametrize(("queue", "last", "demand", "spare"), [
        (0, None, 8_000, 308_571.4), (2, 1000, 10_000, 305_714.3),
    ])  # fmt: skip
    def test_A03_an_undefined_average_hurts_only_what_needs_it(
        self, queue: int, last: int | None, demand: int, spare: float
    ) -> None:
        four = variant(current=4)
        loads = [load(0.02, queue if i == 0 else 0, f"p{i}") for i in range(4)]
        shape = RequestShape().or_last(RequestShape(input_tokens=None if last is None else D(last)))
        found = look(loads, four, shape=shape)
        assert report(found).demand == demand
        assert report(found).spare == near(D(spare))
        assert desired(found, four) == [1]
        assert "NaN" not in str(report(found))

    def test_A03_waiting_requests_of_unknown_length_hold(self) -> None:
        found = look([load(0.02, 2)], variant())
        assert isinstance(found.report, NoReport)
        assert found.report.holds

    @pytest.mark.parametrize(("requests", "replicas"), [(30, 2), (0, 1)])
    def test_A11_the_queue_at_the_picker_counts(self, requests: int, replicas: int) -> None:
        shape = RequestShape(input_tokens=D(1000), output_tokens=D(200), hit_rate=D(0))
        found = look([load(0.4, 0)], variant(), shape=shape, upstream=UpstreamQueue(D(requests)))
        if requests:
            assert report(found).demand == 76_000
            assert report(found).required == near(D(9411.8))
        assert desired(found, variant()) == [replicas]

    def test_A13_every_rank_of_a_pod_is_capacity(self) -> None:
        seven = variant(current=7)
        loads = [load(0.6, 0, f"p{pod}") for pod in range(7) for _ in range(8)]
        found = look(loads, seven)
        assert report(found).supply == 4_480_000
        assert (report(found).required, report(found).spare) == (0, 0)
        assert desired(found, seven) == [7]
        more = [load(0.6, 0, f"p{p}") for p in range(7) for _ in range(8)]
        grown = replace(found, report=replace(report(look(more, seven)), demand=D(4_000_000)))
        assert report(grown).required == near(D(225_882.4))
        assert desired(grown, seven) == [8]

    def test_A14_the_compute_bound_outlives_the_queue(self) -> None:
        memory = CapacityMemory()
        key, silent = BoundKey(MODEL, "A100", 1, "medium"), NoReport("", "", holds=False)
        for _ in range(10):
            memory.learn(MODEL, TokenAnalysis(report=silent, bounds_seen=((key, D(16_000)),)))
        ten = variant(current=10)
        shape = RequestShape(input_tokens=D(1000), output_tokens=D(250))
        found = look([load(0.13, 0, f"p{i}") for i in range(10)], ten, shape=shape, memory=memory)
        assert report(found).per_replica["a"] == 16_000
        assert (report(found).demand, report(found).required, report(found).spare) == (130_000, 0, 0)
        assert desired(found, ten) == [10]

    def test_A14_while_it_queues_what_it_holds_is_the_bound(self) -> None:
        shape = RequestShape(input_tokens=D(1000), output_tokens=D(250))
        found = look([load(0.16, 8)], variant(), shape=shape)
        assert (report(found).demand, report(found).per_replica["a"]) == (24_000, 16_000)
        assert report(found).required == near(D(12_235.3))
        assert found.bounds_seen == ((BoundKey(MODEL, "A100", 1, "medium"), D(16_000)),)
        assert desired(found, variant()) == [2]

    @pytest.mark.parametrize(("queue", "demand", "replicas"), [(40, 135_000, 2), (80, 175_000, 3)])
    def test_A19_an_unready_pod_is_anticipated(self, queue: int, demand: int, replicas: int) -> None:
        two = variant(current=2, ready=1)
        found = look([load(0.95, queue)], two, shape=RequestShape(input_tokens=D(1000)))
        assert report(found).demand == demand
        assert desired(found, two) == [replicas]

    def test_W8_waiting_requests_are_demand(self) -> None:
        """Running is capped at one a pod and nine are deferred: little of the cache is used, much is asked for."""
        shape = RequestShape(input_tokens=D(12_000))
        found = look([load(0.1, 9)], variant(), shape=shape)
        assert report(found).demand == 10_000 + 9 * 12_000
        assert desired(found, variant())[0] > 1

    def test_AS2_capacity_is_of_each_engine(self) -> None:
        small = report(look([load(0.1, 0, tokens=6250 * 16)], variant()))
        large = report(look([load(0.1, 0, tokens=25_750 * 16)], variant()))
        assert (small.per_replica["a"], large.per_replica["a"]) == (80_000, 412_000 * D("0.8"))

    def test_AS2_a_cache_of_unknown_size_is_not_guessed(self) -> None:
        engine = EngineLoad(variant="a", replica="dep-a-0", kv_usage=D(0.5), queue_length=D(0))
        found = look([engine], variant()).report
        assert isinstance(found, NoReport)
        assert found.holds
        assert "vllm:cache_config_info" in found.reason
        assert "dep-a-0" in found.reason


class TestCapacityWithoutReplicas:
    def test_a_variant_without_replicas_keeps_what_was_measured(self) -> None:
        memory = CapacityMemory()
        memory.learn(MODEL, look([load(0.1, 0, of="b", tokens=50_000)], variant("b")))
        found = report(look([load(0.1, 0)], variant(), variant("b", current=0), memory=memory))
        assert found.per_replica == {"a": 80_000, "b": 40_000}

    def test_or_has_that_of_its_like(self) -> None:
        found = report(look([load(0.1, 0)], variant(), variant("b", current=0), variant("c", current=0, gpus=2)))
        assert found.per_replica == {"a": 80_000, "b": 80_000}

    def test_the_median_over_replicas_counts(self) -> None:
        three = variant(current=3)
        loads = [load(0.1, 0, f"p{i}", tokens=t) for i, t in enumerate((100_000, 100_000, 10_000))]
        assert report(look(loads, three)).per_replica["a"] == 80_000


class TestEngineFlags:
    @pytest.mark.parametrize(
        "container",
        [
            {"args": ["--max-num-seqs=64", "--max_num_batched_tokens", "4096"]},
            {"command": ["vllm", "serve", "m"], "args": ["--max_num_seqs", "64", "--max-num-batched-tokens=4096"]},
            {"command": ["sh", "-c", "exec vllm serve m --max-num-seqs 64 \\\n  --max-num-batched-tokens=4096"]},
            {
                "command": ["/bin/bash", "-lc"],
                "args": ["vllm serve m --max-num-seqs=64 --max-num-batched-tokens 4096"],
            },
        ],
    )
    def test_forms(self, container: dict[str, object]) -> None:
        found = engine_flags({"containers": [container]})
        assert (found.max_num_seqs, found.batched_tokens) == (64, 4096)

    def test_tokens_of_a_step_without_a_flag(self) -> None:
        v0 = {"env": [{"name": "VLLM_USE_V1", "value": "0"}]}
        plain = {"args": ["--no-enable-chunked-prefill", "--max-model-len", "32768"]}
        assert engine_flags({}).batched_tokens == 8192
        assert engine_flags({"containers": [v0]}).batched_tokens == 2048
        assert engine_flags({"containers": [plain]}).batched_tokens == 32_768

    def test_what_is_no_number_counts_as_absent(self) -> None:
        found = engine_flags({"containers": [{"args": ["--max-num-seqs=many", "--enforce-eager"]}]})
        assert (found.max_num_seqs, found.enforce_eager) == (256, True)
