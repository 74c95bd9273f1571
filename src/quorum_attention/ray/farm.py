"""``Farm``: attention calls from files to files by the tasks of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from quorum_attention.call.block import WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.call.overlap import Mappings
from quorum_attention.call.validation import as_tensor, check_apart, check_result
from quorum_attention.counts import real_number, whole_number
from quorum_attention.devices.buffers import InFile, in_file
from quorum_attention.devices.call import check_options, sendable
from quorum_attention.devices.report import PoolPass, PoolReport
from quorum_attention.files.call import GRADIENTS, FileCall, file_call, written_as
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.mask import Mask
from quorum_attention.ray.cluster import Cluster
from quorum_attention.ray.compute import Job
from quorum_attention.ray.units import Head, cut_of
from quorum_attention.sizes import parse_bytes

_Value = TypeVar("_Value")


class Farm:
    """A Ray cluster that computes attention calls from files to files.

    A call's key/value heads, or where there are few of them their cyclic quorum tasks, are units
    that do not depend on each other, and each is a Ray task. It maps the rows that it needs,
    computes them as ordinary calls under its own budget, and writes its results, or partial states
    that are merged exactly when all those of a chunk exist. A worker or a machine that dies costs
    the units that it was at, which Ray begins again.

    Inputs and results are tensors that are mapped from files, as those of
    ``quorum_attention.files``, on a file system that all machines have under the same path.

    Use it as a context manager, or ``close`` it.

    Args:
        address: HOST:PORT of a cluster, or "auto" for the one that ``RAY_ADDRESS`` names or that
            runs on this machine, whoever began it: whoever can reach a cluster runs code as those
            who use it (docs/ray.md). None or "local": a new one in this machine, ended with the
            farm. A program that is connected to Ray already stays where it is.
        workers: how many units are computed at once, at most; None: as many as the cluster holds
            at any time.
        num_cpus, num_gpus: what each gets of its machine. With (part of) a GPU it computes on that,
            otherwise on as many threads as it has CPUs. None: one GPU if the cluster has any.
        budget: device bytes of each, as in ``quorum_attention.attention``.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConnectionError: there is no cluster at ``address``.
        RuntimeError: no machine of the cluster has so many CPUs and GPUs.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        budget: int | str | None = None,
    ) -> None:
        if workers is not None:
            workers = whole_number(workers, "workers", 1)
        for name, number in (("num_cpus", num_cpus), ("num_gpus", num_gpus or 0)):
            if not real_number(number, name) >= 0:
                raise ValueError(f"{name} must be a number of at least 0, got {number!r}")
        if not num_cpus and not num_gpus:
            raise ValueError("num_cpus and num_gpus must not both be 0")
        self._budget = None if budget is None else parse_bytes(budget)
        self._cluster = Cluster(address, workers, num_cpus, num_gpus)

    def close(self) -> None:
        """End the cluster if this farm began it."""
        self._cluster.close()

    def __enter__(self) -> Farm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @uncompiled
    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | Mask | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        chunks: int | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        report: PoolReport | None = None,
    ) -> torch.Tensor:
        """``quorum_attention.attention`` from files to files.

        Args:
            query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p, dropout_seed: as
                there. The tensors of ``attn_mask`` may be in memory, and are sent to every worker
                then. With dropout heads are not cut.
            out: the result, (..., heads, n_queries, value_dim) of any dtype, mapped from a file;
                partial states are kept beside that.
            lse: the log-sum-exp, (..., heads, n_queries) in fp32 (fp64 for fp64 inputs), mapped
                from a file; None: it is not wanted.
            chunks: tasks of each key/value head, c = l (l - 1) + 1; 1: heads stay whole. None: as
                many as leave ten units for each worker, if there are fewer heads.
            depth, kernel: of each unit's calls, as there.
            report: filled with what happened.

        Returns:
            ``out``.

        Raises:
            Errors as of ``quorum_attention.attention``; ValueError: a tensor is in no file;
            NotImplementedError: a gradient is wanted, which ``attention_backward`` computes;
            RuntimeError: a unit has lost four workers.
        """
        call = _call(
            {"query": query, "key": key, "value": value}, attn_mask,
            CallOptions(depth=depth, kernel=kernel), dropout_p=dropout_p, dropout_seed=dropout_seed,
            is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        results = {"out": _given(out, "out")} | ({} if lse is None else {"lse": lse})
        self._all(call, results, chunks, report)
        return results["out"]

    def attention_with_lse(
        self, *call: Any, lse: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``quorum_attention.attention_with_lse`` from files to files; arguments as ``attention``
        has them."""
        lse = _given(lse, "lse")
        return self.attention(*call, lse=lse, **options), lse

    @uncompiled
    @torch.no_grad()
    def attention_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        attn_mask: torch.Tensor | Mask | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        chunks: int | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        report: PoolReport | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``quorum_attention.attention_backward`` from files to files.

        Args:
            grads: (grad_query, grad_key, grad_value), of one dtype, mapped from files.
            attn_mask and so on: as in ``attention``.
        """
        call = _call(
            {"query": query, "key": key, "value": value, "grad_out": grad_out, "out": out,
             "lse": lse}, attn_mask,
            CallOptions(depth=depth, kernel=kernel), dropout_p=dropout_p, dropout_seed=dropout_seed,
            is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        grads = _given(grads, "grads")
        self._all(call, dict(zip(GRADIENTS, grads, strict=True)), chunks, report)
        return grads

    def _all(
        self,
        call: FileCall,
        results: dict[str, torch.Tensor],
        chunks: int | None,
        report: PoolReport | None,
    ) -> None:
        ran, work = PoolPass(), call.work
        if report is not None:
            setattr(report, "backward" if call.backward else "forward", ran)
        results = {n: as_tensor(result, n, written=True) for n, result in results.items()}
        for name, (shape, dtype) in call.results(lse="lse" in results).items():
            home, exact = call.tensors["query"].device, dtype if name == "lse" else None
            check_result(results[name], shape, name, home, exact)
        mask = call.whole.mask
        bias = mask.bias if isinstance(mask, Mask) else mask
        check_apart(results, {**call.tensors, "attn_mask": bias})
        heads = list(product(range(work.batch), range(work.kv_heads)))
        for _ in self.by_heads(call, written_as(call, results), heads, chunks=chunks, report=ran):
            pass

    @uncompiled
    @torch.no_grad()
    def by_heads(
        self,
        call: FileCall,
        results: Mapping[str, torch.Tensor],
        heads: Collection[Head],
        *,
        chunks: int | None = None,
        report: PoolPass,
    ) -> Iterator[Head]:
        """A call over some heads, for who keeps book of what is done.

        Args:
            results: out, and lse if wanted; or dq, dk and dv; with a dimension of heads.
            heads: batch entries (through all batch dimensions) and key/value heads to compute.
            report: filled with what happened.

        Yields:
            each head whose results are complete.
        """
        chunks = None if chunks is None else whole_number(chunks, "chunks", 1)
        check_options(call.written)
        work, mappings = call.work, Mappings.now()
        inputs: dict[str, torch.Tensor | InFile] = {
            name: _located(name, tensor, mappings, False) if tensor.numel() else tensor
            for name, tensor in call.tensors.items()
        }
        files = {
            name: _located(name, tensor, mappings, True)
            for name, tensor in results.items()
            if tensor.numel()
        }
        whole, bias, sinks = _sent(call.whole)
        if bias is not None:
            inputs["bias"] = in_file(bias, mappings, written=False) or bias.clone()
        torch.autograd.graph.increment_version(list(results.values()))
        if not heads:
            return
        if not work.n_queries * work.n_keys or not files:
            for name, tensor in results.items():
                tensor.fill_(-torch.inf if name == "lse" else 0.0)
            if "lse" in results and sinks is not None:
                results["lse"].copy_(sinks[:, None])
            yield from heads
            return
        head_bytes = sum(t.nbytes for t in results.values()) // (work.batch * work.kv_heads)
        cut = cut_of(whole, len(heads), self._cluster.workers, head_bytes, chunks)
        folder, name = os.path.split(next(iter(files.values())).path)
        with TemporaryDirectory(prefix=f"{name}.states-", dir=folder) as states:
            job = Job(
                cut, inputs, files, states, work.state_dtype, next(iter(results.values())).dtype,
                {"depth": call.written.depth, "kernel": call.written.kernel}, self._budget,
                self._cluster.cpus, self._cluster.gpus,
            )  # fmt: skip
            yield from self._cluster.run(job, heads, report)


def _call(
    tensors: Mapping[str, Any], mask: torch.Tensor | Mask | None, written: CallOptions, **said: Any
) -> FileCall:
    """A call of ``Farm.attention``. This process computes nothing of it."""
    check_options(written)
    given = {name: as_tensor(tensor, name) for name, tensor in tensors.items()}
    here = CallOptions(depth=written.depth, devices="cpu")
    return replace(file_call(given, mask, here, **said), written=written)


def _sent(whole: WholeCall) -> tuple[WholeCall, torch.Tensor | None, torch.Tensor | None]:
    """A call as it is sent, its tensors in memory of their own; its bias, which may be in a file;
    its sinks."""
    if not isinstance(whole.mask, Mask):
        return replace(whole, mask=None), whole.mask, None
    bias, sinks = whole.mask.bias, whole.mask.sinks
    mask = sendable(replace(whole.mask, bias=None))
    return replace(whole, mask=mask), None if bias is None else bias.detach(), sinks


def _given(value: _Value | None, name: str) -> _Value:
    if value is None:
        raise ValueError(f"{name} must be given: a farm writes to files")
    return value


def _located(name: str, tensor: torch.Tensor, mappings: Mappings, written: bool) -> InFile:
    """The file that a tensor lies in.

    Raises:
        ValueError: it lies in none that other machines may have.
    """
    found = in_file(tensor, mappings, written)
    # Torch's shared memory has a name, too.
    if found is None or found.path.startswith("/dev/shm/torch_"):
        raise ValueError(
            f"{name} must be mapped from a file, whole and as it is there (as by "
            f"quorum_attention.files): a farm computes from files to files"
        )
    inner = 1 if name == "lse" else 2
    if written and not tensor[(0,) * (tensor.dim() - inner)].is_contiguous():
        raise ValueError(f"the rows of {name} must lie one after the other in its file")
    return found


__all__ = ["Farm"]
