"""One attention call with its tensors, as the executor sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.masks import MaskView
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.protocol import InnerKernel

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """Checked inputs and what to run them with.

    query (*batch, heads, n_queries, head_dim), key (*batch, kv_heads, n_keys, head_dim), value
    (*batch, kv_heads, n_keys, value_dim), on ``device`` or on the host; ``device`` computes.
    """

    work: Workload
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: MaskView | None
    scale: float
    device: torch.device
    kernel: InnerKernel

    @property
    def resident(self) -> bool:
        """Whether the inputs already lie where they are computed."""
        return self.query.device == self.device

    @property
    def in_place(self) -> bool:
        """Whether an operator can take the inputs as they lie."""
        return self.resident and lie_well(self.query, self.key, self.value)


def rows_are_dense(*tensors: torch.Tensor) -> bool:
    """Whether operators take tensors of one device as they lie: the last dimension contiguous and,
    on a GPU, rows of whole words of 16 bytes at whole words. (Others are refused, or end in
    misaligned addresses; rows that are no whole words are padded, which copies them.)"""
    word = backend_of(tensors[0].device).word_bytes
    for tensor in tensors:
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return False
        if word > 1 and not _at_whole_words(tensor, word):
            return False
    return True


def lie_well(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether operators take the inputs as they lie: in dense rows and, because a GPU's lay out
    results as the query is, that one not expanded."""
    laid_out = backend_of(query.device).word_bytes == 1 or all(
        n <= 1 or s > 0 for n, s in zip(query.shape, query.stride(), strict=True)
    )
    return laid_out and rows_are_dense(query, key, value)


def _at_whole_words(tensor: torch.Tensor, word: int) -> bool:
    size = tensor.element_size()
    if tensor.shape[-1] * size % word:
        return True
    steps = (s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1)
    return tensor.data_ptr() % word == 0 and not any(s * size % word for s in steps)


def is_operand(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether operators take an upstream gradient or an output as it lies."""
    return tensor.dtype == dtype and 0 not in tensor.stride() and rows_are_dense(tensor)


def operand(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A part of an upstream gradient or of an output as operators take it: in the inputs' dtype,
    in dense rows, not expanded (as the gradient of a sum is)."""
    if is_operand(tensor, dtype):
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def flat_batch(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor`` (*batch, heads, n, d) as (b, heads, n, d) without a copy; None if it has no such
    view."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() == 3:
        return tensor.unsqueeze(0)
    try:
        return tensor.view(-1, *tensor.shape[-3:])
    except RuntimeError:
        return None
