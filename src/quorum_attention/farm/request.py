"""A call on a farm, checked: runs the passes of a ``Request`` there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from quorum_attention.call.arguments import Arguments
from quorum_attention.call.gradients import Given
from quorum_attention.call.request import Request, Tensors
from quorum_attention.call.validation import as_tensor, check_apart, check_result
from quorum_attention.counts import whole_number
from quorum_attention.devices.call import flat, flat_mask
from quorum_attention.devices.partition import Sizes
from quorum_attention.devices.report import PoolPass, PoolReport
from quorum_attention.devices.request import request_of_parts
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.farm.call import Asked, steps
from quorum_attention.farm.crew import Crew
from quorum_attention.farm.units import Head, cut_of
from quorum_attention.mask import Mask

GRADIENTS = ("grad_query", "grad_key", "grad_value")


def call_on(
    crew: Crew,
    function: str,
    three: tuple[Any, ...],
    said: Arguments,
    chunks: int | None,
    report: PoolReport | None,
    *,
    with_lse: bool = False,
    heads: int | None = None,
) -> tuple[Tensors, Request, FarmCall]:
    """A call on the workers of a farm: its tensors, its request, and what runs that.

    Args:
        function, three, said: as of ``request_of``.
        chunks: tasks of a key/value head; None: as many as are good.
        report: filled with what happened.
        with_lse: whether the log-sum-exp is wanted also where no gradient is.
        heads: how many key/value heads are computed; None: all.

    Raises:
        ValueError, TypeError, NotImplementedError: what does not fit, or a farm cannot do, by name.
    """
    if chunks is not None:
        chunks = whole_number(chunks, "chunks", 1)
    tensors, request, mask = request_of_parts(function, *three, *said)
    if request.mask_grad:
        raise NotImplementedError(
            "attn_mask that requires a gradient is not taken by a farm: give one that requires none"
        )
    home = tensors.query.device
    if not on_host(home):
        raise ValueError(f"query must be in host memory or a file for a farm, got {home}")
    made = FarmCall(crew, tensors, request, mask, said, chunks, report, with_lse)
    made.cut_for(heads)
    return tensors, replace(request, runner=made), made


def into(tensors: Tensors, request: Request, lse: torch.Tensor | None) -> Request:
    """The request with a tensor for the log-sum-exp.

    Raises:
        ValueError, TypeError: it does not fit, cannot be written, or shares memory with an input
            or the output.
    """
    if lse is None:
        return request
    query, key, value, mask, _ = tensors
    lse = request.with_heads(as_tensor(lse, "lse", written=True), 1)
    check_result(lse, tuple(query.shape[:-1]), "lse", query.device, request.work.state_dtype)
    read = {"query": query, "key": key, "value": value, "attn_mask": mask, "out": request.out}
    check_apart({"lse": lse}, read)
    torch.autograd.graph.increment_version(lse)
    return replace(request, lse=lse)


class FarmCall:
    """A call on a farm: runs its passes there. It holds none of the call's tensors: autograd does.

    Attributes:
        cut: how its heads are cut.
    """

    def __init__(
        self,
        crew: Crew,
        tensors: Tensors,
        request: Request,
        mask: Mask | None,
        said: Arguments,
        chunks: int | None,
        report: PoolReport | None,
        with_lse: bool,
    ) -> None:
        self._work, self._dropout = request.work, request.dropout
        self._crew, self._mask, self._chunks = crew, mask, chunks
        self._report, self._with_lse = report, with_lse or request.records
        query, key, value = tensors[:3]
        # Of the results of a key/value head.
        share = self._work.heads // max(1, self._work.kv_heads)
        elements = self._work.n_queries * query.shape[-1] * share
        elements += self._work.n_keys * (key.shape[-1] + value.shape[-1])
        self._head_bytes = elements * query.element_size()
        written = said.written
        self._options = {
            "depth": written.depth, "kernel": written.kernel, "scale": request.scale
        }  # fmt: skip

    def cut_for(self, heads: int | None) -> None:
        """Decide how so many key/value heads are cut; None: all."""
        work = self._work
        sizes = Sizes(
            work.batch, work.heads, work.kv_heads, work.n_queries, work.n_keys, work.is_causal
        )
        self.cut = cut_of(
            sizes, max(1, self._crew.expected), self._head_bytes, self._chunks,
            may_cut=self._dropout is None, heads=heads,
        )  # fmt: skip

    def forward(self, tensors: Tensors, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse; the latter has no elements if it is not wanted."""
        query, key, value = (t.detach() for t in tensors[:3])
        rows, out, lse = query.shape[:-1], request.out, request.lse
        if out is None:
            out = torch.empty((*rows, value.shape[-1]), dtype=request.out_dtype, device="cpu")
        else:
            torch.autograd.graph.increment_version(out)
        if lse is None:
            lse = torch.empty(
                rows if self._with_lse else 0, dtype=request.work.state_dtype, device="cpu"
            )
        results = {"out": out.detach(), **({"lse": lse} if self._with_lse else {})}
        self._run(tensors, {"query": query, "key": key, "value": value}, results)
        return out, lse

    def backward(
        self, tensors: Tensors, request: Request, given: Given
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of query, key and value."""
        assert given.grad_lse is None, "only the output has a gradient"
        inputs = {
            "query": tensors.query, "key": tensors.key, "value": tensors.value,
            "grad_out": given.grad_out, "out": given.out, "lse": given.lse,
        }  # fmt: skip
        made = given.grads
        if made is None:
            made = tuple(torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in tensors[:3])  # type: ignore[assignment]
        assert made is not None
        results = dict(zip(GRADIENTS, made, strict=True))
        self._run(tensors, {name: t.detach() for name, t in inputs.items()}, results)
        return tuple(made)

    def _run(
        self,
        tensors: Tensors,
        inputs: Mapping[str, torch.Tensor],
        results: Mapping[str, torch.Tensor],
    ) -> None:
        report = PoolPass()
        if self._report is not None:
            setattr(self._report, "backward" if "grad_out" in inputs else "forward", report)
        with torch.no_grad():
            for _ in self.steps(tensors, inputs, results, report):
                pass

    def steps(
        self,
        tensors: Tensors,
        inputs: Mapping[str, torch.Tensor],
        results: Mapping[str, torch.Tensor],
        report: PoolPass,
        heads: Collection[Head] | None = None,
    ) -> Iterator[set[Head]]:
        """Run a pass; yields the heads that are complete since the last time.

        Args:
            tensors: of the call, whose mask and sinks are read.
        """
        flattened, into = (
            {name: flat(t, 2 if name == "lse" else 3) for name, t in named.items()}
            for named in (inputs, results)
        )
        if tensors.mask is not None:
            flattened["mask"] = flat_mask(tensors.mask.detach(), self._work.batch_shape)
        sinks = None if tensors.sinks is None else tensors.sinks.detach().cpu().clone()
        of, state = self.cut.sizes, self._work.state_dtype
        if of.batch * of.kv_heads * of.n_queries * of.n_keys:
            dtype = next(t.dtype for name, t in results.items() if name != "lse")
            asked = Asked(
                "grad_out" in inputs, self.cut, flattened, into, state, dtype, self._options,
                self._mask, sinks, self._dropout, heads,
            )  # fmt: skip
            yield from steps(self._crew, asked, report)
        else:
            for name, tensor in into.items():
                tensor.fill_(-torch.inf if name == "lse" else 0.0)
                if name == "lse" and sinks is not None:
                    tensor.copy_(sinks[:, None])
        for name, tensor in results.items():
            if tensor.data_ptr() != into[name].data_ptr():
                tensor.copy_(into[name].view(tensor.shape))


__all__ = ["GRADIENTS", "FarmCall", "call_on", "into"]
