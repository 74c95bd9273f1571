"""The work of a Ray task: a unit of a pass, from files to files, also if an earlier try
was killed.

The units are described in ``chunks``.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from safetensors.torch import load_file

from quorum_attention.call.block import BlockResults, CallBlock, Masked
from quorum_attention.decomposition import EMPTY, Ranges
from quorum_attention.devices.handles import TensorHandle
from quorum_attention.execution.device.lookup import GPU, HOST, backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.resolve import resolve
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.passes.block_call import compute_block
from quorum_attention.quorums.interest import chunks_of_task
from quorum_attention.ray.chunks import FarmUnit
from quorum_attention.ray.farm_pass import FarmPass, moved_to

# A task's rows are kept on the device if they take no more than this share of the
# budget.
_MAX_RESIDENT_SHARE = 0.8
# Without a budget, a task has this share of the bytes that are free.
_SHARE_OF_FREE = 0.9

State = list[torch.Tensor]
"""Out and lse of a chunk's rows; or the gradients of its query, key and value."""


def compute(farm_pass: FarmPass, unit: FarmUnit) -> tuple[str, float, Report]:
    """Compute a unit. Its results or states are in the files when this returns.

    Returns:
        Where it ran, the seconds that it took, and the report of its calls.
    """
    started = time.perf_counter()
    report = Report(timed=False)
    device = _choose_device(farm_pass, unit)
    backend = backend_of(device)
    with backend.current(device), torch.no_grad():
        _UnitRun(farm_pass, unit, device, report).run()
        backend.synchronize(device)
    if not on_host(device):
        backend.give_back_cached()  # the next task here may be given another GPU
    return f"{socket.gethostname()} {device}", time.perf_counter() - started, report


