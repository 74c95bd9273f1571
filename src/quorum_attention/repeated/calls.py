"""What is remembered of calls, and how a call is made again."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from quorum_attention.autograd import attend
from quorum_attention.call.request import Request, Tensors
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.repeated.small import Small, small
from quorum_attention.repeated.whole import Whole, whole

# Calls that are remembered; when there are more, all are forgotten. (Under a mask each keeps its
# kernel's tables in page-locked memory, 0.4 MB for 262,144 tokens.)
_MOST = 128
# By what ``like`` calls them; None: they are neither.
_KNOWN: dict[Hashable, Small | Whole | None] = {}


def again(
    name: Hashable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor | None:
    """The output of a call like one that is remembered as ``name``; None: there was none, or there
    is more to this one."""
    known = _KNOWN.get(name)
    if known is None:
        return None
    found = known.output(query, key, value)
    if found is None:
        # It may be another kind of call by now.
        _KNOWN.pop(name, None)
    return found


def output(
    tensors: Tensors,
    request: Request,
    out: torch.Tensor | None,
    name: Hashable | None,
    given: tuple[object, object, object],
) -> torch.Tensor:
    """The output of a call that has been checked; it is remembered.

    Args:
        out: as the caller gave it.
        name: what it is remembered as; None: it is not.
        given: query, key and value as the caller gave them.
    """
    # Of tensors that were broadcast or cast, others like the given ones are not.
    if any(one is not other for one, other in zip(tensors[:3], given, strict=True)):
        name = None
    if not backend_of(request.options.device).own_memory:
        found = small(tensors, request)
        if found is not None:
            if name is not None and tensors.mask is None:
                _note(name, found[0])
            return request.back(found[1])
    elif name is not None and name not in _KNOWN:
        _note(name, whole(tensors, request))
    return attend(tensors, request, out)[0]


def _note(name: Hashable, known: Small | Whole | None) -> None:
    if len(_KNOWN) >= _MOST:
        _KNOWN.clear()
    _KNOWN[name] = known
