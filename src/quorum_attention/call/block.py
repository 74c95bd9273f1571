"""A block of a call: some rows of some heads, against some keys, as a call of its own.

Devices, ranks, Ray tasks and runs over files compute blocks: each cuts inputs and mask
to the block and makes the block's request here, and computes it with ``compute_block``.
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
from quorum_attention.execution.head_groups import batch_index
from quorum_attention.execution.job import OnStored
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.masked.mask_numbers import with_offsets
from quorum_attention.kernels.operator_call import Three
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.mask import Documents, Keeps, Mask
from quorum_attention.plain_types import Keywords

Masked = tuple[Mask | None, bool]
"""``attn_mask`` and ``is_causal`` of a block."""
# The tensors whose heads and rows are those of keys; files have shorter names.
_OF_KEYS = frozenset({"key", "value", "grad_key", "grad_value", "dk", "dv"})


class CallBlock(NamedTuple):
    """Half-open ranges, numbered in the whole call: batch entries (all batch dimensions
    flattened), query heads, rows of queries, keys."""

    entries: Interval
    heads: Interval
    rows: Interval
    keys: Interval


@dataclass(frozen=True, slots=True)
class WholeCall:
    """A call that is computed in blocks.

    Attributes:
        shape: its sizes.
        mask: its ``attn_mask``, for all of it, a tensor as ``Mask.bias``; that
            broadcasts to (*batch_shape, heads, n_queries, n_keys).
        scale: as for ``attention``.
        dropout: None: none.
        records: whether a gradient may follow, which the forward's kernel then has to
            have.
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
        """Return the key/value heads that the block's query heads read."""
        share = self.shape.queries_per_key_head
        first = block.heads.start // share
        stop = ceil_div(block.heads.stop, share)
        return Interval(first, stop)

    def query_heads(self, key_heads: Interval) -> Interval:
        """Return the query heads that read key/value heads."""
        share = self.shape.queries_per_key_head
        return Interval(key_heads.start * share, key_heads.stop * share)

    def cut(
        self, tensor: torch.Tensor, block: CallBlock, *, of_keys: bool
    ) -> torch.Tensor:
        """Return the block's part of a tensor (*batch_shape, heads, tokens, ...).

        The part is a view (entries, heads, tokens, ...).

        Args:
            of_keys: whether its heads and tokens are those of keys and values.
        """
        heads = self.key_heads(block) if of_keys else block.heads
        tokens = block.keys if of_keys else block.rows
        if len(self.shape.batch_shape) == 1:
            entries = tensor[slice(*block.entries)]
        else:
            entries = tensor[self._batch_index(block)][None]
        return entries[:, slice(*heads), slice(*tokens)]

    def cut_named(self, tensors: NamedTensors, block: CallBlock) -> NamedTensors:
        """Return the block's part of inputs, results and gradients, as ``cut`` does.
        Their names say which of them are of keys and values."""
        return {
            name: self.cut(tensor, block, of_keys=name in _OF_KEYS)
            for name, tensor in tensors.items()
        }

    def mask_of(self, block: CallBlock) -> Masked:
        """Return ``attn_mask`` and ``is_causal`` of the block."""
        mask = None if self.mask is None else cut_mask(self, self.mask, block)
        first_query = block.rows.start
        if not self.shape.is_causal or block.keys.stop <= first_query + 1:
            return mask, False  # no key is later than any query
        offset = first_query - block.keys.start
        if offset == 0:
            return mask, True
        # The block's first query does not stand at its first key.
        causal = Mask(causal=True, offset=offset)
        if mask is not None:
            causal = mask & causal
        return causal, False

    def cut_bias(self, bias: torch.Tensor, block: CallBlock) -> torch.Tensor:
        """Return the block's part of a bias, or of its gradient, a view."""
        spans = ((-3, block.heads), (-2, block.rows), (-1, block.keys))
        for dim, span in spans:
            if bias.dim() >= -dim and bias.shape[dim] > 1:
                bias = bias.narrow(dim, span.start, span.length)
        n_batch_dims = bias.dim() - 3
        if n_batch_dims <= 0:
            return bias
        if len(self.shape.batch_shape) == 1:
            return cut_entries(bias, block, 4)
        positions = self._batch_index(block)[-n_batch_dims:]
        index: list[int] = []
        for size, position in zip(bias.shape, positions, strict=False):
            # A dimension of size 1 broadcasts: its only entry is that of all blocks.
            index.append(0 if size == 1 else position)
        return bias[tuple(index)]

    def _batch_index(self, block: CallBlock) -> tuple[int, ...]:
        """Return the index of the block's one entry among several batch dimensions, or
        none."""
        return batch_index(block.entries.start, self.shape.batch_shape)


