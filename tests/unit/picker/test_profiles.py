"""Configurations: what is refused and how it is said; filters; disaggregation."""

from __future__ import annotations

import os

import pytest
from tests.picker_rig import A, B, C, Rig, chat, config, endpoint, headers_of, mutation_of, post
from tests.unit.picker.test_scoring import hold, pick

from tidemill.api.problem import InvalidObjectError
from tidemill.picker.load import Lora
from tidemill.picker.scheduling.plugin import Outcome
from tidemill.picker.scheduling.scheduler import PLUGIN_TYPES, Scheduler

ROLE = "llm-d.ai/role"
GUIDE = """
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
  parameters: {hashBlockSize: 5}
- type: single-profile-handler
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("plugins: [{type: queue-scorrer}]", ["plugins.0.type", "queue-scorrer", "must be one of"]),
        ("plugins: [{name: x}]", ["plugins.0.type"]),
        (
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: d, plugins: [{pluginRef: nope}]}]",
            [
                "schedulingProfiles.0 (d) plugins.0.pluginRef",
                "'nope'",
                "must name one of the plugins: queue-scorer",
            ],
        ),
        (
            "plugins: [{type: load-aware-scorer, parameters: {threshold: 0}}]",
            ["load-aware-scorer", "threshold", "'0'"],
        ),
        (GUIDE, ["prefix-cache-scorer", "hashBlockSize", "not permitted"]),
        ("plugins: [{type: queue-scorer}]\nflowControll: {}", ["flowControll", "not permitted"]),
        ("plugins: [{type: queue-scorer}, {type: queue-scorer}]", ["queue-scorer", "must be unique"]),
        ("featureGates: [flowcontrol]", ["featureGates", "flowcontrol", "must be one of"]),
        ("featureGates: ['flowControl=maybe']", ["must end with =true or =false"]),
        ("kind: Pod", ["'Pod'", "must be EndpointPickerConfig"]),
        ("plugins: [{type: metrics-data-source, parameters: {port: 0}}]", ["metrics-data-source", "port", "'0'"]),
        ("plugins: [{type: metrics-data-source, parameters: {port: 70000}}]", ["port", "'70000'"]),
        (
            "plugins: [{type: utilization-detector, parameters: {metricsStalenessThreshold: 200}}]",
            ["metricsStalenessThreshold", "duration"],
        ),
        (
            "plugins: [{type: disagg-profile-handler}]\nschedulingProfiles: [{name: default}]",
            ["'decode'", "default"],
        ),
        ("plugins: [", ["must be YAML", "line 1"]),
        ("[]", ["must be a mapping"]),
        ("flowControl: {defaultRequestTTL: soon}", ["defaultRequestTTL", "'soon'"]),
        ("flowControl: {maxBytes: 1X}", ["maxBytes", "'1X'", "quantity"]),
        (
            "plugins: [{type: queue-scorer}]\nflowControl: {saturationDetector: {pluginRef: gone}}",
            ["saturationDetector", "'gone'"],
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(text: str, said: list[str]) -> None:
    with pytest.raises(InvalidObjectError) as caught:
        Rig(config=config(text))
    for part in ["EndpointPickerConfig", *said]:
        assert part in str(caught.value)


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(InvalidObjectError) as caught:
        Rig(config=config("plugins: [{type: a}, {type: b}]"))
    assert len(caught.value.problems) == 2


def test_without_profiles_all_plugins_make_one() -> None:
    rig = Rig(config=config("plugins: [{type: queue-scorer}, {type: decode-filter}, {type: random-picker}]"))
    (profile,) = rig.pool.scheduler.profiles.values()
    assert profile.name == "default"
    assert [name for name, _, _ in profile.scorers] == ["queue-scorer"]
    assert [name for name, _ in profile.filters] == ["decode-filter"]


def test_limits_are_read_as_quantities() -> None:
    found = config("flowControl: {maxBytes: 1Gi, maxRequests: 1k, defaultRequestTTL: 5s}").flow_control
    assert (found.max_bytes, found.max_requests, found.default_request_ttl) == (2**30, 1000, 5.0)


def test_two_prefix_indexes_of_different_shape_are_refused() -> None:
    text = """
    plugins:
    - {type: prefix-cache-scorer, parameters: {blockSizeTokens: 64}}
    - {type: approx-prefix-cache-producer, parameters: {blockSizeTokens: 16}}
    """
    with pytest.raises(InvalidObjectError, match=r"blockSizeTokens.*one prefix index"):
        Rig(config=config(text))


def test_parameters_without_effect_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = """
    plugins:
    - {type: active-request-scorer, parameters: {requestTimeout: 2m, idleThreshold: 1}}
    - {type: pd-profile-handler, parameters: {threshold: 10}}
    - {type: queue-scorer, name: prefill}
    schedulingProfiles:
    - {name: decode, plugins: [{pluginRef: active-request-scorer}]}
    - {name: prefill, plugins: [{pluginRef: prefill}]}
    """
    Rig(config=config(text))
    said = [line for line in capsys.readouterr().out.splitlines() if "no effect" in line]
    assert len(said) == 2
    assert "requestTimeout" in said[0]
    assert "threshold" in said[1]
    assert "pd-profile-handler" in said[1]


def test_parameters_that_are_said_to_have_no_effect_are_parameters() -> None:
    for kind in PLUGIN_TYPES.values():
        assert kind.without_effect <= kind.model_fields.keys()


def test_small_blocks_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    Rig(config=config("plugins: [{type: prefix-cache-scorer, parameters: {blockSizeTokens: 1}}]"))
    assert "small prefix blocks cost memory" in capsys.readouterr().out


def kept(rig: Rig, filter_text: str, **cycle: object) -> list[str]:
    scheduler = Scheduler(config(f"plugins: [{filter_text}]"), rig.pool.load, rig.rng)
    snapshot = rig.pool.snapshot
    made = rig.cycle(**cycle)  # type: ignore[arg-type]
    made.prefix = rig.pool.scheduler.prefix
    (_, plugin), *_ = next(iter(scheduler.profiles.values())).filters
    keep = plugin.keep(made)
    return [e.address for e, stays in zip(snapshot.endpoints, keep.tolist(), strict=True) if stays]


class TestFilters:
    @pytest.mark.parametrize(("kind", "expected"), [("decode", [A, C]), ("prefill", [B, C]), ("encode", [])])
    def test_roles(self, kind: str, expected: list[str]) -> None:
        rig = Rig()
        rig.endpoints(
            endpoint(A), endpoint(B, labels={ROLE: "prefill"}), endpoint(C, labels={ROLE: "prefill-decode"})
        )
        assert kept(rig, f"{{type: {kind}-filter}}") == expected

    def test_labels(self) -> None:
        rig = Rig()
        rig.endpoints(endpoint(A, labels={"zone": "a"}), endpoint(B, labels={"zone": "b"}), endpoint(C))
        by_label = "{type: by-label, parameters: {label: zone, validValues: [a], allowsNoLabel: true}}"
        assert kept(rig, by_label) == [A, C]
        selector = "{type: label-selector-filter, parameters: {matchExpressions: [{key: zone, operator: %s}]}}"
        assert kept(rig, selector % "Exists") == [A, B]
        assert kept(rig, selector % "NotIn, values: [a]") == [B, C]

    def test_lora_prefers_who_has_it_then_who_has_room(self) -> None:
        rig = Rig()
        rig.endpoints(A, B, C)
        rig.read(A, waiting=0, lora=Lora(frozenset({"a", "b"}), frozenset(), 2))
        rig.read(B, waiting=0, lora=Lora(frozenset({"c"}), frozenset(), 2))
        rig.read(C, waiting=0)
        text = "{type: lora-affinity-filter, parameters: {threshold: 1.0}}"
        assert kept(rig, text, model="a") == [A]
        assert kept(rig, text, model="d") == [B]

    def test_utilization_softens_to_all(self) -> None:
        rig = Rig()
        rig.endpoints(A, B)
        rig.read(A, waiting=1, kv_usage=0.5)
        rig.read(B, waiting=9, kv_usage=0.5)
        assert kept(rig, "{type: utilization-filter}") == [A]
        rig.read(A, waiting=9, kv_usage=0.5)
        assert kept(rig, "{type: utilization-filter}") == [A, B]

    def test_prefix_affinity_gives_way_to_a_long_queue(self) -> None:
        rig = Rig()
        rig.endpoints(A, B)
        prompt = os.urandom(5 * 256)
        hold(rig, A, prompt, 4)
        assert kept(rig, "{type: prefix-cache-affinity-filter}", prompt=prompt) == [A]
        rig.pool.load.take(rig.seat(A), 15_928 * 19)  # 19 s of prefill
        assert kept(rig, "{type: prefix-cache-affinity-filter}", prompt=prompt) == [A, B]


DISAGGREGATED = """
plugins:
- type: queue-scorer
- type: decode-filter
- type: prefill-filter
- {type: %s, name: decider, parameters: %s}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: decider}}}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: queue-scorer}]}
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: queue-scorer}]}
"""
ALWAYS = DISAGGREGATED % ("always-disagg-pd-decider", "{}")
BY_PREFIX = DISAGGREGATED % ("prefix-based-pd-decider", "{nonCachedTokens: 512}")


class TestDisaggregation:
    def test_the_decode_server_is_told_of_its_prefill_server(self) -> None:
        rig = Rig(config=config(ALWAYS))
        rig.endpoints(endpoint(A, labels={ROLE: "decode"}), endpoint(B, labels={ROLE: "prefill"}))
        talk = rig.ask(*post("/v1/chat/completions", chat(), headers=[("x-prefiller-host-port", "10.9.9.9:22")]))
        assert talk.destination == A
        assert headers_of(mutation_of(talk.answers[0]))["x-prefiller-host-port"] == B

    def test_ps5_always_without_a_prefill_server(self) -> None:
        rig = Rig(config=config(ALWAYS))
        rig.endpoints(endpoint(A, labels={ROLE: "decode"}))
        talk = rig.ask(*post("/v1/chat/completions", chat()))
        assert (talk.status, talk.reason) == (503, "rejected-no-endpoints")
        assert b"prefill-filter" in talk.refusal.body

    def test_ps5_otherwise_decode_does_it_alone_and_no_header_gets_through(self) -> None:
        rig = Rig(config=config(BY_PREFIX))
        rig.endpoints(endpoint(A, labels={ROLE: "decode"}))
        long = chat("x" * 4000)
        talk = rig.ask(*post("/v1/chat/completions", long, headers=[("x-prefiller-host-port", "10.9.9.9:22")]))
        assert talk.destination == A
        mutation = mutation_of(talk.answers[0])
        assert "x-prefiller-host-port" in mutation.remove_headers
        assert "x-prefiller-host-port" not in headers_of(mutation)

    @pytest.mark.parametrize(
        ("tokens", "cached", "prompt_tokens", "worth"),
        [(1000, 8, 0, False), (1000, 4, 0, True), (400, 0, 0, False), (1000, 0, 2000, False)],
    )
    def test_when_a_prefill_elsewhere_is_worth_it(
        self, tokens: int, cached: int, prompt_tokens: int, worth: bool
    ) -> None:
        parameters = f"{{nonCachedTokens: 512, promptTokens: {prompt_tokens}}}"
        rig = Rig(config=config(DISAGGREGATED % ("prefix-based-pd-decider", parameters)))
        rig.endpoints(endpoint(A, labels={ROLE: "decode"}), endpoint(B, labels={ROLE: "prefill"}))
        prompt = os.urandom(tokens * 4)
        if cached:
            hold(rig, A, prompt, cached)
        outcome = rig.pool.scheduler.schedule(rig.cycle(prompt))
        assert isinstance(outcome, Outcome)
        assert (outcome.prefill is not None) == worth


def test_filters_that_leave_nobody_mean_503() -> None:
    rig = Rig(config=config("plugins: [{type: queue-scorer}, {type: encode-filter}]"))
    rig.endpoints(A)
    talk = rig.ask(*post("/v1/chat/completions", chat()))
    assert (talk.status, talk.reason) == (503, "rejected-no-endpoints")


def test_state_is_of_one_pool() -> None:
    rig = Rig()
    rig.endpoints(A)
    other = rig.add_pool("ns", "q")
    rig.endpoints(B, pool=other)
    prompt = os.urandom(512)
    hold(rig, A, prompt, 2)
    assert len(rig.pool.scheduler.prefix) == 2
    assert len(other.scheduler.prefix) == 0
    assert pick(rig) == A
