"""What forwards of changed models run in place of parts of their own.

A part of a model asks ``substitutes`` when it is called: the attention function, the
mask function, and the decoder layers, attention modules and output layers whose class
was changed. Nothing else is handed to a model behind its arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Substitutes(
    threading.local
):  # torch's compiler reads it; a ContextVar breaks its graphs
    """The substitutes of this thread.

    Attributes:
        attention: ``attention(call, query, key, value, attention_mask)`` -> (batch,
            heads, queries, value_dim), which ``call`` computes of the other arguments;
            None: attention is computed.
        append: ``append(update, key, value, layer_idx)`` -> the cache's keys and
            values, which ``update`` computes of the other arguments; None: a
            ``PromptCache`` appends.
        prompt: of which forwards see some tokens, while masks are made for all of its
            ``n_tokens`` and ``padding``; None: forwards see all their tokens
            (``recipes.prompt_inputs``).
        labelled_call: the innermost call with labels, which puts its output layer off,
            or None (``recipes.chunked_loss``).
        layer: ``layer(number, call)``, which runs in place of each decoder layer; None:
            layers run as they are (``recipes.layer_calls``).
        attention_rows: (batch, heads, tokens, value_dim), of which attention modules
            return the output projection; None: they run as they are.
    """

    attention: Callable[..., torch.Tensor] | None = None
    append: Callable[..., Any] | None = None
    prompt: Any = None
    labelled_call: Any = None
    layer: Callable[[int, Any], Any] | None = None
    attention_rows: torch.Tensor | None = None


substitutes = _Substitutes()


@contextmanager
def substituting(**parts: Any) -> Iterator[None]:
    """Let this thread's forwards run these substitutes, by the names of
    ``substitutes``."""
    outside = {name: getattr(substitutes, name) for name in parts}
    try:
        vars(substitutes).update(parts)
        yield
    finally:
        # One step: an interrupt between two would leave a substitute for good.
        vars(substitutes).update(outside)
