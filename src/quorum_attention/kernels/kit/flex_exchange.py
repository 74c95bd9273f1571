"""FlexAttention's backward with the whole row's output and log-sum-exp, without its forward.

FlexAttention's compiled backward computes a task's gradients from the out and lse that its forward
saved, but torch has no function that calls it alone. So the forward is run with a block mask that
lists no block, which costs next to nothing. When the backward reads the saved tensors, they are
exchanged: the empty block counts for the real ones, and the forward's out and lse for those of the
whole row (lse in base 2, as FlexAttention saves it).

It depends on what torch saves. So the exchanged tensors are counted, and for each kind of call the
first gradients are compared with those of another forward (``agree``).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import e, log2
from typing import Any

import torch

from quorum_attention.kernels.protocol import Three

_LOG2_E = log2(e)
# Accepted difference, a share of the norm: far above rounding, far below that of a wrong exchange.
_APART = 0.03


class UnfitError(Exception):
    """FlexAttention did not save the tensors that are to be exchanged."""


def exchanged_gradients(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: Three,
    block_mask: Any,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Three:
    """Gradients of query, key and value.

    Args:
        attend: ``attend(query, key, value, block_mask) -> (out, lse)``, compiled.
        grad_out, out, lse: of the whole rows: (b, h, nq, dv) in the input dtype, (b, h, nq) in
            fp32, -inf in rows without any key.

    Raises:
        UnfitError: a tensor to exchange was not saved, or saved more than once.
    """
    real = (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks)
    nothing = [torch.zeros_like(t) for t in real]
    empty = copy.copy(block_mask)
    empty.kv_num_blocks, empty.full_kv_num_blocks = nothing
    leaves = [t.detach().requires_grad_() for t in inputs]
    exchange = _Exchange(real, nothing, out, lse)
    # The caller's hooks see none of its tensors. Without its graph: a saved output would hold the
    # graph that has it, for good.
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, exchange.taken_up)
    with torch.enable_grad(), hooks:
        own_out, _ = attend(*leaves, empty)
    exchange.own_out = own_out.detach()
    query, key, value = torch.autograd.grad(own_out, leaves, grad_out)
    exchange.check()
    return query, key, value


def agree(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool | None:
    """Whether gradients are the same but for rounding; None where 0 says nothing."""
    sizes = [float(torch.linalg.vector_norm(t, dtype=torch.float32)) for t in wanted]
    if not all(sizes):
        return None
    return all(
        float(torch.linalg.vector_norm(mine - theirs, dtype=torch.float32)) <= _APART * size
        for mine, theirs, size in zip(found, wanted, sizes, strict=True)
    )


@dataclass(slots=True)
class _Exchange:
    real: tuple[torch.Tensor, torch.Tensor]
    nothing: list[torch.Tensor]
    out: torch.Tensor
    lse: torch.Tensor
    own_out: torch.Tensor | None = None
    seen: Counter[str] = field(default_factory=Counter)

    def taken_up(self, saved: torch.Tensor) -> torch.Tensor:
        for number, (ours, real) in enumerate(zip(self.nothing, self.real, strict=True)):
            if saved.data_ptr() == ours.data_ptr():
                self.seen[f"counts {number}"] += 1
                return real.view(saved.shape)
        if self.own_out is not None and saved.data_ptr() == self.own_out.data_ptr():
            self.seen["out"] += 1
            return _laid_out_as(saved, self.out)
        if saved.dtype == torch.float32 and saved.shape == self.lse.shape:
            self.seen["lse"] += 1
            # A new tensor, because compiled code may overwrite it. Rows without any key get 0 in
            # place of -inf, which would give NaN; they have no unmasked score.
            lse = torch.mul(self.lse, _LOG2_E)
            return lse.masked_fill_(lse == -torch.inf, 0.0)
        return saved

    def check(self) -> None:
        counted = all(self.seen[f"counts {n}"] for n in range(2))
        if not (counted and self.seen["out"] == self.seen["lse"] == 1):
            raise UnfitError(f"exchanged {dict(self.seen)}")


def _laid_out_as(pattern: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with the strides and dtype of ``pattern``, which compiled code relies on."""
    if tensor.stride() == pattern.stride() and tensor.dtype == pattern.dtype:
        return tensor
    return torch.empty_strided(
        pattern.shape, pattern.stride(), dtype=pattern.dtype, device=pattern.device
    ).copy_(tensor)
