"""Whether a kernel that would have to be built first is worth it yet.

Another kernel than the preferred one may be faster, and have to be compiled for seconds before its
first call: a call of 0.2 s must not pay 4 s. How many calls there will be nobody knows. So it is
done as by someone who rents skis until the rent comes to what buying them would have cost: calls
run on the preferred kernel until what they have lost by that, by prediction, comes to what building
takes. Then it is built. Whatever their number, calls lose no more than twice what they have to.

Which kernel runs a call then depends on the calls before it, and results may differ in their last
bits. Where calls have to be alike (parts of a call from files to files, and of one on several
devices; torch's deterministic algorithms) the faster kernel is built at once (``alike``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from quorum_attention.kernels.probe import building_left
from quorum_attention.kernels.protocol import CallShape, InnerKernel
from quorum_attention.planner.cost import Cost
from quorum_attention.sizes import format_seconds

_Kind = tuple[int, torch.device, torch.dtype, int, int, bool]
_lost: dict[_Kind, float] = {}
"""Predicted seconds that calls of a kind have lost without a kernel."""
_prepared: set[tuple[object, ...]] = set()
"""What has run instead: its own shapes are prepared."""
_there: set[_Kind] = set()
"""Kinds for which nothing has to be built any more."""
# Kinds, and what ran, that are remembered.
_MOST = 1024
_alike: ContextVar[bool] = ContextVar("_alike", default=False)


@contextmanager
def alike() -> Iterator[None]:
    """Within this, in this thread, what is decided does not depend on calls before."""
    token = _alike.set(True)
    try:
        yield
    finally:
        _alike.reset(token)


def not_yet(
    kernel: InnerKernel,
    call: CallShape,
    device: torch.device,
    instead: tuple[object, ...],
    slower: Cost,
    faster: Cost,
    *,
    counts: bool,
) -> str | None:
    """Why a pass should not run on ``kernel`` yet, in words; None if it should.

    Args:
        kernel: what is predicted to be faster.
        call: a call of the pass.
        instead: stands for what runs instead, shapes and kernel.
        slower, faster: the pass's costs without and with ``kernel``.
        counts: whether the pass is going to run; otherwise it is only asked.
    """
    kind = id(kernel), device, call.dtype, call.head_dim, call.value_dim, call.needs_grad
    if kind in _there or _alike.get() or torch.are_deterministic_algorithms_enabled():
        return None
    left = building_left(kernel, call, device)
    if not left:
        _forget_all_of_too_many()
        _there.add(kind)
        return None
    loses = slower.seconds - faster.seconds
    if instead not in _prepared:
        loses += slower.preparation
    lost = _lost.get(kind, 0.0) + loses
    if lost >= left:
        return None
    if counts:
        _forget_all_of_too_many()
        _lost[kind] = lost
        _prepared.add(instead)
    return (
        f"{kernel.name} would take {format_seconds(faster.seconds)}, and "
        f"{format_seconds(left)} to be built first: not for so few calls"
    )


def _forget_all_of_too_many() -> None:
    for remembered in (_lost, _prepared, _there):
        if len(remembered) >= _MOST:
            remembered.clear()
