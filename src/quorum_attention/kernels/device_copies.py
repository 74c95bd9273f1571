"""Copies on a device and to it."""

from __future__ import annotations

import torch

from quorum_attention.kernels.torch_private import capturing

_WORD_BYTES = 16
# Below this the host takes longer than the device.
_LARGE_BYTES = 8 << 20


def copy_on_device(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``, large tensors in words of 16 bytes where both allow it.

    With gaps between heads torch copies element by element, which takes up to 1.6 times
    as long.
    """
    if target.is_cuda and target.numel() * target.element_size() >= _LARGE_BYTES:
        target, source = in_words(target, source)
    # A copy to host memory has to be waited for: it would be read before it is
    # complete.
    target.copy_(source, non_blocking=target.is_cuda)


def in_words(
    target: torch.Tensor, source: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as views in words of 16 bytes, if both have one dtype and consist of
    whole words."""
    if target.dtype != source.dtype or not (
        _has_whole_words(target) and _has_whole_words(source)
    ):
        return target, source
    return target.view(torch.complex128), source.view(torch.complex128)


def _has_whole_words(tensor: torch.Tensor) -> bool:
    *strides, last_stride = tensor.stride()
    if last_stride != 1 or tensor.data_ptr() % _WORD_BYTES:
        return False
    itemsize = tensor.element_size()
    counts = (tensor.shape[-1], tensor.storage_offset(), *strides)
    return all(count * itemsize % _WORD_BYTES == 0 for count in counts)


# Tensors that captured CUDA graphs copy from, by their ids. Nobody says when a graph is
# gone.
_READ_BY_GRAPHS: dict[int, torch.Tensor] = {}


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor``, in page-locked memory, on ``device``; the host does not wait.

    A CUDA graph that is being captured will copy it at every replay. So it is kept for
    good then: else its memory could be given to another tensor, which the graph would
    read.
    """
    if capturing(device):
        _READ_BY_GRAPHS[id(tensor)] = tensor
    return tensor.to(device, non_blocking=True)
