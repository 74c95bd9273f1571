"""Trials of modules on a few drawn tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook

from quorum_attention.kernels.torch_private import compiled_run_eagerly

# Ids of trials have few values, because large ones may stand for images.
_N_VALUES = 11
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks look on while a module or a part of it runs. They see whole
    tensors, and may do anything to them."""
    if _has_any_global_hook():
        return True
    return any(getattr(part, hooks) for part in module.modules() for hooks in _HOOKS)


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Put a module in evaluation; afterwards each part has its own mode again.

    Modes are set part by part: some modules' ``eval`` does more (it merges adapters).
    """
    trained = [part for part in module.modules() if part.training]
    try:
        for part in trained:
            part.training = False
        yield
    finally:
        for part in trained:
            part.training = True


@contextmanager
def trying(module: torch.nn.Module) -> Iterator[None]:
    """Run a module for a trial: in evaluation, without gradients, uncompiled.

    Weights that autocast casts meanwhile are not kept: torch 2.8 would hand them to the
    step that the trial is for, and these weights would get no gradients.
    """
    is_caching = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        with torch.no_grad(), evaluating(module), compiled_run_eagerly():
            yield
    finally:
        torch.set_autocast_cache_enabled(is_caching)


def failure_words(error: Exception) -> str:
    """Say that a trial has failed, whatever was raised in it."""
    return f"it failed on a few tokens: {type(error).__name__}: {error}"


def result_like(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Return what a module returns of ``x`` in evaluation, or None if it takes no such
    tensor, or returns no tensor of the same shape and dtype."""
    try:
        with trying(module):
            result = module(x)
    except Exception:  # whatever it is
        return None
    if not isinstance(result, torch.Tensor):
        return None
    is_like = result.shape == x.shape and result.dtype == x.dtype
    return result if is_like else None


def some_ids(model: Any, n_tokens: int) -> torch.Tensor:
    """Return ids of a text for a decoder, (1, n_tokens)."""
    table = model.get_input_embeddings().weight
    device = "cpu" if table.is_meta else table.device
    n_values = min(_N_VALUES, len(table))
    return torch.arange(n_tokens, device=device)[None] % n_values


def is_near(
    tensor: torch.Tensor, approximation: torch.Tensor, tolerance: float
) -> bool:
    """Whether the distance of two tensors is small beside the first one's norm."""
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    distance = norm(tensor.detach() - approximation)
    return bool(distance <= tolerance * norm(tensor.detach()))


def differ_by_rounding(tensor: torch.Tensor, approximation: torch.Tensor) -> bool:
    """Whether no element of two tensors differs by more than some roundings of the
    largest element."""
    distance = (tensor - approximation).abs().max()
    rounding = torch.finfo(tensor.dtype).eps * tensor.abs().max()
    return bool(distance <= 100 * rounding)


def drawn(*sizes: int) -> torch.Tensor:
    """Return normal numbers in float64, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sizes, generator=generator, device="cpu", dtype=torch.float64)
