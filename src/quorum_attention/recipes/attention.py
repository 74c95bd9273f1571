"""Quorum attention as a change of a model: set by name, tried on a few tokens, undone if it fails.

Some models compute with their attention mask, choose keys beside it, or hand their attention what
only their own function knows. Such a model keeps the attention that it had.
"""

from __future__ import annotations

from typing import Any

import torch

from quorum_attention.errors import BudgetError
from quorum_attention.recipes.patching import Change, evaluating
from quorum_attention.recipes.step import ATTENTION

# Tokens of a trial: more than the largest block that a model of Transformers compresses its keys
# by. They have few values, because large ones may stand for images.
_TRIED_TOKENS = 144
_TRIED_VALUES = 11
# Two kernels may differ by this many square roots of the dtype's precision.
_ROOTS = 4


def set_attention(model: Any, name: str, how: str) -> Change:
    """Let ``model`` take its attention by ``name``, unless its results on a few tokens change.

    Args:
        model: a ``PreTrainedModel``.
        name: of an attention that Transformers knows.
        how: what the change says if it is made.

    Raises:
        BudgetError: the budget is too small for a few tokens. The model has its own attention then.
    """
    from quorum_attention.integrations.transformers.options import options_of

    before = implementations(model)
    model.set_attn_implementation(name)
    kind = type(model).__name__
    if name not in {config._attn_implementation for config in _part_configs(model)}:
        # Transformers only logs it. Configurations that are of no model may have the name.
        restore_implementations(before)
        return Change(ATTENTION, False, f"{kind} does not take its attention by name")
    options = options_of(name)
    if options is not None and options.group is not None:
        return Change(ATTENTION, True, f"{how}; over a group of ranks it was not tried")
    results = _try_model(model)
    restore_implementations(before)
    if isinstance(results, BudgetError):
        raise results
    expected = _try_model(model)
    if isinstance(expected, Exception):
        model.set_attn_implementation(name)
        why = f"{type(expected).__name__}: {expected}"
        return Change(ATTENTION, True, f"{how}; it was not tried: as it was, {kind} failed: {why}")
    if isinstance(results, Exception):
        why = f"{kind} failed with it on a few tokens: {type(results).__name__}: {results}"
        return Change(ATTENTION, False, why)
    if not agree(results, expected):
        return Change(ATTENTION, False, f"{kind} had other results with it on a few tokens")
    model.set_attn_implementation(name)
    return Change(ATTENTION, True, how)


def _part_configs(model: Any) -> list[Any]:
    """The configurations of a model and of the models within it, outer ones first."""
    return [part.config for part in model.modules() if hasattr(part, "set_attn_implementation")]


def implementations(model: Any) -> list[tuple[Any, str | None]]:
    """The configurations of a model and of its parts, outer ones first, each with the name of its
    attention."""
    todo = _part_configs(model)
    names: dict[int, tuple[Any, str | None]] = {}
    while todo:
        config = todo.pop(0)
        names.setdefault(id(config), (config, config._attn_implementation))
        parts = [getattr(config, key, None) for key in config.sub_configs]
        todo += [part for part in parts if part is not None and id(part) not in names]
    return list(names.values())


def restore_implementations(previous: list[tuple[Any, str | None]]) -> None:
    """Undo ``set_attn_implementation``, which does not take all names that it replaces (None)."""
    for config, name in previous:  # an outer one sets those within it
        config._attn_implementation = name


def _try_model(model: Any) -> list[torch.Tensor] | Exception:
    """The loss and the logits (those that there are) of a few tokens, or what was raised."""
    try:
        words = model.get_input_embeddings().weight
        device = "cpu" if words.device.type == "meta" else words.device
        values = min(_TRIED_VALUES, len(words))
        ids = torch.arange(_TRIED_TOKENS, device=device)[None] % values
        with torch.no_grad(), evaluating(model):
            output = model(input_ids=ids, labels=ids)
        named = {name: getattr(output, name, None) for name in ("loss", "logits")}
        return [value for value in named.values() if isinstance(value, torch.Tensor)]
    except Exception as error:  # whatever it is, the model keeps its own attention
        # The traceback would keep the model's tensors.
        return error.with_traceback(None)


def agree(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether two runs gave the same but for rounding, which experts amplify."""
    if [value.shape for value in results] != [value.shape for value in expected]:
        return False
    for value, exact in zip(results, expected, strict=True):
        # Norms and losses of models are in float32 at most.
        precision = max(torch.finfo(exact.dtype).eps, torch.finfo(torch.float32).eps)
        room = _ROOTS * precision**0.5
        distance = torch.linalg.vector_norm((value - exact).float())
        if not bool(distance <= room * torch.linalg.vector_norm(exact.float())):
            return False
    return True