def _choose_device(farm_pass: FarmPass, unit: FarmUnit) -> torch.device:
    if not farm_pass.gpus or unit.kind == "merge":
        torch.set_num_threads(max(1, int(farm_pass.cpus)))
        return HOST
    import ray

    # A worker computes several tasks and may be given another GPU for each, so it sees
    # all of them.
    gpu = str(ray.get_gpu_ids()[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = visible.index(gpu) if gpu in visible else int(gpu)
    return torch.device(GPU, number)


class _UnitRun:
    """A unit on a device."""

    def __init__(
        self, farm_pass: FarmPass, unit: FarmUnit, device: torch.device, report: Report
    ) -> None:
        self._pass = farm_pass
        self._unit = unit
        self._device = device
        self._report = report
        self._inputs: NamedTensors = {}
        for name, source in farm_pass.inputs.items():
            tensor = source.open() if isinstance(source, TensorHandle) else source
            self._inputs[name] = tensor
        bias = self._inputs.pop("bias", None)
        mask = farm_pass.call.whole_call.mask
        self._sinks: torch.Tensor | None = None
        if mask is not None:
            # A row's sink is counted once: where the states of its chunk are merged.
            self._sinks = mask.sinks
            sinks_of_calls = mask.sinks if unit.kind == "head" else None
            mask = replace(mask, bias=bias, sinks=sinks_of_calls)
        self._call = replace(farm_pass.call.whole_call, mask=mask)
        self._budget = self._choose_budget()

    def _choose_budget(self) -> int | None:
        """Return the device bytes of the unit's calls; None: no limit, in host
        memory."""
        budget = self._pass.call.options.budget
        assert budget is None or isinstance(budget, int), "the farm has read it"
        if budget is not None or on_host(self._device):
            return budget
        free_bytes = backend_of(self._device).free_bytes(self._device)
        gpu_share = min(1.0, self._pass.gpus)
        return int(free_bytes * _SHARE_OF_FREE * gpu_share)

    def run(self) -> None:
        """Compute the unit, and write its results or states."""
        if self._unit.kind == "task":
            self._run_task()
            return
        block = self._block(self._unit.number, self._unit.number)
        if self._unit.kind == "merge":
            results: Sequence[torch.Tensor] = self._merge_states()
        else:
            results = self._compute(block, self._read_rows(0), None)
        self._pass.write_results(block, results)

    def _block(self, query_chunk: int, key_chunk: int) -> CallBlock:
        return self._pass.block(self._unit, query_chunk, key_chunk)

    def _run_task(self) -> None:
        """Compute a quorum task, by one call for each pair of its chunks.

        A state of each chunk is left, an empty one of chunks without a pair.
        """
        chunks = chunks_of_task(self._unit.number, self._pass.n_chunks)
        place = self._choose_place(chunks)
        inputs: dict[int, NamedTensors] = {}
        states: dict[int, State] = {}
        for query_chunk, key_chunk in product(chunks, chunks):
            block = self._block(query_chunk, key_chunk)
            is_of_another_task = query_chunk == key_chunk != self._unit.number
            if is_of_another_task or not block.rows.length or not block.keys.length:
                continue
            masked = self._call.mask_of(block)
            if _keeps_nothing(self._call.shape, block, masked):
                continue
            for chunk in {query_chunk, key_chunk} - states.keys():
                inputs[chunk] = self._read_rows(chunk, place)
                states[chunk] = self._empty_state(chunk, place)
            key_inputs = inputs[key_chunk]
            block_inputs = {
                **inputs[query_chunk],
                "key": key_inputs["key"],
                "value": key_inputs["value"],
            }
            results = self._compute(block, block_inputs, masked)
            self._add(states[query_chunk], states[key_chunk], results)
        for chunk in chunks:
            self._pass.leave_state(
                self._unit,
                chunk,
                states.get(chunk, []),
            )

    def _merge_states(self) -> State:
        """Return the results of a chunk, from the states that tasks have left."""
        chunk = self._unit.number
        total = self._empty_state(chunk, HOST)
        if self._sinks is not None and not self._pass.call.backward:
            _, lse = total
            heads = self._block(chunk, chunk).heads
            sinks = self._sinks[slice(*heads)]
            lse.copy_(sinks[:, None])
        for path in self._pass.merged_paths(self._unit):
            tensors = load_file(path)
            state = [tensors[str(number)] for number in range(len(tensors))]
            if state:
                self._add(total, total, state)
        return total

    def _read_rows(self, chunk: int, place: torch.device = HOST) -> NamedTensors:
        """Return a chunk's rows of all inputs."""
        block = self._block(chunk, chunk)
        parts = self._call.cut_named(self._inputs, block)
        return {name: moved_to(part, place) for name, part in parts.items()}

    def _compute(
        self, block: CallBlock, inputs: NamedTensors, masked: Masked | None
    ) -> tuple[torch.Tensor, ...]:
        """Return a block's out and lse, or its gradients; parts in the state's dtype.

        Args:
            inputs: the rows of the block.
            masked: the mask of the block, if it is known already.
        """
        call = self._pass.call
        out_dtype = call.shape.state_dtype
        if self._unit.kind == "head":
            out_dtype = call.out_dtype
        options = call.options._replace(
            budget=self._budget,
            devices=self._device,
            report=self._report,
        )
        results = BlockResults(out_dtype=out_dtype)
        return compute_block(
            self._call,
            block,
            inputs,
            options,
            results,
            masked,
        )

    def _empty_state(self, chunk: int, place: torch.device) -> State:
        """Return the state of a chunk without any pair."""
        rows = self._read_rows(chunk)
        dtype = self._pass.call.shape.state_dtype
        empty = partial(torch.full, dtype=dtype, device=place)
        if self._pass.call.backward:
            names = ("query", "key", "value")
            return [empty(rows[name].shape, 0.0) for name in names]
        shape = rows["query"].shape[:3]
        value_dim = rows["value"].shape[3]
        out = empty((*shape, value_dim), 0.0)
        lse = empty(shape, -torch.inf)
        return [out, lse]

    def _add(
        self, row_state: State, key_state: State, results: Sequence[torch.Tensor]
    ) -> None:
        """Add the results of a chunk's rows and another chunk's keys to their
        states."""
        if not self._pass.call.backward:
            out, lse = row_state
            new_out, new_lse = results
            new_lse = new_lse.to(lse.device)
            merge_(out, lse, new_out, new_lse)
            return
        grad_query, _, _ = row_state
        _, grad_key, grad_value = key_state
        targets = (grad_query, grad_key, grad_value)
        for target, grad in zip(targets, results, strict=True):
            add_(target, grad)

    def _choose_place(self, chunks: Sequence[int]) -> torch.device:
        """Return where the rows of a task lie: on the device, if they fit there.

        Calls then have what is left of the budget.
        """
        if on_host(self._device):
            return HOST
        assert self._budget is not None
        meta = torch.device("meta")
        row_bytes = 0
        state_bytes: list[int] = []
        for chunk in chunks:
            rows = self._read_rows(chunk)
            state = self._empty_state(chunk, meta)
            row_bytes += _nbytes(rows.values())
            state_bytes.append(_nbytes(state))
        # The results of a call take as much as a state, and those of an addition beside
        # them.
        taken = row_bytes + sum(state_bytes) + 3 * max(state_bytes)
        if taken > self._budget * _MAX_RESIDENT_SHARE:
            return HOST
        self._budget -= taken
        return self._device


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _keeps_nothing(shape: CallShape, block: CallBlock, masked: Masked) -> bool:
    """Tell whether a mask is known to keep no pair of a block."""
    mask, is_causal = masked
    if mask is None or not mask.is_structured:
        return False
    n_queries = block.rows.length
    n_keys = block.keys.length
    block_shape = replace(
        shape,
        batch_shape=(1,),
        n_queries=n_queries,
        n_keys=n_keys,
        is_causal=is_causal,
    )
    all_pairs = Ranges.from_bounds(0, n_queries, 0, n_keys)
    geometries = resolve(mask, block_shape).geometries
    return all(geometry.verdict(all_pairs) == EMPTY for geometry in geometries)
