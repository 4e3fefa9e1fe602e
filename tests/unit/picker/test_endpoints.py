"""Pool and pods to endpoints: ports, annotations, addresses, identity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.picker_rig import Rig, inference_pool, pod_view, post

from tidemill.api.inference import InferenceModelRewrite, InferencePool, rule_for
from tidemill.api.problem import InvalidObjectError
from tidemill.kube.resources import ObjectKey
from tidemill.picker.address import canonical
from tidemill.picker.pools import endpoints as endpoints_module
from tidemill.picker.pools.endpoints import EndpointSet, endpoints_of


def found(*pods, ports=(8000, 8001)) -> EndpointSet:
    return endpoints_of(inference_pool(ports), pods)


def ranks(result: EndpointSet) -> list[tuple[str, int]]:
    return [(e.address, e.rank) for e in result.endpoints]


class TestWhichPods:
    def test_ready_matching_and_here(self) -> None:
        pods = [
            pod_view("a", "10.0.0.11"),
            pod_view("not-ready", "10.0.0.12", ready=False),
            pod_view("leaving", "10.0.0.13", terminating=True),
            pod_view("other-label", "10.0.0.14", labels={"app": "x"}),
            pod_view("elsewhere", "10.0.0.15", key=ObjectKey("other", "elsewhere")),
        ]
        assert ranks(found(*pods, ports=(8000,))) == [("10.0.0.11:8000", 0)]

    def test_one_without_an_address_is_said(self) -> None:
        result = found(pod_view("a", ()))
        assert not result.endpoints
        assert {remark for _, remark in result.remarks} == {"is Ready but has no IP address: no endpoint"}

    def test_e1_a_pod_that_declares_other_ports_is_said_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        rig = Rig()
        result = endpoints_of(inference_pool((8000,)), [pod_view("a", "10.0.0.11", declared_ports=(8300,))])
        for _ in range(3):
            rig.pool.replace(result)
        said = [line for line in capsys.readouterr().out.splitlines() if "8300" in line]
        assert len(said) == 1
        for part in ("ns/p", "ns/a", "8300", "8000"):
            assert part in said[0]

    def test_e2_a_port_that_is_removed_goes(self) -> None:
        pods = [pod_view("a", "10.0.0.11")]
        rig = Rig()
        rig.pool.replace(endpoints_of(inference_pool((8000, 8001)), pods))
        rig.pool.load.take(rig.seat("10.0.0.11:8000"), 5)
        rig.pool.replace(endpoints_of(inference_pool((8000,)), pods))
        assert [(e.address, e.rank) for e in rig.pool.snapshot.endpoints] == [("10.0.0.11:8000", 0)]
        assert rig.in_flight("10.0.0.11:8000") == (1, 5)
        talk = rig.ask(*post("/v1/completions", {"model": "m"}, subset=["10.0.0.11:8001"]))
        assert talk.status == 503


class TestP24:
    @pytest.mark.parametrize(
        ("annotation", "expected", "said"),
        [
            (None, [(8000, 0), (8001, 1)], ""),
            ("8001", [(8001, 1)], ""),
            (" 8001 , 8000 ", [(8000, 0), (8001, 1)], ""),
            ("8000,8000", [(8000, 0)], ""),
            ("8000,9999", [(8000, 0)], "9999"),
            ("abc,8000", [(8000, 0)], "'abc'"),
            ("-1,8000", [(8000, 0)], "'-1'"),
            ("", [], "leaves no port"),
            ("9999", [], "leaves no port"),
            ("8000abc", [], "'8000abc'"),
        ],
    )
    def test_the_annotation(self, annotation: str | None, expected: list[tuple[int, int]], said: str) -> None:
        result = found(pod_view("a", "10.0.0.11", active_ports=annotation))
        assert ranks(result) == [(f"10.0.0.11:{port}", rank) for port, rank in expected]
        remarks = " ".join(remark for _, remark in result.remarks)
        assert said in remarks if said else not remarks

    def test_the_new_key_wins(self) -> None:
        pod = endpoints_module.pod_view(
            {
                "metadata": {
                    "namespace": "ns", "name": "a", "uid": "u", "labels": {"app": "m"},
                    "annotations": {
                        "llm-d.ai/active-ports": "8001", "inference.networking.k8s.io/active-ports": "8000",
                    },
                },
                "status": {"podIP": "10.0.0.11", "conditions": [{"type": "Ready", "status": "True"}]},
            }
        )  # fmt: skip
        assert ranks(found(pod)) == [("10.0.0.11:8001", 1)]

    def test_host_network_with_ports_of_their_own(self) -> None:
        pods = [pod_view("p1", "10.0.0.5", active_ports="8000"), pod_view("p2", "10.0.0.5", active_ports="8001")]
        result = found(*pods)
        assert [(e.address, e.pod.name) for e in result.endpoints] == [
            ("10.0.0.5:8000", "p1"),
            ("10.0.0.5:8001", "p2"),
        ]

    def test_an_address_that_two_pods_claim_is_offered_once(self) -> None:
        result = found(pod_view("p1", "10.0.0.5"), pod_view("p2", "10.0.0.5"))
        assert [(e.address, e.pod.name) for e in result.endpoints] == [
            ("10.0.0.5:8000", "p1"),
            ("10.0.0.5:8001", "p1"),
        ]
        assert any("p2" in str(pod) and "ns/p1" in remark for pod, remark in result.remarks)

    def test_counters_of_ports_that_stay_are_untouched(self) -> None:
        rig = Rig()
        pool = inference_pool((8000, 8001))
        rig.pool.replace(endpoints_of(pool, [pod_view("a", "10.0.0.11")]))
        rig.pool.load.take(rig.seat("10.0.0.11:8001"), 7)
        rig.pool.replace(endpoints_of(pool, [pod_view("a", "10.0.0.11", active_ports="8001")]))
        assert rig.in_flight("10.0.0.11:8001") == (1, 7)


class TestP20:
    def rig(self) -> Rig:
        rig = Rig()
        pod = pod_view("a", ("fd00:10:0:0:0:0:0:5", "10.0.0.11"))
        rig.pool.replace(endpoints_of(inference_pool((8000,)), [pod]))
        return rig

    def test_the_address_is_canonical(self) -> None:
        talk = self.rig().ask(*post("/v1/completions", {"model": "m", "prompt": "x"}))
        assert talk.destination == "[fd00:10::5]:8000"
        metadata = talk.answers[0].dynamic_metadata.fields["envoy.lb"].struct_value.fields
        assert metadata["x-gateway-destination-endpoint"].string_value == "[fd00:10::5]:8000"

    @pytest.mark.parametrize(
        ("hint", "expected"),
        [
            ("[fd00:10::5]:8000", "[fd00:10::5]:8000"),
            ("[FD00:10:0::5]:8000", "[fd00:10::5]:8000"),
            ("10.0.0.11:8000", "10.0.0.11:8000"),
            ("fd00:10::5:8000", None),
            ("fd00:10::5", None),
        ],
    )
    def test_hints(self, hint: str, expected: str | None) -> None:
        talk = self.rig().ask(*post("/v1/completions", {"model": "m", "prompt": "x"}, subset=[hint]))
        assert talk.destination == expected
        if expected is None:
            assert (talk.status, talk.reason) == (503, "rejected-no-endpoints")
            assert b"gateway allows" in talk.refusal.body


@given(st.text(max_size=40))
def test_an_address_is_canonical_or_none(text: str) -> None:
    found = canonical(text)
    assert found is None or canonical(found) == found


class TestPoolObject:
    def test_both_versions_are_read(self) -> None:
        metadata = {"namespace": "ns", "name": "p", "uid": "u"}
        new = InferencePool.parse(
            {
                "apiVersion": "inference.networking.k8s.io/v1",
                "metadata": metadata,
                "spec": {
                    "selector": {"matchLabels": {"app": "m", "a": "b"}},
                    "targetPorts": [{"number": 8000}, {"number": 8001}],
                    "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
                },
            }
        )
        assert (new.selector, new.target_ports) == ("a=b,app=m", (8000, 8001))
        old = InferencePool.parse(
            {
                "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
                "metadata": metadata,
                "spec": {"selector": {"app": "m"}, "targetPortNumber": 8000, "extensionRef": {"name": "epp"}},
            }
        )
        assert (old.match_labels, old.target_ports) == ({"app": "m"}, (8000,))

    @pytest.mark.parametrize(
        ("spec", "said"),
        [
            ({"selector": {"matchLabels": {}}, "targetPorts": [{"number": 1}]}, "matchLabels"),
            ({"selector": {"matchLabels": {"a": "b"}}, "targetPorts": []}, "targetPorts"),
            ({"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 70000}]}, "70000"),
            ({"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 1}, {"number": 1}]}, "unique"),
            ({"targetPorts": [{"number": 1}]}, "spec.selector"),
        ],
    )
    def test_what_is_wrong_is_said(self, spec: dict, said: str) -> None:
        obj = {
            "apiVersion": "inference.networking.k8s.io/v1",
            "metadata": {"namespace": "ns", "name": "p"},
            "spec": spec,
        }
        with pytest.raises(InvalidObjectError, match="InferencePool ns/p") as caught:
            InferencePool.parse(obj)
        assert said in str(caught.value)


def rewrite(name: str, created: str, *rules: dict) -> InferenceModelRewrite:
    return InferenceModelRewrite.parse(
        {
            "metadata": {"namespace": "ns", "name": name, "creationTimestamp": created},
            "spec": {"poolRef": {"name": "p"}, "rules": list(rules)},
        }
    )


class TestRewrites:
    def test_exact_before_generic_then_the_oldest(self) -> None:
        generic = rewrite("z", "2026-01-01T00:00:00Z", {"targets": [{"modelRewrite": "any"}]})
        exact = {"matches": [{"model": {"value": "m"}}]}
        young = rewrite("a", "2026-03-01T00:00:00Z", {**exact, "targets": [{"modelRewrite": "young"}]})
        old = rewrite("b", "2026-02-01T00:00:00Z", {**exact, "targets": [{"modelRewrite": "old"}]})
        everything = (generic, young, old)
        assert rule_for(everything, "m")[0] == "b"  # type: ignore[index]
        assert rule_for(everything, "other")[0] == "z"  # type: ignore[index]
        assert rule_for((young,), "other") is None

    @pytest.mark.parametrize(
        ("weights", "draws"),
        [
            ([None, None], {0.0: "t0", 0.49: "t0", 0.51: "t1", 0.999: "t1"}),
            ([1, 3], {0.0: "t0", 0.24: "t0", 0.26: "t1"}),
            ([None, 2], {0.0: "t1", 0.9: "t1"}),
            ([0, 0], {0.1: "t0", 0.9: "t1"}),
        ],
    )
    def test_weights(self, weights: list[int | None], draws: dict[float, str]) -> None:
        targets = [
            {"modelRewrite": f"t{i}", **({} if weight is None else {"weight": weight})}
            for i, weight in enumerate(weights)
        ]
        rule = rewrite("r", "", {"targets": targets}).rules[0]
        assert {draw: rule.choose(draw) for draw in draws} == draws
