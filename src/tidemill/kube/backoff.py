"""Exponential back-off with jitter."""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """Delays that double from `first` to `cap`, each spread by up to a half of itself upwards.

    `draw` gives numbers in [0, 1), so that tests know the delays.
    """

    def __init__(self, *, first: float, cap: float, draw: Callable[[], float]) -> None:
        self._first = first
        self._cap = cap
        self._draw = draw
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next(self) -> float:
        """Seconds to wait after one more failure."""
        delay = min(self._cap, self._first * 2**self._failures)
        self._failures = min(self._failures + 1, 32)
        return delay * (1 + self._draw() / 2)
