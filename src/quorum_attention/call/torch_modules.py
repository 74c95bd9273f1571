"""Torch's attention modules while ``scaled_dot_product_attention`` is replaced.

``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` have two ways around that
function. In evaluation they take a fast path, an operator of its own. And if weights
are asked for, which is the default of ``nn.MultiheadAttention``, a softmax makes a
tensor of queries x keys. A replacement switches the fast path off, and is told of calls
that ask for weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any

import torch

_lock = Lock()


class _FastPath:
    """The switch of torch's fast path, which is of the whole process.

    Attributes:
        n_users: how many replacements need it off.
        was_enabled: whether it was on before the first of them.
    """

    n_users = 0
    was_enabled = True


def switch_fast_path_off() -> None:
    """Switch torch's fast path off until ``restore_fast_path`` was called as often as
    this."""
    with _lock:
        if _FastPath.n_users == 0:
            _FastPath.was_enabled = torch.backends.mha.get_fastpath_enabled()
        _FastPath.n_users += 1
        torch.backends.mha.set_fastpath_enabled(False)


def restore_fast_path() -> None:
    """Undo one ``switch_fast_path_off``. A fast path that somebody else switched on
    stays on."""
    with _lock:
        _FastPath.n_users -= 1
        if _FastPath.n_users == 0 and not torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(_FastPath.was_enabled)


def watch_weights(
    original: Callable[..., Any],
    on_weights: Callable[[torch.Tensor, torch.Tensor], None],
) -> Callable[..., Any]:
    """``torch.nn.functional.multi_head_attention_forward`` that reports calls with
    weights.

    Args:
        original: the function that computes.
        on_weights: called with query and key, (tokens, batch, width), before a call
            that makes weights of queries x keys.
    """
    signature = inspect.signature(original)

    @wraps(original, updated=())  # its attributes say whose replacement it is
    def multi_head_attention_forward(*args: Any, **named: Any) -> Any:
        arguments = signature.bind_partial(*args, **named).arguments
        if arguments.get("need_weights", True) and {"query", "key"} <= arguments.keys():
            on_weights(arguments["query"], arguments["key"])
        return original(*args, **named)

    return multi_head_attention_forward
