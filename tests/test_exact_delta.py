"""``exact_delta``: gradients of saturated attention, where delta of an output that was
rounded to 16 bits is noise.

More drawn cases: ``python tests/test_exact_delta.py FIRST COUNT``.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import Any

import pytest
import torch
from helpers.fa4 import stand_in
from helpers.kernels import taken_as_tried
from helpers.memory import usage
from helpers.saturated import (
    MOST_OVER_UNFUSED,
    distance,
    errors,
    gradients,
    rounding_of_fp32,
    saturated,
    unfused,
)
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa
from quorum_attention.call import split_output
from quorum_attention.call.split_output import joined, rest_of
from quorum_attention.kernels import CallShape, fa4
from quorum_attention.kernels.select import select_kernel

__all__ = ["stand_in"]
HALF = [torch.bfloat16, torch.float16]


def drawn(draw: random.Random) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """A saturated case, and the options of its call."""
    dtype = draw.choice(HALF)
    heads = draw.choice([2, 4])
    shape = (heads, draw.randint(1, 12), draw.choice([8, 16, 64]))
    kv_heads = draw.choice([heads, 2])
    n_keys = draw.randint(2, 16)
    tensors = saturated(shape, n_keys, dtype, kv_heads)
    if draw.random() < 0.3:
        tensors[1][:, :, 0] *= 4  # a sink: many rows have nearly all weight here
    options: dict[str, Any] = {"enable_gqa": kv_heads != heads}
    if draw.random() < 0.3:
        options["is_causal"] = True
    return tensors, options


def check_drawn(seeds: range) -> None:
    """Check errors against float64 beside those of torch's unfused call."""
    for seed in seeds:
        torch.manual_seed(seed)
        draw = random.Random(seed)
        tensors, options = drawn(draw)
        truth = gradients(unfused, tensors, torch.float64, **options)
        of_unfused = distance(gradients(unfused, tensors, **options), truth)
        ours = {"depth": draw.choice([0, "auto", 1]), "exact_delta": True}
        error = distance(gradients(qa.attention, tensors, **options, **ours), truth)
        most = MOST_OVER_UNFUSED * of_unfused + rounding_of_fp32(tensors)
        assert error <= most, (seed, error, of_unfused)


def test_saturated_cases_are_as_exact_as_the_unfused_call() -> None:
    check_drawn(range(15))


@pytest.mark.slow
def test_more_saturated_cases() -> None:
    check_drawn(range(15, 250))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("depth", [0, 1])
def test_without_it_the_gradients_are_noise(dtype, depth) -> None:  # type: ignore[no-untyped-def]
    """The case of the option: few keys, one of which has nearly all weight."""
    torch.manual_seed(5)
    tensors = saturated((4, 3, 8), 6, dtype)
    truth = gradients(unfused, tensors, torch.float64)
    rounded = errors(gradients(qa.attention, tensors, depth=depth), truth)
    options = {"exact_delta": True, "depth": depth}
    exact = errors(gradients(qa.attention, tensors, **options), truth)
    wide = {"out_dtype": torch.float32, "depth": depth}
    in_fp32 = errors(gradients(qa.attention, tensors, **wide), truth)
    assert max(exact, in_fp32) < rounded / 3


@pytest.mark.parametrize("kernel", ["cpu", "dense"])
@pytest.mark.parametrize("mask", [None, qa.Mask(causal=True), qa.Mask(window=(2, 1))])
def test_masks_and_kernels_have_it(kernel, mask) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    tensors = [t / 4 for t in saturated((2, 9, 16), 9, torch.bfloat16)]
    options = {"attn_mask": mask, "kernel": kernel}
    truth = gradients(qa.attention, tensors, torch.float64, **options)
    exact = gradients(qa.attention, tensors, **options, exact_delta=True)
    assert errors(exact, truth) < 4e-3


