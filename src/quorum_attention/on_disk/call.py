"""A call whose tensors are in files: what it reads, what it gives, and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quorum_attention.call.block import Block, WholeCall
from quorum_attention.call.causal_bias import as_mask
from quorum_attention.call.gradients import given_of
from quorum_attention.call.options import Written
from quorum_attention.call.request import request_of
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.execution.workload import Workload
from quorum_attention.files import Wanted
from quorum_attention.mask import Mask
from quorum_attention.on_disk.parts import Part, parts_of

GRADIENTS = ("dq", "dk", "dv")
_OF_KEYS = ("key", "value", "dk", "dv")


@dataclass(frozen=True, slots=True)
class FileCall:
    """A forward, or a backward from files; made by ``file_call``.

    Attributes:
        tensors: what it reads, by role: (*batch, heads, n, d), lse (*batch, heads, n_queries).
        mask: None, a boolean or additive tensor, or a description.
        is_causal, scale, out_dtype: as for ``attention``; ``out_dtype`` of all results but the lse.
        backward: whether it gives gradients.
        written: its options.
        work: its sizes.
        without_heads: inputs were (tokens, head_dim), and so are results.
    """

    tensors: Mapping[str, torch.Tensor]
    mask: torch.Tensor | Mask | None
    is_causal: bool
    scale: float | None
    out_dtype: torch.dtype
    backward: bool
    written: Written
    work: Workload
    without_heads: bool

    def results(self, *, lse: bool = False) -> Wanted:
        """Shapes and dtypes of the results, by name.

        Args:
            lse: whether the log-sum-exp of a forward is wanted.
        """
        work, of_call = self.work, self.work.batch_shape
        if self.backward:
            shapes: dict[str, tuple[int, ...]] = {
                "dq": (*of_call, work.heads, work.n_queries, work.head_dim),
                "dk": (*of_call, work.kv_heads, work.n_keys, work.head_dim),
                "dv": (*of_call, work.kv_heads, work.n_keys, work.value_dim),
            }
        else:
            shapes = {"out": (*of_call, work.heads, work.n_queries, work.value_dim)}
        wanted = {name: (shape, self.out_dtype) for name, shape in shapes.items()}
        if lse and not self.backward:
            wanted["lse"] = ((*of_call, work.heads, work.n_queries), work.state_dtype)
        if self.without_heads:
            wanted = {name: (shape[1:], dtype) for name, (shape, dtype) in wanted.items()}
        return wanted

    def parts(self, heads: int) -> list[Part]:
        """Its parts, of so many key/value heads."""
        work = self.work
        if not work.kv_heads:
            return []
        share = work.heads // work.kv_heads
        return list(parts_of(work.batch, work.kv_heads, share, heads))

    def heads_of_part(self, wanted: int) -> int:
        """How many key/value heads a part has that should have about ``wanted``: some of one batch
        entry, or all of some entries."""
        most = max(1, self.work.kv_heads)
        if wanted < most or len(self.work.batch_shape) != 1:
            return max(1, min(wanted, most))
        return min(wanted // most, max(1, self.work.batch)) * most

    @property
    def whole(self) -> WholeCall:
        """The call that parts are blocks of."""
        work = self.work
        return WholeCall(
            work.batch_shape, work.heads, work.kv_heads, work.n_queries, work.n_keys, self.mask,
            self.is_causal, self.scale,
        )  # fmt: skip

    def block(self, part: Part) -> Block:
        """The block that a part is."""
        rows, keys = Interval(0, self.work.n_queries), Interval(0, self.work.n_keys)
        return Block(part.entries, part.query_heads, rows, keys)

    def inputs(self, part: Part) -> dict[str, torch.Tensor]:
        """What a part reads, views (entries, heads, ...)."""
        return {name: self.sliced(tensor, part, name) for name, tensor in self.tensors.items()}

    def sliced(self, tensor: torch.Tensor, part: Part, name: str) -> torch.Tensor:
        """A part of an input or a result (*batch, heads, ...), a view (entries, heads, ...)."""
        return self.whole.cut(tensor, self.block(part), of_keys=name in _OF_KEYS)


def file_call(
    tensors: Mapping[str, torch.Tensor],
    mask: torch.Tensor | Mask | None,
    written: Written,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> FileCall:
    """A call on ``tensors``, checked as a call of ``attention`` is.

    Args:
        tensors: query, key and value; with grad_out, out and lse it is a backward.

    Raises:
        ValueError, TypeError, NotImplementedError: what does not fit, by name.
    """
    backward = "grad_out" in tensors
    for name, tensor in tensors.items():
        least = 1 if name == "lse" else 2
        if tensor.dim() < least:
            shape = tuple(tensor.shape)
            raise ValueError(f"{name} must be (..., heads, tokens, head_dim), got shape {shape}")
    query, key, value = given = tuple(tensors[name] for name in ("query", "key", "value"))
    mask = as_mask(mask, query, key)
    checked, request = request_of(
        "attention_backward" if backward else "attention", query, key, value, mask, 0.0, None,
        is_causal, scale, True, None, None if backward else out_dtype, written,
    )  # fmt: skip
    # Views with all dimensions; a mask's are told apart by ``WholeCall.cut_bias``.
    found = {"query": checked.query, "key": checked.key, "value": checked.value}
    if backward:
        heads = 1 if request.without_heads else 0
        if any(a.shape[heads:] != b.shape for a, b in zip(found.values(), given, strict=True)):
            raise NotImplementedError("a backward from files takes no inputs that are broadcast")
        rest = given_of(
            checked, request, tensors["grad_out"], tensors["out"], tensors["lse"], None, False,
            None, given,
        )  # fmt: skip
        found |= {"grad_out": rest.grad_out, "out": rest.out, "lse": rest.lse}
    work = request.work
    dtype = out_dtype or given[0].dtype
    return FileCall(
        found, mask, is_causal, scale, dtype, backward, written, work, request.without_heads
    )


def written_as(call: FileCall, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Results with a dimension of heads, views."""
    if not call.without_heads:
        return dict(results)
    return {name: tensor.unsqueeze(0) for name, tensor in results.items()}


__all__ = ["GRADIENTS", "FileCall", "file_call", "written_as"]
