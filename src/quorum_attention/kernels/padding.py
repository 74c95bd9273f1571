"""Padded forms of the tensors that operators are given.

Zero columns of query and key change no score; zero columns of value only add columns to
the output, which are cut off. Added queries have a grad_out of 0, so they add nothing
to gradients, and their outputs are cut off. Added keys have to be masked. What scores
are made of is padded with its last row, not with zeros: a score of 0 times infinity is
NaN, and NaN times a grad_out of 0 too. Added rows are then finite wherever the last one
is.
"""

from __future__ import annotations

import torch

from quorum_attention.kernels.operator_call import Call


def pad_last(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``tensor`` with zero columns up to ``width``; not copied if it has that
    many."""
    missing = width - tensor.shape[-1]
    if missing <= 0:
        return tensor
    # torch keeps the layout of what it takes for images, channels last: rows of one
    # number may be.
    return torch.nn.functional.pad(tensor, (0, missing)).contiguous()


def pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ``tensor`` (..., n, d) with rows of zeros up to ``rows``; not copied if it
    has them."""
    missing = rows - tensor.shape[-2]
    if missing <= 0:
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing))


def repeat_last(tensor: torch.Tensor, rows: int, dim: int = -2) -> torch.Tensor:
    """Return ``tensor`` with its last row along ``dim`` repeated up to ``rows``; not
    copied if it has them. It has one at least."""
    n_rows = tensor.shape[dim]
    if n_rows >= rows:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = rows - n_rows
    last_row = tensor.narrow(dim, n_rows - 1, 1)
    return torch.cat((tensor, last_row.expand(shape)), dim)


def bias_for_padding(
    call: Call, least_queries: int, least_keys: int
) -> torch.Tensor | None:
    """Return the bias of a rectangle padded to at least so many queries and keys, or
    None.

    It masks the added keys. A causal rectangle needs no mask: its added keys lie after
    every query. Added queries have the bias of the last one.
    """
    bias = call.bias
    n_keys = call.key.shape[2]
    missing_keys = max(0, least_keys - n_keys)
    if not missing_keys and call.query.shape[2] >= least_queries:
        return bias
    if bias is None:
        if call.is_causal or not missing_keys:
            return None
        bias = call.query.new_zeros((1, 1, 1, n_keys))
    bias = bias.expand(*bias.shape[:-1], n_keys)
    bias = torch.nn.functional.pad(
        bias,
        (0, missing_keys),
        value=-torch.inf,
    )
    if bias.shape[2] > 1:
        bias = repeat_last(bias, least_queries)
    return bias
