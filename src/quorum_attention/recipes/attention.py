"""Quorum attention as a change of a model: set by name, tried on a few tokens, undone
if it fails.

Some models compute with their attention mask, choose keys beside it, or hand their
attention what only their own function knows. Such a model keeps the attention that it
had.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from quorum_attention.errors import BudgetError
from quorum_attention.integrations.transformers_private import (
    attention_name,
    configurations_in,
    set_attention_name,
)
from quorum_attention.recipes.changes import LeftOutError, ModelPiece
from quorum_attention.recipes.switches import ATTENTION
from quorum_attention.recipes.trials import is_near, some_ids, trying

# Tokens of a trial: more than the largest block that a model of Transformers compresses
# its keys by.
_TRIED_TOKENS = 144
# Two kernels may differ by this many square roots of the dtype's precision.
_ROOTS = 4
# The results that are compared; a model without an output layer has the last.
_RESULTS = ("loss", "logits", "last_hidden_state")

_Outcome = list[torch.Tensor] | Exception
"""What a trial gave, or what it raised."""


class QuorumAttention(ModelPiece):
    """Let a model take its attention by ``name``, unless its results on a few tokens
    change.

    Args:
        attention: the name of an attention that Transformers knows.
        how: what the change says if it is made.
    """

    name = ATTENTION
    repeats = True
    checked = "the model asks for it, and computed a few tokens by it"

    def __init__(self, attention: str, how: str) -> None:
        self.attention = attention
        self._how = how
        self._previous: list[tuple[Any, str | None]] = []

    def make(self, model: Any) -> str:
        """Set the attention, and try the model on a few tokens with it and without it.

        Raises:
            BudgetError: the budget is too small for a few tokens. The model has its own
                attention then.
        """
        self._previous = implementations(model)
        model.set_attn_implementation(self.attention)
        kind = type(model).__name__
        if self.why_lost(model) is not None:
            # Transformers only logs it. Configurations that are of no model may have
            # the name.
            self._leave_out(model, f"{kind} does not take its attention by name")
        if self._is_over_ranks():
            return f"{self._how}; over a group of ranks it was not tried"
        results, expected = self._try_both(model, has_labels=True)
        if isinstance(expected, Exception):
            # A classifier of texts takes other labels than one for each token.
            results, expected = self._try_both(model, has_labels=False)
        if isinstance(expected, Exception):
            reason = f"{type(expected).__name__}: {expected}"
            return f"{self._how}; it was not tried: as it was, {kind} failed: {reason}"
        if isinstance(results, Exception):
            reason = f"{type(results).__name__}: {results}"
            self._leave_out(model, f"{kind} failed with it on a few tokens: {reason}")
        elif not agree(results, expected):
            self._leave_out(model, f"{kind} had other results with it on a few tokens")
        return self._how

    def _try_both(self, model: Any, *, has_labels: bool) -> tuple[_Outcome, _Outcome]:
        """Try a few tokens with this attention and without it. The model has this
        attention afterwards, or its own if there is an error.

        Raises:
            BudgetError: the budget is too small for a few tokens.
        """
        results = _try_model(model, has_labels=has_labels)
        self.undo(model)
        if isinstance(results, BudgetError):
            raise results
        expected = _try_model(model, has_labels=has_labels)
        model.set_attn_implementation(self.attention)
        return results, expected

    def _is_over_ranks(self) -> bool:
        from quorum_attention.integrations.transformers.options import options_of

        options = options_of(self.attention)
        return options is not None and options.group is not None

    def _leave_out(self, model: Any, reason: str) -> NoReturn:
        self.undo(model)
        raise LeftOutError(reason)

    def why_lost(self, model: Any) -> str | None:
        """Look at the names in the model's configurations."""
        names = {attention_name(config) for config in _part_configs(model)}
        if self.attention in names:
            return None
        return f"the model's attention is {', '.join(sorted(map(str, names)))}"

    def undo(self, model: Any) -> None:
        """Let all configurations ask for what they asked for before."""
        for config, name in self._previous:  # an outer one sets those within it
            set_attention_name(config, name)


def _part_configs(model: Any) -> list[Any]:
    """The configurations of a model and of the models within it, outer ones first."""
    return [
        part.config
        for part in model.modules()
        if hasattr(part, "set_attn_implementation")
    ]


def implementations(model: Any) -> list[tuple[Any, str | None]]:
    """The configurations of a model and of its parts, outer ones first, each with the
    name of its attention."""
    names: dict[int, tuple[Any, str | None]] = {}
    for part_config in _part_configs(model):
        for config in configurations_in(part_config):
            name = attention_name(config)
            names.setdefault(id(config), (config, name))
    return list(names.values())


def _try_model(model: Any, *, has_labels: bool) -> _Outcome:
    """The results of a few tokens (those of ``_RESULTS`` that there are), or what was
    raised."""
    try:
        inputs = {"input_ids": some_ids(model, _TRIED_TOKENS)}
        if has_labels:
            inputs["labels"] = inputs["input_ids"]
        with trying(model):
            output = model(**inputs)
        results = [getattr(output, name, None) for name in _RESULTS]
        return [result for result in results if isinstance(result, torch.Tensor)]
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
        if not is_near(exact, value, _ROOTS * precision**0.5):
            return False
    return True
