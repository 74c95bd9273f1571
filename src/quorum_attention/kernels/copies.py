"""Copies within a device, of rows with gaps between heads, at the memory's rate."""

from __future__ import annotations

import torch

_WORD = 16
# Below it the host takes longer than the device.
_LARGE_BYTES = 8 << 20


def copy_on_device(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``; many rows with gaps between heads in words of 16 bytes where they
    allow it: torch moves one element at a time, which takes up to 1.6 times as long."""
    large = target.is_cuda and target.numel() * target.element_size() >= _LARGE_BYTES
    same = large and target.dtype == source.dtype
    if same and _in_words(target) and _in_words(source):
        target, source = target.view(torch.complex128), source.view(torch.complex128)
    # Into host memory it would be read before it is there.
    target.copy_(source, non_blocking=target.is_cuda)


def _in_words(tensor: torch.Tensor) -> bool:
    size = tensor.element_size()
    *strides, last = tensor.stride()
    return (
        last == 1
        and tensor.shape[-1] * size % _WORD == 0
        and tensor.data_ptr() % _WORD == 0
        and tensor.storage_offset() * size % _WORD == 0
        and all(stride * size % _WORD == 0 for stride in strides)
    )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if it is contiguous and begins with its storage; otherwise a copy that does."""
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        return tensor
    found = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copy_on_device(found, tensor.detach())
    return found
