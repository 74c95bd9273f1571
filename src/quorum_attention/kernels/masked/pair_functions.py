"""Users' functions of single pairs, mapped over all pairs by torch.vmap.

A function is written for single numbers, as in FlexAttention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from quorum_attention.kernels.torch_private import no_torch_modes

MaskMod = Callable[[Any, Any, Any, Any], torch.Tensor]
"""Whether a pair is kept: of batch, head, query and key."""
ScoreMod = Callable[[Any, Any, Any, Any, Any], torch.Tensor]
"""The score of a pair: of score, batch, head, query and key."""


def over_pairs(
    function: Callable[..., Any], scored: bool = False
) -> Callable[..., torch.Tensor]:
    """``function`` of batch, head, query, key mapped over (b, h, q, k); ``scored``: of
    score, too.

    Where its result does not depend on a dimension, the dimension is expanded (stride
    0).

    Raises:
        TypeError: when it is called, for a result that is not one score, or one bool,
            for each pair: numbers of a mask would be joined with others bit by bit.
    """
    checked = score(function) if scored else boolean(function)
    return _mapped(checked, scored=scored)


def _mapped(
    function: Callable[..., Any], *, scored: bool
) -> Callable[..., torch.Tensor]:
    mapped = indexing(function)
    # From the innermost dimension outwards.
    for axis in (3, 2, 1, 0):
        dims: list[int | None] = [None] * 4
        dims[axis] = 0
        if scored:
            dims = [0, *dims]
        mapped = torch.vmap(mapped, in_dims=tuple(dims))
    return mapped


def indexing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which may read a tensor at a number that torch.vmap maps over, as
    in ``slopes[h]``; torch 2.10 and before would ask for the number."""

    def call(*at: torch.Tensor) -> Any:
        with _Indexing():
            return function(*at)

    return call


class _Indexing(TorchFunctionMode):
    """Reads tensors at tensors by ``aten::index``, which can be mapped."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # see TorchFunctionMode
        if func is torch.Tensor.__getitem__:
            tensor, indices = args
            if not isinstance(indices, tuple):
                indices = (indices,)
            if indices and all(isinstance(index, torch.Tensor) for index in indices):
                return torch.ops.aten.index(tensor, indices)
        return func(*args, **(kwargs or {}))


def boolean(mask_mod: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """``mask_mod``, whose result has to be a bool for each pair."""
    return _checked(
        mask_mod,
        lambda dtype: dtype == torch.bool,
        "a mask function (mask_mod, Mask.keeps) must return a tensor of torch.bool",
    )


def score(score_mod: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """``score_mod``, whose result has to be a number for each pair. A bool is none: its
    function is a mask's."""
    return _checked(
        score_mod,
        lambda dtype: dtype != torch.bool and not dtype.is_complex,
        "a score function (score_mod) must return a tensor of real numbers",
    )


def _checked(
    function: Callable[..., Any],
    is_right: Callable[[torch.dtype], bool],
    requirement: str,
) -> Callable[..., torch.Tensor]:
    """Return ``function``, which raises a TypeError if its result has another dtype
    than is right, or dimensions that the tensors it gets have not."""

    def call(*at: torch.Tensor) -> torch.Tensor:
        result = function(*at)
        description = type(result).__name__
        if isinstance(result, torch.Tensor):
            n_dims = max(tensor.dim() for tensor in at)
            if is_right(result.dtype) and result.dim() <= n_dims:
                return result
            description = f"{result.dtype} of shape {tuple(result.shape)}"
        raise TypeError(
            f"{requirement} from the tensors it gets, with no dimensions of its own, "
            f"got {description}"
        )

    return call


@no_torch_modes()
def depends_on_batch_head(
    function: Callable[..., Any], device: torch.device
) -> tuple[bool, bool]:
    """Whether a mask differs between batch entries, and between heads."""
    mapped = over_pairs(function)
    # Entries and heads have size 2: the stride of a dimension of size 1 tells nothing.
    lanes = torch.zeros(2, dtype=torch.int64, device=device)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    result = mapped(lanes, lanes, token, token)
    return result.stride(0) != 0, result.stride(1) != 0
