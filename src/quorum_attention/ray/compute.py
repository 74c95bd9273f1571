"""Units of work, and what a Ray task does: it computes a unit from files to files, also if an
earlier try was killed.

A unit is a whole head, or a cyclic quorum task of a head, or a merge of partial states. A task has
``l`` of the ``c`` chunks of a sequence, and every pair of chunks meets in one task. So a task loads
``l / c`` of the rows and leaves a partial state of each of its chunks: statistics or gradients. A
chunk is merged when the states of the ``l`` tasks that hold it exist.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from quorum_attention.call.block import BlockResults, CallBlock, Masked
from quorum_attention.decomposition import EMPTY, Ranges
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.handles import TensorHandle
from quorum_attention.execution.device.lookup import GPU, HOST, backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.files.file_call import GRADIENTS, OF_KEYS, FileCall
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.resolve import resolve
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.mask import Mask
from quorum_attention.passes.block_call import compute_block
from quorum_attention.quorums import chunk_count, interest_set, quorum_size, quorum_sizes

# A task's rows are kept on the device if they take no more than this share of the budget; without a
# budget, a task has this share of what is free.
_RESIDENT, _OF_FREE = 0.8, 0.9
# Units for each worker, at least: the last one to end, or one that is lost, costs no more.
_UNITS = 10
# A head whose results are larger than this is cut: a worker has the results of whole heads in host
# memory before it writes them.
_WHOLE_BYTES = 1 << 30
# Chunks have this many tokens at least: the states of shorter ones take longer than their pairs.
_FEWEST_TOKENS = 256
_LARGEST_QUORUM = 14
_TILE = 128

_State = list[torch.Tensor]
_Rows = dict[str, torch.Tensor]
# A batch entry and a key/value head of it.
Head = tuple[int, int]


class FarmUnit(NamedTuple):
    """What one Ray task computes, for a key/value head and the query heads that share it.

    Attributes:
        kind: "head": the whole head; "task": partial states of the chunks of a quorum task;
            "merge": the result of one chunk, from all its partial states.
        entry, head: batch entry and key/value head.
        number: of the task or the chunk.
    """

    kind: Literal["head", "task", "merge"]
    entry: int
    head: int
    number: int = 0


def quorum(task: int, chunks: int) -> tuple[int, ...]:
    """The chunks of a task, ascending."""
    return tuple(sorted((task + at) % chunks for at in interest_set(quorum_size(chunks))))


def tasks(chunk: int, chunks: int) -> frozenset[int]:
    """The tasks that hold a chunk."""
    return frozenset((chunk - at) % chunks for at in interest_set(quorum_size(chunks)))


def rows_of(shape: CallShape, chunk: int, chunks: int, n: int) -> Interval:
    """The rows of a chunk, of ``n`` queries or keys. Chunks are equal, up to a tile where tiles are
    small beside them."""
    # A causal rule compares positions, so chunks of queries and keys begin at the same ones.
    span = shape.n_tokens if shape.is_causal else n
    tile = _TILE if span >= 8 * chunks * _TILE else 1
    low, high = (span * at // (chunks * tile) * tile for at in (chunk, chunk + 1))
    return Interval(min(low, n), n if chunk + 1 == chunks else min(high, n))


def chunks_of(
    shape: CallShape, heads: int, workers: int, head_bytes: int, chunks: int | None
) -> int:
    """Into how many chunks to cut each head for so many workers; 1: heads stay whole.

    Args:
        heads: key/value heads that are computed, of all batch entries.
        head_bytes: of the results of one key/value head.
        chunks: what the caller wants; 1: whole heads. None: heads are cut where there are fewer
            than ten for each worker, or where one has too many bytes; with dropout never.

    Raises:
        ValueError: there is no interest set of so many chunks, or heads may not be cut.
    """
    if chunks is None:
        longest = 0 if shape.dropout else min(shape.n_queries, shape.n_keys) // _FEWEST_TOKENS
        sizes = map(chunk_count, quorum_sizes(_LARGEST_QUORUM))
        # Three chunks in three tasks of two: as many rows as two heads, so no cut is worth less.
        every = [1, *(c for c in sizes if 3 < c <= longest)]
        last = every[-1]
        every = [c for c in every if quorum_size(c) * head_bytes <= c * _WHOLE_BYTES]
        chunks = next((c for c in every if heads * c >= _UNITS * workers), last)
    quorum_size(chunks)
    if chunks > 1 and shape.dropout:
        raise ValueError(f"chunks must be 1 for a call with dropout_p, got {chunks}")
    return chunks


@dataclass(frozen=True, slots=True)
class FarmPass:
    """A pass.

    Attributes:
        call: without its tensors and the bias; its options are those of each call of a unit.
        chunks: of a sequence, and tasks of a head; 1: heads are whole.
        inputs: by role, (*batch, heads, rows, ...), and bias, if there is one. Only a bias, and
            what is empty, may be in no file.
        results: by name, likewise: out, lse; dq, dk, dv.
        folder: of partial states. As long as it is there, results may be written.
        cpus, gpus: of each task.
    """

    call: FileCall
    chunks: int
    inputs: dict[str, torch.Tensor | TensorHandle]
    results: dict[str, TensorHandle]
    folder: str
    cpus: float
    gpus: float

    def block(self, unit: FarmUnit, queries: int, keys: int) -> CallBlock:
        """A chunk of queries and one of keys of a unit's head."""
        shape, share = self.call.shape, self.call.shape.queries_per_key_head
        return CallBlock(
            Interval(unit.entry, unit.entry + 1),
            Interval(unit.head * share, (unit.head + 1) * share),
            rows_of(shape, queries, self.chunks, shape.n_queries),
            rows_of(shape, keys, self.chunks, shape.n_keys),
        )

    def state_path(self, unit: FarmUnit, task: int, chunk: int) -> Path:
        """The file of the partial state that a task of the unit's head leaves of a chunk."""
        return Path(self.folder, f"{unit.entry}-{unit.head}-{task}-{chunk}")

    def states_of(self, unit: FarmUnit) -> list[Path]:
        """The files of the states that a unit merges, by ascending task."""
        every = sorted(tasks(unit.number, self.chunks)) if unit.kind == "merge" else ()
        return [self.state_path(unit, task, unit.number) for task in every]

    def leave(self, unit: FarmUnit, chunk: int, state: Sequence[torch.Tensor]) -> None:
        """Write the partial state of a chunk; the file is whole or absent, whoever else writes."""
        path = self.state_path(unit, unit.number, chunk)
        made = f"{path}.{secrets.token_hex(4)}"
        save_file({str(n): moved(one, HOST).contiguous() for n, one in enumerate(state)}, made)
        os.replace(made, path)

    def write(self, block: CallBlock, made: Sequence[torch.Tensor]) -> None:
        """Write out and lse of a block's rows, or gradients of its rows and keys.

        By writing, not through a mapping: of a page that two machines have mapped, a network file
        system may lose what one of them wrote.

        Raises:
            OSError: a file is another one by now, or cannot be written.
            RuntimeError: the call is over; nothing is written.
        """
        if not os.path.isdir(self.folder):
            raise RuntimeError(f"{self.folder} is gone: this call is over and writes no more")
        names = GRADIENTS if self.call.backward else ("out", "lse")
        for name, tensor in zip(names, made, strict=True):
            if name in self.results:
                self._write(self.results[name], block, tensor, name in OF_KEYS)

    def _write(
        self, target: TensorHandle, block: CallBlock, made: torch.Tensor, of_keys: bool
    ) -> None:
        made = moved(made, HOST).to(target.dtype)
        whole = torch.empty_strided(target.shape, target.strides, dtype=made.dtype, device="meta")
        part = self.call.whole.cut(whole, block, of_keys=of_keys)
        with (
            target.opened_file(os.O_WRONLY) as number,
            open(number, "wb", 0, closefd=False) as file,
        ):
            for head, rows in zip(part[0], made[0], strict=True):
                file.seek(target.offset + int(head.storage_offset()) * made.itemsize)
                # Strides of a single element may be any, and then bytes cannot be viewed.
                flat = rows.clone(memory_format=torch.contiguous_format).view(-1)
                raw = memoryview(flat.view(torch.uint8).numpy())
                while raw:
                    raw = raw[file.write(raw) :]


