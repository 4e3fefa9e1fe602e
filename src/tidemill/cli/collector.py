"""The garbage collector of a process that serves: what it may leave alone."""

from __future__ import annotations

import gc


def spare_the_collector() -> None:
    """What is loaded now stays: the collector need not look at it again and again. Neither requests nor lists of
    objects leave cycles behind, so that it need not run often either: otherwise it takes a fifth of the time of a
    request, and half of that in which ten thousand pods are read."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
