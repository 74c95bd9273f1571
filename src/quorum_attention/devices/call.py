"""A call on several devices, checked; its tensors where workers can have them; its two passes."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from quorum_attention.call.block import WholeCall
from quorum_attention.call.gradients import Given
from quorum_attention.call.options import Arguments, Budget, CallOptions
from quorum_attention.call.overlap import Mappings
from quorum_attention.call.request import Request, Tensors, request_of
from quorum_attention.call.validation import as_mask, as_tensor
from quorum_attention.counts import shown
from quorum_attention.devices.buffers import (
    Shared,
    handle_of,
    kept_room,
    made_for,
    prefaulting,
)
from quorum_attention.devices.partition import Sums
from quorum_attention.devices.report import PoolPass, PoolReport, as_one
from quorum_attention.devices.worker import Begin, Rule, answers, changed, sample_pairs
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.problem import Workload, state_dtype
from quorum_attention.kernels.masked.resolve import Sizes as MaskSizes
from quorum_attention.kernels.masked.resolve import resolve
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.mask import Keeps, Mask
from quorum_attention.passes import progress_of
from quorum_attention.sizes import parse_bytes

if TYPE_CHECKING:
    from quorum_attention.devices.pool import Pool

# Of a result: where the caller wants it, else its shape and dtype.
_Wanted = tuple[torch.Tensor | None, Sequence[int], torch.dtype]
_PER_ROW = ("lse", "grad_lse")


def request_on_several(
    function: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Arguments,
    *,
    count: int,
    pool_of: Callable[[], Pool],
    pool_report: PoolReport | None = None,
) -> tuple[Tensors, Request]:
    """``request_of``, for several devices.

    Args:
        count: how many devices there are.
        pool_of: gives their pool, for each pass.
        pool_report: filled with what happened, beside the call's own report.

    Raises:
        Errors as of ``request_of``; NotImplementedError: what several devices cannot do, by name.
    """
    written = call.written
    budgets = _budgets(written.budget, count)
    check_options(written)
    attn_mask = as_mask(call.attn_mask, as_tensor(query, "query"), as_tensor(key, "key"))
    mask = attn_mask if isinstance(attn_mask, Mask) else None
    if mask is not None:
        # Bias and sinks are tensors of the request; the rest is sent as it is.
        attn_mask, mask = (
            Mask(bias=mask.bias, sinks=mask.sinks), replace(mask, bias=None, sinks=None)
        )  # fmt: skip
    # This process computes nothing: its own request is of where the inputs are.
    home = as_tensor(query, "query").device
    here = written._replace(budget=None, kernel="auto", devices="cpu" if on_host(home) else home)
    call = call._replace(attn_mask=attn_mask, written=here)
    tensors, request = request_of(function, query, key, value, call)
    if mask is not None and not (mask.is_structured or mask.softcap):
        mask = None
    if mask is not None:
        work = request.work
        sizes = MaskSizes(work.batch, work.heads, work.n_queries, work.n_keys)
        resolve(mask, sizes, work.is_causal)
        mask = sendable(mask, lambda keeps: _rule(keeps, work, request.options.device))
    options = {name: getattr(written, name) for name in ("depth", "kernel", "accumulator")}
    watched, report = pool_report is not None, pool_report or PoolReport()
    runner = PoolCall(pool_of, budgets, options, mask, report, watched)
    return tensors, replace(request, runner=runner)


def check_options(written: CallOptions) -> None:
    """Raise NotImplementedError for options that several devices cannot have."""
    if written.plan is not None:
        raise NotImplementedError(
            "plan is for one device; several plan their parts by themselves: give budget, depth "
            "or kernel"
        )
    kernel = written.kernel
    if not isinstance(kernel, str):
        raise NotImplementedError(
            f"kernel must be a name where several devices compute, got {shown(kernel)}: other "
            "processes do not have the object"
        )
    if kernel != "auto":
        named = get_kernel(kernel)
        if named.own_attention or named.probed_as is not None:
            raise NotImplementedError(
                f"kernel {kernel!r} computes another attention, of positions in the whole call; "
                "several devices have parts of it: name one device"
            )


def _budgets(budget: Budget | None, count: int) -> tuple[int | None, ...]:
    """A budget for each device.

    Raises:
        ValueError, TypeError: it makes no sense.
    """
    if budget is None:
        return (None,) * count
    if isinstance(budget, (list, tuple)):
        if len(budget) != count:
            raise ValueError(
                f"budget must be one number of bytes or one for each of the {count} devices, got "
                f"{len(budget)}"
            )
        return tuple(parse_bytes(one) for one in budget)
    return (parse_bytes(budget),) * count


def _rule(keeps: Keeps, work: Workload, device: torch.device) -> Rule:
    try:
        pickled = pickle.dumps(keeps)
    except Exception as error:
        raise NotImplementedError(
            f"Mask.keeps must be sent to other processes where several devices compute, and "
            f"{shown(keeps)} cannot be ({type(error).__name__}: {error}): use a function of a "
            "module, not one made inside another function"
        ) from None
    pairs = sample_pairs((work.batch, work.heads, work.n_queries, work.n_keys))
    return Rule(pickled, shown(keeps), pairs, answers(keeps, pairs, device))


def sendable(mask: Mask, rule: Callable[[Keeps], Any] = lambda keeps: keeps) -> Mask:
    """The mask with tensors in host memory of their own: a caller's may be written to."""
    found: Mask = changed(mask, lambda tensor: tensor.detach().cpu().clone(), rule)
    return found


