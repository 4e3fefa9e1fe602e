"""Label selectors: as queries write them (`a=b,c!=d,e in (f,g),h notin (i),j,!k`) and as objects have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

LabelTest: TypeAlias = Callable[[Mapping[str, str]], bool]

_TERM = re.compile(
    r"""\s*(?:
        (?P<set_key>[^\s!=,()]+)\s+(?P<set_op>in|notin)\s*\((?P<values>[^)]*)\)
      | (?P<key>[^\s!=,()]+)\s*(?P<op>==|=|!=)\s*(?P<value>[^\s,()]*)
      | !\s*(?P<absent>[^\s!=,()]+)
      | (?P<present>[^\s!=,()]+)
    )\s*(?:,|$)""",
    re.VERBOSE,
)


def label_selector(text: str) -> LabelTest:
    """A test of labels; the empty selector takes everything. Raises ValueError."""
    tests: list[LabelTest] = []
    end = 0 if text.strip() else len(text)
    while end < len(text):
        match = _TERM.match(text, end)
        if match is None:
            raise ValueError(f"unable to parse requirement: found {text[end:]!r} in {text!r}")
        tests.append(_test(match))
        end = match.end()
    return lambda labels: all(test(labels) for test in tests)


def _test(match: re.Match[str]) -> LabelTest:
    if (key := match["set_key"]) is not None:
        values = {value.strip() for value in match["values"].split(",")}
        if match["set_op"] == "in":
            return lambda labels: key in labels and labels[key] in values
        return lambda labels: key not in labels or labels[key] not in values
    if (key := match["key"]) is not None:
        value = match["value"]
        if match["op"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if (key := match["absent"]) is not None:
        return lambda labels: key not in labels
    present = match["present"]
    return lambda labels: present in labels


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector object takes these labels."""
    return label_selector(selector_query(selector))(labels)


def selector_query(selector: Mapping[str, Any]) -> str:
    """A LabelSelector object (matchLabels, matchExpressions) as a query writes it."""
    terms = [f"{k}={v}" for k, v in (selector.get("matchLabels") or {}).items()]
    for term in selector.get("matchExpressions") or ():
        key, values = term["key"], ",".join(term.get("values") or ())
        terms.append(
            {
                "In": f"{key} in ({values})",
                "NotIn": f"{key} notin ({values})",
                "Exists": key,
                "DoesNotExist": f"!{key}",
            }[term["operator"]]
        )
    return ",".join(terms)
