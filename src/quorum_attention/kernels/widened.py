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

WIDENED_BYTES = 4 << 20
"""Most bytes in fp32 that are held at any one time."""

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Run = Callable[..., Three]


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


def widened_gradients(
    run: Run,
    heads: int,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
) -> Three:
    """The gradients of query, key and value, in their dtype.

    Args:
        run: (grad_out, query, key, value, out, lse, bias) to the three gradients, in fp32.
        heads: ``heads_at_a_time``.
        grad_out, out: (b, h, nq, dv).
        query, key, value: (b, h, nq, d), (b, hk, nk, d), (b, hk, nk, dv).
        lse: (b, h, nq), fp32.
        bias: broadcastable to (b, h, nq, nk), or None.
    """
    batch, key_heads = key.shape[:2]
    shared = query.shape[1] // key_heads
    if heads >= batch * key_heads:
        made = run(*(t.float() for t in (grad_out, query, key, value, out)), lse, _float(bias))
        return made[0].to(query.dtype), made[1].to(key.dtype), made[2].to(value.dtype)
    found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if bias is not None:
        bias = bias.expand(batch, query.shape[1], *bias.shape[-2:])
    for entry in range(batch):
        for first in range(0, key_heads, heads):
            some = slice(entry, entry + 1), slice(first, first + heads)
            rows = slice(entry, entry + 1), slice(shared * first, shared * (first + heads))
            made = run(
                grad_out[rows].float(), query[rows].float(), key[some].float(),
                value[some].float(), out[rows].float(), lse[rows],
                None if bias is None else bias[rows].float(),
            )  # fmt: skip
            for whole, at, part in zip(found, (rows, some, some), made, strict=True):
                whole[at].copy_(part)
            del made, part
    return found


def _float(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float()


@functools.cache
def _multiplies_fp16() -> bool:
    """Whether torch's matrix products of fp16 have instructions of this processor's."""
    try:
        asked: Any = torch.ops.mkldnn._is_mkldnn_fp16_supported
        return bool(asked())
    except (AttributeError, RuntimeError):
        return False
