"""Dropout as a function of a seed and of the global position of a pair.

Every pair of a query and a key has a word of 32 random bits, and its probability is
dropped where the word is below ``p * 2**32``. The word does not depend on how a call is
cut, on the kernel, nor on the order of anything: for the query at position i and the
key at position j of the whole sequence, in query head h of batch entry b (batch
dimensions flattened), it is word ``j mod 4`` of

    Philox4x32-7, counter (j // 4, i, h, b), key (lower half of the seed, upper half of
    the seed)

(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011: seven rounds pass
every test of TestU01's BigCrush). So four neighbouring keys share one evaluation. The
same is written for Triton in ``native/dropout_triton.py``: both change together.

As in torch, the softmax is taken first. Then dropped probabilities are 0 and the others
are divided by ``1 - p``; the log-sum-exp knows nothing of it, so parts of a row are
merged as always:

    out = Z P V,   dV = (Z P)^T dO,
    dS = P (Z (dO V^T) - delta),   delta = rowsum(dO * out)

where Z is 0 for dropped pairs and ``1 / (1 - p)`` for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quorum_attention.decomposition.intervals import Rows
from quorum_attention.kernels.tensors import BLOCK_BYTES, row_blocks

ROUNDS = 7
FACTORS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_BITS = 0xFFFFFFFF

LARGEST_SEED = 2**63 - 1

# Neighbouring keys that share an evaluation.
_GROUP = 4
# Bytes of all temporaries for a group of keys of a row: eight words of 64 bits.
_GROUP_BYTES = 64


@dataclass(frozen=True, slots=True)
class Dropout:
    """The dropout of a call, or of some of its heads and batch entries.

    Attributes:
        p: the chance of a probability to be dropped, from 0 to 1.
        seed: from 0 to ``LARGEST_SEED``.
        first_head, first_entry: numbers, in the whole call, of the first query head and
            of the first batch entry at hand; others follow.
    """

    p: float
    seed: int
    first_head: int = 0
    first_entry: int = 0

    @property
    def threshold(self) -> int:
        """Words below it are dropped. (With p = 1 the one word that is not counts
        nothing.)"""
        return min(_BITS, round(self.p * 2**32))

    @property
    def rescale(self) -> float:
        """Factor of the probabilities that are not dropped."""
        return 0.0 if self.p == 1.0 else 1.0 / (1.0 - self.p)

    def at(self, head: int, entry: int) -> Dropout:
        """Return the dropout from a query head and a batch entry on, numbered among
        those at hand."""
        return replace(
            self,
            first_head=self.first_head + head,
            first_entry=self.first_entry + entry,
        )


def dropped(
    dropout: Dropout,
    batch: int,
    heads: int,
    queries: torch.Tensor,
    keys: Sequence[Rows],
) -> torch.Tensor:
    """Return which probabilities are dropped: (batch, heads, queries, keys), True where
    they are.

    Args:
        queries: (queries,) int64, global positions, on the device of the result.
        keys: runs of neighbouring keys, in ascending order; global and local positions.
    """
    n_keys = sum(run.length for run in keys)
    is_dropped = torch.empty(
        (batch, heads, queries.numel(), n_keys), dtype=torch.bool, device=queries.device
    )
    for run in keys:
        if run.length:
            column = run.local - keys[0].local
            columns = is_dropped[..., column : column + run.length]
            _fill_dropped_(columns, dropout, queries, run.start)
    return is_dropped


def dropped_bytes(batch: int, heads: int, n_queries: int, n_keys: int) -> int:
    """Return an upper bound of the bytes that ``dropped`` takes, its result
    included."""
    rows = batch * heads * n_queries
    row_words = _GROUP_BYTES * (n_keys // _GROUP + 2)
    words = min(rows * row_words, max(BLOCK_BYTES, row_words))
    result = rows * n_keys
    positions = 64 * (batch + heads + n_queries + n_keys)
    return result + words + positions


def _fill_dropped_(
    is_dropped: torch.Tensor, dropout: Dropout, queries: torch.Tensor, first_key: int
) -> None:
    """Write, in place, which probabilities of neighbouring keys are dropped.

    Args:
        is_dropped: (b, h, queries, keys).
        first_key: the global position of the first key.
    """
    batch, heads, n_rows, n_keys = is_dropped.shape
    device = is_dropped.device
    first_group = first_key // _GROUP
    last_group = (first_key + n_keys - 1) // _GROUP
    stop_head = dropout.first_head + heads
    stop_entry = dropout.first_entry + batch
    groups = torch.arange(first_group, last_group + 1, device=device)
    head_numbers = torch.arange(dropout.first_head, stop_head, device=device)
    entry_numbers = torch.arange(dropout.first_entry, stop_entry, device=device)
    column = first_key % _GROUP
    row_bytes = _GROUP_BYTES * groups.numel()
    # In blocks, because words have 64 bits here.
    for b, h, r in row_blocks(batch, heads, n_rows, row_bytes):
        counter = (
            groups,
            queries[r, None],
            head_numbers[h, None, None],
            entry_numbers[b, None, None, None],
        )
        words = philox(counter, dropout.seed)
        is_below = torch.stack([word < dropout.threshold for word in words], dim=-1)
        is_below = is_below.flatten(-2)  # (b, h, rows, keys of whole groups)
        is_dropped[b, h, r] = is_below[..., column : column + n_keys]
        del words, is_below  # before the next block makes some


def philox(counter: tuple[torch.Tensor, ...], seed: int) -> tuple[torch.Tensor, ...]:
    """Return the four words of Philox4x32-7, int64 from 0 to 2**32 - 1, in the
    counters' common shape.

    Args:
        counter: four tensors of words, int64; they are broadcast as late as can be.
        seed: the key, its lower 32 bits first.
    """
    c0, c1, c2, c3 = counter
    low_key = seed & _BITS
    high_key = seed >> 32
    for _ in range(ROUNDS):
        # A product of two words fits 64 bits; as a negative number where its highest
        # bit is set.
        product0 = c0 * FACTORS[0]
        product2 = c2 * FACTORS[1]
        c0 = ((product2 >> 32) ^ c1 ^ low_key).bitwise_and_(_BITS)
        c2 = ((product0 >> 32) ^ c3 ^ high_key).bitwise_and_(_BITS)
        # The upper half of these is left as it is, because it goes no further than the
        # lines above.
        c1 = product2
        c3 = product0
        low_key = (low_key + KEY_STEPS[0]) & _BITS
        high_key = (high_key + KEY_STEPS[1]) & _BITS
    return c0, c1.bitwise_and(_BITS), c2, c3.bitwise_and(_BITS)
