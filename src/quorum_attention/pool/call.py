"""A call on a pool: its tensors where workers can have them, and its two passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from quorum_attention.call.mapped import Mappings
from quorum_attention.call.request import Request, Tensors
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.pool.messages import Begin
from quorum_attention.pool.parts import Part, Sizes, parts_of
from quorum_attention.pool.report import PoolPass, PoolReport
from quorum_attention.pool.shared import Handle, Shared, opened, room

if TYPE_CHECKING:
    from quorum_attention.pool.pool import Pool


class PoolCall:
    """A call on a pool.

    Inputs that had to be copied into shared memory stay there until the backward.
    """

    def __init__(
        self, pool: Pool, tensors: Tensors, request: Request, report: PoolReport | None
    ) -> None:
        self.pool, self.request, self.report = pool, request, report
        self._mask = tensors.mask
        self._kept: dict[str, Shared] = {}
        work = request.work
        # A part of a causal head's rows is causal from the lower right, which needs squares.
        rows = tensors.mask is None and (not work.is_causal or work.n_queries == work.n_keys)
        self.sizes = Sizes(
            work.batch, work.heads, work.kv_heads, work.n_queries, work.n_keys, work.is_causal, rows
        )
        options = request.options
        self.options = {
            "budget": options.budget_bytes,
            "depth": "auto" if options.depth is None else options.depth,
            "kernel": options.kernel,
            "scale": request.scale,
        }

    def parts(self) -> list[Part]:
        """The parts of a pass on the workers that are alive."""
        names = self.pool.names
        return parts_of(self.sizes, len(names), even=len(set(names)) == 1)

    def inputs(
        self, report: PoolPass, mappings: Mappings, tensors: dict[str, torch.Tensor]
    ) -> dict[str, Handle]:
        """Inputs as workers get them."""
        if self._mask is not None:
            missing = 4 - self._mask.dim()
            mask = self._mask.reshape((1,) * missing + self._mask.shape)
            tensors = {**tensors, "mask": mask}
        for name, tensor in tensors.items():
            if name not in self._kept:
                self._kept[name] = Shared.of(tensor, mappings)
                report.copied_bytes += self._kept[name].copied_bytes
        return {name: self._kept[name].handle for name in tensors}

    def forget(self, name: str) -> None:
        """Let go of an input's copy."""
        self._kept.pop(name, None)


def flat(tensor: torch.Tensor, last: int = 3) -> torch.Tensor:
    """With one batch dimension before the ``last`` ones; a view where it can be one."""
    count = math.prod(tensor.shape[: tensor.dim() - last])
    return tensor.reshape(count, *tensor.shape[tensor.dim() - last :])


def attend(call: PoolCall, tensors: Tensors) -> torch.Tensor:
    """The output of a call that has been checked, with its gradients recorded."""
    result: torch.Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        tensors.query, tensors.key, tensors.value, call
    )
    return result


def _made(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A result that workers can write to."""
    if on_host(device):
        return room(tuple(shape), dtype)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _forward(
    call: PoolCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse; in shared memory, or on the inputs' device."""
    report, mappings = PoolPass(), Mappings.now()
    if call.report is not None:
        call.report.forward = report
    given, rows = call.request.out, query.shape[:-1]
    handles = call.inputs(
        report, mappings, {"query": flat(query), "key": flat(key), "value": flat(value)}
    )
    lse = _made(rows, _state_dtype(query.dtype), query.device)
    if given is None:
        out = _made((*rows, value.shape[-1]), call.request.out_dtype, query.device)
        target = Shared(flat(out), flat(out))
    else:
        out, target = given.detach(), Shared.written(flat(given.detach()), mappings)
    handles |= {"out": target.handle, "lse": flat(lse, 2)}
    begin = Begin(call.pool.number(), False, call.sizes, handles, call.options)
    call.pool.run(begin, call.parts(), report, lambda part: None, lambda part, sums: None)
    if target.tensor.data_ptr() != out.data_ptr():
        out.view(target.tensor.shape).copy_(target.tensor)
    return out, lse


def _backward(
    call: PoolCall,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> list[torch.Tensor]:
    """The gradients of query, key and value; in shared memory, or on the inputs' device."""
    report, mappings = PoolPass(), Mappings.now()
    if call.report is not None:
        call.report.backward = report
    inputs = {"query": query, "key": key, "value": value, "grad_out": grad_out, "out": out}
    flattened = {name: flat(tensor) for name, tensor in inputs.items()}
    handles = call.inputs(report, mappings, {**flattened, "lse": flat(lse, 2)})
    made = [_made(t.shape, t.dtype, t.device) for t in (query, key, value)]
    names = ("grad_query", "grad_key", "grad_value")
    handles |= {name: flat(t) for name, t in zip(names, made, strict=True)}
    totals = _Totals(call.sizes, flat(key), flat(value))
    begin = Begin(call.pool.number(), True, call.sizes, handles, call.options)
    try:
        call.pool.run(begin, call.parts(), report, totals.room, totals.add)
    finally:
        for name in ("grad_out", "out", "lse"):
            call.forget(name)
    totals.store(flat(made[1]), flat(made[2]))
    return made


class _Totals:
    """Gradients of those key/value heads that several parts read, added up in fp32 (or fp64)."""

    def __init__(self, sizes: Sizes, key: torch.Tensor, value: torch.Tensor) -> None:
        self._sizes, self._like = sizes, (key, value)
        self._dtype = _state_dtype(key.dtype)
        self._sums: dict[tuple[int, int], list[torch.Tensor]] = {}

    def room(self, part: Part) -> tuple[Handle, Handle] | None:
        """Where a worker puts a part's gradients; None: in the results themselves."""
        if part.whole:
            return None
        kv, keys = part.kv(self._sizes), part.n_keys(self._sizes)
        first, second = (
            _made((1, kv.length, keys, t.shape[3]), self._dtype, t.device) for t in self._like
        )
        return first, second

    def add(self, part: Part, sums: tuple[Handle, Handle] | None) -> None:
        """Add the gradients of a part that is done."""
        if sums is None:
            return
        kv = part.kv(self._sizes)
        for number, head in enumerate(range(*kv)):
            totals = self._sums.setdefault(
                (part.entry, head),
                [torch.zeros(t.shape[2:], dtype=self._dtype, device=t.device) for t in self._like],
            )
            for total, handle in zip(totals, sums, strict=True):
                rows = opened(handle)[0, number]
                total[: rows.shape[0]] += rows

    def store(self, grad_key: torch.Tensor, grad_value: torch.Tensor) -> None:
        """Put the sums where they belong, rounded once."""
        for (entry, head), (first, second) in self._sums.items():
            grad_key[entry, head] = first
            grad_value[entry, head] = second


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: PoolCall
    ) -> torch.Tensor:
        out, lse = _forward(call, query.detach(), key.detach(), value.detach())
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        saved = [tensor.detach() for tensor in ctx.saved_tensors]
        return (*_backward(ctx.call, grad_out, *saved), None)


__all__ = ["PoolCall", "attend", "flat"]
