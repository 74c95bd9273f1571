"""A tensor in the memory of a CUDA device, handed to another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Handed:
    """A tensor in the memory of a CUDA device, for one other process.

    torch's own way of sending such a tensor never learns that the other process was killed, and
    then keeps its memory; this one can be told (``release``).

    Attributes:
        storage: what torch says of the memory: device, handle, size, offset, reference counter,
            event.
        offset, shape, strides: in elements.
        dtype: of the tensor.
    """

    storage: tuple[Any, ...]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Handed:
        """For one other process, which has to open it or be ``release``d from it.

        Raises:
            RuntimeError: the allocator's memory cannot be handed over.
        """
        try:
            storage = tensor.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise RuntimeError(
                f"a tensor on {tensor.device} could not be handed over to another process "
                f"({error}): memory of expandable segments (PYTORCH_CUDA_ALLOC_CONF), of graphs, "
                "or of yet another process cannot; give tensors in host memory"
            ) from error
        shape, strides = tuple(tensor.shape), tensor.stride()
        return cls(tuple(storage), int(tensor.storage_offset()), shape, strides, tensor.dtype)

    def open(self) -> torch.Tensor:
        """The tensor, in the process that received it."""
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(*self.storage)
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made.set_(storage, self.offset, self.shape, self.strides)
        return made

    def release(self) -> None:
        """Count it as given back: the process that has it is gone."""
        torch.UntypedStorage._release_ipc_counter_cuda(*self.storage[4:6])


__all__ = ["Handed"]
