"""One pass of a call, or both, and the smallest budget that a call works in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import quorum_attention as qa
from helpers.attention import Inputs

# Of the call itself: the plain call whose results a backward reads has them as well.
_OF_THE_CALL = ("attn_mask", "is_causal", "scale", "enable_gqa")


def pass_of(
    given: Inputs, backward: bool, results: Any = None, **call: Any
) -> partial[tuple[torch.Tensor, ...]]:
    """One pass, to be run, with more options if it is given some. A backward reads
    ``results``: output and log-sum-exp, or None for those of a plain call."""
    if not backward:
        return partial(qa.attention_with_lse, *given.three, **call)
    if results is None:
        plain = {name: value for name, value in call.items() if name in _OF_THE_CALL}
        results = qa.attention_with_lse(*given.three, **plain)
    return partial(
        qa.attention_backward, given.grad_out, *given.three, *results, **call
    )


def both_passes(
    given: Inputs, each: tuple[dict[str, Any], dict[str, Any]] = ({}, {}), **call: Any
) -> tuple[torch.Tensor, ...]:
    """Output, log-sum-exp and gradients; ``each``: more options of either pass."""
    results = pass_of(given, False, **call, **each[0])()
    return *results, *pass_of(given, True, results, **call, **each[1])()


def smallest_budget(call: Callable[[int], Any], match: str | None = None) -> int:
    """What ``call`` names where its budget is too small: that works, and a byte less
    does not."""
    with pytest.raises(qa.BudgetError, match=match) as refused:
        call(1000)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    assert f"({smallest} bytes)" in str(refused.value)
    with pytest.raises(qa.BudgetError):
        call(smallest - 1)
    call(smallest)
    return smallest
