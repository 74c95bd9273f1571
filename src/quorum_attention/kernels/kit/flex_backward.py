"""FlexAttention's backward of a part, given the results of the whole rows, without its forward.

torch has no function for that backward alone. So the forward runs on lists that name no block,
which costs next to nothing. As the backward reads what torch saved, it gets the lists' real counts
and the rows' out and lse. What torch saves is its own affair: the first gradients of each kind of
call are held against those of a forward that runs again.
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
from quorum_attention.kernels.protocol import Saved, Three

_LOG2_E = math.log2(math.e)
# Of the norm: far above rounding, far below what a wrong exchange gives.
_APART = 0.03


@torch.inference_mode(False)
def gradients_of_rows(
    attend: Callable[..., Any], inputs: Three, block_mask: Any, saved: Saved
) -> Three | None:
    """Gradients of query, key and value; None if torch saved something else than expected.

    Args:
        attend: ``attend(query, key, value, block_mask) -> (out, lse)``, compiled.
        saved: of the whole rows.
    """
    counts: list[torch.Tensor] = [block_mask.kv_num_blocks, block_mask.full_kv_num_blocks]
    nothing = [torch.zeros_like(t) for t in counts]
    empty = copy.copy(block_mask)
    empty.kv_num_blocks, empty.full_kv_num_blocks = nothing
    read: Counter[str] = Counter()
    own_out: list[torch.Tensor] = []

    def exchange(tensor: torch.Tensor) -> torch.Tensor:
        for name, ours, real in zip(("counts", "full counts"), nothing, counts, strict=True):
            if tensor.data_ptr() == ours.data_ptr():
                read[name] = 1
                return real.view(tensor.shape)
        if own_out and tensor.data_ptr() == own_out[0].data_ptr():
            read["out"] += 1
            if (saved.out.stride(), saved.out.dtype) == (tensor.stride(), tensor.dtype):
                return saved.out
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(saved.out)
        if tensor.dtype == torch.float32 and tensor.shape == saved.lse.shape:
            read["lse"] += 1
            # In base 2, and a new tensor, which compiled code may overwrite. Rows without a key get
            # 0 in place of -inf, which would give NaN.
            lse = torch.mul(saved.lse, _LOG2_E)
            return lse.masked_fill_(lse == -torch.inf, 0.0)
        return tensor

    # The caller's hooks see none of its tensors. Without its graph: a saved output would hold the
    # graph that has it, for good.
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, exchange)
    with torch.enable_grad(), hooks:
        leaves = [recordable(t).detach().requires_grad_() for t in inputs]
        out, _ = attend(*leaves, empty)
        own_out.append(out.detach())
        query, key, value = torch.autograd.grad(out, leaves, recordable(saved.grad_out))
    # Both counts, out and lse, once each.
    return (query, key, value) if list(read.values()) == [1] * 4 else None


def takes_rows(
    attend: Callable[..., Any], inputs: Three, block_mask: Any, saved: Saved, wanted: Three
) -> bool | None:
    """Whether ``gradients_of_rows`` are those wanted; None where 0 says nothing."""
    sizes = [float(torch.linalg.vector_norm(t, dtype=torch.float32)) for t in wanted]
    if not all(sizes):
        return None
    try:
        found = gradients_of_rows(attend, inputs, block_mask, saved)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, AttributeError, TypeError):
        found = None
    right = found is not None and all(
        float(torch.linalg.vector_norm(mine - theirs, dtype=torch.float32)) <= _APART * size
        for mine, theirs, size in zip(found, wanted, sizes, strict=True)
    )
    if not right:
        warnings.warn(
            "this torch's FlexAttention takes no results of another forward: its backward runs the "
            "forward again, which is as exact and slower",
            RuntimeWarning,
            stacklevel=2,
        )
    return right
