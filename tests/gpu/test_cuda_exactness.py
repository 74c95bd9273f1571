"""attention() on a GPU against float64; the yardstick is the same kernel's undivided
call."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers.attention import Inputs, exact, inputs
from helpers.cuda import both, errors
from helpers.fa4 import FA4, check_overflow_of_scores

import quorum_attention as qa
from quorum_attention import dispatch
from quorum_attention.kernels import CallShape, get_kernel, why_not

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
KERNELS = (FA4, "cudnn", "flash", "efficient", "native", "dense")
# What is added to 1.5 times the undivided call's error: a few last places of the dtype.
TINY = {torch.float16: 2e-4, torch.bfloat16: 2e-3, torch.float32: 2e-6}


def cuda_inputs(n: int, **sizes) -> Inputs:  # type: ignore[no-untyped-def]
    return inputs(n, device="cuda", **{"heads": 4, "head_dim": 64, **sizes})


def skip_unless(kernel: str, given: Inputs, is_causal: bool) -> None:
    q, k, v = given.three
    widths = (q.shape[1], k.shape[1], q.shape[-1], v.shape[-1])
    reason = why_not(
        get_kernel(kernel), CallShape("cuda", q.dtype, *widths, is_causal, True)
    )
    if reason is not None:
        pytest.skip(f"{kernel}: {reason}")


def compare(given: Inputs, kernel: str, depth: int, is_causal: bool) -> None:
    skip_unless(kernel, given, is_causal)
    call = {"is_causal": is_causal}
    whole, cut = (
        errors(both(given, kernel=kernel, depth=d, **call), given, **call)
        for d in (0, depth)
    )
    for name, error in cut.items():
        limit = 1.5 * whole[name] + TINY[given.query.dtype]
        assert error <= limit, f"{name}: {error:.2e}, undivided {whole[name]:.2e}"


WIDTHS = (
    {"kv_heads": 1, "batch": (2,)},
    {"value_dim": 32},
    {"head_dim": 80},
    {"head_dim": 256},
)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("sizes", "is_causal", "depth"),
    [
        *product([{"dtype": dtype} for dtype in TINY], [False, True], [1, 2]),
        *product(WIDTHS, [True], [1]),
    ],
    ids=str,
)
def test_cut_is_as_exact_as_uncut(kernel, sizes, is_causal, depth) -> None:
    given = cuda_inputs(1000, **{"dtype": torch.float16, **sizes})
    compare(given, kernel, depth, is_causal)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_keys", [1, 4, 63, 64, 65, 100, 130])
def test_scores_far_below_zero(kernel, dtype, is_causal, n_keys) -> None:
    """What a kernel makes of keys beyond the end must not outweigh the keys that there
    are."""
    given = cuda_inputs(130, n_keys=n_keys, dtype=dtype)
    given.query.data[..., 0] = 8.0
    given.key.data[..., 0] = -300.0
    # Scores of 16-bit products of these sizes are some per cent off, and so is all
    # else.
    skip_unless(kernel, given, is_causal)
    found = both(given, kernel=kernel, depth=0, is_causal=is_causal)
    assert max(errors(found, given, is_causal=is_causal).values()) < 0.5


@pytest.mark.parametrize("kernel", ["flash", "dense"])
@pytest.mark.parametrize("accumulator", ["device", "host"])
def test_the_number_of_slots_changes_nothing(kernel, accumulator) -> None:
    """Bit for bit: streams and events keep the order of one slot. Inputs on the host,
    several head groups, so that everything that can overlap does."""
    given = Inputs(*(t.cpu() for t in (*cuda_inputs(3000, dtype=torch.float16).three,
                                       torch.zeros(1))))  # fmt: skip
    results = []
    for n_cap in (1, 2, 3):
        plan = qa.plan(
            3000, heads=4, levels=(13,), n_cap=n_cap, accumulator=accumulator, kernel=kernel,
            heads_per_group=2, is_causal=True, device="cuda", inputs="host",
        )  # fmt: skip
        for _ in range(2):
            results.append(
                qa.attention(*given.three, is_causal=True, plan=plan, devices="cuda")
            )
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_an_fp16_backward_is_cached_until_its_gradients_overflow() -> None:
    n = 4096
    dispatch._CACHE.clear()

    def gradients(given: Inputs) -> tuple[torch.Tensor, ...]:
        leaves = [t.cuda().requires_grad_() for t in given.three]
        out = qa.attention(*leaves, is_causal=True)
        return torch.autograd.grad(out, leaves, given.grad_out.cuda())

    def cached() -> list[bool]:
        (request,) = dispatch._CACHE.values()
        assert request.decisions is not None
        return [problem is not None for problem in request.decisions.values()]

    usual = inputs(n, heads=8, head_dim=64, dtype=torch.float16)
    first = gradients(usual)
    assert cached() == [True, True]  # both passes
    for again, before in zip(gradients(usual), first, strict=True):
        torch.testing.assert_close(again, before, atol=1e-3, rtol=1e-2)
    # Products of values and upstream gradients leave fp16; small keys and queries make
    # gradients that do not.
    factors = (2e-3, 1e-3, 1000.0, 1000.0)
    overflowing = Inputs(
        *(
            t * factor
            for t, factor in zip((*usual.three, usual.grad_out), factors, strict=True)
        )
    )
    wanted = exact(overflowing, is_causal=True, gradients=True).grads
    assert wanted is not None
    for _ in range(2):
        for found, right in zip(gradients(overflowing), wanted, strict=True):
            error = (found.cpu().double() - right).norm() / right.norm()
            assert float(error) < 5e-3
        assert cached() == [True, False]  # the backward is planned from now on


@pytest.mark.parametrize("kernel", [FA4, "cudnn", "flash", "efficient"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_backward_is_scaled_if_gradients_of_scores_overflow(kernel, kv_heads) -> None:
    check_overflow_of_scores(kernel, "cuda", kv_heads=kv_heads, softcap=None)
    if kernel == "fa4":
        check_overflow_of_scores(kernel, "cuda", kv_heads=kv_heads, softcap=50.0)