@dataclass(eq=False)
class PoolCall:
    """A call on a pool: runs the passes of a ``Request`` there.

    Inputs that had to be copied into shared memory stay there until the backward.

    Attributes:
        pool_of: gives the pool, for each pass.
        budgets: one for each device of the pool; None: what is free there.
        options: depth, kernel and accumulator, as in ``api.attention``.
        mask: what is masked beside a mask tensor; no bias and no sinks are in it.
        report: filled beside the call's own.
        watched: whether somebody asked for that.
    """

    pool_of: Callable[[], Pool]
    budgets: tuple[int | None, ...]
    options: dict[str, Any]
    mask: Mask | None
    report: PoolReport
    watched: bool
    _kept: dict[str, Shared] = field(default_factory=dict)

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
        sums = Sums(self._whole(request), *likes, flattened)
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
        pool, home = self.pool_of(), tensors.query.device
        pool.check_open()
        with self._told(request, backward=sums is not None) as report, torch.no_grad():
            mappings = Mappings.now()
            handles = self._inputs(pool, report, mappings, inputs, tensors, request)
            results: list[tuple[torch.Tensor, Shared]] = []
            fresh: list[torch.Tensor] = []
            for name, (made, shape, dtype) in wanted.items():
                if made is None:
                    made, untouched = _result(shape, dtype, home, pool.pins)
                    fresh += [made] if untouched else []
                    view = flat(made, 2 if name in _PER_ROW else 3)
                    handles[name] = Shared(handle_of(view), view)
                else:
                    handles[name] = Shared.of(flat(made.detach()), mappings, written=True)
                    torch.autograd.graph.increment_version(made)
                results.append((made, handles[name]))
            begin = Begin(
                next(pool.numbers), sums is not None, self._whole(request),
                {name: one.handle for name, one in handles.items()}, self.options,
                self.watched or request.report is not None, len(set(self.budgets)) > 1,
            )  # fmt: skip
            # Others do not know this process's streams.
            backend_of(home).synchronize(home)
            with prefaulting(fresh), progress_of(request) as progress:
                pool.run(
                    begin, request.work, self._left(pool, request, home), report, sums, progress
                )
            if sums is not None:
                sums.store(handles["grad_key"].tensor, handles["grad_value"].tensor)
            for made, target in results:
                if target.tensor.data_ptr() != made.data_ptr():
                    made.detach().copy_(target.tensor.reshape(made.shape))
        return tuple(made for made, _ in results)

    def _whole(self, request: Request) -> WholeCall:
        work = request.work
        return WholeCall(
            (work.batch,), work.heads, work.kv_heads, work.n_queries, work.n_keys,
            self.mask, work.is_causal, request.scale, request.dropout, request.records,
            request.mask_grad,
        )  # fmt: skip

    def _left(self, pool: Pool, request: Request, home: torch.device) -> list[int | None]:
        """Budgets, less what inputs that were cast take on their device."""
        return [
            None if budget is None
            else max(0, budget - (request.cast_bytes if worker.device == str(home) else 0))
            for budget, worker in zip(self.budgets, pool.workers, strict=False)
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
        setattr(self.report, name, report)
        if request.report is not None:
            if request.report.pool is None:
                request.report.pool = self.report
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
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, pins: bool
) -> tuple[torch.Tensor, bool]:
    """A result that workers can write to, and whether its pages are to be made for one that
    copies."""
    if pins and on_host(device):
        return kept_room(shape, dtype)
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
