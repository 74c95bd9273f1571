"""Plain attention calls of a rank that are one kernel call: made again as they were.

To decide how a pass is run takes the host longer than to launch it, and of a backward it may ask
how much memory is free, which waits for the device. A rank's device waits for its host at each
call, so what was decided is kept (``repeated/whole.py``); where memory runs out it is decided anew.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from quorum_attention.call.options import Written
from quorum_attention.call.request import request_of
from quorum_attention.execution.memory import is_out_of_memory
from quorum_attention.repeated import like
from quorum_attention.repeated.whole import Whole, whole

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Calls that are remembered; when there are more, all are forgotten.
_MOST = 128
# None: such a call is not one kernel call.
_KNOWN: dict[Hashable, Whole | None] = {}


def forward(
    three: _Three,
    causal: bool,
    scale: float | None,
    held: dict[Hashable, Whole] | None = None,
    at: Hashable = None,
) -> tuple[torch.Tensor, ...] | None:
    """(out, lse) of query, key and value, whose gradients nobody records; None: it is to be decided
    as any other call.

    Args:
        held: of calls that are alike in all that is looked at here, what is known of each, by name;
            to be filled.
        at: what this one is called there.
    """
    name, known = None, None if held is None else held.get(at)
    if known is None:
        name = _name(three, causal, scale)
        if name is None:
            return None
        if name not in _KNOWN:
            tensors, request = request_of(
                "attention", *three, None, 0.0, None, causal, scale, True, None, None, Written()
            )
            if len(_KNOWN) >= _MOST:
                _KNOWN.clear()
            _KNOWN[name] = whole(tensors, request)
        known = _KNOWN[name]
        if known is None:
            return None
        if held is not None:
            held[at] = known
    try:
        return known.forward(*three)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # The next one is decided by what is free then.
    _KNOWN.pop(_name(three, causal, scale), None)
    if held is not None:
        held.pop(at, None)
    return None


def backward(
    three: _Three,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, ...] | None:
    """The gradients of query, key and value of such a call; None: as ``forward``."""
    name = _name(three, causal, scale)
    known = None if name is None else _KNOWN.get(name)
    return None if known is None else known.backward(grad_out, three, out, lse)


def _name(three: _Three, causal: bool, scale: float | None) -> Hashable | None:
    name = like(*three, None, causal, scale, True)
    # With the number of keys, which ``like`` may round up.
    return None if name is None else (name, three[1].shape[2])


__all__ = ["backward", "forward"]
