from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.api.durations import format_duration, parse_duration
from tidemill.api.manager_config import ManagerConfig, read_manager_config, restart_needed
from tidemill.api.saturation_config import (
    FleetSettings,
    read_saturation_map,
    resolve_fleet,
    resolve_saturation,
)


class TestDurations:
    @pytest.mark.parametrize(
        ("text", "seconds"), [("60s", 60), ("1m30s", 90), ("250ms", 0.25), ("1.5h", 5400), ("0", 0)]
    )
    def test_reads(self, text: str, seconds: float) -> None:
        assert parse_duration(text) == seconds

    @pytest.mark.parametrize("text", ["", "soon", "60", "1m x", "-5s", "5 s"])
    def test_refuses(self, text: str) -> None:
        with pytest.raises(ValueError, match="duration with a unit"):
            parse_duration(text)

    @given(st.integers(1, 10**6))
    def test_round_trip(self, seconds: int) -> None:
        assert parse_duration(format_duration(seconds)) == seconds


def manager(data: dict[str, str], last: ManagerConfig | None = None):
    return read_manager_config(
        data, object_name="ConfigMap s/wva-manager-config", base=ManagerConfig(), last_good=last or ManagerConfig()
    )


class TestManagerConfig:
    @pytest.mark.parametrize(
        ("value", "rule"), [("0", "at least 1s"), ("soon", "duration"), ("500ms", "at least 1s"), ("60", "unit")]
    )
    def test_a_bad_interval_leaves_the_last_good_one(self, value: str, rule: str) -> None:
        last, _ = manager({"GLOBAL_OPT_INTERVAL": "15s"})
        config, (problem,) = manager({"GLOBAL_OPT_INTERVAL": value}, last)
        assert config.interval == 15
        assert (problem.field, problem.value) == ("GLOBAL_OPT_INTERVAL", value)
        assert rule in problem.rule

    def test_keys_may_come_in_a_document(self) -> None:
        config, problems = manager(
            {"config.yaml": "GLOBAL_OPT_INTERVAL: 30s\nPROMETHEUS_TLS_INSECURE_SKIP_VERIFY: true\n"}
        )
        assert not problems
        assert config.interval == 30
        assert config.prometheus.tls_insecure_skip_verify is True

    def test_yaml_that_is_none_is_said(self) -> None:
        config, (problem,) = manager({"config.yaml": "a: [", "GLOBAL_OPT_INTERVAL": "2s"})
        assert config.interval == 2
        assert "must be YAML" in problem.rule

    def test_thresholds_must_be_in_order(self) -> None:
        config, (problem,) = manager({"PROMETHEUS_METRICS_CACHE_STALE_THRESHOLD": "10s"})
        assert config.freshness.stale == 120
        assert "must not decrease" in problem.rule

    def test_what_needs_a_restart(self) -> None:
        config, _ = manager({"PROMETHEUS_BASE_URL": "http://p:9090/", "GLOBAL_OPT_INTERVAL": "5s"})
        assert restart_needed(ManagerConfig(), config) == ["PROMETHEUS_BASE_URL"]
        assert config.prometheus.base_url == "http://p:9090"


def saturation(data: dict[str, str], name: str = "ConfigMap s/wva-saturation-scaling-config", last=None):
    return read_saturation_map(data, object_name=name, last_good=last)


def resolve(*maps, model="m", namespace="n", accelerator="A100"):
    return resolve_saturation(maps, model=model, namespace=namespace, accelerator=accelerator)


