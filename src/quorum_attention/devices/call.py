"""A call on several devices, checked; its tensors where workers can have them; its two passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from quorum_attention.call.block import WholeCall
from quorum_attention.call.gradients import BackwardInputs
from quorum_attention.call.options import Arguments, Budget, CallOptions
from quorum_attention.call.overlap import Mappings
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.validation import Tensors, as_mask, as_tensor
from quorum_attention.counts import shown
from quorum_attention.devices.buffers import InFile, handle_of, share, shared_memory
from quorum_attention.devices.partition import Sums
from quorum_attention.devices.report import PoolPass, PoolReport, as_one
from quorum_attention.devices.worker import PassSpec, pickled
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.execution.problem import state_dtype
from quorum_attention.kernels.masked.resolve import Sizes as MaskSizes
from quorum_attention.kernels.masked.resolve import resolve
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.mask import Mask, map_tensors
from quorum_attention.passes import progress_of
from quorum_attention.sizes import parse_bytes

if TYPE_CHECKING:
    from quorum_attention.devices.pool import Pool

# Of a result: where the caller wants it, else its shape and dtype.
_Wanted = tuple[torch.Tensor | None, tuple[int, ...], torch.dtype]


def request_on_several(
    function: str,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    call: Arguments,
    *,
    count: int,
    pool_of: Callable[[], Pool],
) -> tuple[Tensors, Request]:
    """``request_of``, for several devices.

    Args:
        inputs: query, key and value.
        count: how many devices there are.
        pool_of: gives their pool, for each pass.

    Raises:
        Errors as of ``request_of``; NotImplementedError: what several devices cannot do, by name.
    """
    written = call.written
    budgets = _budgets(written.budget, count)
    check_options(written)
    query, key, _ = inputs
    attn_mask = as_mask(call.attn_mask, as_tensor(query, "query"), as_tensor(key, "key"))
    mask = attn_mask if isinstance(attn_mask, Mask) else None
    if mask is not None:
        # Bias and sinks are tensors of the request; the rest is sent as it is.
        attn_mask = Mask(bias=mask.bias, sinks=mask.sinks)
    # This process computes nothing: its own request is of where the inputs are.
    home = as_tensor(query, "query").device
    here = written._replace(budget=None, kernel="auto", devices=home)
    call = call._replace(attn_mask=attn_mask, written=here)
    tensors, request = request_of(function, *inputs, call)
    sent = None
    if mask is not None and (mask.is_structured or mask.softcap):
        mask, work = replace(mask, bias=None, sinks=None), request.work
        sizes = work.batch, work.heads, work.n_queries, work.n_keys
        resolve(mask, MaskSizes(*sizes), work.is_causal)
        # Now: the caller may write to its tensors before the backward.
        mask = map_tensors(mask, lambda tensor, name: tensor.detach().cpu())
        sent = pickled(mask, sizes, home.type)
    options = CallOptions(
        depth=written.depth, kernel=written.kernel, accumulator=written.accumulator
    )
    steady = mask is None or not mask.is_structured
    runner = PoolCall(pool_of, budgets, options, sent, steady)
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
    each = budget if isinstance(budget, (list, tuple)) else [budget] * count
    if len(each) != count:
        raise ValueError(
            f"budget must be one number of bytes or one for each of the {count} devices, got "
            f"{len(each)}"
        )
    return tuple(None if one is None else parse_bytes(one) for one in each)


@dataclass(eq=False)
class PoolCall:
    """A call on a pool: runs the passes of a ``Request`` there.

    Inputs that had to be copied into shared memory stay there until the backward.

    Attributes:
        pool_of: gives the pool, for each pass.
        budgets: one for each device of the pool; None: what is free there.
        written: depth, kernel and accumulator.
        mask: what is masked beside a bias, pickled for workers.
        steady: whether blocks take as long as their pairs say.
    """

    pool_of: Callable[[], Pool]
    budgets: tuple[int | None, ...]
    written: CallOptions
    mask: bytes | None
    steady: bool
    _kept: dict[str, tuple[InFile, torch.Tensor]] = field(default_factory=dict)

    def forward(self, tensors: Tensors, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse; in shared memory, or on the inputs' device."""
        query, _, value = tensors[:3]
        rows = tuple(query.shape[:-1])
        wanted: dict[str, _Wanted] = {
            "out": (request.out, (*rows, value.shape[-1]), request.out_dtype),
            "lse": (None, rows, state_dtype(query.dtype)),
        }
        out, lse = self._run(tensors, request, {}, wanted)
        return out, lse

    def backward(
        self, tensors: Tensors, request: Request, given: BackwardInputs
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of query, key and value, and of the bias if it is wanted; in shared memory,
        or on the inputs' device."""
        upstream = {"grad_out": given.grad_out, "out": given.out, "lse": given.lse}
        if given.grad_lse is not None:
            upstream["grad_lse"] = given.grad_lse
        names = ("grad_query", "grad_key", "grad_value")
        wanted: dict[str, _Wanted] = {
            name: (grad, tuple(t.shape), t.dtype)
            for name, grad, t in zip(names, given.grads or (None,) * 3, tensors[:3], strict=True)
        }
        bias = tensors.mask if given.grad_mask is not False else None
        sums = Sums(self._whole(request), tensors.key, tensors.value, bias)
        try:
            made = self._run(tensors, request, upstream, wanted, sums)
        finally:
            for name in upstream:
                self._kept.pop(name, None)
        if bias is None or sums.bias is None:
            return made
        result = given.grad_mask
        if not isinstance(result, torch.Tensor):
            result = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
        with torch.no_grad():
            return (*made, result.copy_(sums.bias))

    def _run(
        self,
        tensors: Tensors,
        request: Request,
        upstream: dict[str, torch.Tensor],
        wanted: dict[str, _Wanted],
        sums: Sums | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """A pass; its results."""
        pool, home, mappings = self.pool_of(), tensors.query.device, cache(Mappings.now)
        with self._reported(request, backward=sums is not None) as report, torch.no_grad():
            named = dict(zip(("query", "key", "value", "bias", "sinks"), tensors, strict=True))
            inputs = {name: t for name, t in {**named, **upstream}.items() if t is not None}
            for name, tensor in inputs.items():
                if name not in self._kept:
                    _, own = self._kept[name] = share(tensor.detach(), mappings)
                    report.copied_bytes += own.nbytes * (own.data_ptr() != tensor.data_ptr())
            handles = {name: self._kept[name][0] for name in inputs}
            results: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
            for name, (given, shape, dtype) in wanted.items():
                if given is None:
                    own = shared_memory(shape, dtype, home)
                    handles[name] = handle_of(own)
                    given = own if on_host(home) else torch.empty_like(own, device=home)
                else:
                    handles[name], own = share(given.detach(), mappings, written=True)
                    torch.autograd.graph.increment_version(given)
                results[name] = given, own
            spec = PassSpec(
                next(pool.numbers), sums is not None, self._whole(request), self.mask, handles,
                self.written, len(set(self.budgets)) > 1, self.steady,
            )  # fmt: skip
            with progress_of(request) as progress:
                budgets = self._left(pool, request, home)
                pool.run(spec, request.work, budgets, report, sums, progress)
            if sums is not None:
                sums.store(results["grad_key"][1], results["grad_value"][1])
            for given, made in results.values():
                if made.data_ptr() != given.data_ptr():
                    given.detach().copy_(made)
        return tuple(given for given, _ in results.values())

    def _whole(self, request: Request) -> WholeCall:
        work = request.work
        return WholeCall(
            work.batch_shape, work.heads, work.kv_heads, work.n_queries, work.n_keys, None,
            work.is_causal, request.scale, request.dropout, request.records, request.mask_grad,
        )  # fmt: skip

    def _left(self, pool: Pool, request: Request, home: torch.device) -> list[int | None]:
        """Budgets, less what inputs that were cast take on their device."""
        return [
            None if budget is None
            else max(0, budget - (request.cast_bytes if worker.device == str(home) else 0))
            for budget, worker in zip(self.budgets, pool.workers, strict=False)
        ]  # fmt: skip

    @contextmanager
    def _reported(self, request: Request, *, backward: bool) -> Iterator[PoolPass]:
        """A pass's report, in the call's own."""
        report, name = PoolPass(), "backward" if backward else "forward"
        if request.report is not None:
            request.report.pool = request.report.pool or PoolReport()
            setattr(request.report.pool, name, report)
        yield report
        made = as_one(report, backward)
        if request.report is not None:
            setattr(request.report, name, made)
        for sums in request.sums:
            sums.total.add(made, backward=backward)
