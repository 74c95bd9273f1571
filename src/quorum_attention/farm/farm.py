"""``Farm``: attention calls on the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from quorum_attention.autograd import attend
from quorum_attention.call.arguments import Arguments
from quorum_attention.call.gradients import given_of
from quorum_attention.call.options import Written
from quorum_attention.call.validation import as_tensor
from quorum_attention.devices.report import PoolPass, PoolReport
from quorum_attention.farm.crew import Crew
from quorum_attention.farm.request import call_on, into
from quorum_attention.farm.units import Head
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.mask import Mask
from quorum_attention.passes import beside_casts, run_backward


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
        address: HOST:PORT of a cluster, or "auto" for the one that ``RAY_ADDRESS`` names or that
            runs on this machine, whoever began it: whoever can reach a cluster runs code as those
            who use it (docs/farm.md). None or "local": a new one in this machine, ended with the
            farm. A program that is connected to Ray already stays where it is.
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
        attn_mask: torch.Tensor | Mask | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
        out: torch.Tensor | None = None,
        chunks: int | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        report: PoolReport | None = None,
    ) -> torch.Tensor:
        """``quorum_attention.attention`` of tensors in host memory, with gradients.

        Args:
            query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p, dropout_seed: as
                there. The bias of ``attn_mask`` gets no gradient here, and its tensors (not the
                bias) are sent to every worker. With dropout heads are not cut.
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
        said = Arguments(
            attn_mask, dropout_p, dropout_seed, is_causal, scale, enable_gqa, out, None,
            Written(depth=depth, kernel=kernel),
        )  # fmt: skip
        three = query, key, value
        tensors, request, _ = call_on(self._crew, "attention", three, said, chunks, report)
        return attend(tensors, request, out)[0]

    @uncompiled
    def attention_with_lse(
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``quorum_attention.attention_with_lse`` without gradients, from files to files if wished.

        Args:
            out, lse: preallocated results; (..., heads, n_queries, value_dim) of any dtype, and
                (..., heads, n_queries) in fp32 (fp64 for fp64 inputs). If both are mapped from
                files, workers write to these, and partial states are kept beside them.

        Other arguments as in ``attention``.
        """
        said = Arguments(
            attn_mask, dropout_p, dropout_seed, is_causal, scale, enable_gqa, out, None,
            Written(depth=depth, kernel=kernel),
        )  # fmt: skip
        with torch.no_grad():
            tensors, request, _ = call_on(
                self._crew, "attention", (query, key, value), said, chunks, report, with_lse=True
            )
            made, made_lse = attend(tensors, into(tensors, request, lse), out)
        return made, made_lse if lse is None else lse

    @uncompiled
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
        """``quorum_attention.attention_backward``, from files to files if wished.

        Args:
            grads: (grad_query, grad_key, grad_value) to fill, of one dtype. If all are mapped from
                files, workers write to these, and partial states are kept beside them.

        Other arguments as there, and as in ``attention``.
        """
        said = Arguments(
            attn_mask, dropout_p, dropout_seed, is_causal, scale, enable_gqa,
            written=Written(depth=depth, kernel=kernel),
        )  # fmt: skip
        names = ("query", "key", "value")
        three = tuple(as_tensor(t, n) for t, n in zip((query, key, value), names, strict=True))
        with torch.no_grad():
            tensors, request, _ = call_on(
                self._crew, "attention_backward", three, said, chunks, report
            )
            given = given_of(tensors, request, grad_out, out, lse, grads, False, None, three)
            made = beside_casts(request, lambda left: run_backward(tensors, left, given))
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
        said: Arguments,
        *,
        chunks: int | None = None,
        reports: list[PoolPass] | None = None,
    ) -> Iterator[int]:
        """A pass over some heads, from tensors to tensors, for who keeps book of what is done.

        Args:
            inputs: query, key and value, each (..., heads, rows, dim); grad_out, out and lse
                as well for a backward.
            results: out, and lse if wanted; or grad_query, grad_key and grad_value.
            groups: batch entries (through all batch dimensions) and key/value heads to compute.
            said: what else the call says.
            reports: gets the pass that this is; where heads are cut, the one of each group.

        Yields:
            the number of each group whose results are complete.
        """
        function = "attention_backward" if "grad_out" in inputs else "attention"
        three = tuple(inputs[name] for name in ("query", "key", "value"))
        with torch.no_grad():
            heads = sum(map(len, groups))
            tensors, _, call = call_on(self._crew, function, three, said, chunks, None, heads=heads)
            if call.cut.chunks > 1:
                for number, group in enumerate(groups):
                    call.cut_for(len(group))
                    one = PoolPass()
                    if reports is not None:
                        reports.append(one)
                    for _ in call.steps(tensors, inputs, results, one, group):
                        pass
                    yield number
                return
            left = {number: set(group) for number, group in enumerate(groups)}
            every = set().union(*left.values())
            one = PoolPass()
            if reports is not None:
                reports.append(one)
            for complete in call.steps(tensors, inputs, results, one, every):
                for number in list(left):
                    left[number] -= complete
                    if not left[number]:
                        del left[number]
                        yield number
            yield from left  # where there was nothing to compute


__all__ = ["Farm"]
