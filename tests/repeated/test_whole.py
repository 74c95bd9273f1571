"""A call that is one kernel call, made again: as it would be if it were planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.call.options import Written
from quorum_attention.call.request import Request, Tensors, request_of
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.repeated.whole import Whole, whole

OPTIONS: dict[str, Any] = {"enable_gqa": True, "kernel": "cpu"}


def inputs(n: int = 40, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    shapes = ((4, n), (2, n), (2, n))
    return tuple(torch.randn(1, h, m, 16, dtype=dtype).requires_grad_() for h, m in shapes)


def checked(
    three: tuple[torch.Tensor, ...], *, is_causal: bool = False, mask: Any = None, **written: Any
) -> tuple[Tensors, Request]:
    return request_of(
        "attention", *three, mask, 0.0, None, is_causal, None, True, None, None,  # type: ignore[arg-type]
        Written(**{"kernel": "cpu", **written}),
    )  # fmt: skip


def known(three: tuple[torch.Tensor, ...], **named: Any) -> Whole:
    found = whole(*checked(three, **named))
    assert found is not None
    return found


def made(call: Whole, three: tuple[torch.Tensor, ...]) -> torch.Tensor:
    found = call.output(*three)
    assert found is not None
    return found


@pytest.mark.parametrize("is_causal", [False, True])
def test_it_is_what_a_planned_call_is(is_causal: bool) -> None:
    call = known(inputs(), is_causal=is_causal)
    for grad_out in (
        torch.randn(1, 4, 40, 16),
        torch.ones(()).expand(1, 4, 40, 16),
        torch.randn(1, 4, 16, 40).mT,
    ):
        three = inputs()
        out, want = made(call, three), qa.attention(*three, is_causal=is_causal, **OPTIONS)
        assert torch.equal(out, want)
        for one, other in zip(
            torch.autograd.grad(out, three, grad_out),
            torch.autograd.grad(want, three, grad_out),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert list(call.at_backward.values()) == [True]


def test_gradients_that_are_looked_at_afterwards_come_as_usual() -> None:
    three = inputs(dtype=torch.float16)
    call = known(three)
    out, want = made(call, three), qa.attention(*three, **OPTIONS)
    grad_out = torch.randn(1, 4, 40, 16).half()
    grads = torch.autograd.grad(out, three, grad_out)
    assert list(call.at_backward.values()) == [False]
    for one, other in zip(grads, torch.autograd.grad(want, three, grad_out), strict=True):
        assert torch.equal(one, other)


def test_it_saves_what_a_planned_call_saves() -> None:
    """A checkpoint may meet the one when it runs and the other when it runs again."""
    three, saved = inputs(dtype=torch.float16), []  # in fp32 it would be torch's own function

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        saved[-1].append((tensor.shape, tensor.dtype, tensor.device))
        return tensor

    call = known(three)
    for make in (lambda: made(call, three), lambda: qa.attention(*three, **OPTIONS)):
        saved.append([])
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
            make()
    assert len(saved[0]) == 5
    assert saved[0] == saved[1]


def test_only_what_is_asked_for_has_a_gradient() -> None:
    q, k, v = inputs()
    call = known((q, k, v))
    k.requires_grad_(False)
    made(call, (q, k, v)).sum().backward()
    assert q.grad is not None
    assert v.grad is not None
    assert k.grad is None


def test_a_second_derivative_is_refused_in_words() -> None:
    three = inputs()
    out = made(known(three), three)
    (grad,) = torch.autograd.grad(out.square().sum(), three[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(grad.sum(), three[0])


def test_an_input_that_is_changed_before_the_backward_is_noticed() -> None:
    three = inputs()
    out = made(known(three), three)
    with torch.no_grad():
        three[1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_where_memory_runs_out_the_backward_comes_as_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    three = inputs()
    out = made(known(three), three)
    want = torch.autograd.grad(qa.attention(*three, **OPTIONS).sum(), three)
    own, failures = CpuKernel.whole_backward, []

    def once(self: CpuKernel, *args: Any, **named: Any) -> Any:
        if not failures:
            failures.append(True)
            raise torch.OutOfMemoryError("no memory")
        return own(self, *args, **named)

    monkeypatch.setattr(CpuKernel, "whole_backward", once)
    for one, other in zip(torch.autograd.grad(out.sum(), three), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert failures


def test_where_memory_runs_out_in_the_forward_there_is_no_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    three = inputs()
    call = known(three)

    def fails(*args: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(CpuKernel, "whole_forward", fails)
    assert call.output(*three) is None


def test_calls_that_are_cut_and_users_kernels_are_not_remembered() -> None:
    assert whole(*checked(inputs(300), depth=1)) is None
    assert whole(*checked(inputs(), kernel=CpuKernel())) is None
    assert whole(*checked(inputs(), mask=qa.Mask(window=3))) is None
    assert whole(*checked(inputs(0))) is None
