"""A call whose tensors are in files, and its parts: blocks that need nothing of each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quorum_attention.call.block import Block, WholeCall
from quorum_attention.call.gradients import BackwardInputs, check_backward_inputs
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.call.request import request_of
from quorum_attention.call.validation import as_mask
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.execution.problem import Workload
from quorum_attention.files.formats import Wanted
from quorum_attention.mask import Mask

GRADIENTS = ("dq", "dk", "dv")
OF_KEYS = ("key", "value", "dk", "dv")


@dataclass(frozen=True, slots=True)
class FileCall:
    """A forward, or a backward from files; made by ``file_call``.

    Attributes:
        tensors: what it reads, by role: (*batch, heads, n, d), lse (*batch, heads, n_queries).
        whole: the call that parts are blocks of.
        out_dtype: of all results but the lse.
        backward: whether it gives gradients.
        written: its options.
        work: its sizes.
        without_heads: inputs were (tokens, head_dim), and so are results.
    """

    tensors: Mapping[str, torch.Tensor]
    whole: WholeCall
    out_dtype: torch.dtype
    backward: bool
    written: CallOptions
    work: Workload
    without_heads: bool

    @property
    def device(self) -> torch.device:
        """What computes it."""
        device = self.written.devices
        assert isinstance(device, torch.device)
        return device

    def results(self, *, lse: bool = False) -> Wanted:
        """Shapes and dtypes of the results, by name.

        Args:
            lse: whether the log-sum-exp of a forward is wanted.
        """
        work = self.work
        rows = (*work.batch_shape, work.heads, work.n_queries)
        keys = (*work.batch_shape, work.kv_heads, work.n_keys)
        if self.backward:
            sizes = (*rows, work.head_dim), (*keys, work.head_dim), (*keys, work.value_dim)
            wanted = {n: (shape, self.out_dtype) for n, shape in zip(GRADIENTS, sizes, strict=True)}
        else:
            wanted = {"out": ((*rows, work.value_dim), self.out_dtype)}
            if lse:
                wanted["lse"] = (rows, work.state_dtype)
        if self.without_heads:
            wanted = {name: (shape[1:], dtype) for name, (shape, dtype) in wanted.items()}
        return wanted

    def parts(self, heads: int) -> list[Block]:
        """Its parts: all rows and keys of some heads of one batch entry, or of some entries.

        Args:
            heads: key/value heads of each, from ``heads_of_part``.
        """
        work = self.work
        batch, kv_heads, share = work.batch, work.kv_heads, work.heads // max(1, work.kv_heads)
        entries, rows, keys = max(1, heads // max(1, kv_heads)), work.n_queries, work.n_keys
        return [
            Block(
                Interval(entry, min(entry + entries, batch)),
                Interval(head * share, min(head + heads, kv_heads) * share),
                Interval(0, rows),
                Interval(0, keys),
            )
            for entry in range(0, batch, entries)
            for head in range(0, kv_heads, heads)
        ]

    def heads_of_part(self, wanted: int) -> int:
        """How many key/value heads a part has that should have about ``wanted``: some of one batch
        entry, or all of some entries."""
        most = max(1, self.work.kv_heads)
        if wanted < most or len(self.work.batch_shape) != 1:
            return max(1, min(wanted, most))
        return min(wanted // most, max(1, self.work.batch)) * most

    def cut(self, tensors: Mapping[str, torch.Tensor], part: Block) -> dict[str, torch.Tensor]:
        """The part of inputs or results (*batch, heads, ...), views (entries, heads, ...)."""
        return {n: self.whole.cut(t, part, of_keys=n in OF_KEYS) for n, t in tensors.items()}


def file_call(
    written: CallOptions,
    tensors: Mapping[str, torch.Tensor],
    mask: torch.Tensor | Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> FileCall:
    """A call on ``tensors``, checked as a call of ``attention`` is.

    Args:
        written: its options.
        tensors: query, key and value; with grad_out, out and lse it is a backward.
        mask and so on: as there.

    Raises:
        ValueError, TypeError, NotImplementedError: what does not fit, by name.
    """
    backward = "grad_out" in tensors
    for name, tensor in tensors.items():
        if tensor.dim() < (1 if name == "lse" else 2):
            shape = tuple(tensor.shape)
            raise ValueError(f"{name} must be (..., heads, tokens, head_dim), got shape {shape}")
    query, key, value = three = tuple(tensors[name] for name in ("query", "key", "value"))
    mask = as_mask(mask, query, key)
    function = "attention_backward" if backward else "attention"
    said = Arguments(
        mask, dropout_p, dropout_seed, is_causal, scale, enable_gqa, None, out_dtype, written
    )
    checked, request = request_of(function, query, key, value, said)
    if request.records:
        raise NotImplementedError(
            "query, key, value and attn_mask must require no gradient: gradients of files are "
            "computed by a backward of its own"
        )
    # Views with all dimensions; a bias is broadcast by ``WholeCall.cut_bias``.
    inputs = {"query": checked.query, "key": checked.key, "value": checked.value}
    if backward:
        heads = 1 if request.without_heads else 0
        if any(a.shape[heads:] != b.shape for a, b in zip(inputs.values(), three, strict=True)):
            raise NotImplementedError("a backward from files takes no inputs that are broadcast")
        rest = BackwardInputs(tensors["grad_out"], tensors["out"], tensors["lse"])
        rest = check_backward_inputs(checked, request, rest, three)
        inputs |= {"grad_out": rest.grad_out, "out": rest.out, "lse": rest.lse}
    work = request.work
    whole = WholeCall(
        work.batch_shape, work.heads, work.kv_heads, work.n_queries, work.n_keys, mask,
        is_causal, scale, request.dropout,
    )  # fmt: skip
    return FileCall(
        inputs, whole, out_dtype or query.dtype, backward, written, work, request.without_heads
    )


def written_as(call: FileCall, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Results with a dimension of heads, views."""
    if not call.without_heads:
        return dict(results)
    return {name: tensor.unsqueeze(0) for name, tensor in results.items()}
