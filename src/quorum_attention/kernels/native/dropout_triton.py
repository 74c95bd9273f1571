# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""Which pairs of a tile are dropped: the same bits as ``kernels/dropout.py``."""

import triton
import triton.language as tl


@triton.jit
def philox(c0, c1, c2, c3, key_low, key_high):
    """The four words of Philox4x32-7; counters and key are uint32 and broadcast."""
    for _ in tl.static_range(7):
        # One multiplication gives both halves. What does not differ by row or by key
        # yet is multiplied once: the first rounds are nearly free.
        product_0 = c0.to(tl.uint64) * 0xD2511F53
        product_2 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product_2 >> 32).to(tl.uint32) ^ c1 ^ key_low
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ key_high
        c1 = product_2.to(tl.uint32)
        c3 = product_0.to(tl.uint32)
        key_low += 0x9E3779B9
        key_high += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _dropped_in_groups(rows, groups, dropout):
    """Whether the first, second, third and fourth key of each group is dropped, int8
    each."""
    seed_low, seed_high, threshold, first_head, first_entry, lane = dropout
    entry, head = lane
    # Numbered in the whole call: the third and the fourth word of the counter.
    head = (first_head + head).to(tl.uint32)
    entry = (first_entry + entry).to(tl.uint32)
    key_low = seed_low.to(tl.uint32)
    key_high = seed_high.to(tl.uint32)
    threshold = threshold.to(tl.uint32)
    w0, w1, w2, w3 = philox(groups, rows, head, entry, key_low, key_high)
    return (
        (w0 < threshold).to(tl.int8),
        (w1 < threshold).to(tl.int8),
        (w2 < threshold).to(tl.int8),
        (w3 < threshold).to(tl.int8),
    )


@triton.jit
def _pick(number, a, b, c, d):
    """``a``, ``b``, ``c`` or ``d``, by a number from 0 to 3."""
    is_first = number == 0
    is_second = number == 1
    is_third = number == 2
    picked = tl.where(is_third, c, d)
    picked = tl.where(is_second, b, picked)
    return tl.where(is_first, a, picked)


@triton.jit
def dropped_pairs(rows, first_key, dropout, BY_KEY: tl.constexpr, K: tl.constexpr):
    """Which pairs of a tile are dropped: int8, not 0 where they are.

    Args:
        rows: (BLOCK_M,) int32, global positions of the queries.
        first_key: int32, global position of the first of BLOCK_N neighbouring keys;
            with DROPOUT 2 a multiple of four, with 1 anything (twice the work).
        dropout: halves of the seed, threshold, first head and first entry, all int32;
            and the lane: batch entry and query head, numbered in the launch.

    Returns:
        (BLOCK_M, BLOCK_N); with BY_KEY (BLOCK_N, BLOCK_M).
    """
    first_key = first_key.to(tl.uint32)
    groups = (first_key // 4) + tl.arange(0, K.BLOCK_N // 4).to(tl.uint32)
    groups = groups[None, :]
    rows = rows.to(tl.uint32)[:, None]
    d0, d1, d2, d3 = _dropped_in_groups(rows, groups, dropout)
    if K.DROPOUT == 1:
        # A tile's four neighbouring keys begin within a group and end in the next one.
        n0, n1, n2, _ = _dropped_in_groups(rows, groups + 1, dropout)
        n_skipped = first_key % 4
        shifted_0 = _pick(n_skipped, d0, d1, d2, d3)
        shifted_1 = _pick(n_skipped, d1, d2, d3, n0)
        shifted_2 = _pick(n_skipped, d2, d3, n0, n1)
        d3 = _pick(n_skipped, d3, n0, n1, n2)
        d0 = shifted_0
        d1 = shifted_1
        d2 = shifted_2
    # The last dimensions, of the joins, become neighbouring keys.
    even = tl.join(d0, d2)
    odd = tl.join(d1, d3)
    is_dropped = tl.join(even, odd).reshape(K.BLOCK_M, K.BLOCK_N)
    if BY_KEY:
        is_dropped = tl.trans(is_dropped)
    return is_dropped