@pytest.mark.slow
def test_native_reads_the_unrounded_output(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_as_tried(monkeypatch, "native")
    torch.manual_seed(2)
    tensors = saturated((1, 17, 16), 17, torch.float16)
    truth = gradients(unfused, tensors, torch.float64)
    for depth in (0, 1):
        options = {"kernel": "native", "depth": depth}
        exact = gradients(qa.attention, tensors, **options, exact_delta=True)
        assert errors(exact, truth) < 1e-3


@pytest.mark.parametrize("depth", [0, 1])
def test_flash_attention_4_gets_the_rounding_as_a_gradient_of_lse(  # type: ignore[no-untyped-def]
    stand_in, depth
) -> None:
    torch.manual_seed(3)
    q, k, v, grad_out = saturated((2, 24, 16), 24, torch.bfloat16)
    truth = gradients(unfused, (q, k, v, grad_out), torch.float64)
    wide = {"out_dtype": torch.float32, "exact_delta": True}
    out, lse = qa.attention_with_lse(q, k, v, **wide)
    options = {"kernel": stand_in, "depth": depth}
    grads = qa.attention_backward(grad_out, q, k, v, out, lse, **options)
    rounded = qa.attention_backward(grad_out, q, k, v, out.bfloat16(), lse, **options)
    assert errors(grads, truth) < 4e-3
    assert errors(grads, truth) < errors(rounded, truth) / 2


@pytest.mark.parametrize("name", ["fa4", "cudnn", "flash", "efficient"])
def test_kernels_that_round_refuse_it(name, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(fa4, "version", lambda: "4.0.0b36")
    shape = CallShape("cuda", torch.float16, 4, 4, 64, 64, wide_out=True)
    with pytest.raises(NotImplementedError, match="exact_delta"):
        select_kernel(name, shape, torch.device("cuda"), tried=False)
    chosen = select_kernel("auto", shape, torch.device("cuda"), tried=False, flops=1e15)
    assert chosen.name == "native"


@pytest.mark.parametrize("dtype", HALF)
def test_two_numbers_of_16_bits_hold_all_bits_of_fp32(dtype) -> None:  # type: ignore[no-untyped-def]
    out = torch.randn(2, 3, 700, 8) * 10.0 ** torch.randint(-3, 3, (2, 3, 700, 1))
    rounded = out.to(dtype)
    rest = rest_of(out, rounded)
    assert rest.dtype == torch.int16
    back = joined(rounded, rest)
    is_tie = (out.view(torch.int32) & 0xFFFF) == 0x8000  # one bit off, beside bf16
    is_normal = out.abs() >= torch.finfo(dtype).tiny
    holds_all = is_normal & ~is_tie
    assert torch.equal(back[holds_all], out[holds_all])
    torch.testing.assert_close(back, out, rtol=2**-23, atol=2**-25)


def test_the_rest_of_a_number_that_is_not_finite_is_left_out() -> None:
    out = torch.tensor([[7e4, -7e4, float("inf"), float("nan"), 1e-9, 0.0]])
    back = joined(out.half(), rest_of(out, out.half()))
    assert back[0, :3].isinf().all()
    assert back[0, 3].isnan()
    assert bool((back[0, 4:].abs() < 1e-7).all())


def test_what_is_saved_has_16_bits() -> None:
    saved: list[torch.Tensor] = []
    tensors = saturated((2, 9, 16), 9, torch.bfloat16)
    leaves = [t.requires_grad_() for t in tensors[:3]]

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = qa.attention(*leaves, exact_delta=True)
    assert out.dtype == torch.bfloat16
    sizes = sorted(t.element_size() for t in saved)
    assert sizes == [2] * 5 + [4]  # the lse alone has 32 bits


def test_a_given_out_and_a_vmap_have_it() -> None:
    torch.manual_seed(4)
    q, k, v, grad_out = saturated((2, 9, 16), 9, torch.bfloat16)
    truth = gradients(unfused, (q, k, v, grad_out), torch.float64)
    out = torch.empty_like(grad_out)
    options = {"exact_delta": True, "out": out}
    grads = gradients(qa.attention, (q, k, v, grad_out), **options)
    assert errors(grads, truth) < 4e-3
    expected = qa.attention(q, k, v, exact_delta=True)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-5)

    def one_entry(q, k, v, g):  # type: ignore[no-untyped-def]
        def call(*inputs):  # type: ignore[no-untyped-def]
            return (qa.attention(*inputs, exact_delta=True) * g).sum()

        return torch.func.grad(call, (0, 1, 2))(q, k, v)

    mapped = torch.func.vmap(one_entry)(q, k, v, grad_out)
    assert errors(mapped, truth) < 4e-3


@pytest.mark.parametrize("value", ["yes", 1.5])
def test_another_value_is_refused(value) -> None:  # type: ignore[no-untyped-def]
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(TypeError, match="exact_delta"):
        qa.attention(q, q, q, exact_delta=value)


def test_both_passes_stay_within_the_budget() -> None:
    """It holds copies of inputs in fp32, both parts of the output, and their sum."""
    q, k, v, grad_out = saturated((2, 1500, 64), 1500, torch.bfloat16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options = {"is_causal": True, "exact_delta": True, "budget": "10MiB"}
    qa.attention(*leaves, **options).backward(grad_out)  # kernels are tried out
    forward = usage(lambda: qa.attention(*leaves, **options))
    out = qa.attention(*leaves, **options)
    backward = usage(lambda: torch.autograd.grad(out, leaves, grad_out))
    assert max(forward.peak, backward.peak) <= 10 << 20


def test_splitting_an_output_stays_within_the_smallest_budget() -> None:
    """It takes nine bytes for each number of a block. They were not counted, and a
    block was all rows of all batch entries, up to 16 million numbers."""
    query = torch.randn(1500, 2, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(qa.BudgetError) as refused:
        qa.attention(query, query, query, exact_delta=True, budget=1024)
    smallest = refused.value.smallest_bytes

    def call() -> torch.Tensor:
        return qa.attention(query, query, query, exact_delta=True, budget=smallest)

    call()  # kernels are tried out
    assert usage(call).peak <= smallest


@pytest.mark.parametrize("shape", [(3, 5, 9, 16), (700, 2, 5, 16), (2, 1, 3000, 8)])
def test_parts_of_blocks_are_joined_again(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the longest dimension, whose last block may be shorter."""
    monkeypatch.setattr(split_output, "_BLOCK_NUMBERS", 1000)
    unrounded = torch.randn(shape)
    rounded = unrounded.bfloat16()
    rest = rest_of(unrounded, rounded)
    assert torch.equal(joined(rounded, rest), unrounded)


def test_a_checkpoint_has_it() -> None:
    """What is saved may be unpacked once alone."""
    torch.manual_seed(5)
    q, k, v, grad_out = saturated((2, 9, 16), 9, torch.bfloat16)
    truth = gradients(unfused, (q, k, v, grad_out), torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = checkpoint(
        partial(qa.attention, exact_delta=True), *leaves, use_reentrant=False
    )
    grads = torch.autograd.grad(out, leaves, grad_out)
    assert errors(grads, truth) < 4e-3


@pytest.mark.parametrize("options", [{"exact_delta": True}, {"out_dtype": torch.float}])
def test_a_graph_of_the_compiler_has_it(options) -> None:  # type: ignore[no-untyped-def]
    """The graph does not break, and its results have the dtype of an eager call's."""
    torch.manual_seed(5)
    tensors = saturated((2, 9, 16), 9, torch.bfloat16)
    truth = gradients(unfused, tensors, torch.float64)
    call = partial(qa.attention, **options)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    grads = gradients(compiled, tensors)
    assert errors(grads, truth) < 4e-3
    leaf = tensors[0].requires_grad_()
    out = compiled(leaf, *tensors[1:3])
    expected = call(leaf, *tensors[1:3])
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("through", ["eager", "compiled"])
def test_settings_have_it(through: str) -> None:
    """A graph that was made without them computes the output again."""
    torch.manual_seed(5)
    q, k, v, grad_out = saturated((2, 9, 16), 9, torch.bfloat16)
    truth = gradients(unfused, (q, k, v, grad_out), torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    call = qa.attention
    if through == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    call(*leaves)
    with qa.using(exact_delta=True):
        out = call(*leaves)
        rounded = call(*leaves, exact_delta=False)
    grads = torch.autograd.grad(out, leaves, grad_out)
    assert errors(grads, truth) < 4e-3
    noise = torch.autograd.grad(rounded, leaves, grad_out)
    assert errors(noise, truth) > 3 * errors(grads, truth)


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    check_drawn(range(first, first + count))
