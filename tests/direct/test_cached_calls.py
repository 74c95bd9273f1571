"""A call like one before is what it was then, and nobody checks or decides it again."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa
from quorum_attention import api, autograd, direct, passes
from quorum_attention.kernels import registry
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.kernels.protocol import Call


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> None:
    direct.forget_all()


def inputs(n_keys: int = 24, kv_heads: int = 2, *, learned: bool = True) -> list[torch.Tensor]:
    shapes = ((4, 24), (kv_heads, n_keys), (kv_heads, n_keys))
    return [torch.randn(1, h, n, 16).requires_grad_(learned) for h, n in shapes]


def refused(*args: Any) -> Any:
    raise AssertionError("a call like one before was checked again")


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        three = (t.double() for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*three, **options, enable_gqa=True)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.5}])
def test_it_is_right_and_is_not_checked_again(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    qa.attention(*inputs(), **options, enable_gqa=True)
    monkeypatch.setattr(api, "request_of", refused)
    for _ in range(3):
        leaves, grad_out = inputs(), torch.randn(1, 4, 24, 16)
        out = qa.attention(*leaves, **options, enable_gqa=True)
        want = exact(*leaves, **options)
        torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-5)
        grads = torch.autograd.grad(out, leaves, grad_out)
        for got, wanted in zip(
            grads, torch.autograd.grad(want, leaves, grad_out.double()), strict=True
        ):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_cache_that_grows_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    qa.attention(*inputs(33, learned=False), enable_gqa=True)
    monkeypatch.setattr(api, "request_of", refused)
    for n_keys in range(34, 65):
        tensors = inputs(n_keys, learned=False)
        out = qa.attention(*tensors, enable_gqa=True)
        torch.testing.assert_close(out, exact(*tensors).float(), rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="checked again"):
        qa.attention(*inputs(65, learned=False), enable_gqa=True)


@pytest.mark.parametrize("remembered", [False, True])
def test_a_checkpoint_of_a_row_that_is_odd_saves_the_same_when_it_runs_again(
    remembered: bool,
) -> None:
    """A first row of zeros has log-sum-exp 0 under a causal mask: that takes a second attempt."""
    options = {"is_causal": True, "enable_gqa": True}
    q, k, v = inputs()
    with torch.no_grad():
        q[:, :, 0] = 0.0
    want = torch.autograd.grad(exact(q, k, v, is_causal=True).sum(), (q, k, v))
    if remembered:
        qa.attention(*inputs(), **options)
    out = checkpoint(partial(qa.attention, **options), q, k, v, use_reentrant=False)
    for got, wanted in zip(torch.autograd.grad(out.sum(), (q, k, v)), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_queries_whose_rows_overlap_or_are_all_the_same_are_right_after_others_were() -> None:
    _, k, v = inputs(kv_heads=4, learned=False)
    for make in (
        lambda: torch.randn(1, 4, 5, 16),
        lambda: torch.randn(1, 4, 20).unfold(2, 16, 1),
        lambda: torch.randn(1, 1, 5, 19).unfold(3, 16, 1)[:, 0].transpose(1, 2),
        lambda: torch.randn(4, 16).as_strided((1, 4, 5, 16), (1, 16, 0, 1)),
    ):
        q = make()
        assert q.shape == (1, 4, 5, 16)
        torch.testing.assert_close(qa.attention(q, k, v), exact(q, k, v).float())


def test_rows_of_one_number_that_lie_as_images_do_are_right() -> None:
    q, k, v = (
        torch.randn(1, 3, 1, 2).permute(0, 3, 1, 2),
        torch.randn(1, 2, 4, 1),
        torch.randn(8, 5),
    )
    assert q.is_contiguous(memory_format=torch.channels_last)
    v = v.view(1, 2, 4, 5)
    torch.testing.assert_close(qa.attention(q, k, v), exact(q, k, v).float())


@pytest.mark.parametrize("n_keys", [3, 24])
def test_a_nan_stays_in_its_row(n_keys: int) -> None:
    for time in range(3):
        q, k, v = inputs(n_keys, learned=False)
        if time:
            q[0, 1, 5, 3] = torch.nan
        found = qa.attention(q, k, v, enable_gqa=True).isnan()
        assert found[0, 1, 5].all() == bool(time)
        assert found.sum() == (16 if time else 0)


def test_a_second_derivative_is_refused_in_words() -> None:
    for _ in range(2):
        q, k, v = inputs()
        (grad,) = torch.autograd.grad(
            qa.attention(q, k, v, enable_gqa=True).square().sum(), q, create_graph=True
        )
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(grad.sum(), q)


def test_another_kernel_of_the_name_is_asked() -> None:
    asked = []

    class Counted(CpuKernel):
        def whole_forward(self, *args: Any, **named: Any) -> Any:
            asked.append(True)
            return super().whole_forward(*args, **named)

    tensors = inputs(learned=False)
    qa.attention(*tensors, enable_gqa=True)
    before = registry._KERNELS["cpu"]
    qa.register_kernel(Counted())
    try:
        qa.attention(*tensors, enable_gqa=True)
        assert asked
    finally:
        registry._KERNELS["cpu"] = before
    asked.clear()
    qa.attention(*tensors, enable_gqa=True)
    assert not asked


def test_inputs_that_are_broadcast_are_not_remembered() -> None:
    q, k, v = inputs(kv_heads=1, learned=False)
    for _ in range(2):
        out = qa.attention(torch.cat((q, q)), k, v)  # one key head and entry, as torch broadcasts
        torch.testing.assert_close(out[1:], exact(q, k, v).float(), rtol=1e-5, atol=1e-5)
    assert not direct._CACHE


def test_where_memory_runs_out_the_call_is_made_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = inputs(kv_heads=4, learned=False)
    want = qa.attention(*tensors, enable_gqa=True)
    assert len(direct._CACHE) == 1
    failures, original = [], CpuKernel.whole_forward

    def fails(*args: Any) -> Any:
        if failures:
            return original(*args)
        failures.append(True)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(CpuKernel, "whole_forward", fails)
    torch.testing.assert_close(qa.attention(*tensors, enable_gqa=True), want)
    assert failures
    assert not direct._CACHE


@pytest.mark.parametrize("own_memory", [False, True], ids=["host", "own memory"])
@pytest.mark.parametrize("before", [False, True], ids=["first", "remembered"])
def test_a_whole_call_that_runs_out_of_memory_is_not_remembered(
    own_memory: bool, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decided without asking how much is free: again and again, as long as it fails."""
    backend = SimpleNamespace(own_memory=own_memory)
    monkeypatch.setattr(direct, "backend_of", lambda device: backend)
    leaves = [torch.randn(1, 2, 300, 16).half().requires_grad_() for _ in range(3)]
    want = exact(*leaves).half()
    if before:
        qa.attention(*leaves, enable_gqa=True)
        assert [type(one) for one in direct._CACHE.values()] == [direct.DirectCall]
    forward, failures = CpuKernel.whole_forward, []

    def scarce_forward(self: CpuKernel, call: Call) -> Any:
        if (call.query.shape[2], call.key.shape[2]) == (300, 300):
            failures.append(True)
            raise torch.OutOfMemoryError("no memory for all of it at once")
        return forward(self, call)

    with monkeypatch.context() as scarce:
        scarce.setattr(CpuKernel, "whole_forward", scarce_forward)
        for _ in range(2):
            out = qa.attention(*leaves, enable_gqa=True)
            torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-3)
            assert failures
            assert not direct._CACHE
            failures.clear()
    torch.testing.assert_close(qa.attention(*leaves, enable_gqa=True), want, rtol=1e-2, atol=1e-3)
    assert [type(one) for one in direct._CACHE.values()] == [direct.DirectCall]


