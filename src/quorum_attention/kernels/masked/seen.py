"""What a tensor of a mask held when it was read: whether it has been written to since.

Torch counts what is written to a tensor, and that is all there is to ask of one on a GPU, for whose
numbers the host would have to wait. It does not count what is written through ``.data``, nor what
NumPy or another library writes to memory that it shares. In host memory numbers are compared
instead: 0.05 ms for the ids of 262,144 tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.kernels.torch_private import outside

_are_transforms_active = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack


class Seen:
    """The state of a tensor: its numbers in host memory, elsewhere its version and its place."""

    __slots__ = ("_numbers", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._numbers: NDArray[np.generic] | None = None
        self._version: tuple[int, int] | None = None
        if tensor.is_cpu or tensor.is_inference():  # which has no version
            self._numbers = _numbers(tensor).copy()
        else:
            self._version = tensor._version, tensor.data_ptr()

    def is_same(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, the one of then, has not been written to since, as far as can be
        told."""
        if self._numbers is None:
            return self._version == (tensor._version, tensor.data_ptr())
        found = _numbers(tensor)
        return found.dtype == self._numbers.dtype and np.array_equal(found, self._numbers)


def _numbers(tensor: torch.Tensor) -> NDArray[np.generic]:
    if tensor.is_cpu and not _are_transforms_active() and not _modes():
        found: NDArray[np.generic] = tensor.numpy()
        return found
    with outside():  # a transformation or a mode would take part in that
        return tensor.cpu().numpy()
