# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""Which pairs of a tile are dropped: ``kernels/dropout.py`` in Triton, bit for bit the same."""

import triton
import triton.language as tl


@triton.jit
def dropout_params(drops, h, b):
    """What a program's tiles need of a dropout (``launch._words``).

    Args:
        drops: halves of the seed, threshold, first head, first entry, after how many entries they
            repeat, all int32; and 1 / (1 - p) and 1 - p, fp32.
        h, b: head and batch entry, numbered in the launch.

    Returns:
        (head, entry, key_low, key_high, threshold): words of 32 bits, the first two of the counter,
        numbered in the whole call; and (rescale, share): 1 / (1 - p) and 1 - p.
    """
    seed_low, seed_high, threshold, first_head, first_entry, repeat, rescale, share = drops
    head = (first_head + h).to(tl.uint32)
    entry = ((first_entry + b) % repeat).to(tl.uint32)
    return (
        head, entry, seed_low.to(tl.uint32), seed_high.to(tl.uint32), threshold.to(tl.uint32),
        rescale, share,
    )  # fmt: skip


@triton.jit
def philox(c0, c1, c2, c3, key_low, key_high):
    """The four words of Philox4x32-7; counters and key are uint32 and broadcast."""
    for _ in tl.static_range(7):
        # One multiplication gives both halves. What does not differ by row or by key yet is
        # multiplied once: the first rounds are nearly free.
        one = c0.to(tl.uint64) * 0xD2511F53
        two = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (two >> 32).to(tl.uint32) ^ c1 ^ key_low
        c2 = (one >> 32).to(tl.uint32) ^ c3 ^ key_high
        c1 = two.to(tl.uint32)
        c3 = one.to(tl.uint32)
        key_low += 0x9E3779B9
        key_high += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _four(rows, groups, drops):
    """Whether the four keys of each group are dropped, int8 each."""
    head, entry, key_low, key_high, threshold, _, _ = drops
    w0, w1, w2, w3 = philox(groups, rows, head, entry, key_low, key_high)
    return (
        (w0 < threshold).to(tl.int8), (w1 < threshold).to(tl.int8),
        (w2 < threshold).to(tl.int8), (w3 < threshold).to(tl.int8),
    )  # fmt: skip


@triton.jit
def _pick(skipped, a, b, c, d):
    return tl.where(skipped == 0, a, tl.where(skipped == 1, b, tl.where(skipped == 2, c, d)))


@triton.jit
def dropped(rows, at_key, drops, BY_KEY: tl.constexpr, K: tl.constexpr):
    """Which pairs of a tile are dropped: (BLOCK_M, BLOCK_N) int8, not 0 where they are; with BY_KEY
    (BLOCK_N, BLOCK_M).

    Args:
        rows: (BLOCK_M,) int32, global positions of the queries.
        at_key: int32, global position of the first of BLOCK_N neighbouring keys; with DROPOUT 2 a
            multiple of four, with 1 anything (twice the work).
        drops: as ``dropout_params`` returns them.
    """
    at = at_key.to(tl.uint32)
    groups = ((at // 4) + tl.arange(0, K.BLOCK_N // 4).to(tl.uint32))[None, :]
    rows = rows.to(tl.uint32)[:, None]
    f0, f1, f2, f3 = _four(rows, groups, drops)
    if K.DROPOUT == 1:
        e0, e1, e2, _ = _four(rows, groups + 1, drops)
        skipped = at % 4
        g0 = _pick(skipped, f0, f1, f2, f3)
        g1 = _pick(skipped, f1, f2, f3, e0)
        g2 = _pick(skipped, f2, f3, e0, e1)
        f3 = _pick(skipped, f3, e0, e1, e2)
        f0, f1, f2 = g0, g1, g2
    # The last dimensions, of the joins, become neighbouring keys.
    found = tl.join(tl.join(f0, f2), tl.join(f1, f3)).reshape(K.BLOCK_M, K.BLOCK_N)
    if BY_KEY:
        found = tl.trans(found)
    return found
