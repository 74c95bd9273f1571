"""Calls of a rank that were one kernel call are made again without being decided."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from quorum_attention.call.options import Written
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.distributed import again
from quorum_attention.distributed.calls import Calls
from quorum_attention.repeated.whole import Whole


class Pass:
    """A pass in which nobody fails."""

    def computed(self, make: Any, instead: Any) -> Any:
        return make()


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "_KNOWN", {})


def made(inputs: list[torch.Tensor], causal: bool = True) -> list[torch.Tensor]:
    """Output, log-sum-exp and gradients of one of a rank's calls."""
    calls, watch, q = Calls(None, Written(), (4, 9)), Pass(), inputs[0]
    heads, rows = Interval(0, q.shape[1]), Interval(0, q.shape[2])
    with torch.no_grad():
        out, lse = calls.forward(watch, *inputs[:3], causal, heads, rows)  # type: ignore[arg-type]
        given = (inputs[3], *inputs[:3], out, lse)
        grads = calls.backward(watch, given, causal, heads, rows, None)  # type: ignore[arg-type]
    return [out, lse, *grads]


def drawn(dtype: torch.dtype, rows: int = 9, keys: int = 9, heads: int = 4) -> list[torch.Tensor]:
    shapes = [(heads, rows), (2, keys), (2, keys), (heads, rows)]
    return [torch.randn(1, h, n, 16).to(dtype) for h, n in shapes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_results_are_those_of_a_call_that_is_decided(
    dtype: torch.dtype, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time and again, of any numbers and sizes."""
    torch.manual_seed(0)
    for sizes in ((9, 9), (9, 9), (40, 40), (9, 9), (200, 200), (9, 13), (9, 14), (9, 13)):
        if causal and sizes[0] != sizes[1]:
            continue
        inputs = drawn(dtype, *sizes)
        with monkeypatch.context() as patch:
            patch.setattr(again, "like", lambda *of: None)
            wanted = made(inputs, causal)
        for got, one in zip(made(inputs, causal), wanted, strict=True):
            assert got.dtype == one.dtype
            assert torch.equal(got, one)
    assert again._KNOWN


def test_what_is_known_is_not_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = drawn(torch.float32)
    first = made(inputs)

    def never(*args: object) -> NoReturn:
        raise AssertionError("decided again")

    for name in ("request_of", "whole"):
        monkeypatch.setattr(again, name, never)
    monkeypatch.setattr("quorum_attention.direct.decide_backward", never)
    assert all(torch.equal(a, b) for a, b in zip(made(inputs), first, strict=True))


def test_where_memory_runs_out_it_is_decided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = drawn(torch.float32)
    wanted = made(inputs)

    def out_of_memory(*args: object) -> NoReturn:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Whole, "forward", out_of_memory)
        for got, one in zip(made(inputs), wanted, strict=True):
            torch.testing.assert_close(got, one)
        assert not again._KNOWN

    def broken(*args: object) -> NoReturn:
        raise ArithmeticError("planted")

    made(inputs)
    monkeypatch.setattr(Whole, "forward", broken)
    with pytest.raises(ArithmeticError, match="planted"):
        made(inputs)


def test_what_is_remembered_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "_MOST", 2)
    for rows in range(3, 9):
        made(drawn(torch.float32, rows, rows))
        assert 0 < len(again._KNOWN) <= 2
