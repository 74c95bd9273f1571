"""Users' functions of single pairs, mapped over all pairs by torch.vmap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from quorum_attention.kernels.kit.masks import BlockMask, MaskMod
from quorum_attention.kernels.torch_private import outside


def over_pairs(function: Callable[..., Any], scored: bool = False) -> Callable[..., torch.Tensor]:
    """``function`` of batch, head, query, key mapped over (b, h, q, k); ``scored``: of score, too.

    The function is written for single numbers, as in FlexAttention. Where its result does not
    depend on a dimension, the dimension is expanded (stride 0).

    Raises:
        TypeError: when it is called, for a mask that returns anything but booleans: numbers would
            be joined with others bit by bit.
    """
    return _mapped(function, [0]) if scored else _mapped(boolean(function), [])


def _mapped(function: Callable[..., Any], first: list[int]) -> Callable[..., torch.Tensor]:
    found = indexing(function)
    # From the innermost dimension outwards.
    for axis in (3, 2, 1, 0):
        dims = [0 if i == axis else None for i in range(4)]
        found = torch.vmap(found, in_dims=(*first, *dims))
    return found


def indexing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which may read a tensor at a number that torch.vmap maps over, as in
    ``slopes[h]``; torch 2.10 and before would ask for the number."""
    if _vmap_reads_tensors():
        return function

    def call(*at: torch.Tensor) -> Any:
        with _Indexing():
            return function(*at)

    return call


class _Indexing(TorchFunctionMode):
    """Tensors are read at tensors by ``aten::index``, which can be mapped."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # see TorchFunctionMode
        if func is torch.Tensor.__getitem__:
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            if at and all(isinstance(one, torch.Tensor) for one in at):
                return torch.ops.aten.index(args[0], at)
        return func(*args, **(kwargs or {}))


@functools.cache
@outside()
def _vmap_reads_tensors() -> bool:
    numbers = torch.arange(2, device="cpu")
    try:
        torch.vmap(lambda number: numbers[number])(numbers)
    except RuntimeError:
        return False
    return True


def boolean(mask_mod: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """``mask_mod``, whose result has to be a tensor of bool."""

    def checked(*at: torch.Tensor) -> torch.Tensor:
        kept = mask_mod(*at)
        if isinstance(kept, torch.Tensor) and kept.dtype == torch.bool:
            return kept
        got = kept.dtype if isinstance(kept, torch.Tensor) else type(kept).__name__
        raise TypeError(
            "a mask function (mask_mod, Mask.keeps) must return a tensor of torch.bool from the "
            f"tensors it gets, got {got}"
        )

    return checked


@outside()
def depends_on_batch_head(
    function: Callable[..., Any], device: torch.device, scored: bool = False
) -> tuple[bool, bool]:
    """Whether a mask, or a score modification (``scored``), differs between batch entries, and
    between heads."""
    if isinstance(function, BlockMask):
        function = function.on(device)
    if scored:
        score = torch.zeros((), dtype=torch.float32, device=device)
        mapped = _mapped(functools.partial(function, score), [])
    else:
        mapped = over_pairs(function)
    # Each dimension has size 2: the stride of a dimension of size 1 tells nothing.
    twice, once = (torch.zeros(n, dtype=torch.int64, device=device) for n in (2, 1))
    found = mapped(twice, twice, once, once)
    return found.stride(0) != 0, found.stride(1) != 0


# FlexAttention's result with materialised scores.

ScoreMod = Callable[[Any, Any, Any, Any, Any], torch.Tensor]


def materialised(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's (out, lse) with materialised scores; differentiable.

    It is used where FlexAttention has no backward (on the CPU) or no kernel (for float64).
    Modifications may be written for single numbers, as in FlexAttention: they are mapped over all
    pairs.

    Args:
        query, key, value: (b, h, nq, d), (b, hk, nk, d), (b, hk, nk, dv), any floating dtype.
        score_mod, mask_mod: get indices into these tensors, not global positions.
        scale: factor of the scores.

    Returns:
        out (b, h, nq, dv) in the input dtype, lse (b, h, nq) in fp32 or fp64, -inf in rows that
        keep nothing.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
    work = torch.promote_types(query.dtype, torch.float32)
    scores = scale * (query.to(work) @ key.to(work).mT)
    at = [torch.arange(size, device=query.device) for size in scores.shape]
    if score_mod is not None:
        scores = over_pairs(score_mod, scored=True)(scores, *at).to(work)
    if mask_mod is not None:
        kept = over_pairs(mask_mod)(*at)
        scores = scores.masked_fill(~kept, -torch.inf)
        # In a row that keeps nothing, any finite lse makes all probabilities 0.
        some = kept.any(dim=-1)
        lse = torch.logsumexp(scores.masked_fill(~some.unsqueeze(-1), 0.0), dim=-1)
        p = torch.exp(scores - lse.unsqueeze(-1))
        lse = lse.masked_fill(~some, -torch.inf)
    else:
        lse = torch.logsumexp(scores, dim=-1)
        p = torch.exp(scores - lse.unsqueeze(-1))
    return (p @ value.to(work)).to(query.dtype), lse
