"""A step of decoding: queries that all ranks have, over keys that are sharded.

Each rank computes what its own keys say, and the ranks tell each other output and log-sum-exp: a
few vectors, however long the sequence is. Keys and values stay where they are.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from quorum_attention.api import attention_with_lse
from quorum_attention.call.validation import as_tensor
from quorum_attention.distributed import agreement
from quorum_attention.distributed.masks import checked_mask
from quorum_attention.distributed.report import ShardedReport
from quorum_attention.execution.problem import state_dtype
from quorum_attention.execution.report import Report
from quorum_attention.kernels.merge import join_sinks_, merge_
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.mask import Mask


@uncompiled
@torch.no_grad()
def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | Mask | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    budget: int | str | None = None,
    depth: int | str = "auto",
    kernel: str | InnerKernel = "auto",
    report: ShardedReport | None = None,
) -> torch.Tensor:
    """Attention of the same queries on all ranks over the keys of all ranks; no gradients.

    All ranks call it together. The result is the same on all of them, to the last bit. Partial
    results are exchanged and merged in fp32 (fp64 for fp64 inputs).

    Args:
        query: (..., heads, queries, head_dim), the same on all ranks.
        key: (..., kv_heads, keys, head_dim), value: (..., kv_heads, keys, value_dim): those that
            this rank holds, any number of them, also none.
        attn_mask: of this rank's keys: a tensor that broadcasts to (..., heads, queries, keys),
            boolean (True keeps) or additive, or a ``Mask``. Its sinks, if it has any, are the same
            on all ranks, and take part once.
        group: the process group; None is the default one.
        scale, enable_gqa, budget, depth, kernel: as in ``quorum_attention.attention``.
        report: a ``ShardedReport`` to fill with what this rank did.

    Returns:
        (..., heads, queries, value_dim), in the query's dtype; 0 in rows that see no key.

    Raises:
        RuntimeError: as of ``attention``, also for other ranks.
        ValueError: the ranks do not agree on the step (sizes, dtype, ``scale``, whether there are
            sinks). On a GPU they compare the first step of a kind; later on all have NaN where
            ranks are at different ones.
    """
    everyone = agreement.member_of(group)
    with agreement.refusing(everyone, agreement.waits(everyone, query)):
        for tensor, name in ((query, "query"), (key, "key"), (value, "value")):
            as_tensor(tensor, name)
        mask = checked_mask(attn_mask, query, key)
        agreement.check_kernel_of_parts(kernel)
    sinks = None if mask is None else mask.sinks
    heads, queries, head_dim = query.shape[-3:]
    arguments = {
        "call": "decode", "batch size": query.shape[:-3].numel(), "heads": heads,
        "queries": queries, "head_dim": head_dim, "value_dim": value.shape[-1],
        "dtype": query.dtype, "scale": scale, "attn_mask.sinks": sinks is not None,
    }  # fmt: skip
    number = agreement.agreed_number(everyone, query, arguments)
    made = None if report is None else Report()
    with agreement.exchanging(everyone):
        own = mask if mask is None or sinks is None else replace(mask, sinks=None)
        out, lse = attention_with_lse(
            query, key, value, own, scale=scale, enable_gqa=enable_gqa, budget=budget,
            depth=depth, kernel=kernel, out_dtype=state_dtype(query.dtype), report=made,
        )  # fmt: skip
        size = (*out.shape[:-1], out.shape[-1] + 1)
        mine = out.new_empty(math.prod(size) + 1)
        torch.cat([out, lse.to(out.device).unsqueeze(-1)], dim=-1, out=mine[:-1].view(size))
        mine[-1:].fill_(number)
        every = mine.new_empty((everyone.size(), mine.numel()))
        dist.all_gather(list(every.unbind()), mine, group=everyone)
    if report is not None and made is not None:
        received = (everyone.size() - 1) * mine.nbytes
        report.fill(
            everyone, way="keys and values stay", pairs=query.shape[-2] * key.shape[-2], stages=1,
            forward_bytes=received, most_forward_bytes=received, calls=[made],
        )  # fmt: skip
    # By entry of all batch dimensions: (ranks, entries, heads, queries, value_dim and lse).
    parts = every[:, :-1].view(everyone.size(), -1, *size[-3:])
    total, weight = parts[0, ..., :-1], parts[0, ..., -1]
    for part in parts[1:]:
        merge_(total, weight, part[..., :-1], part[..., -1])
    if sinks is not None:
        join_sinks_(total, weight, sinks)
    found = total.reshape(out.shape).to(query.dtype)
    return found.masked_fill_((every[:, -1] != number).any(), math.nan)
