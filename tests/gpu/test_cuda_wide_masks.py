"""Additive masks wider than query, key and value on a GPU, against equations in float64
that share nothing with the package."""

from __future__ import annotations

from itertools import product
from typing import Any

import helpers.equations as equations
import pytest
import torch
from helpers.attention import error

import quorum_attention as qa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HALVES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 1e-2}
HEADS = 4


def alibi(n: int, m: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Slopes times distances of positions that begin at 3,000: (heads, n, m)."""
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float64)
    apart = 3000 + torch.arange(n)[:, None] * 0.3 - torch.arange(m)[None]
    return (-slopes[:, None, None] * apart).to(dtype)


def check(
    dtype: torch.dtype, mask: torch.Tensor, sizes: tuple[int, int], *, width: int = 64,
    kv_heads: int = 2, home: str = "cuda", rules: qa.Mask | None = None, **options: Any,
) -> qa.Report:  # fmt: skip
    """Results and gradients of a call are those of the equations; the report of the
    call."""
    n, m = sizes
    shapes = ((HEADS, n), (kv_heads, m), (kv_heads, m), (HEADS, n))
    *three, grad_out = (torch.randn(1, *shape, width).to(dtype) for shape in shapes)
    leaves = [t.to(home).requires_grad_() for t in three]
    bias, report = mask.to(home).requires_grad_(), qa.Report()
    given = bias if rules is None else rules & qa.Mask(bias=bias)
    how = {"enable_gqa": True, "devices": "cuda", "report": report, **options}
    out, lse = qa.attention_with_lse(*leaves, given, **how)
    grads = torch.autograd.grad(out, [*leaves, bias], grad_out.to(home))
    plain = mask if rules is None else rules & qa.Mask(bias=mask)
    done = equations.forward(*three, plain, is_causal=options.get("is_causal", False))
    exact = equations.backward(done, grad_out)
    of_keys = [
        equations.summed_by_key_head(t, HEADS // kv_heads)
        for t in (exact.key, exact.value)
    ]
    of_mask = equations.summed_like(exact.scores, mask, (1, HEADS, n, m))
    assert grads[3].dtype == mask.dtype
    assert error(lse, done.lse) < 1e-5
    wanted = (done.out, exact.query, *of_keys, of_mask)
    for result, exactly in zip((out, *grads), wanted, strict=True):
        assert error(result, exactly) < max(
            TOLERANCE[dtype], TOLERANCE.get(result.dtype, 0.0)
        )
    return report


@pytest.mark.parametrize("home", ["cuda", "cpu"])
@pytest.mark.parametrize("depth", ["auto", 1, 2])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_alibi_in_fp32(dtype: torch.dtype, depth: Any, home: str) -> None:
    for sizes, causal in product([(600, 600), (257, 1000)], [False, True]):
        mask = alibi(*sizes)
        report = check(dtype, mask, sizes, home=home, depth=depth, is_causal=causal)
        assert report.forward.kernel in ("native", "dense")


@pytest.mark.parametrize("width", [8, 40, 64, 72, 128, 192, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_width_of_native_fits_the_device(dtype: torch.dtype, width: int) -> None:
    """Tiles of an fp32 mask take twice the shared memory of those in 16 bits."""
    check(dtype, alibi(300, 300), (300, 300), width=width, kernel="native")


@pytest.mark.parametrize(
    "shape", [(1, 500), (300, 1), (1, 1, 1, 500), (1, 4, 300, 500)], ids=str
)
def test_whatever_dimensions_the_mask_has(shape: tuple[int, ...]) -> None:
    mask = 4000 + 2 * torch.randn(shape)
    for depth, kernel in product(("auto", 1), ("auto", "dense")):
        check(torch.bfloat16, mask, (300, 500), depth=depth, kernel=kernel)


@pytest.mark.parametrize(
    ("inputs", "mask"),
    [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16),
     (torch.bfloat16, torch.float64), (torch.float16, torch.float64)],
    ids=str,
)  # fmt: skip
def test_every_other_dtype(inputs: torch.dtype, mask: torch.dtype) -> None:
    check(inputs, alibi(300, 400, mask), (300, 400))


@pytest.mark.parametrize(
    "rules",
    [qa.Mask(causal=True, window=(100, 0)), qa.Mask(window=20, softcap=5.0),
     qa.Mask(key_lengths=torch.tensor([200])), qa.Mask(keeps=lambda b, h, q, k: (q + k) % 3 > 0)],
    ids=lambda rules: ", ".join(rules.set_fields()),
)  # fmt: skip
@pytest.mark.parametrize("home", ["cuda", "cpu"])
def test_beside_every_rule_of_a_mask(rules: qa.Mask, home: str) -> None:
    check(torch.float16, alibi(300, 300), (300, 300), home=home, rules=rules)


def test_a_shift_beyond_the_range_of_fp16() -> None:
    for shift in (1e5, -1e5):
        mask = torch.full((300, 300), shift) + 10 * torch.randn(300, 1)
        check(torch.float16, mask, (300, 300))


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_kernels_that_would_round_it_refuse_by_name(kernel: str) -> None:
    q = torch.randn(1, 4, 300, 64, device="cuda").bfloat16()
    mask = alibi(300, 300).cuda()
    with pytest.raises(NotImplementedError, match="which would round it"):
        qa.attention(q, q, q, mask, kernel=kernel)
    qa.attention(q, q, q, mask.bfloat16(), kernel=kernel)


def test_a_mask_of_the_inputs_dtype_keeps_its_kernel() -> None:
    q = torch.randn(1, 4, 2048, 64, device="cuda").bfloat16()
    for mask in (
        alibi(2048, 2048, torch.bfloat16).cuda(),
        torch.rand(2048, 2048).cuda() < 0.5,
    ):
        report = qa.Report()
        qa.attention(q, q, q, mask, report=report)
        assert report.forward.kernel == "cudnn"
