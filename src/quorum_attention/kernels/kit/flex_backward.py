"""The backward of FlexAttention with the whole row's output and log-sum-exp.

A task's gradients follow from the *whole row's* O and lse, as in FlashAttention's backward:

    P = exp(S - lse),   dS = P (dO V^T - rowsum(dO O)).

FlexAttention's compiled backward computes exactly that from the out and lse that its forward saved,
but torch has no function that calls it alone. So the forward is run with a block mask that lists no
block, which costs next to nothing. When the backward reads the saved tensors, they are exchanged:
the empty block counts for the real ones, and the forward's out and lse for those of the whole row
(lse in base 2, as FlexAttention saves it). This avoids running the forward a second time.

It depends on what torch saves. So the exchanged tensors are counted, and before the method is used
its gradients are compared with recomputed ones (``recomputed_gradients``) on a sample (``Trust``).
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import e, log2
from typing import Any

import torch

from quorum_attention.kernels.kit.function import upstream_of

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``attend(query, key, value, block_mask) -> (out, lse)``, differentiable."""

_LOG2_E = log2(e)
# Accepted difference, a share of the norm: far above rounding, far below that of a wrong exchange.
_APART = 0.03
_TRIES = 3
# Errors that the device reports; they say nothing about the exchange.
_ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)


class UnfitError(Exception):
    """FlexAttention did not save the tensors that are to be exchanged."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What a backward gets of the whole rows.

    grad_out, out (b, h, nq, dv) in the input dtype, lse (b, h, nq) in fp32, -inf in rows without
    any key.
    """

    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def recomputed_gradients(attend: Attend, inputs: Three, block_mask: Any, rows: Rows) -> Three:
    """Gradients of query, key and value by autograd through another forward of the task."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    with _recording():
        own_out, own_lse = attend(*leaves, block_mask)
    upstream = upstream_of(own_out, own_lse, rows.grad_out, rows.out, rows.lse)
    query, key, value = torch.autograd.grad((own_out, own_lse), leaves, upstream)
    return query, key, value


def exchanged_gradients(attend: Attend, inputs: Three, block_mask: Any, rows: Rows) -> Three:
    """The same gradients without that forward (see above).

    Raises:
        UnfitError: a tensor to exchange was not saved, or saved more than once.
    """
    real = (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks)
    nothing = [torch.zeros_like(t) for t in real]
    empty = copy.copy(block_mask)
    empty.kv_num_blocks, empty.full_kv_num_blocks = nothing
    leaves = [t.detach().requires_grad_() for t in inputs]
    exchange = _Exchange(real, nothing, rows)
    with _recording(exchange.taken_up):
        own_out, _ = attend(*leaves, empty)
    exchange.own_out = own_out.detach()
    query, key, value = torch.autograd.grad(own_out, leaves, rows.grad_out)
    exchange.check()
    return query, key, value


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def _recording(taken_up: Callable[[torch.Tensor], torch.Tensor] = _as_it_is) -> Iterator[None]:
    """Records a graph of our own: the caller's hooks see none of its tensors, which a checkpoint
    would count."""
    # Without its graph: a saved output would hold the graph that has it, for good.
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, taken_up)
    with torch.enable_grad(), hooks:
        yield


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
            # A new tensor, because compiled code may overwrite it. Rows without any key get 0 in
            # place of -inf, which would give NaN; they have no unmasked score.
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
    """For which kinds of calls the exchange has been tried, and whether it was right."""

    found: dict[Hashable, bool] = field(default_factory=dict)
    asked: Counter[Hashable] = field(default_factory=Counter)

    def earned(self, kind: Hashable, sample: Callable[[], tuple[Attend, Three, Any]]) -> bool:
        """Whether calls of this ``kind`` may use ``exchanged_gradients``.

        Args:
            kind: all that the compiled code depends on.
            sample: makes a small call that is compiled the same way: (attend, inputs, block mask).
        """
        if kind not in self.found:
            wrong = _disagreement(*sample())
            if wrong is None:
                # The sample was inconclusive. It is tried again, but only a few times, because it
                # takes longer than a short backward.
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
        """Recompute gradients of this kind from now on, with a warning."""
        self.found[kind] = False
        warnings.warn(
            f"this torch's FlexAttention does not take another forward's results ({reason}): its "
            "backward recomputes the forward, which is as exact and slower",
            RuntimeWarning,
            stacklevel=3,
        )


def _disagreement(attend: Attend, inputs: Three, block_mask: Any) -> str | None:
    """How the two methods disagree, "" if they agree; None if the sample is inconclusive."""
    # Called exactly as the real call will be, so that nothing else is compiled.
    leaves = [t.detach().requires_grad_() for t in inputs]
    with _recording():
        own_out, own_lse = (t.detach() for t in attend(*leaves, block_mask))
    with torch.no_grad():
        # As if other keys had been merged: any out, and any larger lse.
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
