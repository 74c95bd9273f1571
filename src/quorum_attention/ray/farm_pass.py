"""A pass of a call from files to files, as its Ray tasks get it, and what they write.

A task that is begun again writes the same bytes to the same places.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from quorum_attention.call.block import CallBlock
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.handles import TensorHandle
from quorum_attention.execution.device.lookup import HOST, on_host
from quorum_attention.files.file_call import GRADIENTS, FileCall
from quorum_attention.quorums.interest import tasks_of_chunk
from quorum_attention.ray.chunks import FarmUnit, rows_of_chunk


@dataclass(frozen=True, slots=True)
class FarmPass:
    """A pass.

    Attributes:
        call: without its tensors and the bias; its options are those of each call of a
            unit.
        n_chunks: of a sequence, and tasks of a head; 1: heads are whole.
        inputs: by role, (*batch, heads, rows, ...), and bias, if there is one. Only a
            bias, and what is empty, may be in no file.
        results: by name, likewise: out, lse; dq, dk, dv.
        folder: of partial states. As long as the folder is there, results may be
            written.
        cpus, gpus: of each task.
    """

    call: FileCall
    n_chunks: int
    inputs: dict[str, torch.Tensor | TensorHandle]
    results: dict[str, TensorHandle]
    folder: str
    cpus: float
    gpus: float

    def block(self, unit: FarmUnit, query_chunk: int, key_chunk: int) -> CallBlock:
        """Return a chunk of queries and a chunk of keys of a unit's head."""
        shape = self.call.shape
        group_size = shape.queries_per_key_head
        return CallBlock(
            Interval(unit.entry, unit.entry + 1),
            Interval(unit.head * group_size, (unit.head + 1) * group_size),
            rows_of_chunk(shape, query_chunk, self.n_chunks, shape.n_queries),
            rows_of_chunk(shape, key_chunk, self.n_chunks, shape.n_keys),
        )

    def state_path(self, unit: FarmUnit, task: int, chunk: int) -> Path:
        """Return the file of the partial state that a task of the unit's head leaves of
        a chunk."""
        name = f"{unit.entry}-{unit.head}-{task}-{chunk}"
        return Path(self.folder, name)

    def merged_paths(self, unit: FarmUnit) -> list[Path]:
        """Return the files of the states that a unit merges, by ascending task."""
        if unit.kind != "merge":
            return []
        tasks = tasks_of_chunk(unit.number, self.n_chunks)
        return [self.state_path(unit, task, unit.number) for task in tasks]

    def leave_state(
        self, unit: FarmUnit, chunk: int, state: Sequence[torch.Tensor]
    ) -> None:
        """Write the partial state of a chunk; the file is whole or absent, whoever else
        writes."""
        path = self.state_path(unit, unit.number, chunk)
        temporary = f"{path}.{secrets.token_hex(4)}"
        tensors = {
            str(number): moved_to(tensor, HOST).contiguous()
            for number, tensor in enumerate(state)
        }
        save_file(tensors, temporary)
        os.replace(temporary, path)

    def write_results(self, block: CallBlock, results: Sequence[torch.Tensor]) -> None:
        """Write out and lse of a block's rows, or gradients of its rows and keys.

        Results are written to the file, not through a mapping: of a page that two
        machines have mapped, a network file system may lose what one of them wrote.

        Raises:
            OSError: a file is another one by now, or cannot be written.
            RuntimeError: the call is over; nothing is written.
        """
        if not os.path.isdir(self.folder):
            raise RuntimeError(
                f"{self.folder} is gone: this call is over and writes no more"
            )
        names = GRADIENTS if self.call.backward else ("out", "lse")
        for name, tensor in zip(names, results, strict=True):
            if name in self.results:
                self._write(name, block, tensor)

    def _write(self, name: str, block: CallBlock, tensor: torch.Tensor) -> None:
        target = self.results[name]
        tensor = moved_to(tensor, HOST).to(target.dtype)
        # Where the rows of each head lie in the file.
        layout = torch.empty_strided(
            target.shape, target.strides, dtype=target.dtype, device="meta"
        )
        layout_of_block = self.call.whole_call.cut_named({name: layout}, block)[name]
        with (
            target.opened_file(os.O_WRONLY) as descriptor,
            open(descriptor, "wb", closefd=False) as file,
        ):
            for place, rows in zip(layout_of_block[0], tensor[0], strict=True):
                file.seek(target.offset + int(place.storage_offset()) * tensor.itemsize)
                # Strides of a single element may be any, and then bytes cannot be
                # viewed.
                flat = rows.clone(memory_format=torch.contiguous_format).view(-1)
                file.write(flat.view(torch.uint8).numpy())


def moved_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device or in host memory.

    It moves through page-locked memory, which torch keeps, and fills from a mapped file
    with all its threads.
    """
    if tensor.device == device or tensor.numel() == 0:
        return tensor.to(device)
    if on_host(tensor.device):
        return tensor.pin_memory().to(device, non_blocking=True)
    pinned = torch.empty(
        tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu"
    )
    return pinned.copy_(tensor)
