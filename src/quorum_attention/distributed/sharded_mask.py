"""The mask of a sharded call: checked, put together from the parts of ranks, and
counted."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from quorum_attention.argument_checks import shown
from quorum_attention.call.options import Arguments
from quorum_attention.call.validation import Tensors, as_mask, check_tensors
from quorum_attention.decomposition import Ranges
from quorum_attention.decomposition.intervals import cut
from quorum_attention.distributed.groups import all_gather_objects
from quorum_attention.distributed.sharded_shape import rows_per_step
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.mask_fields import fields_key, masks_in, tensors_of
from quorum_attention.kernels.masked.resolve import ResolvedMask, resolve
from quorum_attention.mask import Keeps, Mask, map_tensors

# Fields with a number for each token.
_TOKEN_FIELDS = ("documents", "key_padding")
_KEPT_PAIRS: WeakKeyDictionary[ResolvedMask, tuple[int, ...]] = WeakKeyDictionary()


def checked_mask(attn_mask: Any) -> Mask | None:
    """Return the argument ``attn_mask`` as a ``Mask``.

    Raises:
        TypeError: it is none.
    """
    attn_mask = as_mask(attn_mask)
    if attn_mask is None or isinstance(attn_mask, Mask):
        return attn_mask
    if isinstance(attn_mask, torch.Tensor):
        return Mask(bias=attn_mask)
    raise TypeError(
        f"attn_mask must be a Mask, a tensor or None, got {shown(attn_mask)}"
    )


def mask_tensors(mask: Mask | None) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a mask with the names of their fields; none of None."""
    if mask is None:
        return []
    named = tensors_of(mask)
    if mask.bias is not None:
        named.append(("bias", mask.bias))
    if mask.sinks is not None:
        named.append(("sinks", mask.sinks))
    return named


def functions_of_mask(mask: Mask | None) -> list[Keeps]:
    """Return the functions of a mask and of the masks within it; none of None."""
    if mask is None:
        return []
    return [inner.keeps for inner in masks_in(mask) if inner.keeps is not None]


def token_widths(mask: Mask | None) -> list[int]:
    """Return how many tokens each tensor has that has a number for each token."""
    return [
        tensor.shape[-1] for name, tensor in mask_tensors(mask) if name in _TOKEN_FIELDS
    ]


def mask_signature(mask: Mask | None) -> Hashable:
    """Return what must be the same on all ranks, and is known without looking into
    tensors.

    Tensors with a number for each token may be of different lengths.
    """
    if mask is None:
        return None
    shapes = [
        (name, tuple(tensor.shape[:-1] if name in _TOKEN_FIELDS else tensor.shape))
        for name, tensor in mask_tensors(mask)
    ]
    return fields_key(mask), tuple(shapes)


def gather_mask(
    mask: Mask, group: dist.ProcessGroup, lengths: Sequence[int], tensors: Tensors
) -> Mask:
    """Return the mask of the whole sequence: ids and paddings of this rank's rows are
    gathered.

    Args:
        lengths: rows of every rank.
        tensors: this rank's part of the call.

    Raises:
        ValueError: a bias or sinks do not fit the whole call, by name.
    """
    n_tokens = sum(lengths)
    n_rows = tensors.query.shape[-2]
    is_cut = max(lengths) < n_tokens

    def gather(tensor: torch.Tensor, name: str) -> torch.Tensor:
        if name not in _TOKEN_FIELDS or len(lengths) == 1:
            return tensor
        # Where one rank has all rows, a tensor of all tokens cannot be told from one of
        # its rows there, so all ranks gather.
        if is_cut and tensor.shape[-1] == n_tokens:
            return tensor
        of_rows = torch.atleast_2d(tensor)[:, :n_rows]
        of_ranks = all_gather_objects(group, of_rows.cpu())
        together = torch.cat(of_ranks, dim=1)
        return together.to(tensor.device)

    mask = map_tensors(mask, gather)
    _check_fits_whole_call(mask, n_tokens, tensors)
    bias = mask.bias
    batch_shape = tensors.query.shape[:-3]
    if bias is None or bias.dim() <= 3 or len(batch_shape) <= 1:
        return mask
    # The call has one batch dimension.
    expanded = bias.expand(*batch_shape, *bias.shape[-3:])
    return replace(mask, bias=expanded.flatten(0, -4))


def _check_fits_whole_call(mask: Mask, n_tokens: int, tensors: Tensors) -> None:
    """Check that a mask's bias and sinks broadcast to the whole call.

    Raises:
        ValueError: one does not, by name.
    """
    query, key, value = (
        tensor.new_empty(()).expand(
            *tensor.shape[:-2],
            n_tokens,
            tensor.shape[-1],
        )
        for tensor in tensors[:3]
    )
    check_tensors(
        query,
        key,
        value,
        Arguments(mask, enable_gqa=True),
    )


def count_kept_pairs(mask: Mask, shape: CallShape) -> tuple[int, ...]:
    """Return the pairs of a head that a mask keeps, as ``ShardedShape.kept_pairs``.

    Pairs that rules of single pairs leave out are counted as well.
    """
    resolved = resolve(mask, shape)
    if resolved not in _KEPT_PAIRS:
        _KEPT_PAIRS[resolved] = _count_by_steps(resolved, shape.n_queries)
    return _KEPT_PAIRS[resolved]


def _count_by_steps(resolved: ResolvedMask, n_tokens: int) -> tuple[int, ...]:
    """Return the kept pairs of all rows before each step, and of all rows."""
    step_rows = rows_per_step(n_tokens)
    edges = range(0, n_tokens + step_rows, step_rows)
    pairs_of_steps = [0] * len(edges)
    everything = Ranges.from_bounds(0, n_tokens, 0, n_tokens)
    for geometry in resolved.geometries:
        for part, band in geometry.within(everything):
            for rows in cut(part.queries, edges):
                n_pairs = band.count(*rows, *part.keys)
                step = rows.start // step_rows
                pairs_of_steps[step + 1] += n_pairs
    return tuple(accumulate(pairs_of_steps))
