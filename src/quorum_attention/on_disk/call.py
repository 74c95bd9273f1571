"""A call whose tensors are in files: what it reads, what it gives, and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from quorum_attention.call.causal_bias import as_mask
from quorum_attention.call.gradients import Given, given_of
from quorum_attention.call.options import Written
from quorum_attention.call.request import Request, Tensors, request_of
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.execution.workload import Workload
from quorum_attention.files import Wanted
from quorum_attention.mask import Mask
from quorum_attention.on_disk.parts import Part, parts_of

GRADIENTS = ("dq", "dk", "dv")
# Fields of a mask with a number for each batch entry, where they have so many dimensions.
_BY_ENTRY = {"key_lengths": 1, "key_padding": 2}


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

    def of_part(
        self, part: Part, written: Written, out: torch.Tensor | None = None
    ) -> tuple[Tensors, Request]:
        """The tensors and the request of a part.

        Args:
            out: where the output of a forward goes.
        """
        return request_of(
            "attention_backward" if self.backward else "attention",
            self.input(part, "query"), self.input(part, "key"), self.input(part, "value"),
            self.mask_of(part), 0.0, None, self.is_causal, self.scale, True, out,
            None if out is not None or self.backward else self.out_dtype, written,
        )  # fmt: skip

    def given(
        self,
        part: Part,
        tensors: Tensors,
        request: Request,
        grads: tuple[torch.Tensor, ...] | None = None,
    ) -> Given:
        """What the backward of a part reads besides, and where its gradients go."""
        grad_out, out, lse = (self.input(part, name) for name in ("grad_out", "out", "lse"))
        return given_of(
            tensors, request, grad_out, out, lse, grads, False, None, tuple(tensors[:3])
        )

    def input(self, part: Part, role: str) -> torch.Tensor:
        """A part of an input, a view (entries, heads, ...)."""
        heads = part.key_heads if role in ("key", "value") else part.query_heads
        return self.sliced(self.tensors[role], part, heads)

    def sliced(self, tensor: torch.Tensor, part: Part, heads: Interval) -> torch.Tensor:
        """A part of a tensor (*batch, heads, ...), a view (entries, heads, ...)."""
        shape = self.work.batch_shape
        if len(shape) == 1:
            found = tensor[slice(*part.entries)]
        else:
            found = tensor[_unravelled(part.entries.start, shape)][None]
        return found[:, slice(*heads)]

    def mask_of(self, part: Part) -> torch.Tensor | Mask | None:
        """The mask of a part."""
        mask = self.mask
        if not isinstance(mask, Mask):
            return None if mask is None else self._bias(mask, part)
        changes: dict[str, Any] = {}
        if mask.bias is not None:
            changes["bias"] = self._bias(mask.bias, part)
        if mask.sinks is not None:
            changes["sinks"] = mask.sinks[slice(*part.query_heads)]
        if isinstance(mask.documents, tuple):
            changes["documents"] = tuple(_entries(ids, part, 2) for ids in mask.documents)
        elif mask.documents is not None:
            changes["documents"] = _entries(mask.documents, part, 2)
        for name, dims in _BY_ENTRY.items():
            given = getattr(mask, name)
            if given is not None:
                changes[name] = _entries(given, part, dims)
        return replace(mask, **changes)

    def _bias(self, bias: torch.Tensor, part: Part) -> torch.Tensor:
        shape = self.work.batch_shape
        if bias.dim() < 3:
            return bias
        if bias.shape[-3] > 1:
            heads = part.query_heads
            bias = bias.narrow(-3, heads.start, heads.length)
        dims = bias.dim() - 3
        if not dims:
            return bias
        if len(shape) == 1:
            return bias if bias.shape[0] == 1 else bias[slice(*part.entries)]
        index = _unravelled(part.entries.start, shape)[len(shape) - dims :]
        return bias[tuple(0 if n == 1 else i for n, i in zip(bias.shape, index, strict=False))]


def _entries(tensor: torch.Tensor, part: Part, dims: int) -> torch.Tensor:
    """The batch entries of a part, where the tensor has that dimension."""
    has = tensor.dim() == dims and tensor.shape[0] != 1
    return tensor[slice(*part.entries)] if has else tensor


def _unravelled(entry: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        entry, at = divmod(entry, size)
        index.append(at)
    return tuple(reversed(index))


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
    # Views with all dimensions; a mask's are told apart by ``_bias``.
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
    if isinstance(mask, Mask):
        _check_entries(mask, work.batch)
    dtype = out_dtype or given[0].dtype
    return FileCall(
        found, mask, is_causal, scale, dtype, backward, written, work, request.without_heads
    )


def _check_entries(mask: Mask, batch: int) -> None:
    """Only what ``request_of`` has not: nothing here may be cut wrongly."""
    for inner in (*mask.either, *mask.every):
        for field in fields(Mask):
            if field.name in ("documents", *_BY_ENTRY) and getattr(inner, field.name) is not None:
                raise NotImplementedError(f"a mask within a mask has no {field.name} here")


def written_as(call: FileCall, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Results with a dimension of heads, views."""
    if not call.without_heads:
        return dict(results)
    return {name: tensor.unsqueeze(0) for name, tensor in results.items()}


__all__ = ["GRADIENTS", "FileCall", "file_call", "written_as"]
