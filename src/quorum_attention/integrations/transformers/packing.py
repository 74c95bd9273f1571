"""A warning of packed documents that see each other.

Positions that begin anew within a row tell of packed documents. Transformers makes a
mask of them if a call has neither an ``attention_mask`` nor a cache, in most models. In
other calls the documents see each other, in each attention of Transformers that has no
``cu_seq_lens``.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from quorum_attention.integrations.transformers.masks import DescribedMask
from quorum_attention.kernels.torch_private import capturing, has_no_numbers
from quorum_attention.mask import Mask

_warned: set[str] = set()
_WORDS = (
    "position_ids begin anew within a row, as those of packed documents, and the mask "
    "of {model} lets the documents see each other. Transformers keeps them apart in "
    "calls without an attention_mask and without a cache (use_cache=False), and in "
    "some models never (gpt-oss). cu_seq_lens_q and cu_seq_lens_k keep the documents "
    "of one row apart in any call"
)


def warn_of_packing(module: torch.nn.Module, described: Any, positions: Any) -> None:
    """Warn once if ``positions`` tell of packed documents and the mask lets them see
    each other.

    Args:
        module: the layer's attention.
        described: its mask. Only a ``DescribedMask`` is looked at, and once.
        positions: (1 or batch, queries) integers, or whatever the model passes on as
            ``position_ids``.
    """
    if torch.compiler.is_compiling() or _warned:
        return
    if not isinstance(described, DescribedMask) or described.is_checked:
        return
    described.is_checked = True  # layers of a forward share the mask
    if _keeps_apart(described.mask) or not _tells_positions(positions, described):
        return
    if bool((positions.diff() < 1).any()) and _begins_anew(
        described.mask, positions.cpu()
    ):
        _warned.add("packing")
        warnings.warn(_WORDS.format(model=type(module).__name__), stacklevel=2)


def _keeps_apart(mask: Mask) -> bool:
    """Whether a mask may know of documents."""
    parts = (mask.documents, mask.keeps, mask.either, mask.every)
    return any(part is not None and part != () for part in parts)


def _tells_positions(positions: Any, described: DescribedMask) -> bool:
    """Whether ``positions`` are numbers, one of each query."""
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
        return False
    if positions.shape[1] != described.shape[2] or positions.shape[1] < 2:
        return False
    return not has_no_numbers(positions) and not capturing(positions.device)


def _begins_anew(mask: Mask, positions: torch.Tensor) -> bool:
    """Whether positions of tokens that are no padding go down or stay within a row."""
    if mask.key_padding is None:
        return True
    first = mask.offset if isinstance(mask.offset, int) else 0
    stop = first + positions.shape[1]
    is_token = mask.key_padding.cpu()[:, first:stop]
    for row, tokens in zip(positions.expand(len(is_token), -1), is_token, strict=True):
        if bool((row[tokens].diff() < 1).any()):
            return True
    return False