def test_bad_arguments_are_refused_after_a_good_call_too() -> None:
    q, k, v = inputs()
    qa.attention(q, k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa"):
        qa.attention(q, k, v)
    with pytest.raises(ValueError, match="tokens"):
        qa.attention(q, k, v[:, :, 1:], enable_gqa=True)
    with pytest.raises(TypeError, match="is_causal"):
        qa.attention(q, k, v, is_causal=0, enable_gqa=True)  # type: ignore[arg-type]


def test_no_more_than_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_MOST", 3)
    for n in range(1, 9):
        q = torch.randn(1, 2, n, 8)
        torch.testing.assert_close(qa.attention(q, q, q), exact(q, q, q).float())
        assert len(direct._CACHE) <= 3


def test_a_call_that_is_one_kernel_call_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a model that decodes has another length at every call."""
    decided = []

    def counted(*args: Any) -> Any:
        decided.append(True)
        return passes.decide_forward(*args)

    monkeypatch.setattr(direct, "backend_of", lambda device: SimpleNamespace(own_memory=True))
    monkeypatch.setattr(direct, "decide_forward", counted)
    monkeypatch.setattr(autograd, "run_forward", refused)
    for learned in (False, True):
        leaves = inputs(33, learned=learned)
        out = qa.attention(*leaves, enable_gqa=True)
        torch.testing.assert_close(out, exact(*leaves).float(), rtol=1e-5, atol=1e-5)
    assert len(decided) == 2