class TestSaturationConfig:
    def test_the_most_specific_wins_field_by_field(self) -> None:
        found, problems = saturation(
            {
                "default": "kvCacheThreshold: 0.7\nqueueLengthThreshold: 9",
                "A100": "queueLengthThreshold: 4",
                "by-field": "accelerator: H100\nqueueLengthThreshold: 2",
                "mine": "model_id: m\nnamespace: n\nkvSpareTrigger: 0.2",
            }
        )
        assert not problems
        settings, _ = resolve(found)
        assert settings.kv_cache_threshold == Decimal("0.7")
        assert settings.queue_length_threshold == 4
        assert settings.kv_spare_trigger == Decimal("0.2")
        assert settings.queue_spare_trigger == 3
        other, _ = resolve(found, model="other", accelerator="H100")
        assert (other.queue_length_threshold, other.kv_spare_trigger) == (2, Decimal("0.10"))

    def test_the_local_map_lies_over_the_global_one(self) -> None:
        world, _ = saturation({"default": "kvCacheThreshold: 0.6", "mine": "model_id: m\nqueueLengthThreshold: 7"})
        local, _ = saturation({"default": "queueLengthThreshold: 2"}, "ConfigMap n/wva-saturation-scaling-config")
        settings, _ = resolve(world, local)
        assert (settings.kv_cache_threshold, settings.queue_length_threshold) == (Decimal("0.6"), 2)

    @pytest.mark.parametrize(
        ("entry", "field"),
        [
            ("kvCacheThreshold: 1.2", "default.kvCacheThreshold"),
            ("kvSpareTrigger: -0.1", "default.kvSpareTrigger"),
            ("queueLengthThreshold: -1", "default.queueLengthThreshold"),
            ("kvCacheThreshold: abc", "default.kvCacheThreshold"),
            ("kvCacheThreshold: .nan", "default.kvCacheThreshold"),
            ("kvCacheThreshold: 0.05\nkvSpareTrigger: 0.5", "default.kvCacheThreshold"),
            ("- a list", "default"),
            ("a: [", "default"),
        ],
    )
    def test_a_bad_entry_leaves_its_last_good_state(self, entry: str, field: str) -> None:
        good, _ = saturation({"default": "kvCacheThreshold: 0.60"})
        found, (problem,) = saturation({"default": entry}, last=good)
        assert problem.field == field
        settings, _ = resolve(found)
        assert settings.kv_cache_threshold == Decimal("0.60")

    def test_a_layer_that_breaks_the_merged_rule_is_left_out_and_said(self) -> None:
        world, _ = saturation({"default": "kvCacheThreshold: 0.30\nkvSpareTrigger: 0.2"})
        local, _ = saturation({"default": "kvSpareTrigger: 0.4"}, "ConfigMap n/wva-saturation-scaling-config")
        settings, (problem,) = resolve(world, local)
        assert settings.kv_spare_trigger == Decimal("0.2")
        assert problem.object == "ConfigMap n/wva-saturation-scaling-config"
        assert (problem.field, problem.value) == ("default.kvSpareTrigger", "0.4")
        assert "kvCacheThreshold (0.3" in problem.rule

    def test_decimals_stay_exact(self) -> None:
        found, _ = saturation({"default": "kvCacheThreshold: 0.1"})
        assert found.layers["default"].kv_cache_threshold == Decimal("0.1")


