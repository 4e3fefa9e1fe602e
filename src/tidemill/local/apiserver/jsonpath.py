"""The small part of JSONPath that printer columns and scale paths use."""

from __future__ import annotations

import re
from typing import Any

_STEP = re.compile(
    r"""\.(?P<field>(?:[A-Za-z0-9_\-/]|\\.)+)
      | \['(?P<quoted>[^']+)'\]
      | \[(?P<index>\d+)\]
      | \[\?\(@\.(?P<key>[A-Za-z0-9_]+)\s*==\s*["'](?P<value>[^"']*)["']\)\]
      | (?P<all>\[\*\])""",
    re.VERBOSE,
)


def find(path: str, obj: Any) -> Any:
    """The first value at `path` in `obj`; None when there is none. Raises ValueError for other paths."""
    nodes: list[Any] = [obj]
    end = 0
    while end < len(path):
        step = _STEP.match(path, end)
        if step is None:
            raise ValueError(f"JSONPath {path!r} is not supported from {path[end:]!r} on")
        end = step.end()
        nodes = [found for node in nodes for found in _follow(step, node)]
    return nodes[0] if nodes else None


def _follow(step: re.Match[str], node: Any) -> list[Any]:
    if (name := step["quoted"] or step["field"]) is not None:
        name = name.replace("\\", "")
        return [node[name]] if isinstance(node, dict) and name in node else []
    if not isinstance(node, list):
        return []
    if (index := step["index"]) is not None:
        return [node[int(index)]] if int(index) < len(node) else []
    if (key := step["key"]) is not None:
        return [item for item in node if isinstance(item, dict) and str(item.get(key)) == step["value"]]
    return node