def compute(job: FarmPass, unit: FarmUnit) -> tuple[str, float, Report]:
    """Compute a unit. Its results or states are in the files when this returns.

    Returns:
        where it ran, the seconds that it took, and the report of its calls.
    """
    begun, report = time.perf_counter(), Report(timed=False)
    device = _device(job, unit)
    backend = backend_of(device)
    with backend.current(device), torch.no_grad():
        work = _UnitRun(job, unit, device, report)
        if unit.kind == "task":
            work.task()
        else:
            block = job.block(unit, unit.number, unit.number)
            job.write(block, work.merge() if unit.kind == "merge" else work.computed(block))
        backend.synchronize(device)
    if not on_host(device):
        backend.give_back_cached()  # the next task here may be given another GPU
    return f"{socket.gethostname()} {device}", time.perf_counter() - begun, report


def _device(job: FarmPass, unit: FarmUnit) -> torch.device:
    if not job.gpus or unit.kind == "merge":
        torch.set_num_threads(max(1, int(job.cpus)))
        return HOST
    import ray

    # A worker computes several tasks and may be given another GPU for each, so it sees all of them.
    own = str(ray.get_gpu_ids()[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return torch.device(GPU, visible.index(own) if own in visible else int(own))


class _UnitRun:
    """A unit on a device."""

    def __init__(self, job: FarmPass, unit: FarmUnit, device: torch.device, report: Report) -> None:
        self._job, self._unit, self._device, self._report = job, unit, device, report
        inputs = {n: t.open() if isinstance(t, TensorHandle) else t for n, t in job.inputs.items()}
        self._sinks, call = None, job.call.whole
        mask, bias = call.mask, inputs.pop("bias", None)
        if mask is not None:
            # A row's sink is counted once: where the states of its chunk are merged.
            self._sinks = mask.sinks
            mask = replace(mask, bias=bias, sinks=mask.sinks if unit.kind == "head" else None)
        self._inputs, self._call = inputs, replace(call, mask=mask)
        self._left: int | None = job.call.options.budget  # type: ignore[assignment]
        if self._left is None and not on_host(device):
            free = backend_of(device).free_bytes(device)
            self._left = int(free * _OF_FREE * min(1.0, job.gpus))

    def task(self) -> None:
        """A quorum task, one call for each pair of its chunks. Leaves a state of each chunk, an
        empty one of those without a pair."""
        job, number = self._job, self._unit.number
        held = quorum(number, job.chunks)
        place = self._placed(held)
        inputs, states = dict[int, _Rows](), dict[int, _State]()
        for own, other in product(held, held):
            block = job.block(self._unit, own, other)
            if own == other != number or not block.rows.length or not block.keys.length:
                continue
            masked = self._call.mask_of(block)
            if _keeps_nothing(job.call.shape, block, *masked):
                continue
            for n in {own, other} - states.keys():
                inputs[n], states[n] = self._read(n, place), self._empty(n, place)
            read = inputs[own] | {name: inputs[other][name] for name in ("key", "value")}
            self._add(states[own], states[other], self.computed(block, read, masked))
        for chunk in held:
            job.leave(self._unit, chunk, states.get(chunk, []))

    def merge(self) -> Sequence[torch.Tensor]:
        """The results of a chunk, from the states that tasks have left."""
        job, chunk = self._job, self._unit.number
        total = self._empty(chunk, HOST)
        if self._sinks is not None and not job.call.backward:
            total[1].copy_(self._sinks[slice(*job.block(self._unit, chunk, chunk).heads)][:, None])
        for path in job.states_of(self._unit):
            if state := load_file(path):  # empty: of a task without a pair of the chunk's
                self._add(total, total, [state[str(number)] for number in range(len(state))])
        return total

    def _read(self, chunk: int, place: torch.device = HOST) -> _Rows:
        """A chunk's rows of all inputs."""
        cut, block = self._call.cut, self._job.block(self._unit, chunk, chunk)
        return {
            name: moved(cut(tensor, block, of_keys=name in OF_KEYS), place)
            for name, tensor in self._inputs.items()
        }

    def computed(
        self, block: CallBlock, read: _Rows | None = None, masked: Masked | None = None
    ) -> tuple[torch.Tensor, ...]:
        """A block's out and lse, or its gradients; in the state's dtype, if they are parts.

        Args:
            read: its rows; None: it is a whole head, whose one chunk is read.
        """
        call = self._job.call
        whole = self._unit.kind == "head"
        results = BlockResults(out_dtype=call.out_dtype if whole else call.shape.state_dtype)
        options = call.options._replace(
            budget=self._left, devices=self._device, report=self._report
        )
        read = self._read(0) if read is None else read
        return compute_block(self._call, block, read, options, results, masked)

    def _empty(self, chunk: int, place: torch.device) -> _State:
        """The state of a chunk without any pair."""
        read, call = self._read(chunk), self._job.call
        new = partial(torch.full, dtype=call.shape.state_dtype, device=place)
        if call.backward:
            return [new(read[name].shape, 0.0) for name in ("query", "key", "value")]
        rows = read["query"].shape[:3]
        return [new((*rows, read["value"].shape[3]), 0.0), new(rows, -torch.inf)]

    def _add(self, rows: _State, keys: _State, made: Sequence[torch.Tensor]) -> None:
        """Add what was made of a chunk's rows and another's keys to their states."""
        if not self._job.call.backward:
            merge_(rows[0], rows[1], made[0], made[1].to(rows[1].device))
            return
        for target, one in zip([rows[0], *keys[1:]], made, strict=True):
            add_(target, one)

    def _placed(self, chunks: Sequence[int]) -> torch.device:
        """Where the rows of a task lie: on the device, if they fit, and calls have what is left."""
        if on_host(self._device):
            return HOST
        assert self._left is not None
        rows = [t.nbytes for n in chunks for t in self._read(n).values()]
        states = [sum(t.nbytes for t in self._empty(n, torch.device("meta"))) for n in chunks]
        # A call's results and the result of an addition beside them.
        taken = sum(rows) + sum(states) + 3 * max(states)
        if taken > self._left * _RESIDENT:
            return HOST
        self._left -= taken
        return self._device


def _keeps_nothing(shape: CallShape, block: CallBlock, mask: Mask | None, is_causal: bool) -> bool:
    """Whether a mask is known to keep no pair of a block."""
    if mask is None or not mask.is_structured:
        return False
    rows, keys = block.rows.length, block.keys.length
    sizes = replace(shape, batch_shape=(1,), n_queries=rows, n_keys=keys, is_causal=is_causal)
    every = Ranges.from_bounds(0, rows, 0, keys)
    return all(one.verdict(every) == EMPTY for one in resolve(mask, sizes).geometries)


def moved(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """A tensor on a device or in host memory; between them through page-locked memory, which torch
    keeps, and fills from a mapped file with all its threads."""
    if tensor.device == place or tensor.numel() == 0:
        return tensor.to(place)
    if on_host(tensor.device):
        return tensor.pin_memory().to(place, non_blocking=True)
    locked = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
    return locked.copy_(tensor)
