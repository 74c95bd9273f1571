"""Copies tensors with gaps between their heads to and from a GPU.

torch copies a tensor with gaps slowly between host and device, and the host waits. Each
head is one run of memory. Where there are bindings of the driver, all heads are copied
by one call; else by a call for each.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self.copy_all([(target, source)])

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin to copy several tensors, (target, source) each."""
        batch = self._batch
        for target, source in pairs:
            if batch is not None and _has_equal_runs(target, source):
                _note_heads(batch, target, source)
            else:
                with torch.cuda.stream(self._stream):
                    copy_heads(target, source)
        if batch is not None:
            batch.flush(self._stream)


def _note_heads(
    batch: BatchedCopies, target: torch.Tensor, source: torch.Tensor
) -> None:
    n_bytes = source.element_size() * source.shape[-2] * source.shape[-1]
    targets = _head_addresses(target)
    sources = _head_addresses(source)
    for target_address, source_address in zip(targets, sources, strict=True):
        batch.add(target_address, source_address, n_bytes)


def _head_addresses(tensor: torch.Tensor) -> list[int]:
    """The address of each head of a tensor (..., n, width)."""
    addresses = [tensor.data_ptr()]
    for dim in range(tensor.dim() - 2):
        step = tensor.stride(dim) * tensor.element_size()
        offsets = [index * step for index in range(tensor.shape[dim])]
        addresses = [start + offset for start in addresses for offset in offsets]
    return addresses


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
