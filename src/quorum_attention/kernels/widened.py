"""Gradients of a short 16-bit call on a CPU by the operator in fp32.

torch's operator multiplies matrices of 16 bits one small tile at a time, by a library whose call
takes longer than the product; where the processor has no instructions for fp16, five times as long
and more. In fp32, with all that it reads copied and its results rounded once, the same backward
takes a seventh of the time in fp16, and half in bf16. It is twice as exact too: probabilities and
the parts of sums are not rounded to 16 bits (docs/gradients.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from quorum_attention.kernels.cpu import sums_groups
from quorum_attention.kernels.protocol import Call, Saved, Three

WIDENED_BYTES = 4 << 20
"""Most bytes in fp32 that are held at any one time."""

Run = Callable[[Call, Saved], Three]
_At = tuple[slice, slice]


def quicker_widened(dtype: torch.dtype, *, grouped: bool) -> bool:
    """Whether gradients of this dtype are computed in fp32: not those of bf16 that torch's autograd
    records, of calls without grouped heads."""
    if dtype == torch.bfloat16:
        return grouped
    return dtype == torch.float16 and not _multiplies_fp16()


def heads_at_a_time(
    batch: int,
    heads: int,
    key_heads: int,
    n_queries: int,
    n_keys: int,
    widths: tuple[int, int],
    *,
    masked: bool = False,
    causal: bool = False,
) -> int:
    """How many key heads, with their query heads, go to the operator together; all of the batch's
    if there are as many. 0 if the call is too large, or that would leave threads idle.

    Args:
        widths: head and value dimension.
        masked: whether scores have a bias.
        causal: whether the operator's own sums over query heads may be taken, where it has them.
    """
    shared = heads // key_heads
    width, pads = max(widths), widths[0] != widths[1]
    every = batch * key_heads
    # Query, output, their gradients, a copy of one in another order, the query times a part of the
    # scale; keys and values, and their gradients.
    rows = (6 + 2 * pads) * shared * n_queries * width
    keys = (4 + 2 * pads) * n_keys * width
    one = 4 * (rows + keys + masked * shared * n_queries * n_keys)
    most = _together(one, every, key_heads)
    # Of the last ones too: those that are left.
    last = most if most >= every else key_heads % most if most and key_heads % most else most
    if shared == 1 or not causal or not sums_groups(4, min(last, every)):
        # Gradients of keys and values for every query head, before they are summed.
        most = _together(one + 4 * 2 * shared * n_keys * width, every, key_heads)
    busy = min(torch.get_num_threads(), batch * heads)
    return most if most * shared >= busy else 0


def _together(one: int, every: int, key_heads: int) -> int:
    """How many key heads of ``one`` bytes each fit: more than an entry has only if all do."""
    most = WIDENED_BYTES // max(1, one)
    return most if most >= every else min(most, key_heads)


def widened_gradients(run: Run, heads: int, call: Call, saved: Saved) -> Three:
    """The gradients of query, key and value, in their dtype.

    Args:
        run: the operator's backward, in fp32.
        heads: ``heads_at_a_time``.
        call, saved: in 16 bits; lse in fp32.
    """
    batch, key_heads = call.key.shape[:2]
    shared = call.query.shape[1] // key_heads
    every = slice(None)
    if heads >= batch * key_heads:
        made = run(*_widened(call, saved, (every, every), (every, every)))
        return (
            made[0].to(call.query.dtype),
            made[1].to(call.key.dtype),
            made[2].to(call.value.dtype),
        )
    query, key, value = map(torch.empty_like, call.inputs)
    for entry in range(batch):
        for first in range(0, key_heads, heads):
            some = slice(entry, entry + 1), slice(first, first + heads)
            rows = slice(entry, entry + 1), slice(shared * first, shared * (first + heads))
            made = run(*_widened(call, saved, rows, some))
            for whole, at, part in zip((query, key, value), (rows, some, some), made, strict=True):
                whole[at].copy_(part)
            del made, part
    return query, key, value


def _widened(call: Call, saved: Saved, rows: _At, keys: _At) -> tuple[Call, Saved]:
    """Some batch entries and heads of a call in fp32."""
    bias = call.bias
    if bias is not None:
        # What broadcasts does so in parts too.
        at = (rows[0] if bias.shape[0] > 1 else slice(None),
              rows[1] if bias.shape[1] > 1 else slice(None))  # fmt: skip
        bias = bias[at].float()
    return (
        call.mapped(lambda tensor: tensor[rows].float(), lambda tensor: tensor[keys].float(),
                    bias=bias),
        saved.mapped(lambda tensor: tensor[rows].float()),
    )  # fmt: skip


@functools.cache
def _multiplies_fp16() -> bool:
    """Whether torch's matrix products of fp16 have instructions of this processor's."""
    try:
        asked: Any = torch.ops.mkldnn._is_mkldnn_fp16_supported
        return bool(asked())
    except (AttributeError, RuntimeError):
        return False
