"""What forwards of changed models run in place of parts of their own.

A part of a model asks ``substitutes`` when it is called: the attention function, the
mask function, and the decoder layers, attention modules and output layers whose class
was changed. Nothing else is handed to a model behind its arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class WholePrompt:
    """The prompt that forwards see some tokens of. Masks are made for all of them.

    Attributes:
        n_tokens: of the prompt, which begins an empty cache.
        padding: (batch, n_tokens), the ``attention_mask`` of the prompt, or None.
    """

    n_tokens: int
    padding: torch.Tensor | None = None


class _Substitutes(
    threading.local
):  # torch's compiler reads it; a ContextVar breaks its graphs
    """The substitutes of this thread.

    Attributes:
        attention: ``attention(call, query, key, value, attention_mask)`` -> (batch,
            heads, queries, value_dim), which ``call`` computes of the other arguments;
            None: attention is computed.
        prompt: whose masks are made; None: forwards see all their tokens.
        labelled_call: the innermost call with labels, which puts its output layer off,
            or None (``recipes.chunked_loss``).
    """

    attention: Callable[..., torch.Tensor] | None = None
    prompt: WholePrompt | None = None
    labelled_call: Any = None


substitutes = _Substitutes()


@contextmanager
def attention_replaced_by(function: Callable[..., Any]) -> Iterator[None]:
    """Let layers call ``function(call, query, key, value, mask)`` in place of their
    attention.

    ``call`` of the other arguments computes the attention: (batch, heads, queries,
    value_dim).
    """
    outside = substitutes.attention
    substitutes.attention = function
    try:
        yield
    finally:
        substitutes.attention = outside


@contextmanager
def prompt_masks(n_tokens: int, padding: torch.Tensor | None) -> Iterator[None]:
    """Let masks that a model makes of a tile be those of the whole prompt."""
    is_token = None if padding is None else padding.bool()
    substitutes.prompt = WholePrompt(n_tokens, is_token)
    try:
        yield
    finally:
        substitutes.prompt = None
