"""A call that is one kernel call, made again: as it would be if it were planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention import direct
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.call.request import Request, Tensors, request_of
from quorum_attention.direct import DirectCall, direct_call
from quorum_attention.kernels.cpu import CpuKernel

OPTIONS: dict[str, Any] = {"enable_gqa": True, "kernel": "cpu"}


def inputs(n: int = 40, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    shapes = ((4, n), (2, n), (2, n))
    return tuple(torch.randn(1, h, m, 16, dtype=dtype).requires_grad_() for h, m in shapes)


def checked(
    three: tuple[torch.Tensor, ...], *, is_causal: bool = False, mask: Any = None, **written: Any
) -> tuple[Tensors, Request]:
    options = CallOptions(**{"kernel": "cpu", **written})
    call = Arguments(mask, is_causal=is_causal, enable_gqa=True, written=options)
    return request_of("attention", *three, call)


def known(three: tuple[torch.Tensor, ...], **named: Any) -> DirectCall:
    found = direct_call(*checked(three, **named))
    assert found is not None
    return found


def made(call: DirectCall, three: tuple[torch.Tensor, ...]) -> torch.Tensor:
    found = call.output(Tensors(*three, None))
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
    assert list(call.backwards.values()) == [True]


def both_ways(
    three: tuple[torch.Tensor, ...], grad_out: torch.Tensor, **options: Any
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Output and gradients of a call that is remembered, each beside the planned call's."""
    results = []
    for written in ({}, {}, {"out_dtype": three[0].dtype}):
        out = qa.attention(*three, **options, **written, enable_gqa=True)
        results.append((out.detach(), *torch.autograd.grad(out, three, grad_out)))
    assert any(type(one) is DirectCall for one in direct._CACHE.values())
    yield from zip(results[1], results[2], strict=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="calls would go to the GPU")
@pytest.mark.parametrize(
    ("dtype", "n"),
    [(torch.bfloat16, 12), (torch.bfloat16, 90), (torch.float16, 12), (torch.float16, 90),
     # Longer ones in float64 are recorded by torch.
     (torch.float64, 12)],
)  # fmt: skip
@pytest.mark.parametrize("upstream", [1.0, 3e4, 1e-7, torch.nan])
def test_gradients_of_ours_on_a_cpu_are_bit_for_bit_those_of_a_planned_call(
    dtype: torch.dtype, n: int, upstream: float
) -> None:
    """From materialised scores and from the operator in fp32; too large in fp16, too small, and
    odd."""
    direct.forget_all()
    three, grad_out = inputs(n, dtype), torch.randn(1, 4, n, 16, dtype=dtype)
    if upstream == upstream:
        grad_out = (upstream * grad_out.double()).to(dtype)
    else:
        grad_out[0, 0, 0, 0] = upstream
    for is_causal in (False, True):
        for one, other in both_ways(three, grad_out, is_causal=is_causal):
            assert one.dtype == dtype
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    direct.forget_all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="calls would go to the GPU")
@pytest.mark.parametrize(
    ("dtype", "n"),
    [(torch.bfloat16, 12), (torch.bfloat16, 90), (torch.float16, 12), (torch.float16, 90),
     (torch.float64, 12), (torch.float64, 90), (torch.float32, 12)],
)  # fmt: skip
def test_calls_under_a_mask_are_remembered_without_it(dtype: torch.dtype, n: int) -> None:
    """Each is of its own mask, boolean or additive, of one dimension or four; also with rows that
    see no key, and where the upstream gradient is not finite."""
    direct.forget_all()
    for shape in ((n, n), (1, 4, 1, n)):
        for boolean in (True, False):
            names = len(direct._CACHE)
            for time in range(3):
                mask = torch.rand(shape) < 0.6
                mask[..., 0] |= time > 1
                mask = mask if boolean else torch.randn(shape).masked_fill(~mask, -torch.inf)
                three, grad_out = inputs(n, dtype), torch.randn(1, 4, n, 16, dtype=dtype)
                if time == 2:
                    grad_out[0, 1, 3, 5] = torch.inf
                results = []
                for written in ({}, {"report": qa.Report()}):
                    out = qa.attention(*three, mask, **written, enable_gqa=True)  # type: ignore[arg-type]
                    results.append((out.detach(), *torch.autograd.grad(out, three, grad_out)))
                bound = {"rtol": 2e-2, "atol": 3e-2} if dtype.itemsize == 2 else {}
                for one, other in zip(*results, strict=True):
                    torch.testing.assert_close(one, other, equal_nan=True, **bound)
            assert len(direct._CACHE) <= names + 1
    assert any(type(one) is DirectCall for one in direct._CACHE.values())
    direct.forget_all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="calls would go to the GPU")
def test_a_mask_that_is_changed_before_the_backward_is_noticed() -> None:
    direct.forget_all()
    mask = torch.zeros(40, 40, dtype=torch.float16)
    for _ in range(2):
        three = inputs(dtype=torch.float16)
        out = qa.attention(*three, mask, enable_gqa=True)
        mask.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    direct.forget_all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="calls would go to the GPU")
def test_threads_may_become_more(one_thread: None) -> None:
    """How many heads are computed together, and whether in fp32, depends on how many there are."""
    direct.forget_all()
    for threads in (1, 8, 1, 8):
        torch.set_num_threads(threads)
        for heads, key_heads, n, dtype in ((8, 2, 256, torch.bfloat16), (8, 8, 400, torch.float16)):
            query = torch.randn(2, heads, n, 64).to(dtype).requires_grad_()
            key, value = (
                torch.randn(2, key_heads, n, 64).to(dtype).requires_grad_() for _ in range(2)
            )
            out = qa.attention(query, key, value, enable_gqa=True)
            out.backward(torch.ones_like(out))
            assert bool(key.grad.isfinite().all())
    direct.forget_all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="calls would go to the GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_in_batches_are_refused_in_words(dtype: torch.dtype) -> None:
    direct.forget_all()
    three = inputs(12, dtype)
    for _ in range(2):
        out = qa.attention(*three, enable_gqa=True)
    many = torch.randn(3, *out.shape).to(dtype)
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(out, three, many, is_grads_batched=True)
    direct.forget_all()


def test_only_what_is_asked_for_has_a_gradient() -> None:
    q, k, v = inputs()
    call = known((q, k, v))
    k.requires_grad_(False)
    made(call, (q, k, v)).sum().backward()
    assert q.grad is not None
    assert v.grad is not None
    assert k.grad is None


def test_where_memory_runs_out_the_backward_comes_as_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    three = inputs()
    call = known(three)
    torch.autograd.grad(made(call, three).sum(), three)
    assert call.backwards
    out = made(call, three)
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
    assert not call.backwards, "the next one is decided anew, by what is free then"
    torch.autograd.grad(made(call, three).sum(), three)
    assert call.backwards


def test_calls_that_are_cut_or_empty_are_not_remembered() -> None:
    assert direct_call(*checked(inputs(300), depth=1)) is None
    assert direct_call(*checked(inputs(0))) is None
