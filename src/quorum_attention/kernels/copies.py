"""Copies within a device, of rows with gaps between heads, at the memory's rate."""

from __future__ import annotations

import torch

_WORD = 16
# Below it the host takes longer than the device.
_LARGE_BYTES = 8 << 20


def copy_on_device(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``; many rows with gaps between heads in words of 16 bytes where they
    allow it: torch moves one element at a time, which takes up to 1.6 times as long."""
    if target.is_cuda and target.numel() * target.element_size() >= _LARGE_BYTES:
        target, source = in_words(target, source)
    # Into host memory it would be read before it is there.
    target.copy_(source, non_blocking=target.is_cuda)


def in_words(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as words of 16 bytes, if both consist of whole ones and are of one dtype."""
    if target.dtype != source.dtype or not (_whole_words(target) and _whole_words(source)):
        return target, source
    return target.view(torch.complex128), source.view(torch.complex128)


def _whole_words(tensor: torch.Tensor) -> bool:
    size = tensor.element_size()
    *strides, last = tensor.stride()
    counts = (tensor.shape[-1], tensor.storage_offset(), *strides)
    aligned = tensor.data_ptr() % _WORD == 0
    return last == 1 and aligned and all(count * size % _WORD == 0 for count in counts)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if it is contiguous and begins with its storage; otherwise a copy that does."""
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        return tensor
    found = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copy_on_device(found, tensor.detach())
    return found
