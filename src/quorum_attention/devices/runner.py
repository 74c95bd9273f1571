"""The passes of a call on a pool: tensors are shared with workers, and the results
collected."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.block import WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.call.overlap import Mappings
from quorum_attention.call.request import Request
from quorum_attention.call.validation import Tensors
from quorum_attention.devices.coordinator import Coordinator
from quorum_attention.devices.messages import GRADIENTS, INPUTS, WorkerPass
from quorum_attention.devices.partition import pieces_of
from quorum_attention.devices.report import PoolPass, PoolReport, merge_reports
from quorum_attention.devices.shared_memory import (
    SharedTensor,
    shared_result,
    to_handle,
)
from quorum_attention.devices.shared_pools import shared_pool
from quorum_attention.devices.speeds import expected_speed
from quorum_attention.devices.sums import GradientSums
from quorum_attention.devices.work_queue import BlockQueue
from quorum_attention.devices.worker_pool import WorkerPool
from quorum_attention.devices.worker_process import Worker
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.kernels.call_shape import state_dtype
from quorum_attention.kernels.operator_call import OutLse
from quorum_attention.kernels.result_layout import empty_like_input, result_strides
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.passes.run_decision import progress_of


@dataclass(eq=False)
class PoolRunner:
    """Runs the passes of a ``Request`` on a pool.

    Inputs that had to be copied into shared memory stay there until the backward.

    Attributes:
        pool: the pool, or the names of devices whose calls share one.
        budgets: bytes for each device of the pool; None for what is free there.
        options: depth, kernel, accumulator and exact_delta.
        mask: the mask without bias and sinks, as workers get it; None if there is none.
        is_uniform: whether blocks take as long as their pairs say.
    """

    pool: WorkerPool | tuple[str, ...]
    budgets: tuple[int | None, ...]
    options: CallOptions
    mask: bytes | None
    is_uniform: bool
    _shared_inputs: dict[str, SharedTensor] = field(default_factory=dict)
    _process: int = field(default_factory=os.getpid)

    def forward(self, tensors: Tensors, request: Request) -> OutLse:
        """Return (out, lse), in shared memory or on the inputs' device."""
        if self._shared_inputs:
            raise NotImplementedError("devices cannot be several under torch.vmap")
        query = tensors.query
        rows = tuple(query.shape[:-1])
        out_shape = (*rows, tensors.value.shape[-1])
        pool = self._open_pool()
        out = _empty_result(pool, query, request.out, out_shape, request.out_dtype)
        lse_dtype = state_dtype(query.dtype)
        if on_host(query.device):
            lse = shared_result(rows, lse_dtype)
        else:
            lse = query.new_empty(rows, dtype=lse_dtype)
        self._run(pool, tensors, request, {}, {"out": out, "lse": lse})
        return out, lse

    def backward(
        self, tensors: Tensors, request: Request, backward_inputs: BackwardInputs
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of query, key and value, and that of the bias if it is
        wanted.

        They are in shared memory or on the inputs' device.
        """
        upstream = {
            "grad_out": backward_inputs.grad_out,
            "out": backward_inputs.out,
            "lse": backward_inputs.lse,
        }
        if backward_inputs.grad_lse is not None:
            upstream["grad_lse"] = backward_inputs.grad_lse
        preallocated = backward_inputs.grads or (None, None, None)
        pool = self._open_pool()
        gradients = tuple(
            _empty_result(pool, tensor, grad, tuple(tensor.shape), tensor.dtype)
            for tensor, grad in zip(tensors[:3], preallocated, strict=True)
        )
        bias = None if backward_inputs.grad_mask is False else tensors.bias
        sums = GradientSums(
            _whole_call(request),
            tensors.key,
            tensors.value,
            bias,
        )
        named = dict(zip(GRADIENTS, gradients, strict=True))
        self._run(pool, tensors, request, upstream, named, sums)
        if bias is None or sums.bias is None:
            return gradients
        grad_bias = backward_inputs.grad_mask
        if not isinstance(grad_bias, torch.Tensor):
            grad_bias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
        with torch.no_grad():
            return (*gradients, grad_bias.copy_(sums.bias))

    def _open_pool(self) -> WorkerPool:
        if isinstance(self.pool, WorkerPool):
            return self.pool
        return shared_pool(self.pool)

    def _run(
        self,
        pool: WorkerPool,
        tensors: Tensors,
        request: Request,
        upstream: NamedTensors,
        targets: NamedTensors,
        sums: GradientSums | None = None,
    ) -> None:
        """Run a pass.

        Args:
            upstream: what a backward reads beside the inputs.
            targets: the results by name, to be written.
            sums: adds up gradients; None in a forward.
        """
        home = tensors.query.device
        mappings = cache(Mappings.now)
        with (
            _pass_report(request, backward=sums is not None) as report,
            torch.no_grad(),
        ):
            inputs = self._share_inputs(tensors, upstream, mappings, report)
            results = {
                name: to_handle(target.detach(), mappings, writable=True)
                for name, target in targets.items()
            }
            handles = {
                name: shared.handle for name, shared in (inputs | results).items()
            }
            worker_pass = WorkerPass(
                number=next(pool.pass_numbers),
                backward=sums is not None,
                call=_whole_call(request),
                mask=self.mask,
                tensors=handles,
                options=self.options,
            )
            with progress_of(request) as progress, pool.exclusive() as workers:
                budgets = self._worker_budgets(workers, request, home)
                queue = self._block_queue(worker_pass, workers, budgets)
                coordinator = Coordinator(
                    workers, worker_pass, queue, budgets, report, sums, progress
                )
                coordinator.run()
            if sums is not None:
                sums.store(results["grad_key"].tensor, results["grad_value"].tensor)
            for name, target in targets.items():
                computed = results[name].tensor
                if computed.data_ptr() != target.data_ptr():
                    target.detach().copy_(computed)

    def _share_inputs(
        self,
        tensors: Tensors,
        upstream: NamedTensors,
        mappings: Callable[[], Mappings],
        report: PoolPass,
    ) -> dict[str, SharedTensor]:
        """Return what a pass reads, by name, and count the bytes that are copied for
        it."""
        if self._process != os.getpid():  # the parent may use that memory again
            self._process = os.getpid()
            self._shared_inputs.clear()
        names = (*INPUTS, "bias", "sinks")
        for name, tensor in zip(names, tensors, strict=False):
            if tensor is not None and name not in self._shared_inputs:
                self._shared_inputs[name] = _share_input(tensor, mappings, report)
        return self._shared_inputs | {
            name: _share_input(tensor, mappings, report)
            for name, tensor in upstream.items()
        }

    def _worker_budgets(
        self, workers: Sequence[Worker], request: Request, home: torch.device
    ) -> list[int | None]:
        """Return bytes for each worker's device, less those of inputs that were cast
        there.

        A worker that has joined has as many as the last one.
        """
        budgets: list[int | None] = []
        last = len(self.budgets) - 1
        for number, worker in enumerate(workers):
            budget = self.budgets[min(number, last)]
            if budget is not None and worker.device == str(home):
                budget = max(0, budget - request.cast_bytes)
            budgets.append(budget)
        return budgets

    def _block_queue(
        self,
        worker_pass: WorkerPass,
        workers: Sequence[Worker],
        budgets: Sequence[int | None],
    ) -> BlockQueue:
        """Return the blocks of a pass, shared among the workers that are alive.

        Raises:
            RuntimeError: there is none.
        """
        alive = {
            number: worker for number, worker in enumerate(workers) if worker.alive
        }
        if not alive:
            raise RuntimeError(
                "the pool has no worker: it was closed, all of them were lost, or "
                "they belong to the process that this one was forked from (give the "
                "devices by name)"
            )
        shape = worker_pass.call.shape
        backward = worker_pass.backward
        speeds = {
            number: expected_speed(
                worker.device,
                worker.name,
                shape.dtype,
                shape.head_dim,
                backward=backward,
            )
            for number, worker in alive.items()
        }
        kinds = {(worker.name, budgets[number]) for number, worker in alive.items()}
        are_gpus = all(_has_own_memory(worker.device) for worker in alive.values())
        is_homogeneous = are_gpus and len(kinds) == 1
        pieces = pieces_of(
            shape, speeds, uniform_cost=self.is_uniform and is_homogeneous
        )
        return BlockQueue(shape, speeds, pieces)


def _whole_call(request: Request) -> WholeCall:
    """Return the call without its mask."""
    return WholeCall(
        request.shape,
        scale=request.scale,
        dropout=request.dropout,
        records=request.records,
        mask_grad=request.mask_grad,
    )


def _share_input(
    tensor: torch.Tensor, mappings: Callable[[], Mappings], report: PoolPass
) -> SharedTensor:
    shared = to_handle(tensor.detach(), mappings)
    if shared.tensor.data_ptr() != tensor.data_ptr():
        report.copied_bytes += shared.tensor.nbytes
    return shared


def _has_own_memory(device_name: str) -> bool:
    return backend_of(torch.device(device_name)).own_memory


def _empty_result(
    pool: WorkerPool,
    like: torch.Tensor,
    preallocated: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the caller's tensor for a result, or an uninitialised one.

    That is in shared memory where the inputs are on the host.

    Args:
        pool: computes the result.
        like: the input whose layout the result has.
        preallocated: the caller's tensor, or None.
        shape, dtype: of the result.
    """
    if preallocated is not None:
        torch.autograd.graph.increment_version(preallocated)
        return preallocated
    if not on_host(like.device):
        return empty_like_input(like, shape, dtype)
    # Workers of GPUs page-lock a result head by head.
    has_gpu = any(map(_has_own_memory, pool.devices))
    if like.is_contiguous() or has_gpu or 0 in shape:
        return shared_result(shape, dtype)
    flat = shared_result((math.prod(shape),), dtype)
    return flat.as_strided(shape, result_strides(like, shape))


@contextmanager
def _pass_report(request: Request, *, backward: bool) -> Iterator[PoolPass]:
    """Yield the report of a pass. At the end it is added to those of the call."""
    pool_pass = PoolPass()
    name = "backward" if backward else "forward"
    if request.report is not None:
        request.report.pool = request.report.pool or PoolReport()
        setattr(request.report.pool, name, pool_pass)
    yield pool_pass
    merged = merge_reports(pool_pass, backward=backward)
    if request.report is not None:
        setattr(request.report, name, merged)
    for report in request.reports_with_totals:
        report.total.add(merged, backward=backward)
