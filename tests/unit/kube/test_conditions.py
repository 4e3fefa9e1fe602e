from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.kube.conditions import find_condition, set_condition


def put(conditions, status, now, message="m"):
    return set_condition(
        conditions, type="Ready", status=status, reason="R", message=message, generation=3, now=now
    )


def test_the_transition_time_moves_with_the_status_only() -> None:
    conditions = put([{"type": "Other", "status": "True"}], True, "t1")
    conditions = put(conditions, True, "t2", "another message")
    ready = find_condition(conditions, "Ready")
    assert ready == {
        "type": "Ready", "status": "True", "reason": "R", "message": "another message",
        "observedGeneration": 3, "lastTransitionTime": "t1",
    }  # fmt: skip
    assert find_condition(put(conditions, None, "t3"), "Ready")["lastTransitionTime"] == "t3"
    assert conditions[0] == {"type": "Other", "status": "True"}


@given(st.lists(st.sampled_from([True, False, None]), min_size=1))
def test_there_is_one_of_each_type(statuses) -> None:
    conditions: list = []
    for index, status in enumerate(statuses):
        conditions = put(conditions, status, f"t{index}")
    assert len(conditions) == 1
    changes = [i for i, s in enumerate(statuses) if i == 0 or s != statuses[i - 1]]
    assert conditions[0]["lastTransitionTime"] == f"t{changes[-1]}"
