"""What a Ray task gets and does: computes a unit from files to files, also if an earlier try was
killed."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from quorum_attention.call.block import AttnMask, Block, BlockResults
from quorum_attention.call.options import CallOptions
from quorum_attention.decomposition import EMPTY, Ranges
from quorum_attention.devices.buffers import InFile
from quorum_attention.execution.device.lookup import GPU, backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.files.call import GRADIENTS
from quorum_attention.kernels.masked.resolve import Sizes, resolve
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.mask import Mask
from quorum_attention.passes import compute_block
from quorum_attention.ray.units import Cut, Unit

# A task's rows are kept on the device if they take no more than this share of the budget; without a
# budget, a task has this share of what is free.
_RESIDENT, _OF_FREE = 0.8, 0.9
_HOST = torch.device("cpu")
_OF_ROWS, _OF_KEYS = ("query", "grad_out", "out", "lse"), ("key", "value")

_Masked = tuple[AttnMask, bool]


@dataclass(frozen=True, slots=True)
class Job:
    """A pass.

    Attributes:
        cut: the call, its mask without the bias, and how its heads are cut.
        inputs: by name, (*batch, heads, rows, ...): query, key, value; grad_out, out and lse of a
            backward; bias, if there is one. Only a bias, and what is empty, may be in no file.
        results: by name, likewise: out, lse; dq, dk, dv.
        folder: of partial states. As long as it is there, results may be written.
        state, dtype: of states and the log-sum-exp; of the other results.
        written: depth, kernel and budget of each call.
        cpus, gpus: of each task.
    """

    cut: Cut
    inputs: dict[str, torch.Tensor | InFile]
    results: dict[str, InFile]
    folder: str
    state: torch.dtype
    dtype: torch.dtype
    written: CallOptions
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

    def leave(self, unit: Unit, chunk: int, state: Sequence[torch.Tensor]) -> None:
        """Write the partial state of a chunk; the file is whole or absent, whoever else writes."""
        path = self.state_path(unit, unit.number, chunk)
        made = f"{path}.{secrets.token_hex(4)}"
        tensors = {str(n): moved(one, _HOST).contiguous() for n, one in enumerate(state)}
        save_file(tensors, made)
        os.replace(made, path)

    def read_state(self, merge: Unit, task: int) -> list[torch.Tensor]:
        """The partial state of the merged chunk that a task has left; [] if it had no pair."""
        found = load_file(self.state_path(merge, task, merge.number))
        return [found[str(number)] for number in range(len(found))]

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
        names = GRADIENTS if self.backward else ("out", "lse")
        for name, tensor in zip(names, made, strict=True):
            if name in self.results:
                self._write(self.results[name], block, tensor, name in GRADIENTS[1:])

    def _write(self, target: InFile, block: Block, made: torch.Tensor, of_keys: bool) -> None:
        made = moved(made, _HOST).to(target.dtype)
        whole = torch.empty_strided(target.shape, target.strides, dtype=made.dtype, device="meta")
        part = self.cut.call.cut(whole, block, of_keys=of_keys)
        with os.fdopen(target.descriptor(os.O_WRONLY), "wb", buffering=0) as file:
            for head, rows in zip(part[0], made[0], strict=True):
                file.seek(target.offset + int(head.storage_offset()) * made.itemsize)
                # Strides of a single element may be any, and then bytes cannot be viewed.
                flat = rows.clone(memory_format=torch.contiguous_format).view(-1)
                raw = memoryview(flat.view(torch.uint8).numpy())
                while raw:
                    raw = raw[file.write(raw) :]


class Done(NamedTuple):
    """What a Ray task answers.

    Attributes:
        where: it ran.
        seconds: that it took.
        report: of its calls.
    """

    where: str
    seconds: float
    report: Report


def compute(job: Job, unit: Unit) -> Done:
    """Compute a unit. Its results or states are in the files when this returns."""
    begun, report = time.perf_counter(), Report()
    device = _device(job, unit)
    backend = backend_of(device)
    with backend.current(device), torch.no_grad():
        work = _Work(job, unit, device, report)
        if unit.kind == "task":
            work.task()
        else:
            made = work.head() if unit.kind == "head" else work.merge()
            job.write(work.block(unit.number, unit.number), made)
        backend.synchronize(device)
    kind = "cpu"
    if not on_host(device):
        backend.give_back_cached()  # the next task here may be given another GPU
        kind = f"{backend.model(device)} {device.index}"
    where = f"{socket.gethostname()} {kind}"
    return Done(where, time.perf_counter() - begun, report)


def _device(job: Job, unit: Unit) -> torch.device:
    if not job.gpus or unit.kind == "merge":
        torch.set_num_threads(max(1, int(job.cpus)))
        return _HOST
    import ray

    # A worker computes several tasks and may be given another GPU for each, so it sees all of them.
    own = str(ray.get_gpu_ids()[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return torch.device(GPU, visible.index(own) if own in visible else int(own))


class _Work:
    """A unit on a device."""

    def __init__(self, job: Job, unit: Unit, device: torch.device, report: Report) -> None:
        self._job, self._unit, self._cut = job, unit, job.cut
        self._device, self._report = device, report
        inputs = {
            name: source.open() if isinstance(source, InFile) else source
            for name, source in job.inputs.items()
        }
        self._sinks, call = None, job.cut.call
        mask, bias = call.mask, inputs.pop("bias", None)
        if isinstance(mask, Mask):
            # A row's sink is counted once: where the states of its chunk are merged.
            self._sinks = mask.sinks
            mask = replace(mask, bias=bias, sinks=mask.sinks if unit.kind == "head" else None)
        self._inputs, self._call = inputs, replace(call, mask=bias if mask is None else mask)
        self._left: int | None = job.written.budget  # type: ignore[assignment]
        if self._left is None and not on_host(device):
            free = backend_of(device).free_bytes(device)
            self._left = int(free * _OF_FREE * min(1.0, job.gpus))

    def block(self, queries: int, keys: int) -> Block:
        """A block of the unit's head, as ``Cut.block`` has it."""
        return self._cut.block(self._unit, queries, keys)

    def head(self) -> Sequence[torch.Tensor]:
        """The results of a whole head, by one call."""
        block = self.block(0, 0)  # there is one chunk
        return self._computed(block, self._read(block, self._inputs), self._job.dtype)

    def task(self) -> None:
        """A quorum task, one call for each pair of its chunks. Leaves a state of each chunk, an
        empty one of those without a pair."""
        job, pairs = self._job, self._pairs()
        used = sorted({chunk for pair in pairs for chunk in pair})
        place = self._placed(used)
        of_keys = {n: self._read(self.block(n, n), _OF_KEYS, place) for n in used}
        states = {n: self._empty(n, place) for n in used if job.backward}
        for own in used:
            of_rows = self._read(self.block(own, own), _OF_ROWS, place)
            state = states[own] if job.backward else self._empty(own, place)
            for other in used:
                if (own, other) in pairs:
                    inputs, masked = {**of_rows, **of_keys[other]}, pairs[own, other]
                    made = self._computed(self.block(own, other), inputs, job.state, masked)
                    self._add([state[0], *states[other][1:]] if job.backward else state, made)
            if not job.backward:
                job.leave(self._unit, own, state)
        for chunk in set(self._cut.quorum(self._unit.number)) - set(used):
            states[chunk] = []
        for chunk, state in states.items():
            job.leave(self._unit, chunk, state)

    def merge(self) -> Sequence[torch.Tensor]:
        """The results of a chunk, from the states that tasks have left."""
        chunk = self._unit.number
        total = self._empty(chunk, _HOST)
        if self._sinks is not None and not self._job.backward:
            total[1].copy_(self._sinks[slice(*self.block(chunk, chunk).heads)][:, None])
        for task in sorted(self._cut.tasks(chunk)):
            if state := self._job.read_state(self._unit, task):
                self._add(total, state)
        return total

    def _pairs(self) -> dict[tuple[int, int], _Masked]:
        """The pairs of chunks (of queries, of keys) that the task computes, with their masks."""
        found = {}
        quorum = self._cut.quorum(self._unit.number)
        for own, other in product(quorum, quorum):
            _, _, rows, keys = block = self.block(own, other)
            if own == other != self._unit.number or not rows.length or not keys.length:
                continue
            if self._call.is_causal and keys.start >= rows.stop:
                continue
            masked = self._call.mask_of(block)
            if not _keeps_nothing(block, *masked):
                found[own, other] = masked
        return found

    def _read(
        self, block: Block, names: Iterable[str], place: torch.device = _HOST
    ) -> dict[str, torch.Tensor]:
        """A block's parts of inputs."""
        cut, inputs = self._call.cut, self._inputs
        return {
            name: moved(cut(inputs[name], block, of_keys=name in _OF_KEYS), place)
            for name in names
            if name in inputs
        }

    def _computed(
        self,
        block: Block,
        inputs: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        masked: _Masked | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """A block's out and lse, or its gradients; ``dtype``: of all but the lse."""
        written = self._job.written._replace(
            budget=self._left, devices=self._device, report=self._report
        )
        results = BlockResults(out_dtype=dtype)
        if self._job.backward:
            three = (inputs[name] for name in ("query", "key", "value"))
            query, key, value = (torch.empty_like(t, dtype=dtype) for t in three)
            results = BlockResults(grads=(query, key, value))
        return compute_block(self._call, block, inputs, written, results, masked)

    def _empty(self, chunk: int, place: torch.device) -> list[torch.Tensor]:
        """The state of a chunk without any pair."""
        block, state = self.block(chunk, chunk), self._job.state
        query, key, value = (
            self._call.cut(self._inputs[name], block, of_keys=name in _OF_KEYS)
            for name in ("query", "key", "value")
        )
        if self._job.backward:
            return [torch.zeros(t.shape, dtype=state, device=place) for t in (query, key, value)]
        out = torch.zeros((*query.shape[:3], value.shape[3]), dtype=state, device=place)
        return [out, torch.full(query.shape[:3], -torch.inf, dtype=state, device=place)]

    def _add(self, total: Sequence[torch.Tensor], part: Sequence[torch.Tensor]) -> None:
        if not self._job.backward:
            merge_(total[0], total[1], part[0], part[1].to(total[1].device))
            return
        for target, one in zip(total, part, strict=True):
            add_(target, one)

    def _placed(self, used: Sequence[int]) -> torch.device:
        """Where the rows of a task lie: on the device, if they fit, and calls have what is left."""
        if on_host(self._device) or not used:
            return _HOST
        assert self._left is not None
        rows = [t for n in used for t in self._read(self.block(n, n), self._inputs).values()]
        states = [sum(t.nbytes for t in self._empty(n, torch.device("meta"))) for n in used]
        # What is added up, and a call's results and the result of an addition beside it.
        taken = sum(t.nbytes for t in rows) + 3 * max(states)
        taken += sum(states) if self._job.backward else 0
        if taken > self._left * _RESIDENT:
            return _HOST
        self._left -= taken
        return self._device


def _keeps_nothing(block: Block, mask: AttnMask, is_causal: bool) -> bool:
    """Whether a mask is known to keep no pair of a block."""
    if not isinstance(mask, Mask):
        return False
    heads, n_queries, n_keys = (span.length for span in block[1:])
    sizes, every = Sizes(1, heads, n_queries, n_keys), Ranges.of(0, n_queries, 0, n_keys)
    return all(one.verdict(every) == EMPTY for one in resolve(mask, sizes, is_causal).geometries)


def moved(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """A tensor on a device or in host memory; between them through page-locked memory, which torch
    keeps, and fills from a mapped file with all its threads."""
    if tensor.device == place or tensor.numel() == 0:
        return tensor.to(place)
    if on_host(tensor.device):
        return tensor.pin_memory().to(place, non_blocking=True)
    locked = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
    return locked.copy_(tensor)
