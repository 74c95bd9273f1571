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
        padding: (batch, n_tokens), the ``attention_mask`` of the prompt as booleans, or
            None.
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
        layer: ``layer(number, call)``, which runs in place of each decoder layer; None:
            layers run as they are (``recipes.layer_calls``).
        attention_rows: (batch, heads, tokens, value_dim), of which attention modules
            return the output projection; None: they run as they are.
    """

    attention: Callable[..., torch.Tensor] | None = None
    prompt: WholePrompt | None = None
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
        for name, part in parts.items():
            setattr(substitutes, name, part)
        yield
    finally:
        for name, part in outside.items():
            setattr(substitutes, name, part)
