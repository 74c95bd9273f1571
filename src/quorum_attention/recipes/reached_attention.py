"""A layer that runs up to its attention, and the attention computed somewhere else.

A layer that is computed tile by tile runs twice for each tile: up to its attention, and
from its attention on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class ReachedAttentionError(Exception):
    """Ends a layer's forward at its attention.

    Attributes:
        call: the attention, without its query, key and value.
        heads: query, key and value, (batch, heads, tokens, head_dim).
    """

    def __init__(self, call: Any, heads: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.heads = heads


def reach_attention(run: Callable[..., Any]) -> ReachedAttentionError:
    """Run a layer up to its attention.

    Args:
        run: runs the layer, with its argument in place of the layer's attention.

    Raises:
        NotImplementedError: the layer has no attention that can be replaced.
    """
    try:
        run(_stop)
    except ReachedAttentionError as reached:
        return reached.with_traceback(None)
    raise NotImplementedError("a layer has no attention that can be replaced")


def _stop(call: Any, query: Any, key: Any, value: Any, *mask: Any) -> torch.Tensor:
    """End a layer's forward, in place of its attention."""
    raise ReachedAttentionError(partial(call, *mask), (query, key, value))


def attend_where_heads_are(
    call: Any, heads: Sequence[torch.Tensor], **extra: Any
) -> torch.Tensor:
    """Compute the attention of a layer on the device of ``heads``.

    Args:
        call: the attention, as it was reached.
        heads: query, key and value of all tokens.
        extra: further arguments of the attention function.
    """
    device = heads[0].device
    # The mask is the argument behind query, key and value.
    options, module, *mask = call.args
    named = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), call.keywords)
    output: torch.Tensor = call.func(
        options,
        module,
        *heads,
        *mask,
        **named,
        **extra,
    )
    return output
