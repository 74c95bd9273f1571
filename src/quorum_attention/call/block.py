"""A block of a call: some rows of some heads, against some keys, as a call of its own.

Devices, ranks, Ray tasks and runs over files compute blocks: each cuts inputs and mask to the block
and makes the block's request here, and computes it with ``compute_block``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.call.backward_inputs import BackwardInputs, check_backward_inputs
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.validation import Tensors
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.masked.resolve import with_offsets
from quorum_attention.kernels.protocol import CallShape
from quorum_attention.mask import Keeps, Mask

Masked = tuple[Mask | None, bool]
"""``attn_mask`` and ``is_causal`` of a block."""


class CallBlock(NamedTuple):
    """Half-open ranges, numbered in the whole call: batch entries (all batch dimensions flattened),
    query heads, rows of queries, keys."""

    entries: Interval
    heads: Interval
    rows: Interval
    keys: Interval


@dataclass(frozen=True, slots=True)
class WholeCall:
    """A call that is computed in blocks.

    Attributes:
        shape: its sizes.
        mask: its ``attn_mask``, for all of it, a tensor as ``Mask.bias``; that broadcasts to
            (*batch_shape, heads, n_queries, n_keys).
        scale: as for ``attention``.
        dropout: None: none.
        records: whether a gradient may follow, which the forward's kernel then has to have.
        mask_grad: whether the gradient of the mask may follow.
    """

    shape: CallShape
    mask: Mask | None = None
    scale: float | None = None
    dropout: Dropout | None = None
    records: bool = False
    mask_grad: bool = False

    def __post_init__(self) -> None:
        if self.mask is not None:
            # A block has too few tokens to count from the last ones.
            object.__setattr__(self, "mask", with_offsets(self.mask, self.shape))

    def key_heads(self, block: CallBlock) -> Interval:
        """The key/value heads that the block's query heads read."""
        share = self.shape.queries_per_key_head
        return Interval(block.heads.start // share, ceil_div(block.heads.stop, share))

    def cut(self, tensor: torch.Tensor, block: CallBlock, *, of_keys: bool) -> torch.Tensor:
        """The block's part of a tensor (*batch_shape, heads, tokens, ...), a view (entries, heads,
        tokens, ...).

        Args:
            of_keys: whether its heads and tokens are those of keys and values.
        """
        heads = self.key_heads(block) if of_keys else block.heads
        tokens = block.keys if of_keys else block.rows
        if len(self.shape.batch_shape) == 1:
            entries = tensor[slice(*block.entries)]
        else:
            entries = tensor[self._index(block)][None]
        return entries[:, slice(*heads), slice(*tokens)]

    def mask_of(self, block: CallBlock) -> Masked:
        """``attn_mask`` and ``is_causal`` of the block."""
        mask, rows, keys = self.mask, block.rows, block.keys
        if mask is not None:
            mask = self._cut_mask(mask, block)
        if not self.shape.is_causal or keys.stop <= rows.start + 1:
            return mask, False  # no key is later than any query
        if rows.start == keys.start:
            return mask, True
        # The block's first query does not stand at its first key.
        later = Mask(causal=True, offset=rows.start - keys.start)
        return later if mask is None else mask & later, False

    def cut_bias(self, bias: torch.Tensor, block: CallBlock) -> torch.Tensor:
        """The block's part of a bias, or of its gradient, a view."""
        spans = ((-3, block.heads), (-2, block.rows), (-1, block.keys))
        for dim, span in spans:
            if bias.dim() >= -dim and bias.shape[dim] > 1:
                bias = bias.narrow(dim, span.start, span.length)
        dims = bias.dim() - 3
        if dims <= 0:
            return bias
        if len(self.shape.batch_shape) == 1:
            return _entries(bias, block, 4)
        index = self._index(block)[len(self.shape.batch_shape) - dims :]
        return bias[tuple(0 if n == 1 else i for n, i in zip(bias.shape, index, strict=False))]

    def _index(self, block: CallBlock) -> tuple[int, ...]:
        """Where the block's one entry is among several batch dimensions, or none."""
        entry, index = block.entries.start, list[int]()
        for size in reversed(self.shape.batch_shape):
            entry, at = divmod(entry, size)
            index.append(at)
        return tuple(reversed(index))

    def _cut_mask(self, mask: Mask, block: CallBlock) -> Mask:
        """The mask of a block; tensors of which it has everything stay the very tensors."""
        entries, heads, rows, keys = block
        changes: dict[str, Any] = {}
        all_rows, all_keys = rows == (0, self.shape.n_queries), keys == (0, self.shape.n_keys)
        assert not mask.counts_from_last, "__post_init__ has put numbers there"
        offset: Any = 0 if mask.offset is None else mask.offset
        if isinstance(offset, torch.Tensor):
            offset = _entries(offset, block, 2)
            by_row = offset.shape[-1] > 1 and not all_rows
            changes["offset"] = offset = offset[..., slice(*rows)] if by_row else offset
        if rows.start != keys.start:
            changes["offset"] = offset + rows.start - keys.start
        if mask.documents is not None:
            two = isinstance(mask.documents, tuple)
            both: Any = mask.documents if two else (mask.documents, mask.documents)
            both = tuple(_entries(ids, block, 2) for ids in both)
            if not (all_rows and all_keys):
                both, two = (both[0][..., slice(*rows)], both[1][..., slice(*keys)]), True
            changes["documents"] = both if two else both[0]
        if mask.key_lengths is not None:
            lengths = _entries(mask.key_lengths, block, 1)
            lengths = lengths if all_keys else (lengths - keys.start).clamp(0, keys.length)
            changes["key_lengths"] = lengths
        if mask.key_padding is not None:
            padding = _entries(mask.key_padding, block, 2)
            changes["key_padding"] = padding if all_keys else padding[..., slice(*keys)]
        starts = entries.start, heads.start, rows.start, keys.start
        if mask.keeps is not None and any(starts):
            changes["keeps"] = _ShiftedKeeps(mask.keeps, *starts)
        for name in ("either", "every"):
            changes[name] = tuple(self._cut_mask(one, block) for one in getattr(mask, name))
        if mask.bias is not None:
            changes["bias"] = self.cut_bias(mask.bias, block)
        if mask.sinks is not None:
            changes["sinks"] = mask.sinks[slice(*heads)]
        if mask.chunk is None or keys.start % mask.chunk == 0:
            return replace(mask, **changes)
        # Its chunks are not counted from the block's first key.
        places = torch.arange(*rows, device="cpu") + torch.as_tensor(offset).cpu()
        of_queries = places // mask.chunk
        of_keys = torch.arange(*keys, device="cpu") // mask.chunk
        return replace(mask, **changes, chunk=None) & Mask(documents=(of_queries, of_keys))


def _entries(tensor: torch.Tensor, block: CallBlock, dims: int) -> torch.Tensor:
    """The block's entries of a tensor that has batch entries first, if it has ``dims``."""
    if tensor.dim() < dims or len(tensor) == 1 or block.entries == (0, len(tensor)):
        return tensor
    return tensor[slice(*block.entries)]


@dataclass(frozen=True)
class _ShiftedKeeps:
    """A rule of positions in the whole call, for positions in a block."""

    keeps: Keeps
    entry: int
    head: int
    row: int
    key: int

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return self.keeps(batch + self.entry, head + self.head, query + self.row, key + self.key)


@dataclass(frozen=True, slots=True)
class BlockResults:
    """Where results of a block go, and which are wanted beside the usual ones.

    Attributes:
        out, lse: of a forward; None: they are made. ``lse`` is in the state's dtype.
        out_dtype: of an output or gradients that are made; None: the inputs'.
        grads: of query, key and value; None: they are made.
        grad_mask: a tensor, or whether the gradient of the bias is wanted.
        grad_sinks: whether the gradient of the sinks is wanted.
    """

    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    grad_mask: torch.Tensor | bool = False
    grad_sinks: bool = False


def request_of_block(
    call: WholeCall,
    block: CallBlock,
    inputs: Mapping[str, torch.Tensor],
    options: CallOptions,
    results: BlockResults,
    masked: Masked | None = None,
) -> tuple[Tensors, Request, BackwardInputs | None]:
    """The block as a call of its own; ``BackwardInputs`` for a backward.

    Args:
        inputs: the block's query, key and value; for a backward grad_out, out and lse besides, and
            grad_lse if there is one.
        masked: ``mask_of`` the block, where the caller has moved its tensors.
    """
    mask, causal = call.mask_of(block) if masked is None else masked
    dropout, backward = call.dropout, "grad_out" in inputs
    p, seed = (0.0, None) if dropout is None else (dropout.p, dropout.seed)
    three = inputs["query"], inputs["key"], inputs["value"]
    function = "attention_backward" if backward else "attention"
    arguments = Arguments(
        mask, p, seed, causal, call.scale, True, results.out, results.out_dtype, options
    )
    tensors, request = request_of(function, *three, arguments)
    if dropout is not None:
        assert block.rows.start == block.keys.start == 0, "dropout counts positions from 0"
        dropout = dropout.at(block.heads.start, block.entries.start)
    request = replace(
        request, dropout=dropout, records=call.records or request.records,
        mask_grad=call.mask_grad or request.mask_grad, lse=results.lse,
    )  # fmt: skip
    if not backward:
        return tensors, request, None
    grads, dtype = results.grads, results.out_dtype
    if grads is None and dtype is not None:
        query, key, value = (t.new_empty(t.shape, dtype=dtype) for t in three)
        grads = query, key, value
    backward_inputs = BackwardInputs(
        inputs["grad_out"], inputs["out"], inputs["lse"], grads,
        results.grad_mask, results.grad_sinks, inputs.get("grad_lse"),
    )  # fmt: skip
    return tensors, request, check_backward_inputs(tensors, request, backward_inputs, three)