class TestCapacitySettings:
    def settings(self, **entries: str):
        found, problems = saturation(entries)
        assert not problems
        return resolve(found)[0]

    def test_percentages_are_the_default(self) -> None:
        assert self.settings().by_percentage
        assert not self.settings(default="analyzerName: saturation").by_percentage

    def test_without_a_list_tokens_vote(self) -> None:
        found = self.settings(default="analyzerName: saturation\nscaleUpThreshold: 0.9")
        assert found.voting() == {"saturation": (Decimal("0.9"), Decimal("0.70"))}

    def test_the_list_says_who_votes_with_thresholds_of_their_own(self) -> None:
        found = self.settings(
            default="analyzers:\n- {name: throughput, scaleUpThreshold: 0.8}\n- {name: saturation, enabled: false}"
        )
        assert not found.by_percentage
        assert found.voting() == {"throughput": (Decimal("0.8"), Decimal("0.70"))}

    def test_targets_are_milliseconds_and_ask_the_queueing_model(self) -> None:
        found = self.settings(mine="model_id: m\nttftTarget: 500\nitlTarget: 40\ntargetPercentile: 95")
        assert (found.ttft_target, found.itl_target, found.target_percentile) == (0.5, 0.04, 95)
        assert set(found.voting()) == {"saturation", "queueing-model"}

    def test_a_class_gives_what_the_model_does_not_say_itself(self) -> None:
        classes = {"interactive": "ttftTarget: 300\nitlTarget: 30\ntargetPercentile: 90"}
        plain = self.settings(default="latencyClass: interactive", **classes)
        assert (plain.ttft_target, plain.itl_target, plain.target_percentile) == (0.3, 0.03, 90)
        own = self.settings(default="latencyClass: interactive", mine="model_id: m\nttftTarget: 1000", **classes)
        assert (own.ttft_target, own.itl_target) == (1.0, 0.03)

    def test_a_class_that_is_not_there_is_said(self) -> None:
        found, _ = saturation({"default": "latencyClass: batch"})
        _, (problem,) = resolve(found)
        assert (problem.field, problem.value) == ("default.latencyClass", "batch")
        assert "there is no entry 'batch'" in problem.rule

    @pytest.mark.parametrize(
        ("text", "field"),
        [
            ("analyzerName: magic", "default.analyzerName"),
            ("analyzers: [{name: magic}]", "default.analyzers.0.name"),
            ("scaleUpThreshold: 1.2", "default.scaleUpThreshold"),
            ("scaleUpThreshold: 0.6\nscaleDownBoundary: 0.6", "default.scaleUpThreshold"),
            ("ttftTarget: 0", "default.ttftTarget"),
            ("targetPercentile: 100", "default.targetPercentile"),
            ("latencyClass: fast", "default.latencyClass"),
            ("optimizer: magic", "default.optimizer"),
            ("optimizerTimeLimit: 1h", "default.optimizerTimeLimit"),
            ("scaleUpStep: 0", "default.scaleUpStep"),
            ("priority: -1", "default.priority"),
        ],
    )
    def test_bad_values_name_the_field(self, text: str, field: str) -> None:
        found, (problem, *_) = saturation({"default": text})
        assert problem.field.startswith(field)
        assert "default" not in found.layers

    def test_a_threshold_that_breaks_the_merged_rule_is_refused_and_the_tuned_one_stays(self) -> None:
        found, _ = saturation(
            {"default": "scaleUpThreshold: 0.6\nscaleDownBoundary: 0.5", "A100": "scaleDownBoundary: 0.65"}
        )
        settings, (problem,) = resolve(found)
        assert (settings.scale_up_threshold, settings.scale_down_boundary) == (Decimal("0.6"), Decimal("0.5"))
        assert problem.field == "A100.scaleDownBoundary"
        assert problem.rule == "scaleDownBoundary (0.65) must be below scaleUpThreshold (0.6)"

    def test_what_holds_for_the_fleet_is_in_the_default_entry(self) -> None:
        found, _ = saturation({"default": "enableLimiter: true\noptimizer: greedy\noptimizerTimeLimit: 2s"})
        assert resolve_fleet(found, limited=False) == FleetSettings(
            limited=True, optimizer="greedy", time_limit=2.0
        )
        assert resolve_fleet(None, limited=True) == FleetSettings(limited=True)

    def test_limited_mode_and_node_labels(self) -> None:
        config, problems = manager({"WVA_LIMITED_MODE": "true", "WVA_NODE_SELECTOR": "pool=a, zone=b"})
        assert not problems
        assert (config.limited_mode, config.node_selector) == (True, (("pool", "a"), ("zone", "b")))
        _, (problem,) = manager({"WVA_NODE_SELECTOR": "pool"})
        assert "key=value" in problem.rule
