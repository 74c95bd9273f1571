"""FlexAttention's backward of a part, given the results of the whole rows, without its
forward.

torch has no function for that backward alone. So the forward runs on lists that name no
block, which costs next to nothing. As the backward reads what torch saved, it gets the
real counts of the lists and the rows' out and lse. What torch saves is its own affair:
the first gradients of each kind of call are held against those of a forward that runs
again.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from quorum_attention.kernels.kit.function import recordable
from quorum_attention.kernels.operator_call import Saved, Three

_LOG2_E = math.log2(math.e)
# The share of a gradient's norm by which the two ways may differ: far above rounding,
# far below what a wrong exchange gives.
_TOLERANCE = 0.03


@torch.inference_mode(False)
def gradients_of_rows(
    attend: Callable[..., Any], inputs: Three, block_mask: Any, saved: Saved
) -> Three | None:
    """Gradients of query, key and value; None if torch saved something else than
    expected.

    Args:
        attend: ``attend(query, key, value, block_mask) -> (out, lse)``, compiled.
        inputs: query, key and value of the part.
        block_mask: the part's ``BlockMask``.
        saved: the results of the whole rows.
    """
    exchange = _SavedTensorSwap(block_mask, saved)
    # The caller's hooks see none of its tensors. Without its graph: a saved output
    # would hold the graph that has it, for good.
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, exchange)
    with torch.enable_grad(), hooks:
        leaves = [recordable(tensor).detach().requires_grad_() for tensor in inputs]
        out, _ = attend(*leaves, exchange.empty_block_mask)
        exchange.part_out = out.detach()
        query, key, value = torch.autograd.grad(out, leaves, recordable(saved.grad_out))
    if not exchange.is_complete:
        return None
    return query, key, value


class _SavedTensorSwap:
    """The hook that gives torch's backward other tensors than its forward saved.

    Args:
        block_mask: the part's ``BlockMask``.
        saved: the results of the whole rows.

    Attributes:
        empty_block_mask: ``block_mask`` with counts of 0, for the forward.
        part_out: the output of that forward, once it has run.
    """

    def __init__(self, block_mask: Any, saved: Saved) -> None:
        self._saved = saved
        self._n_exchanged: Counter[str] = Counter()
        self._counts: torch.Tensor = block_mask.kv_num_blocks
        self._full_counts: torch.Tensor = block_mask.full_kv_num_blocks
        self._no_counts = torch.zeros_like(self._counts)
        self._no_full_counts = torch.zeros_like(self._full_counts)
        self.empty_block_mask = copy.copy(block_mask)
        self.empty_block_mask.kv_num_blocks = self._no_counts
        self.empty_block_mask.full_kv_num_blocks = self._no_full_counts
        self.part_out: torch.Tensor | None = None

    @property
    def is_complete(self) -> bool:
        """Whether both counts, out and lse have been exchanged; out and lse once
        each."""
        return list(self._n_exchanged.values()) == [1, 1, 1, 1]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the backward shall read in place of a saved one."""
        if _is_same(tensor, self._no_counts):
            self._n_exchanged["counts"] = 1
            return self._counts.view(tensor.shape)
        if _is_same(tensor, self._no_full_counts):
            self._n_exchanged["full counts"] = 1
            return self._full_counts.view(tensor.shape)
        if self.part_out is not None and _is_same(tensor, self.part_out):
            self._n_exchanged["out"] += 1
            return self._out_like(tensor)
        if tensor.dtype == torch.float32 and tensor.shape == self._saved.lse.shape:
            self._n_exchanged["lse"] += 1
            return self._lse_in_base_2()
        return tensor

    def _out_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows' output in the dtype and the memory order of ``tensor``."""
        out = self._saved.out
        if out.stride() == tensor.stride() and out.dtype == tensor.dtype:
            return out
        copied = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
        )
        return copied.copy_(out)

    def _lse_in_base_2(self) -> torch.Tensor:
        """The rows' lse as torch saves it, in a new tensor, which compiled code may
        overwrite.

        Rows without a key get 0 in place of -inf, which would give NaN.
        """
        lse = torch.mul(self._saved.lse, _LOG2_E)
        return lse.masked_fill_(lse == -torch.inf, 0.0)


def _is_same(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    return tensor.data_ptr() == expected.data_ptr()


def takes_rows(
    attend: Callable[..., Any],
    inputs: Three,
    block_mask: Any,
    saved: Saved,
    expected: Three,
) -> bool | None:
    """Whether ``gradients_of_rows`` gives the ``expected`` gradients; None if one of
    these is 0.

    A gradient of 0 says nothing. The arguments are those of ``gradients_of_rows``.
    """
    norms = [_norm(gradient) for gradient in expected]
    if not all(norms):
        return None
    try:
        gradients = gradients_of_rows(attend, inputs, block_mask, saved)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, AttributeError, TypeError):
        gradients = None
    is_right = gradients is not None and all(
        _norm(gradient - right) <= _TOLERANCE * norm
        for gradient, right, norm in zip(gradients, expected, norms, strict=True)
    )
    if not is_right:
        warnings.warn(
            "this torch's FlexAttention takes no results of another forward: its "
            "backward runs the forward again, which is as exact and slower",
            RuntimeWarning,
            stacklevel=2,
        )
    return is_right


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32))
