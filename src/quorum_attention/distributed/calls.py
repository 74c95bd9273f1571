"""The attention calls of a rank: heads and rows of the whole call, with its mask and dropout."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention.call.gradients import given_of
from quorum_attention.call.options import Written, compute_device
from quorum_attention.call.request import Request, Tensors, request_of
from quorum_attention.call.settings import current, filled
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.distributed import again
from quorum_attention.distributed.masks import cut, part_of, tensors_of
from quorum_attention.distributed.peers import Peers
from quorum_attention.distributed.report import ShardedReport
from quorum_attention.distributed.watch import Watch
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.execution.report import Report
from quorum_attention.execution.workload import state_dtype
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.mask import Mask
from quorum_attention.passes import run_backward, run_forward
from quorum_attention.repeated.whole import Whole

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def kernel_of_parts(kernel: str | InnerKernel) -> InnerKernel:
    """The kernel of that name, for calls that are parts of one.

    Raises:
        ValueError, TypeError: there is none.
        NotImplementedError: it computes another attention, by positions in the whole call.
    """
    found = get_kernel(kernel)
    if found.probed_as is not None or (found.own_attention and not found.position_free):
        raise NotImplementedError(
            f"kernel {found.name!r} computes another attention, of positions in the whole call; "
            "ranks have parts of it: give attn_mask, or a function that takes no positions"
        )
    return found


@dataclass(slots=True)
class Learned:
    """The gradients of a mask's own tensors, added up over what this rank computes.

    Attributes:
        bias, sinks: like the mask's, in at least fp32; None: not asked for.
    """

    bias: torch.Tensor | None
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, mask: Mask | None, bias: bool, sinks: bool) -> Learned | None:
        """Zeros for the gradients that are wanted; None if none is."""
        if mask is None or not (bias or sinks):
            return None
        rooms = [
            torch.zeros_like(t, dtype=state_dtype(t.dtype)) if wanted and t is not None else None
            for wanted, t in ((bias, mask.bias), (sinks, mask.sinks))
        ]
        return cls(*rooms)

    def add(self, made: Sequence[torch.Tensor], heads: Interval, rows: Interval) -> None:
        """Add what a call of some heads and rows has made, of the bias before the sinks."""
        made = list(made)
        if self.bias is not None:
            cut(self.bias, heads, rows).add_(made.pop(0))
        if self.sinks is not None:
            self.sinks[heads.start : heads.stop] += made.pop(0)

    def found(self, mask: Mask) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Both, in the dtypes of the mask's tensors."""
        both = ((self.bias, mask.bias), (self.sinks, mask.sinks))
        bias, sinks = (None if g is None or t is None else g.to(t.dtype) for g, t in both)
        return bias, sinks


