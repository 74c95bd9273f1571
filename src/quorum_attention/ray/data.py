"""What a Ray task gets of a pass, and the files that it writes: rows of results, partial states."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from quorum_attention.call.block import Block
from quorum_attention.devices.buffers import InFile
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.ray.units import Cut, Unit
from quorum_attention.writing import replacing

OF_KEYS = ("key", "value", "grad_key", "grad_value")
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Job:
    """A pass.

    Attributes:
        cut: the call, its mask without the bias, and how its heads are cut.
        inputs: by name, (*batch, heads, rows, ...): query, key, value; grad_out, out and lse of a
            backward; bias, if there is one. Only a bias, and what is empty, may be in no file.
        results: by name, likewise: out, lse; grad_query, grad_key, grad_value.
        folder: of partial states. As long as it is there, results may be written.
        state, dtype: of states and the log-sum-exp; of the other results.
        options: depth and kernel of each call.
        budget, cpus, gpus: of each task.
    """

    cut: Cut
    inputs: dict[str, torch.Tensor | InFile]
    results: dict[str, InFile]
    folder: str
    state: torch.dtype
    dtype: torch.dtype
    options: dict[str, Any]
    budget: int | None
    cpus: float
    gpus: float

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return "grad_out" in self.inputs

    def state_path(self, unit: Unit, task: int, chunk: int) -> str:
        """The file of the partial state that a task of the unit's head leaves of a chunk."""
        return os.path.join(self.folder, f"{unit.entry}-{unit.head}-{task}-{chunk}")

    def remove_states(self, merge: Unit) -> None:
        """Remove the states that are merged."""
        for task in self.cut.tasks(merge.number):
            with suppress(FileNotFoundError):
                os.unlink(self.state_path(merge, task, merge.number))

    def write(self, block: Block, made: Sequence[torch.Tensor]) -> None:
        """Write out and lse of a block's rows, or gradients of its rows and keys.

        By writing, not through a mapping: of a page that two machines have mapped, a network file
        system may lose what one of them wrote.

        Raises:
            OSError: a file is another one by now, or cannot be written.
            RuntimeError: the call is over; nothing is written.
        """
        if not os.path.isdir(self.folder):
            raise RuntimeError(f"{self.folder} is gone: this call is over and writes no more")
        names = ("grad_query", "grad_key", "grad_value") if self.backward else ("out", "lse")
        for name, tensor in zip(names, made, strict=True):
            if name in self.results:
                self._write(name, block, tensor)

    def _write(self, name: str, block: Block, made: torch.Tensor) -> None:
        target = self.results[name]
        made = moved(made, _HOST).to(target.dtype).contiguous()
        whole = torch.empty_strided(target.shape, target.strides, dtype=made.dtype, device="meta")
        part = self.cut.call.cut(whole, block, of_keys=name in OF_KEYS)
        file = target.descriptor(os.O_WRONLY)
        try:
            for head, rows in zip(part[0], made[0], strict=True):
                at = target.offset + int(head.storage_offset()) * made.itemsize
                raw = _bytes_of(rows)
                while raw:
                    count = os.pwrite(file, raw, at)
                    raw, at = raw[count:], at + count
        finally:
            os.close(file)


def write_state(path: str, tensors: Sequence[torch.Tensor]) -> None:
    """Write a partial state, one tensor after the other: the file is whole or absent."""
    with replacing(path) as file:
        for tensor in tensors:
            file.write(_bytes_of(moved(tensor, _HOST).contiguous()))


def read_state(path: str, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a state, of the shapes and dtypes of ``likes``."""
    found = [torch.empty_like(like, device=_HOST) for like in likes]
    with open(path, "rb") as file:
        for tensor in found:
            if file.readinto(_bytes_of(tensor)) != tensor.nbytes:
                raise OSError(f"{path} is shorter than the state of a chunk")
    return found


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor on the host."""
    # A single element is contiguous whatever its strides are, and a view of bytes is not.
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def moved(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """A tensor on a device or in host memory; between them through page-locked memory, which torch
    keeps, and fills from a mapped file with all its threads."""
    if tensor.device == place or tensor.numel() == 0:
        return tensor.to(place)
    if on_host(tensor.device):
        return tensor.pin_memory().to(place, non_blocking=True)
    locked = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
    return locked.copy_(tensor)


__all__ = ["OF_KEYS", "Job", "moved", "read_state", "write_state"]
