from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from tidemill.metrics.exporter import DecisionExporter, ExportedDecision


def text(exporter: DecisionExporter) -> str:
    registry = CollectorRegistry()
    registry.register(exporter)
    return generate_latest(registry).decode()


def test_series_and_labels() -> None:
    exporter = DecisionExporter("blue")
    exporter.publish(ExportedDecision("va", "ns", "A100", desired=3, current=2))
    shown = text(exporter)
    labels = '{accelerator_type="A100",controller_instance="blue",namespace="ns",variant_name="va"}'
    assert f"wva_desired_replicas{labels} 3.0" in shown
    assert f"wva_optimized_replicas{labels} 3.0" in shown
    assert f"wva_current_replicas{labels} 2.0" in shown
    assert f"wva_desired_ratio{labels} 1.5" in shown


def test_ratio_without_replicas_is_the_desired_count() -> None:
    assert ExportedDecision("v", "n", "x", desired=4, current=0).ratio == 4


def test_a_new_accelerator_leaves_no_old_series() -> None:
    exporter = DecisionExporter()
    exporter.publish(ExportedDecision("va", "ns", "unknown", 1, 1))
    exporter.publish(ExportedDecision("va", "ns", "A100", 1, 1))
    assert text(exporter).count("wva_desired_replicas{") == 1


def test_everything_of_a_variant_goes() -> None:
    exporter = DecisionExporter()
    decision = ExportedDecision("va", "ns", "A100", 2, 1)
    exporter.publish(decision)
    exporter.count_scaling(decision, direction="up", reason="KVSpareBelowTrigger")
    assert 'direction="up"' in text(exporter)
    exporter.drop("ns", "va")
    exporter.drop("ns", "va")
    assert 'variant_name="va"' not in text(exporter)
