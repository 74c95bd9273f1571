"""The backward of FlexAttention with the whole row's output and log-sum-exp.

A task's gradients follow from the *whole row's* O and lse, as FlashAttention's backward has them:

    P = exp(S - lse),   dS = P (dO V^T - rowsum(dO O)).

FlexAttention's compiled backward computes just that from the out and lse that its forward saved,
but torch has no call for it. So the forward is run with a block mask that lists nothing, which
costs nothing, and what it saved is exchanged as the backward takes it up: the real block counts for
the empty ones, the whole row's out and lse (in base 2, as FlexAttention keeps it) for its own. One
forward is saved.

It rests on what torch saves, so what was exchanged is counted, and its gradients are compared with
recomputed ones (``recomputed_gradients``) on a sample before they are relied on (``Trust``).
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import e, log2
from typing import Any

import torch

from quorum_attention.kernels.kit.function import upstream_of

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``attend(query, key, value, block_mask) -> (out, lse)``, differentiable."""

_LOG2_E = log2(e)
# Of the norm: far above what recomputing rounds, far below what a wrong exchange makes.
_APART = 0.03
_TRIES = 3
# What the device itself reports says nothing about the exchange.
_ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)


class UnfitError(Exception):
    """FlexAttention did not save what is to be exchanged."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What a backward is given of the whole rows.

    grad_out, out (b, h, nq, dv) in the input dtype, lse (b, h, nq) in fp32, -inf in rows without
    any key.
    """

    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def recomputed_gradients(attend: Attend, inputs: Three, block_mask: Any, rows: Rows) -> Three:
    """Gradients of query, key and value by autograd through a forward of the task's own."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        own_out, own_lse = attend(*leaves, block_mask)
    upstream = upstream_of(own_out, own_lse, rows.grad_out, rows.out, rows.lse)
    query, key, value = torch.autograd.grad((own_out, own_lse), leaves, upstream)
    return query, key, value


def exchanged_gradients(attend: Attend, inputs: Three, block_mask: Any, rows: Rows) -> Three:
    """The same without a forward.

    Raises:
        UnfitError: something was not saved, or not once.
    """
    real = (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks)
    nothing = [torch.zeros_like(t) for t in real]
    empty = copy.copy(block_mask)
    empty.kv_num_blocks, empty.full_kv_num_blocks = nothing
    leaves = [t.detach().requires_grad_() for t in inputs]
    exchange = _Exchange(real, nothing, rows)
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(_as_it_is, exchange.taken_up),
    ):
        own_out, _ = attend(*leaves, empty)
    exchange.own_out = own_out.detach()
    query, key, value = torch.autograd.grad(own_out, leaves, rows.grad_out)
    exchange.check()
    return query, key, value


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(slots=True)
class _Exchange:
    real: tuple[torch.Tensor, torch.Tensor]
    nothing: list[torch.Tensor]
    rows: Rows
    own_out: torch.Tensor | None = None
    seen: Counter[str] = field(default_factory=Counter)

    def taken_up(self, saved: torch.Tensor) -> torch.Tensor:
        for number, (ours, real) in enumerate(zip(self.nothing, self.real, strict=True)):
            if saved.data_ptr() == ours.data_ptr():
                self.seen[f"counts {number}"] += 1
                return real.view(saved.shape)
        if self.own_out is not None and saved.data_ptr() == self.own_out.data_ptr():
            self.seen["out"] += 1
            return _laid_out_as(saved, self.rows.out)
        if saved.dtype == torch.float32 and saved.shape == self.rows.lse.shape:
            self.seen["lse"] += 1
            # A tensor of its own: compiled code may write over it. A row without any key has no
            # unmasked score either; 0 keeps NaN out.
            lse = torch.mul(self.rows.lse, _LOG2_E)
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


@dataclass(slots=True)
class Trust:
    """Which kinds of calls the exchange has been tried on, and found right or not."""

    found: dict[Hashable, bool] = field(default_factory=dict)
    asked: Counter[Hashable] = field(default_factory=Counter)

    def earned(self, kind: Hashable, sample: Callable[[], tuple[Attend, Three, Any]]) -> bool:
        """Whether calls of this ``kind`` may use ``exchanged_gradients``.

        Args:
            kind: whatever compiled code depends on.
            sample: makes a small call that is compiled the same way: forward, inputs, block mask.
        """
        if kind not in self.found:
            wrong = _disagreement(*sample())
            if wrong is None:
                # It showed nothing. Asked again, but not for ever: a sample takes longer than a
                # short backward.
                self.asked[kind] += 1
                if self.asked[kind] >= _TRIES:
                    self.found[kind] = False
                return False
            if wrong:
                self.distrust(kind, wrong)
            else:
                self.found[kind] = True
        return self.found[kind]

    def distrust(self, kind: Hashable, reason: str) -> None:
        """Recompute from now on, and say so."""
        self.found[kind] = False
        warnings.warn(
            f"this torch's FlexAttention does not take another forward's results ({reason}): its "
            "backward recomputes the forward, which is as exact and slower",
            RuntimeWarning,
            stacklevel=3,
        )


def _disagreement(attend: Attend, inputs: Three, block_mask: Any) -> str | None:
    """How both ways disagree, empty if they do not; None where the sample shows nothing."""
    # As it will be called, so that nothing else is compiled.
    leaves = [t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        own_out, own_lse = (t.detach() for t in attend(*leaves, block_mask))
    with torch.no_grad():
        # As if other keys had been merged: any out will do, and any larger lse.
        generator = torch.Generator().manual_seed(1)
        noise = [torch.randn(own_out.shape, generator=generator, device="cpu") for _ in range(2)]
        grad_out, out = (t.to(own_out.device, own_out.dtype) for t in noise)
        more = torch.rand(own_lse.shape, generator=generator, device="cpu")
        lse = own_lse + more.to(own_lse.device)
    rows = Rows(grad_out, own_out + out, lse.contiguous())
    wanted = recomputed_gradients(attend, inputs, block_mask, rows)
    sizes = [float(torch.linalg.vector_norm(t.float())) for t in wanted]
    if not all(sizes):
        return None
    try:
        found = exchanged_gradients(attend, inputs, block_mask, rows)
    except (torch.OutOfMemoryError, _ACCELERATOR_ERROR):
        raise
    except (UnfitError, RuntimeError, AssertionError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    for mine, theirs, size in zip(found, wanted, sizes, strict=True):
        apart = float(torch.linalg.vector_norm(mine.float() - theirs.float()))
        if not apart <= _APART * size:
            return f"gradients are {apart / size:.1e} of their norm apart"
    return ""