def cut_mask(call: WholeCall, mask: Mask, block: CallBlock) -> Mask:
    """Return the mask of a block.

    Tensors that the block has completely stay the very tensors.
    """
    assert not mask.counts_from_last, "__post_init__ has put numbers there"
    offset = _cut_offset(mask, block)
    changes: Keywords = {
        **_cut_key_fields(call, mask, block),
        **_shift_positions(mask, offset, block),
    }
    if mask.documents is not None:
        changes["documents"] = _cut_documents(mask.documents, block)
    changes["either"] = tuple(cut_mask(call, inner, block) for inner in mask.either)
    changes["every"] = tuple(cut_mask(call, inner, block) for inner in mask.every)
    if mask.bias is not None:
        changes["bias"] = call.cut_bias(mask.bias, block)
    if mask.sinks is not None:
        changes["sinks"] = mask.sinks[slice(*block.heads)]
    if mask.chunk is None or block.keys.start % mask.chunk == 0:
        return replace(mask, **changes)
    # The mask's chunks are not counted from the block's first key.
    same_chunk = _chunks_as_documents(mask.chunk, offset, block)
    return replace(mask, **changes, chunk=None) & same_chunk


def _shift_positions(mask: Mask, offset: Any, block: CallBlock) -> Keywords:
    """Return the fields that count positions, counted from the block's first ones.

    Args:
        offset: of the block's queries, by positions in the whole call.
    """
    entries, heads, queries, keys = block
    fields: Keywords = {}
    if isinstance(offset, torch.Tensor):
        fields["offset"] = offset
    if queries.start != keys.start:
        fields["offset"] = offset + queries.start - keys.start
    starts = (entries.start, heads.start, queries.start, keys.start)
    if mask.keeps is not None and any(starts):
        fields["keeps"] = _ShiftedKeeps(mask.keeps, *starts)
    return fields


def _chunks_as_documents(chunk: int, offset: Any, block: CallBlock) -> Mask:
    """Return the mask of pairs in one chunk of ``chunk`` tokens of the whole call.

    Args:
        offset: of queries, as ``Mask.offset``.
    """
    queries = torch.arange(*block.rows, device="cpu")
    places = queries + torch.as_tensor(offset).cpu()
    keys = torch.arange(*block.keys, device="cpu")
    query_chunks = places // chunk
    key_chunks = keys // chunk
    return Mask(documents=(query_chunks, key_chunks))


def _cut_key_fields(call: WholeCall, mask: Mask, block: CallBlock) -> Keywords:
    """Return the fields about a block's keys: their lengths and padding."""
    keys = block.keys
    fields: Keywords = {}
    if mask.key_lengths is not None:
        lengths = cut_entries(mask.key_lengths, block, 1)
        if keys != (0, call.shape.n_keys):
            lengths = (lengths - keys.start).clamp(0, keys.length)
        fields["key_lengths"] = lengths
    if mask.key_padding is not None:
        padding = cut_entries(mask.key_padding, block, 2)
        fields["key_padding"] = _cut_tokens(padding, keys)
    return fields


def _cut_offset(mask: Mask, block: CallBlock) -> Any:
    """Return the mask's offsets of a block's queries, by positions in the whole
    call."""
    if mask.offset is None:
        return 0
    if not isinstance(mask.offset, torch.Tensor):
        return mask.offset
    return _cut_tokens(cut_entries(mask.offset, block, 2), block.rows)


