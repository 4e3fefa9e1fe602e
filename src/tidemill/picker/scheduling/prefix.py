"""Which endpoint has probably cached how much of a prompt: an index fed by where requests were served.

A prompt is cut into blocks of tokens; the hash of a block covers everything before it, the model or adapter
and the cache salt. For each hash the index knows the rows that served it, as the bits of one integer, so that
a walk along a prompt compares all endpoints at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from tidemill.picker.load import IntArray

BYTES_PER_TOKEN = 4  # of a text, estimated; token ids are packed as 32-bit integers
DEFAULT_CAPACITY = 31_250  # blocks per endpoint
MOST_BLOCKS = 6_250_000  # of all endpoints together, each counted by itself: some 220 bytes each at the worst


class Prompt(NamedTuple):
    """What affinity sees of a request: chains of tokens, four bytes a token. Several prompts in one request
    are several chains; none continues another."""

    chains: tuple[bytes, ...] = ()

    @property
    def tokens(self) -> int:
        chains = self.chains
        if len(chains) == 1:
            return -(-len(chains[0]) // BYTES_PER_TOKEN)
        return sum(-(-len(chain) // BYTES_PER_TOKEN) for chain in chains)


NO_PROMPT = Prompt()


class Blocks(NamedTuple):
    """Hashes of the full blocks of a prompt, a sequence for each chain."""

    chains: tuple[Sequence[int], ...]

    @property
    def total(self) -> int:
        chains = self.chains
        return len(chains[0]) if len(chains) == 1 else sum(map(len, chains))


NO_BLOCKS = Blocks(())


class PrefixIndex:
    """Least recently used blocks of each row are forgotten beyond its capacity, or beyond its share of `most`.

    `block_tokens` tokens a block; at most `max_tokens` of a request are looked at.
    """

    def __init__(
        self,
        *,
        block_tokens: int = 64,
        max_tokens: int = 131_072,
        capacity: int = DEFAULT_CAPACITY,
        most: int = MOST_BLOCKS,
    ) -> None:
        self.block_tokens = block_tokens
        self._block_bytes = block_tokens * BYTES_PER_TOKEN
        self._max_blocks = max_tokens // block_tokens
        self._capacity = capacity
        self._most = most
        self._holders: dict[int, int] = {}
        self._held: dict[int, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        """Blocks known, those of each row counted by themselves."""
        return sum(map(len, self._held.values()))

    def size_of(self, row: int) -> int:
        return len(self._held.get(row, ()))

    def blocks(self, prompt: Prompt, *, model: str, salt: str) -> Blocks:
        """Cut and hash a prompt. Only full blocks count, so a prompt under one block has none."""
        size = self._block_bytes
        left = self._max_blocks
        root = 0
        found: list[Sequence[int]] = []
        for chain in prompt.chains:
            count = min(len(chain) // size, left)
            if count <= 0:
                continue
            if not root:
                root = _root(model, salt)
            left -= count
            previous = root
            hashes: list[int] = []
            for start in range(0, count * size, size):
                previous = xxh3_64_intdigest(chain[start : start + size], previous)
                hashes.append(previous)
            found.append(hashes)
        return Blocks(tuple(found)) if found else NO_BLOCKS

    def matched(self, blocks: Blocks, size: int) -> IntArray | None:
        """For each row below `size`, how many blocks of the prompt it holds, counted from the front without
        a gap; None when no row holds any."""
        holders = self._holders
        if not any(chain[0] in holders for chain in blocks.chains):
            return None
        counts = np.zeros(size, dtype=np.int64)
        for chain in blocks.chains:
            alive = -1  # every row, before the first block
            depth = 0
            for block in chain:
                holding = holders.get(block, 0) & alive
                if holding != alive:
                    if depth:
                        _credit(counts, alive & ~holding, depth)
                    alive = holding
                    if not alive:
                        break
                depth += 1
            if alive > 0:
                _credit(counts, alive, depth)
        return counts

    def served(self, blocks: Blocks, row: int, capacity: int | None = None) -> None:
        """`row` has computed these blocks. `capacity` is the engine's own number of them, where known."""
        held = self._held.get(row)
        if held is None:
            held = self._held[row] = OrderedDict()
        holders = self._holders
        bit = 1 << row
        for chain in blocks.chains:
            # The deepest block first: the front of a prompt is of use without its end, not the other way.
            for block in reversed(chain):
                if block in held:
                    held.move_to_end(block)
                else:
                    held[block] = None
                    holders[block] = holders.get(block, 0) | bit
        limit = min(self._capacity, capacity or self._capacity, max(1, self._most // len(self._held)))
        while len(held) > limit:
            self._drop(held.popitem(last=False)[0], bit)

    def forget(self, row: int) -> None:
        """The cache of this row is gone."""
        for block in self._held.pop(row, ()):
            self._drop(block, 1 << row)

    def _drop(self, block: int, bit: int) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


@lru_cache(maxsize=1024)
def _root(model: str, salt: str) -> int:
    """The hash that the first block of every prompt for a model continues."""
    return xxh3_64_intdigest(f"{model}\0{salt}".encode("utf-8", "surrogatepass"))


def _credit(counts: IntArray, rows: int, depth: int) -> None:
    """Add `depth` to each row whose bit is set."""
    if rows.bit_count() > 8:
        width = len(counts)
        packed = np.frombuffer(rows.to_bytes(-(-width // 8), "little"), dtype=np.uint8)
        counts[np.unpackbits(packed, count=width, bitorder="little").view(np.bool_)] += depth
        return
    while rows:
        row = rows.bit_length() - 1
        counts[row] += depth
        rows ^= 1 << row
