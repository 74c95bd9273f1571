"""A call on several devices: its tensors where workers can have them, and its two passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from quorum_attention.call.block import WholeCall
from quorum_attention.call.gradients import Given
from quorum_attention.call.mapped import Mappings
from quorum_attention.call.request import Request, Tensors
from quorum_attention.devices.buffers import Shared, kept_room, made_for
from quorum_attention.devices.mapped import Prefault
from quorum_attention.devices.messages import Begin
from quorum_attention.devices.partition import Sizes
from quorum_attention.devices.report import PoolPass, PoolReport, as_one
from quorum_attention.devices.sums import Sums
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.workload import state_dtype
from quorum_attention.mask import Mask
from quorum_attention.passes import progress_of

if TYPE_CHECKING:
    from quorum_attention.devices.pool import Pool

# Of a result: where the caller wants it, else its shape and dtype.
_Wanted = tuple[torch.Tensor | None, Sequence[int], torch.dtype]
_PER_ROW = ("lse", "grad_lse")


class PoolCall:
    """A call on a pool: runs the passes of a ``Request`` there.

    Inputs that had to be copied into shared memory stay there until the backward.

    Args:
        pool_of: gives the pool, for each pass.
        budgets: one for each device of the pool; None: what is free there.
        options: depth, kernel and accumulator, as in ``api.attention``.
        mask: what is masked beside a mask tensor; no bias and no sinks are in it.
        report: filled beside the call's own.
    """

    def __init__(
        self,
        pool_of: Callable[[], Pool],
        budgets: tuple[int | None, ...],
        options: dict[str, Any],
        mask: Mask | None,
        report: PoolReport | None = None,
    ) -> None:
        self._pool_of, self._budgets, self._options, self._mask = pool_of, budgets, options, mask
        self._report = PoolReport() if report is None else report
        self._watched = report is not None
        self._kept: dict[str, Shared] = {}

    def forward(self, tensors: Tensors, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse; in shared memory, or on the inputs' device."""
        query, key, value = tensors[:3]
        rows = query.shape[:-1]
        wanted: dict[str, _Wanted] = {
            "out": (request.out, (*rows, value.shape[-1]), request.out_dtype),
            "lse": (None, rows, state_dtype(query.dtype)),
        }
        inputs = {"query": query, "key": key, "value": value}
        out, lse = self._run(tensors, request, inputs, wanted)
        return out, lse

    def backward(
        self, tensors: Tensors, request: Request, given: Given
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of query, key and value, and of the mask if it is wanted; in shared memory,
        or on the inputs' device."""
        inputs = dict(zip(("query", "key", "value"), tensors[:3], strict=True))
        inputs |= {"grad_out": given.grad_out, "out": given.out, "lse": given.lse}
        if given.grad_lse is not None:
            inputs["grad_lse"] = given.grad_lse
        grads = given.grads or (None,) * 3
        names = ("grad_query", "grad_key", "grad_value")
        wanted: dict[str, _Wanted] = {
            name: (grad, t.shape, t.dtype)
            for name, grad, t in zip(names, grads, tensors[:3], strict=True)
        }
        mask, batch = tensors.mask if given.of_mask else None, request.work.batch_shape
        likes = flat(tensors.key), flat(tensors.value)
        flattened = None if mask is None else flat_mask(mask.detach(), batch)
        sums = Sums(self._sizes(request), self._whole(request), *likes, flattened)
        try:
            made = self._run(tensors, request, inputs, wanted, sums)
        finally:
            for name in ("grad_out", "out", "lse", "grad_lse"):
                self._kept.pop(name, None)
        if mask is None:
            return made
        result = given.grad_mask
        if result is None:
            result = torch.empty(mask.shape, dtype=mask.dtype, device=mask.device)
        with torch.no_grad():
            sums.store_mask(result, batch)
        return (*made, result)

    def _run(
        self,
        tensors: Tensors,
        request: Request,
        inputs: dict[str, torch.Tensor],
        wanted: dict[str, _Wanted],
        sums: Sums | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """A pass; its results."""
        pool, home = self._pool_of(), tensors.query.device
        pool.check_open()
        with self._told(request, backward=sums is not None) as report, torch.no_grad():
            mappings = Mappings.now()
            handles = self._inputs(pool, report, mappings, inputs, tensors, request)
            results: list[tuple[torch.Tensor, Shared]] = []
            fresh: list[torch.Tensor] = []
            for name, (given, shape, dtype) in wanted.items():
                if given is None:
                    made, touched = _result(shape, dtype, home, pool.pins)
                    fresh += [] if touched else [made]
                    handles[name] = Shared.made(flat(made, 2 if name in _PER_ROW else 3))
                else:
                    made = given
                    handles[name] = Shared.written(flat(given.detach()), mappings)
                    torch.autograd.graph.increment_version(given)
                results.append((made, handles[name]))
            begin = Begin(
                next(pool.numbers), sums is not None, self._whole(request),
                {name: one.handle for name, one in handles.items()}, self._options,
                self._watched or request.report is not None, len(set(self._budgets)) > 1,
            )  # fmt: skip
            # Others do not know this process's streams.
            backend_of(home).synchronize(home)
            fresh = [] if all(on_host(torch.device(name)) for name in pool.devices) else fresh
            with Prefault(fresh), progress_of(request) as progress:
                pool.run(
                    begin, self._sizes(request), report, sums, self._left(pool, request, home),
                    (request.work.dtype, request.work.head_dim),
                    steady=self._mask is None or not self._mask.is_structured, progress=progress,
                )  # fmt: skip
            if sums is not None:
                sums.store(handles["grad_key"].tensor, handles["grad_value"].tensor)
            for made, target in results:
                if target.tensor.data_ptr() != made.data_ptr():
                    made.detach().copy_(target.tensor.reshape(made.shape))
        return tuple(made for made, _ in results)

    def _sizes(self, request: Request) -> Sizes:
        """The sizes of the call, and how it may be cut."""
        work = request.work
        # Dropped pairs are counted in positions of the whole sequence.
        return Sizes(
            work.batch, work.heads, work.kv_heads, work.n_queries, work.n_keys, work.is_causal,
            rows_may_be_cut=request.dropout is None,
            all_keys=self._mask is not None or work.mask is not None,
        )  # fmt: skip

    def _whole(self, request: Request) -> WholeCall:
        work = request.work
        return WholeCall(
            (work.batch,), work.heads, work.kv_heads, work.n_queries, work.n_keys,
            self._mask, work.is_causal, request.scale, request.dropout, request.records,
            request.mask_grad,
        )  # fmt: skip

    def _left(self, pool: Pool, request: Request, home: torch.device) -> list[int | None]:
        """Budgets, less what inputs that were cast take on their device."""
        return [
            None if budget is None
            else max(0, budget - (request.cast_bytes if worker.device == str(home) else 0))
            for budget, worker in zip(self._budgets, pool.workers, strict=False)
        ]  # fmt: skip

    def _inputs(
        self,
        pool: Pool,
        report: PoolPass,
        mappings: Mappings,
        inputs: dict[str, torch.Tensor],
        tensors: Tensors,
        request: Request,
    ) -> dict[str, Shared]:
        """Inputs as workers get them."""
        begun, make = time.perf_counter(), (lambda *of: kept_room(*of)[0]) if pool.pins else None
        flattened = {
            name: flat(tensor.detach(), 2 if name in _PER_ROW else 3)
            for name, tensor in inputs.items()
        }
        if tensors.mask is not None:
            flattened["mask"] = flat_mask(tensors.mask.detach(), request.work.batch_shape)
        if tensors.sinks is not None:
            flattened["sinks"] = tensors.sinks.detach()
        for name, tensor in flattened.items():
            if name not in self._kept:
                self._kept[name] = Shared.of(tensor, mappings, make)
                report.copied_bytes += self._kept[name].copied_bytes
        report.copy_seconds = time.perf_counter() - begun
        return {name: self._kept[name] for name in flattened}

    @contextmanager
    def _told(self, request: Request, *, backward: bool) -> Iterator[PoolPass]:
        """A pass's report, in the call's own."""
        report = PoolPass()
        name = "backward" if backward else "forward"
        setattr(self._report, name, report)
        if request.report is not None:
            if request.report.pool is None:
                request.report.pool = self._report
            setattr(request.report.pool, name, report)
        yield report
        made = as_one(report, backward)
        if request.report is not None:
            setattr(request.report, name, made)
        for sums in request.sums:
            sums.total.add(
                made.kernel, backward=backward, seconds=report.seconds, cut=report.parts > 1,
                peak_bytes=made.peak_bytes or made.planned_peak_bytes,
                recoveries=len(made.recoveries), recovery_seconds=made.recovery_seconds,
            )  # fmt: skip


def _result(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, keep: bool
) -> tuple[torch.Tensor, bool]:
    """A result that workers can write to, and whether its pages were made before."""
    if keep and on_host(device):
        made, fresh = kept_room(shape, dtype)
        return made, not fresh
    return made_for(shape, dtype, device), False


def flat(tensor: torch.Tensor, last: int = 3) -> torch.Tensor:
    """With one batch dimension before the ``last`` ones; a view where it can be one."""
    count = math.prod(tensor.shape[: tensor.dim() - last])
    return tensor.reshape(count, *tensor.shape[tensor.dim() - last :])


def flat_mask(mask: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    """A mask as (batch or 1, heads or 1, n_queries or 1, n_keys or 1); a view where it can be."""
    mask = mask[(None,) * (len(batch) + 3 - mask.dim())]
    if all(n == 1 for n in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])


__all__ = ["PoolCall", "flat", "flat_mask"]