def _cut_documents(documents: Documents, block: CallBlock) -> Documents:
    """Return the document ids of a block's queries and keys, one tensor where that is
    enough."""
    if isinstance(documents, tuple):
        query_ids, key_ids = (cut_entries(ids, block, 2) for ids in documents)
    else:
        query_ids = key_ids = cut_entries(documents, block, 2)
    ids_of_rows = _cut_tokens(query_ids, block.rows)
    ids_of_keys = _cut_tokens(key_ids, block.keys)
    return ids_of_rows if ids_of_rows is ids_of_keys else (ids_of_rows, ids_of_keys)


def _cut_tokens(tensor: torch.Tensor, tokens: Interval) -> torch.Tensor:
    """Return some tokens of a tensor that has tokens last, or one number for all."""
    n_tokens = tensor.shape[-1]
    if n_tokens == 1 or tokens == (0, n_tokens):
        return tensor
    return tensor[..., slice(*tokens)]


def cut_entries(tensor: torch.Tensor, block: CallBlock, n_dims: int) -> torch.Tensor:
    """Return the block's entries of a tensor that has batch entries first if it has
    ``n_dims``."""
    if tensor.dim() < n_dims:
        return tensor
    n_entries = len(tensor)
    if n_entries == 1 or block.entries == (0, n_entries):
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
        return self.keeps(
            batch + self.entry,
            head + self.head,
            query + self.row,
            key + self.key,
        )


@dataclass(frozen=True, slots=True)
class BlockResults:
    """Where results of a block go, and which are wanted beside the usual ones.

    Attributes:
        out, lse: of a forward; None: they are made. ``lse`` is in the state's dtype.
        out_dtype: of an output or gradients that are made; None: the inputs'.
        grads: of query, key and value; None: they are made.
        grad_mask: a tensor, or whether the gradient of the bias is wanted.
        grad_sinks: whether the gradient of the sinks is wanted.
        on_stored: called with head groups whose results are in ``out`` and ``lse``, or
            in ``grads``, as soon as that is known; None: nobody asks.
    """

    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    grads: Three | None = None
    grad_mask: torch.Tensor | bool = False
    grad_sinks: bool = False
    on_stored: OnStored | None = None


def request_of_block(
    call: WholeCall,
    block: CallBlock,
    inputs: Mapping[str, torch.Tensor],
    options: CallOptions,
    results: BlockResults,
    masked: Masked | None = None,
) -> tuple[Tensors, Request, BackwardInputs | None]:
    """Make a call of the block; ``BackwardInputs`` are those of a backward.

    Args:
        inputs: the block's query, key and value; for a backward grad_out, out and lse
            besides, and grad_lse if there is one.
        masked: ``mask_of`` the block, where the caller has moved its tensors.
    """
    mask, is_causal = call.mask_of(block) if masked is None else masked
    dropout = call.dropout
    is_backward = "grad_out" in inputs
    query = inputs["query"]
    key = inputs["key"]
    value = inputs["value"]
    arguments = Arguments(
        mask,
        0.0 if dropout is None else dropout.p,
        None if dropout is None else dropout.seed,
        is_causal,
        call.scale,
        enable_gqa=True,
        out=results.out,
        out_dtype=results.out_dtype,
        options=options,
    )
    function = "attention_backward" if is_backward else "attention"
    tensors, request = request_of(
        function, query, key, value, arguments, records=call.records
    )
    if dropout is not None:
        assert block.rows.start == block.keys.start == 0, (
            "dropout counts positions from 0"
        )
        dropout = dropout.at(block.heads.start, block.entries.start)
    request = replace(
        request,
        dropout=dropout,
        mask_grad=call.mask_grad or request.mask_grad,
        lse=results.lse,
        on_stored=results.on_stored,
    )
    if not is_backward:
        return tensors, request, None
    grads = results.grads
    if grads is None and results.out_dtype is not None:
        grads = (
            query.new_empty(query.shape, dtype=results.out_dtype),
            key.new_empty(key.shape, dtype=results.out_dtype),
            value.new_empty(value.shape, dtype=results.out_dtype),
        )
    backward_inputs = BackwardInputs(
        inputs["grad_out"],
        inputs["out"],
        inputs["lse"],
        grads,
        results.grad_mask,
        results.grad_sinks,
        inputs.get("grad_lse"),
    )
    checked = check_backward_inputs(
        tensors, request, backward_inputs, (query, key, value)
    )
    return tensors, request, checked
