"""What is remembered of calls, and how a call is made again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from quorum_attention.autograd import attend
from quorum_attention.call.request import Request, Tensors
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.repeated.likeness import like
from quorum_attention.repeated.recent import again, forget, note
from quorum_attention.repeated.small import Small, small
from quorum_attention.repeated.whole import Whole, gradients_are_ours, whole

# Calls that are remembered; when there are more, all are forgotten. (Under a mask each keeps its
# kernel's tables in page-locked memory, 0.4 MB for 262,144 tokens.)
_MOST = 128
# By what ``like`` calls them; None: they are neither.
_KNOWN: dict[Hashable, Small | Whole | None] = {}


def repeat(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> tuple[torch.Tensor | None, Hashable | None, Small | Whole | None]:
    """Makes a call without other options as one before.

    Returns:
        (output or None, what the call is remembered as, what was tried in vain).
    """
    tried = again(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if tried is not None:
        found = tried.output(query, key, value, attn_mask)
        if found is not None:
            return found, None, None
        forget(tried)
    name = like(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if name is None or tried is not None:
        return None, name, tried
    tried = _KNOWN.get(name)
    if tried is None:
        return None, name, None
    mask = attn_mask if isinstance(attn_mask, torch.Tensor) else None
    found = tried.output(query, key, value, mask)
    if found is not None:
        note(name, (query, key, value, mask), (is_causal, scale, enable_gqa), tried)
    return found, name, tried


def output(
    tensors: Tensors,
    request: Request,
    out: torch.Tensor | None,
    name: Hashable | None,
    given: tuple[object, object, object],
    tried: Small | Whole | None = None,
) -> torch.Tensor:
    """The output of a call that has been checked; it is remembered.

    Args:
        out: as the caller gave it.
        name: what it is remembered as; None: it is not.
        given: query, key and value as the caller gave them.
        tried: what was ``known``, where that was not the whole of this call.
    """
    if tried is not None:
        # It may be another kind of call by now, and one that ran out of memory may do so again: it
        # is remembered by the next call like it that does not.
        _KNOWN.pop(name, None)
        name = None
    # Of tensors that were broadcast or cast, others like the given ones are not.
    if any(one is not other for one, other in zip(tensors[:3], given, strict=True)):
        name = None
    here = not backend_of(request.options.device).own_memory
    if here:
        # Not tried twice: a checkpoint counts what is saved, also of an output that is thrown away.
        found = small(tensors, request) if tried is None else None
        if found is not None and found[1] is not None:
            if name is not None:
                _note(name, found[0])
            return request.back(found[1])
        if found is not None or not gradients_are_ours(request):
            name = None
    if name is not None and name not in _KNOWN:
        one = whole(tensors, request)
        # It is decided: not once more, unless memory runs out. Then it is not remembered either: a
        # short call is decided without asking how much is free.
        made = None if one is None else one.output(*tensors[:4])
        if one is None or made is not None:
            _note(name, one)
        if made is not None:
            return made
    return attend(tensors, request, out)[0]


def forget_all() -> None:
    """Nothing is remembered any more."""
    _KNOWN.clear()
    forget()


def _note(name: Hashable, known: Small | Whole | None) -> None:
    if len(_KNOWN) >= _MOST:
        forget_all()
    _KNOWN[name] = known