@dataclass(frozen=True, slots=True)
class Calls:
    """What all calls of a rank have in common.

    Attributes:
        scale, asked: of every call; budget, depth and kernel.
        sizes: query heads and tokens of the whole call.
        mask: of the whole call; None: what a call says by ``causal`` is all.
        dropout: chance and seed.
        name: what the call is on all ranks, in plain values.
        mark: a number of it, if the ranks are not asked in every call whether they agree.
        partial: whether a call may have some of its rows' keys alone.
    """

    scale: float | None
    asked: Written
    sizes: tuple[int, int]
    report: ShardedReport | None = None
    mask: Mask | None = None
    dropout: tuple[float, int] | None = None
    name: Hashable = None
    mark: int | None = None
    partial: bool = False

    def at_backward(self, group: dist.ProcessGroup, device: torch.device) -> Watch:
        """The pass that begins."""
        watch = Watch(group, on_host(device))
        watch.knows(("the backward of", self.name), None if self.mark is None else ~self.mark)
        return watch

    def saved(
        self, ctx: Any, group: dist.ProcessGroup, device: torch.device
    ) -> Sequence[torch.Tensor]:
        """What a forward has saved. Where that cannot be had (it was changed meanwhile, or the
        backward has been here before) the others hear of it, who begin the backward."""
        passes = Peers.of(group).passes
        try:
            saved: Sequence[torch.Tensor] = ctx.saved_tensors
        except Exception:
            # A checkpoint computes anew here, and in passes of its own they have heard already.
            if Peers.of(group).passes == passes:
                with self.at_backward(group, device):
                    raise
            raise
        return saved

    def forward(
        self,
        watch: Watch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        heads: Interval,
        rows: Interval,
        out_dtype: torch.dtype | None = None,
        held: dict[Hashable, Whole] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of some rows of some heads; the whole call's numbers of both.

        NaN where a rank has failed: the pass raises at its end.

        Args:
            held: what is known of such calls, by what may differ among them (``again.py``).
        """

        def instead() -> tuple[torch.Tensor, torch.Tensor]:
            size, state = query.shape[:3], state_dtype(query.dtype)
            out = query.new_full((*size, value.shape[3]), math.nan, dtype=out_dtype or query.dtype)
            return out, query.new_full(size, math.nan, dtype=state)

        return watch.computed(
            lambda: self._forward(query, key, value, causal, heads, rows, out_dtype, held), instead
        )

    def _forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        heads: Interval,
        rows: Interval,
        out_dtype: torch.dtype | None,
        held: dict[Hashable, Whole] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask = None if self.mask is None else part_of(self.mask, heads, rows, self.sizes)
        if self._plain and (out_dtype is None or out_dtype == query.dtype):
            at = None if held is None else (causal, heads, query.shape, key.shape)
            found = again.forward((query, key, value), causal, self.scale, held, at)
            if found is not None:
                return found[0], found[1]
        if self._plain:
            device = compute_device(query.device, None)
            request = _request(
                query.shape, key.shape, value.shape, query.dtype, query.device, device, causal,
                self.scale, out_dtype,
            )  # fmt: skip
            return run_forward(Tensors(query, key, value, None), request)
        tensors, request = self._request("attention", (query, key, value), mask, causal, heads)
        return run_forward(tensors, replace(request, out_dtype=out_dtype or request.out_dtype))

    def backward(
        self,
        watch: Watch,
        given: tuple[torch.Tensor, ...],
        causal: bool,
        heads: Interval,
        rows: Interval,
        learned: Learned | None,
        grads: Three | None = None,
    ) -> Three:
        """The gradients of such a call; ``grads`` are filled.

        Args:
            given: upstream gradient, query, key, value, output, log-sum-exp.
            learned: the gradients of the mask's own tensors, to which those of this call are added.
        """

        def instead() -> Three:
            query, key, value = grads or (torch.empty_like(t) for t in given[1:4])
            return query.fill_(math.nan), key.fill_(math.nan), value.fill_(math.nan)

        return watch.computed(
            lambda: self._backward(given, causal, heads, rows, learned, grads), instead
        )

    def _backward(
        self,
        given: tuple[torch.Tensor, ...],
        causal: bool,
        heads: Interval,
        rows: Interval,
        learned: Learned | None,
        grads: Three | None,
    ) -> Three:
        if self._plain and grads is None:
            upstream, query, key, value, out, lse = given
            found = again.backward((query, key, value), upstream, out, lse, causal, self.scale)
            if found is not None:
                return found[0], found[1], found[2]
        mask = None if self.mask is None else part_of(self.mask, heads, rows, self.sizes)
        of_bias = learned is not None and learned.bias is not None
        of_sinks = learned is not None and learned.sinks is not None
        grad_out, *inputs, out, lse = given
        tensors, request = self._request("attention_backward", inputs, mask, causal, heads)
        read = given_of(tensors, request, grad_out, out, lse, grads, of_bias, None, inputs)
        read = read._replace(of_sinks=of_sinks, partial=self.partial)
        made = run_backward(tensors, request, read)
        if learned is not None:
            learned.add(made[3:], heads, rows)
        return made[0], made[1], made[2]

    def read(self) -> list[torch.Tensor]:
        """Tensors of the mask: changed before the backward, they would give a wrong one."""
        return [] if self.mask is None else tensors_of(self.mask)

    @property
    def unlimited(self) -> bool:
        """Whether nothing is said of how a call is run, as by a budget."""
        return self.asked.says_nothing and current() is None

    @property
    def _plain(self) -> bool:
        """Whether calls are of attention and nothing more."""
        if self.mask is not None or self.dropout is not None or self.report is not None:
            return False
        return self.unlimited

    def _request(
        self, function: str, inputs: Any, mask: Mask | None, causal: bool, heads: Interval
    ) -> tuple[Tensors, Request]:
        """A call; for dropout its heads are numbered as in the whole call."""
        report = None
        if self.report is not None:
            report = Report()
            self.report.calls.append(report)
        (query, key, value), (p, seed) = inputs, self.dropout or (0.0, None)
        tensors, request = request_of(
            function, query, key, value, mask, p, seed, causal, self.scale, True, None, None,
            filled(self.asked._replace(report=report)),
        )  # fmt: skip
        if request.dropout is None:
            return tensors, request
        return tensors, replace(request, dropout=request.dropout.at(heads.start, 0))


@lru_cache(maxsize=256)
def _request(
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    dtype: torch.dtype,
    home: torch.device,
    device: torch.device,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
) -> Request:
    """The forward of a plain call whose gradients nobody records, by its sizes.

    It is checked once: a device that waits for a message waits for this as well.

    Args:
        device: that computes it; it depends on the current one.
    """
    q, k, v = (torch.empty((), dtype=dtype, device=home).expand(t) for t in (query, key, value))
    with torch.no_grad():
        _, request = request_of(
            "attention", q, k, v, None, 0.0, None, causal, scale, True, None, out_dtype, Written()
        )
    assert request.options.device == device
    return request


__all__ = ["Calls", "Learned", "Three", "kernel_of_parts"]
