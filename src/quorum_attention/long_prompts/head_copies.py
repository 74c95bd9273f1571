"""Copies tensors with gaps between their heads to and from a GPU.

torch copies a tensor with gaps slowly between host and device, and the host waits. Each
head is one run of memory. Where there are bindings of the driver, all heads are copied
by one call; else by a call for each.
"""

from __future__ import annotations

from itertools import product

import torch

from quorum_attention.execution.device.cuda_mover import cuda_runtime
from quorum_attention.execution.device.staging import BatchedCopies


class HeadCopies:
    """Copies of tensors (..., n, width) on one stream of a GPU.

    Args:
        stream: a stream beside the current one. The driver takes no copies of several
            runs on the default stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        runtime = cuda_runtime()
        self._batch = None if runtime is None else BatchedCopies(runtime)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy a tensor. One of both is in page-locked host memory, and the
        other on the device."""
        if self._batch is None or not _has_equal_runs(target, source):
            with torch.cuda.stream(self._stream):
                copy_heads(target, source)
            return
        self._note_heads(self._batch, target, source)
        self._batch.flush(self._stream)

    def _note_heads(
        self, batch: BatchedCopies, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        size = source.element_size()
        n_bytes = size * source.shape[-2] * source.shape[-1]
        leading_dims = range(source.dim() - 2)
        for index in product(*map(range, source.shape[:-2])):
            target_start = sum(index[dim] * target.stride(dim) for dim in leading_dims)
            source_start = sum(index[dim] * source.stride(dim) for dim in leading_dims)
            batch.add(
                target.data_ptr() + size * target_start,
                source.data_ptr() + size * source_start,
                n_bytes,
            )


def _has_equal_runs(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether each head is one run of memory, the same in both."""
    dense_strides = (source.shape[-1], 1)
    if target.dtype != source.dtype:
        return False
    return all(tensor.stride()[-2:] == dense_strides for tensor in (target, source))


def copy_heads(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy (..., n, width) on the current stream without waiting, head by head."""
    target_heads = target.flatten(0, -3)
    source_heads = source.flatten(0, -3)
    for target_head, source_head in zip(target_heads, source_heads, strict=True):
        target_head.copy_(source_head, non_blocking=True)
