"""Operations that FlopCounterMode counts: as for torch's own attention, whichever
kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
ours = partial(qa.attention, enable_gqa=True)
Sizes = tuple[tuple[int, ...], ...]

SIZES = {
    "grouped": ((2, 4, 30, 8), (2, 2, 30, 8), (2, 2, 30, 8)),
    "wide values": ((1, 2, 20, 8), (1, 2, 33, 8), (1, 2, 33, 16)),
    "without heads": ((2, 30, 8),) * 3,
    "five dimensions": ((2, 3, 2, 20, 8),) * 3,
}
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "cut": {"depth": 1},
    "dense": {"kernel": "dense"},
}


def counted(
    call: Callable[..., torch.Tensor], given: Sequence[torch.Tensor]
) -> tuple[int, int]:
    """The operations of a forward, and of its backward; 0 without gradients."""
    with FlopCounterMode(display=False) as counter:
        out = call(*given)
        forward = counter.get_total_flops()
        if out.requires_grad:
            out.sum().backward()
        return forward, counter.get_total_flops() - forward


def of_torch(sizes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The operations of a forward and a backward by torch's formulas, with all heads as
    entries."""
    entries = torch.Size(sizes[0][:-2]).numel()
    query, key, value = [(entries, 1, *size[-2:]) for size in sizes]
    grad_out = (entries, 1, query[2], value[3])
    return sdpa_flop_count(query, key, value), sdpa_backward_flop_count(
        grad_out, query, key, value
    )


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("kind", CALLS)
def test_operations_are_those_of_torchs_attention(kind: str, sizes: Sizes) -> None:
    """However a call is cut; nothing is counted twice."""
    call = partial(ours, **CALLS[kind])
    given = [torch.randn(size, requires_grad=True) for size in sizes]
    forward, backward = of_torch(sizes)
    assert counted(call, given) == (forward, backward)
    constants = [t.detach() for t in given]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert counted(call, constants) == (forward, 0)


def three() -> list[torch.Tensor]:
    return [torch.randn(size) for size in SIZES["grouped"]]


def test_operations_of_a_program_that_was_exported() -> None:
    """It calls the operator, without this package's Python."""

    class Twice(torch.nn.Module):
        def forward(self, *given: Any) -> torch.Tensor:
            return ours(*given) + ours(*given, is_causal=True)

    program = torch.export.export(Twice(), tuple(three())).module()
    assert counted(program, three()) == (2 * of_torch(SIZES["grouped"])[0], 0)


def test_operations_count_for_the_module_that_calls() -> None:
    class Layer(torch.nn.Module):
        def forward(self, *given: Any) -> torch.Tensor:
            return ours(*given)

    with FlopCounterMode(display=False) as counter:
        Layer()(*three())
    forward, _ = of_torch(SIZES["grouped"])
    operators = {torch.ops.quorum_attention.attention: forward}
    assert counter.get_flop_counts()["Layer"] == operators


@pytest.mark.slow
def test_operations_of_the_native_kernel() -> None:
    """None of them is an operator of torch's."""
    pytest.importorskip("triton")
    sizes = ((1, 2, 32, 16),) * 3
    given = [torch.randn(size, requires_grad=True) for size in sizes]
    assert counted(partial(ours, kernel="native"), given) == of_torch(sizes)
