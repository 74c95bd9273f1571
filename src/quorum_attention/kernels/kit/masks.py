"""Masks that know of a whole block whether it is masked or clear, so that no pair is tried.

Each is a FlexAttention ``mask_mod``: called with the numbers of batch entry and head and the
positions of query and key, it returns which pairs are kept. Combine them with ``&`` and ``|``.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Ranges, Verdict
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.masked.functions import BlockMask, MaskMod
from quorum_attention.kernels.torch_private import outside

__all__ = ["BlockMask", "MaskMod", "causal", "document", "prefix_lm", "sliding_window"]


def causal() -> BlockMask:
    """Keep keys at or before the query."""
    return BlockMask(lambda b, h, q, k: q >= k, Band(None, 0).verdict, reach=(math.inf, 0))


def sliding_window(left: int, right: int = 0) -> BlockMask:
    """Keep keys from ``left`` tokens before the query to ``right`` after it.

    Raises:
        ValueError: a side below 0.
    """
    if min(left, right) < 0:
        raise ValueError(f"left and right must be 0 or more, got {left} and {right}")

    def keeps(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (q - k <= left) & (k - q <= right)  # type: ignore[no-any-return]

    return BlockMask(keeps, Band(-left, right).verdict, reach=(left, right))


def prefix_lm(prefix: int) -> BlockMask:
    """Keep the first ``prefix`` keys for every query, and the others at or before it."""

    def verdict(r: Ranges) -> Verdict:
        return FULL if r.keys.stop <= prefix else PARTIAL

    only_prefix = BlockMask(
        lambda b, h, q, k: k < prefix,
        lambda r: EMPTY if r.keys.start >= prefix else verdict(r),
    )
    return only_prefix | causal()


def document(ids: torch.Tensor) -> BlockMask:
    """Keep pairs within one document.

    Args:
        ids: (n,) integers, ascending: the document of every token. They are copied, once to every
            device on which the mask is used.

    Raises:
        ValueError: not one dimension of ascending integers; in a call: a token has no id.
    """
    if ids.ndim != 1 or ids.is_floating_point() or bool((ids[1:] < ids[:-1]).any()):
        raise ValueError("ids must be one dimension of ascending integers")
    # A copy, so that cached verdicts stay right if the ids change; made outside inference mode,
    # whose tensors a backward refuses.
    with outside():
        own = ids.detach().clone()
    host = own.cpu().numpy()

    # The ids are moved here, so that the function that is traced only reads a tensor.
    @lru_cache(maxsize=16)
    def placed(device: torch.device) -> MaskMod:
        with outside():
            return _same(own.to(device))

    def verdict(r: Ranges) -> Verdict:
        (q0, q1), (k0, k1) = r
        if max(q1, k1) > len(host):
            last = max(q1, k1) - 1
            raise ValueError(f"document has ids of {len(host)} tokens, not of token {last}")
        q0, q1, k0, k1 = host[[q0, q1 - 1, k0, k1 - 1]].tolist()
        if q0 > k1 or k0 > q1:
            return EMPTY
        return FULL if q0 == q1 == k0 == k1 else PARTIAL

    longest = int(np.unique(host, return_counts=True)[1].max(initial=1))
    reach = (longest - 1, longest - 1)
    return BlockMask(lambda b, h, q, k: placed(q.device)(b, h, q, k), verdict, placed, reach)


def _same(ids: torch.Tensor) -> MaskMod:
    return lambda b, h, q, k: ids[q] == ids[k]
