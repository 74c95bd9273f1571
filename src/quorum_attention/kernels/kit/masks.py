"""Masks that know of a whole block whether it is empty or full, so that no pair is
evaluated.

Each is a FlexAttention ``mask_mod``: called with the numbers of batch entry and head
and the positions of query and key, it returns which pairs are kept. Combine them with
``&`` and ``|``.
"""

from __future__ import annotations

import numpy as np
import torch

from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.masked.blocks import Blocks
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.rules import EqualIds, FunctionRule
from quorum_attention.kernels.torch_private import no_torch_modes

_FAR = 1 << 62  # beyond every position


def causal() -> Geometry:
    """Keep keys at or before the query."""
    return Geometry(Band(None, 0))


def sliding_window(left: int, right: int = 0) -> Geometry:
    """Keep keys from ``left`` tokens before the query to ``right`` after it.

    Raises:
        ValueError: a side below 0.
    """
    if min(left, right) < 0:
        raise ValueError(f"left and right must be 0 or more, got {left} and {right}")
    return Geometry(Band(-left, right))


def prefix_lm(prefix: int) -> Geometry:
    """Keep the first ``prefix`` keys for every query, and the others at or before
    it."""
    prefix_of_all_queries = [0, _FAR, 0, prefix]
    blocks = np.array([prefix_of_all_queries], dtype=np.int64)
    in_prefix = FunctionRule(lambda b, h, q, k: k < prefix)
    keys_of_prefix = Geometry(
        blocks=Blocks(blocks),
        block_rules=(in_prefix,),
    )
    return keys_of_prefix | causal()


def document(ids: torch.Tensor) -> Geometry:
    """Keep pairs within one document.

    Args:
        ids: (n,) integers: the document of every token. They are copied, once to every
            device on which the mask is used.

    Raises:
        ValueError: not one dimension of integers; in a call: a token has no id.
    """
    if ids.ndim != 1 or ids.is_floating_point():
        raise ValueError("ids must be one dimension of integers")
    with no_torch_modes():
        # A copy: verdicts on blocks stay right if the caller writes to the ids.
        copied_ids = ids.detach().cpu().numpy().astype(np.int64)
    return Geometry(rules=(EqualIds(copied_ids, copied_ids),))
