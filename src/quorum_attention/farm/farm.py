"""``Farm``: attention calls on the workers of a Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from quorum_attention.call.gradients import given_of
from quorum_attention.call.options import Written
from quorum_attention.call.request import Request, Tensors, request_of
from quorum_attention.call.validation import as_tensor
from quorum_attention.counts import whole_number
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.farm.call import Asked, steps
from quorum_attention.farm.crew import Crew
from quorum_attention.farm.units import Head, cut_of
from quorum_attention.kernels.uncompiled import uncompiled
from quorum_attention.mask import Mask
from quorum_attention.pool.parts import Sizes
from quorum_attention.pool.report import PoolPass, PoolReport


class Farm:
    """Workers of a Ray cluster that share the work of attention calls.

    A call's key/value heads, or where there are few of them their cyclic quorum tasks, are units
    that do not depend on each other. A worker takes a unit as soon as it has none, loads the rows
    that the unit needs by itself, computes it as ordinary calls under its own budget, and leaves
    its results, or its partial states, to be merged exactly. A worker or a machine that dies costs
    the unit that it was at; workers that come later take part.

    Tensors that are mapped from files, as those of ``quorum_attention.files``, stay there: workers
    read and write the files themselves, which have to be on a file system that all machines have
    under the same path. Others go through Ray's object store, and their results come back to this
    process.

    Use it as a context manager, or ``close`` it.

    Args:
        address: of a cluster, "auto" for the one of this machine, "local" for a new one in this
            machine; None: the one that runs, else a new one.
        workers: how many are wanted; more than the cluster holds now come as it grows. None: as
            many as it holds, at any time. Or a sequence of ``Workers``, of several kinds.
        num_cpus, num_gpus: what each gets of its machine. A worker with (part of) a GPU computes on
            that, others on as many threads as they have CPUs. None: one GPU each where the cluster
            has any, and one CPU.
        budget: device bytes of each worker, as in ``quorum_attention.attention``.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConnectionError: there is no cluster at ``address``.
        RuntimeError: no worker started.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: Any = None,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        budget: int | str | None = None,
    ) -> None:
        from quorum_attention.farm.cluster import Cluster

        self._crew: Crew = Cluster(address, workers, num_cpus, num_gpus, budget)

    @classmethod
    def of(cls, crew: Crew) -> Farm:
        """A farm of other workers than Ray's."""
        made = cls.__new__(cls)
        made._crew = crew
        return made

    @property
    def workers(self) -> list[str]:
        """The workers that are alive, by machine and device."""
        return [hand.label for hand in self._crew.hands if hand.alive]

    def close(self) -> None:
        """End the workers, and the cluster if this farm began it."""
        self._crew.close()

    def __enter__(self) -> Farm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @uncompiled
    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        out: torch.Tensor | None = None,
        chunks: int | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        report: PoolReport | None = None,
    ) -> torch.Tensor:
        """``quorum_attention.attention`` of tensors in host memory, with gradients.

        Args:
            query, key, value, attn_mask, is_causal, scale, enable_gqa: as there. With
                ``attn_mask``, which gets no gradient, heads are not cut.
            out: preallocated result of any dtype. If it is mapped from a file, and no gradient is
                recorded, workers write to it, and partial states are kept beside it.
            chunks: tasks of each key/value head, c = l (l - 1) + 1; 1: heads stay whole. None: as
                many as leave ten units for each worker, if there are fewer heads.
            depth, kernel: of each worker's calls, as there.
            report: filled with what happened.

        Returns:
            (..., heads, n_queries, value_dim).

        Raises:
            Errors as of ``quorum_attention.attention``; RuntimeError: no worker is left, with what
            was done until then.
        """
        call = _Call.of(
            self._crew, (query, key, value), attn_mask, is_causal, scale, enable_gqa, out, chunks,
            depth, kernel, report,
        )  # fmt: skip
        three = call.tensors[:3]
        if not call.request.records:
            return call.request.back(call.forward(*three, None, False)[0])
        result: torch.Tensor = _Attention.apply(*three, call)  # type: ignore[no-untyped-call]
        return call.request.back(result)

    @uncompiled
    def attention_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        chunks: int | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        report: PoolReport | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``quorum_attention.attention_with_lse`` without gradients, from files to files if wished.

        Args:
            out, lse: preallocated results; (..., heads, n_queries, value_dim) of any dtype, and
                (..., heads, n_queries) in fp32 (fp64 for fp64 inputs). If both are mapped from
                files, workers write to these, and partial states are kept beside them.

        Other arguments as in ``attention``.
        """
        three = _detached(query, key, value)
        call = _Call.of(
            self._crew, three, attn_mask, is_causal, scale, enable_gqa, out, chunks, depth,
            kernel, report,
        )  # fmt: skip
        made, made_lse = call.forward(*call.tensors[:3], lse, True)
        return call.request.back(made), call.request.back(made_lse)

    @uncompiled
    def attention_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        chunks: int | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        report: PoolReport | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``quorum_attention.attention_backward``, from files to files if wished.

        Args:
            grads: (grad_query, grad_key, grad_value) to fill, of one dtype. If all are mapped from
                files, workers write to these, and partial states are kept beside them.

        Other arguments as there, and as in ``attention``.
        """
        three = _detached(query, key, value)
        call = _Call.of(
            self._crew, three, attn_mask, is_causal, scale, enable_gqa, None, chunks, depth,
            kernel, report,
        )  # fmt: skip
        given = given_of(
            call.tensors, call.request, grad_out, out, lse, grads, False, None, three
        )  # fmt: skip
        made = call.backward(given.grad_out, *call.tensors[:3], given.out, given.lse, given.grads)
        if grads is not None:
            return grads
        first, second, third = (
            g.sum_to_size(o.shape).to(o.dtype) for g, o in zip(made, three, strict=True)
        )
        return first, second, third

    @uncompiled
    def by_heads(
        self,
        inputs: Mapping[str, torch.Tensor],
        results: Mapping[str, torch.Tensor],
        groups: Sequence[Collection[Head]],
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        *,
        chunks: int | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        reports: list[PoolPass] | None = None,
    ) -> Iterator[int]:
        """A pass over some heads, from tensors to tensors, for who keeps book of what is done.

        Args:
            inputs: query, key and value, each (..., heads, rows, dim); grad_out, out and lse
                as well for a backward.
            results: out, and lse if wanted; or grad_query, grad_key and grad_value.
            groups: batch entries (through all batch dimensions) and key/value heads to compute.
            reports: gets the pass that this is; where heads are cut, the one of each group.

        Yields:
            the number of each group whose results are complete.
        """
        backward = "grad_out" in inputs
        with torch.no_grad():
            call = _Call.of(
                self._crew, _detached(*(inputs[name] for name in ("query", "key", "value"))),
                attn_mask, is_causal, scale, True, None, chunks, depth, kernel, None,
                heads=sum(map(len, groups)),
            )  # fmt: skip
            if call.cut.chunks > 1:
                for number, group in enumerate(groups):
                    call.cut_for(len(group), chunks)
                    one = PoolPass()
                    if reports is not None:
                        reports.append(one)
                    for _ in call.steps(backward, inputs, results, one, group):
                        pass
                    yield number
                return
            left = {number: set(group) for number, group in enumerate(groups)}
            every = set().union(*left.values())
            one = PoolPass()
            if reports is not None:
                reports.append(one)
            for complete in call.steps(backward, inputs, results, one, every):
                for number in list(left):
                    left[number] -= complete
                    if not left[number]:
                        del left[number]
                        yield number
            yield from left  # where there was nothing to compute


