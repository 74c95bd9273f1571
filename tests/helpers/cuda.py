"""Both passes of a call on a GPU, and how far they are from float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from helpers.attention import Inputs, exact
from helpers.passes import both_passes

NAMES = ("out", "query", "key", "value")
Results = Mapping[str, torch.Tensor]


def both(
    given: Inputs,
    pins: Sequence[Mapping[str, Any]] = ({}, {}),
    *,
    mask: Any = None,
    **call: Any,
) -> Results:
    """The output and the gradients; ``pins``: more options of either pass."""
    call = {"attn_mask": mask, "enable_gqa": True, "devices": "cuda", **call}
    out, _, *grads = both_passes(given, pins, **call)
    return dict(zip(NAMES, (out, *grads), strict=True))


def errors(results: Results, given: Inputs, **call: Any) -> dict[str, float]:
    """Of each result: the norm of what it is off, as a share of its norm."""
    on_device = Inputs(*(t.cuda() for t in (*given.three, given.grad_out)))
    reference = exact(on_device, gradients=True, **call)
    assert reference.grads is not None
    found = {}
    for name, wanted in zip(NAMES, (reference.out, *reference.grads), strict=True):
        assert bool(results[name].isfinite().all()), name
        off = results[name].cuda().double() - wanted
        found[name] = (off.norm() / wanted.norm().clamp_min(1e-2)).item()
    return found
