"""One attention call with its tensors, as the executor sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.masks import MaskView
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.protocol import InnerKernel

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """Checked inputs and what to run them with.

    Attributes:
        work: the call's sizes.
        query: (*batch, heads, n_queries, head_dim), on ``device`` or on the host, as key and value.
        key: (*batch, kv_heads, n_keys, head_dim).
        value: (*batch, kv_heads, n_keys, value_dim).
        mask: the call's mask; None if it has none.
        scale: the factor of the scores.
        device: the device that computes.
        kernel: the inner kernel.
        sinks: (heads,), on ``device``, of the state's dtype; None if the call has none.
        dropout: which probabilities are dropped; None: none.
    """

    work: Workload
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: MaskView | None
    scale: float
    device: torch.device
    kernel: InnerKernel
    sinks: torch.Tensor | None = None
    dropout: Dropout | None = None

    @property
    def in_place(self) -> bool:
        """Whether operators can read the inputs where they are, without a copy."""
        return self.query.device == self.device and lie_well(self.query, self.key, self.value)


def rows_are_dense(*tensors: torch.Tensor) -> bool:
    """Whether operators can read ``tensors``, all of one device, without a copy.

    The last dimension has to be contiguous. On a GPU every row also has to start at a multiple of
    a word (16 bytes): operators refuse other rows, or fail with misaligned addresses. Rows whose
    length is no multiple of a word may start anywhere, because they are padded, which copies them.
    On a CPU rows of 16 bits may not begin within the row before: torch's matrix products refuse
    them where the processor multiplies bf16.
    """
    word = backend_of(tensors[0].device).word_bytes
    for tensor in tensors:
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return False
        if word > 1:
            if not _at_whole_words(tensor, word):
                return False
        elif tensor.element_size() == 2 and rows_overlap(tensor):
            return False
    return True


def lie_well(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether operators can read the inputs without a copy: their rows are dense, and results can
    have the query's strides."""
    if backend_of(query.device).word_bytes == 1:
        laid_out = results_are_dense(query)
    else:
        laid_out = all(n <= 1 or s > 0 for n, s in zip(query.shape, query.stride(), strict=True))
    return laid_out and rows_are_dense(query, key, value)


def results_are_dense(query: torch.Tensor) -> bool:
    """Whether torch's operator on a CPU gives its output, which it lays out as the query, dense
    rows; it fills them as if they were dense.

    They are not where another dimension than the last has steps of one number too, as ``unfold``
    makes them; of a dimension of size 1, beside one that is expanded.
    """
    steps = query.stride()
    if steps.count(1) < 2 or query.shape[-1] < 2:
        return True
    expanded = 0 in steps
    each = zip(query.shape[:-1], steps[:-1], strict=True)
    return not any(s == 1 and (n > 1 or expanded) for n, s in each)


def rows_overlap(tensor: torch.Tensor) -> bool:
    """Whether rows begin within the row before; not those that are all the same."""
    return tensor.shape[-2] > 1 and 0 < tensor.stride(-2) < tensor.shape[-1]


def _at_whole_words(tensor: torch.Tensor, word: int) -> bool:
    size = tensor.element_size()
    if tensor.shape[-1] * size % word:
        return True
    steps = (s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1)
    return tensor.data_ptr() % word == 0 and not any(s * size % word for s in steps)


def is_operand(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether operators can read an upstream gradient or an output without a copy."""
    return tensor.dtype == dtype and 0 not in tensor.stride() and rows_are_dense(tensor)


def operand(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A part of an upstream gradient or of an output as operators can read it: of ``dtype``, in
    dense rows, not expanded (the gradient of a sum is). Copies it only if it is not so already."""
    if is_operand(tensor, dtype):
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def flat_batch(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor`` (*batch, heads, n, d) as a view (b, heads, n, d); None if it has none."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() == 3:
        return tensor.unsqueeze(0)
    try:
        return tensor.view(-1, *tensor.shape[-3:])
    except RuntimeError:
        return None