class _Call:
    """A call that has been checked, on a crew."""

    def __init__(
        self, crew: Crew, tensors: Tensors, request: Request, report: PoolReport | None
    ) -> None:
        self._crew, self.tensors, self.request = crew, tensors, request
        self._report = report
        options = request.options
        self._options = {
            "depth": "auto" if options.depth is None else options.depth,
            "kernel": options.kernel,
            "scale": request.scale,
        }

    @classmethod
    def of(
        cls, crew: Crew, three: tuple[Any, Any, Any], mask: Any, is_causal: bool,
        scale: float | None, enable_gqa: bool, out: Any, chunks: int | None, depth: int | str,
        kernel: str, report: PoolReport | None, heads: int | None = None,
    ) -> _Call:  # fmt: skip
        if isinstance(mask, Mask):
            raise NotImplementedError("attn_mask must be a tensor or None in a farm, got a Mask")
        if not isinstance(kernel, str):
            raise TypeError(f"kernel must be a name in a farm, got {type(kernel).__name__}")
        if chunks is not None:
            chunks = whole_number(chunks, "chunks", 1)
        tensors, request = request_of(
            "attention", *three, mask, 0.0, None, is_causal, scale, enable_gqa, out,
            None, Written(depth=depth, kernel=kernel),
        )  # fmt: skip
        if request.mask_grad:
            raise NotImplementedError("attn_mask that requires a gradient is not taken by a farm")
        if not on_host(tensors.query.device):
            raise ValueError(
                f"query must be in host memory or a file for a farm, got {tensors.query.device}"
            )
        made = cls(crew, tensors, request, report)
        made.cut_for(heads, chunks)
        return made

    def cut_for(self, heads: int | None, chunks: int | None) -> None:
        """Decide how so many key/value heads are cut; None: all."""
        work, (query, key, value, *_) = self.request.work, self.tensors
        sizes = Sizes(
            work.batch, work.heads, work.kv_heads, work.n_queries, work.n_keys, work.is_causal
        )
        elements = sizes.share * sizes.n_queries * query.shape[-1]
        elements += sizes.n_keys * (key.shape[-1] + value.shape[-1])
        self.cut = cut_of(
            sizes, max(1, self._crew.expected), elements * query.element_size(), chunks,
            may_cut=self.tensors.mask is None, heads=heads,
        )  # fmt: skip

    @property
    def _state(self) -> torch.dtype:
        return torch.float64 if self.tensors.query.dtype == torch.float64 else torch.float32

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lse: torch.Tensor | None,
        with_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse; the latter is made only if it is wanted."""
        report, rows = PoolPass(), query.shape[:-1]
        if self._report is not None:
            self._report.forward = report
        out = self.request.out
        if out is None:
            out = torch.empty((*rows, value.shape[-1]), dtype=self.request.out_dtype)
        if lse is not None:
            lse = self.request.with_heads(as_tensor(lse, "lse", written=True), 1)
            if tuple(lse.shape) != tuple(rows) or lse.dtype != self._state:
                raise ValueError(
                    f"lse must be {tuple(rows)} in {self._state}, got {tuple(lse.shape)} in "
                    f"{lse.dtype}"
                )
        else:
            lse = torch.empty(rows if with_lse else 0, dtype=self._state)
        results = {"out": out.detach(), **({"lse": lse} if with_lse else {})}
        self._run(False, {"query": query, "key": key, "value": value}, results, report)
        return out, lse

    def backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        grads: Any = None,
    ) -> list[torch.Tensor]:
        """The gradients of query, key and value."""
        report = PoolPass()
        if self._report is not None:
            self._report.backward = report
        inputs = {"query": query, "key": key, "value": value, "grad_out": grad_out, "out": out}
        made = [torch.empty(t.shape, dtype=t.dtype) for t in (query, key, value)]
        if grads is not None:
            made = list(grads)
        names = ("grad_query", "grad_key", "grad_value")
        results = dict(zip(names, made, strict=True))
        self._run(True, {**inputs, "lse": lse}, results, report)
        return made

    def _run(
        self,
        backward: bool,
        inputs: Mapping[str, torch.Tensor],
        results: Mapping[str, torch.Tensor],
        report: PoolPass,
    ) -> None:
        for _ in self.steps(backward, inputs, results, report):
            pass

    def steps(
        self,
        backward: bool,
        inputs: Mapping[str, torch.Tensor],
        results: Mapping[str, torch.Tensor],
        report: PoolPass,
        heads: Collection[Head] | None = None,
    ) -> Iterator[set[Head]]:
        """Run a pass; yields the heads that are complete since the last time."""
        flattened, into = (
            {name: flat(t, 2 if name == "lse" else 3) for name, t in named.items()}
            for named in (inputs, results)
        )
        mask = self.tensors.mask
        if mask is not None:
            missing = 4 - mask.dim()
            flattened["mask"] = mask.reshape((1,) * missing + mask.shape)
        of = self.cut.sizes
        if of.batch * of.kv_heads * of.n_queries * of.n_keys:
            asked = Asked(
                backward, self.cut, flattened, into, self._state, results_dtype(results),
                self._options, heads,
            )  # fmt: skip
            yield from steps(self._crew, asked, report)
        else:
            for name, tensor in into.items():
                tensor.fill_(-math.inf if name == "lse" else 0.0)
        for name, tensor in results.items():
            if tensor.data_ptr() != into[name].data_ptr():
                tensor.copy_(into[name].view(tensor.shape))


def results_dtype(results: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Of the output, or of gradients."""
    return next(tensor.dtype for name, tensor in results.items() if name != "lse")


def _detached(*tensors: Any) -> tuple[Any, Any, Any]:
    first, second, third = (
        as_tensor(t, name).detach()
        for t, name in zip(tensors, ("query", "key", "value"), strict=True)
    )
    return first, second, third


def flat(tensor: torch.Tensor, last: int = 3) -> torch.Tensor:
    """With one batch dimension before the ``last`` ones; a view where it can be one."""
    count = math.prod(tensor.shape[: tensor.dim() - last])
    return tensor.reshape(count, *tensor.shape[tensor.dim() - last :])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        out, lse = call.forward(query.detach(), key.detach(), value.detach(), None, True)
        if call.request.out is not None:
            # Written to by others, unseen by autograd.
            torch.autograd.graph.increment_version(out)
            out = out.detach()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        query, key, value, out, lse = (tensor.detach() for tensor in ctx.saved_tensors)
        return (*ctx.call.backward(grad_out, query, key, value, out, lse), None)


__all__ = ["Farm"]
