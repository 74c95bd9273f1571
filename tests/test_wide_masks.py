"""An additive mask wider than query, key and value is added as it is, on every way
through the package; its gradient is that of the mask as it was given.

The equations that results are compared with share nothing with the package
(helpers/equations.py). Numbers of these masks are so large that the inputs' dtype
rounds them by many units: a mask that is rounded anywhere is off by tenths of the
largest result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import helpers.equations as equations
import pytest
import torch
from helpers.attention import error
from helpers.kernels import taken_as_tried
from helpers.memory import usage

import quorum_attention as qa
from quorum_attention.kernels.call_shape import BiasShape, CallShape, Extent
from quorum_attention.kernels.protocol import Kernel, refusal
from quorum_attention.kernels.registry import get_kernel

pytestmark = pytest.mark.usefixtures("one_thread")
HALVES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 2e-4}
HEADS, N, M, DIM = 4, 150, 170, 16


def drawn(dtype: torch.dtype, batch: int = 2) -> list[torch.Tensor]:
    """Query, key, value (two key heads) and an upstream gradient."""
    shapes = ((HEADS, N), (2, M), (2, M), (HEADS, N))
    return [torch.randn(batch, *shape, DIM).to(dtype) for shape in shapes]


def alibi(dtype: torch.dtype = torch.float32, rows: int = N) -> torch.Tensor:
    """Slopes times distances of positions that begin at 3,000: (heads, n, m)."""
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float64)
    apart = 3000 + torch.arange(rows)[:, None] * 0.3 - torch.arange(M)[None]
    return (-slopes[:, None, None] * apart).to(dtype)


def check(inputs: list[torch.Tensor], mask: Any, **options: Any) -> None:
    """A call's results and gradients, that of the mask among them, are those of the
    equations."""
    *three, grad_out = inputs
    leaves = [t.detach().requires_grad_() for t in three]
    bias = mask.bias if isinstance(mask, qa.Mask) else mask
    learned = [bias] if bias.requires_grad else []
    how = {"enable_gqa": True, **options}
    out, lse = qa.attention_with_lse(*leaves, mask, **how)
    grads = torch.autograd.grad(out, [*leaves, *learned], grad_out)
    causal, seed = options.get("is_causal", False), options.get("dropout_seed", 0)
    done = equations.forward(
        *three,
        mask,
        is_causal=causal,
        dropout_p=options.get("dropout_p", 0.0),
        dropout_seed=seed,
    )
    exact = equations.backward(done, grad_out)
    of_keys = [
        equations.summed_by_key_head(t, HEADS // 2) for t in (exact.key, exact.value)
    ]
    wanted = [done.out, exact.query, *of_keys]
    if learned:
        assert grads[3].dtype == bias.dtype
        wanted.append(equations.summed_like(exact.scores, bias, done.scores.shape))
    tolerance = TOLERANCE[three[0].dtype]
    assert error(lse, done.lse) < 1e-5
    for result, exactly in zip((out, *grads), wanted, strict=True):
        allowed = max(tolerance, TOLERANCE.get(result.dtype, 0.0))
        assert error(result, exactly) < allowed


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut": {"depth": 1},
    "cut twice": {"depth": 2},
    "least memory": {"budget": "least"},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 2**40 + 5},
    "causal, cut": {"is_causal": True, "depth": 1},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", ["auto", "cpu", "dense"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_alibi_in_fp32_is_added_in_fp32(
    dtype: torch.dtype, kernel: str, way: str
) -> None:
    options = dict(WAYS[way])
    inputs, mask = drawn(dtype), alibi().requires_grad_()
    if options.get("budget") == "least":
        with pytest.raises(qa.BudgetError) as refused:
            qa.attention(*inputs[:3], mask, enable_gqa=True, kernel=kernel, budget=1)
        options["budget"] = 2 * refused.value.smallest_bytes
    check(inputs, mask, kernel=kernel, **options)


@pytest.mark.parametrize(
    "shape",
    [(N, M), (1, M), (N, 1), (2, 1, 1, M), (2, HEADS, N, M), (HEADS, 1, M)],
    ids=str,
)
def test_whatever_dimensions_the_mask_has(shape: tuple[int, ...]) -> None:
    mask = (4000 + 2 * torch.randn(shape)).requires_grad_()
    for depth in ("auto", 1):
        check(drawn(torch.bfloat16), mask, depth=depth)


@pytest.mark.parametrize(
    ("inputs", "mask"),
    [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16),
     (torch.bfloat16, torch.float64), (torch.float16, torch.float64),
     (torch.float32, torch.float64), (torch.float32, torch.bfloat16)],
    ids=str,
)  # fmt: skip
def test_every_other_dtype(inputs: torch.dtype, mask: torch.dtype) -> None:
    """Two dtypes of 16 bits round each other too; narrower masks are exact as they
    are."""
    for depth in ("auto", 1):
        check(drawn(inputs), alibi(mask).requires_grad_(), depth=depth)


@pytest.mark.parametrize("shift", [1e5, -1e5])
def test_a_mask_beyond_the_range_of_fp16_only_shifts_scores(shift: float) -> None:
    """As fp16 it would be infinite: NaN above, and a row without keys below."""
    mask = torch.full((N, M), shift) + 10 * torch.randn(N, 1)
    check(drawn(torch.float16), mask.requires_grad_())


@pytest.mark.parametrize(
    "rules",
    [qa.Mask(causal=True), qa.Mask(causal=True, window=(40, 0)), qa.Mask(window=20, softcap=5.0),
     qa.Mask(key_lengths=torch.tensor([100, M])), qa.Mask(key_padding=torch.arange(M) % 3 > 0),
     qa.Mask(documents=(torch.arange(N) // 40, torch.arange(M) // 50)),
     qa.Mask(keeps=lambda b, h, q, k: (q + k) % 3 > 0)],
    ids=lambda rules: ", ".join(rules.set_fields()),
)  # fmt: skip
@pytest.mark.parametrize("kernel", ["auto", "dense"])
def test_beside_every_rule_of_a_mask(rules: qa.Mask, kernel: str) -> None:
    for depth in ("auto", 1):
        bias = alibi().requires_grad_()
        check(
            drawn(torch.float16), rules & qa.Mask(bias=bias), kernel=kernel, depth=depth
        )


def test_in_torchs_place() -> None:
    inputs, mask = drawn(torch.bfloat16), alibi()
    wanted = equations.forward(*inputs[:3], mask).out
    three = (inputs[0], *(t.repeat_interleave(2, 1) for t in inputs[1:3]))
    report = qa.Report()
    with qa.patched_sdpa(min_tokens=1, report=report):
        out = torch.nn.functional.scaled_dot_product_attention(*three, mask)
    assert report.total.forwards == 1
    assert error(out, wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.slow
def test_native_by_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_as_tried(monkeypatch, "native")
    q, k, v, grad_out = (torch.randn(1, 1, 17, 8).half() for _ in range(4))
    mask = (-3000 - torch.arange(17.0)) + torch.randn(17, 1)
    out, lse = qa.attention_with_lse(q, k, v, mask, kernel="native")
    grads = qa.attention_backward(grad_out, q, k, v, out, lse, mask, kernel="native")
    done = equations.forward(q, k, v, mask)
    exact = equations.backward(done, grad_out)
    wanted = done.out, exact.query, exact.key, exact.value
    for result, exactly in zip((out, *grads), wanted, strict=True):
        assert error(result, exactly) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_a_kernel_that_cannot_says_so_and_what_to_do(name: str) -> None:
    narrow, wide = (BiasShape(False, True, True, wide=wide) for wide in (False, True))
    shape = CallShape("cuda", torch.bfloat16, 4, 4, 64, 64, bias=narrow)
    assert refusal(get_kernel(name), shape) is None
    words = refusal(get_kernel(name), replace(shape, bias=wide))
    assert words is not None
    assert "which would round it" in words
    assert "attn_mask.to(torch.bfloat16)" in words


def test_a_kernel_of_a_users_own_never_gets_one_unless_it_says_so() -> None:
    class Narrow(type(get_kernel("cpu"))):  # type: ignore[misc]
        name = "narrow"
        wide_masks = False

    kernel: Kernel = Narrow()
    inputs = drawn(torch.bfloat16)
    qa.attention(*inputs[:3], alibi(torch.bfloat16), enable_gqa=True, kernel=kernel)
    with pytest.raises(
        NotImplementedError, match=r"kernel 'narrow' cannot run.*attn_mask.to"
    ):
        qa.attention(*inputs[:3], alibi(), enable_gqa=True, kernel=kernel)


@pytest.mark.parametrize("kernel", ["cpu", "native"])
def test_its_bytes_are_planned(kernel: str) -> None:
    """A rectangle's part of a wide mask may be a copy in fp32."""
    shapes = [
        CallShape(
            "cpu",
            torch.bfloat16,
            4,
            4,
            64,
            64,
            bias=BiasShape(True, True, True, wide=wide),
        )
        for wide in (False, True)
    ]
    extent = Extent(1, 4, 4, n_tokens=4096, max_queries=4096, max_keys=4096)
    made = get_kernel(kernel)
    for bound in (made.forward_workspace_bytes, made.backward_workspace_bytes):
        narrow, wide = (bound(shape, extent) for shape in shapes)
        assert wide - narrow >= 2 * 4 * 4096 * 4096


def test_tiles_of_a_wide_mask_take_what_was_planned() -> None:
    """A mask in host memory, in another order of dimensions, within the smallest
    budget."""
    n = 1500
    q, k, v = (torch.randn(1, 2, n, 32).bfloat16() for _ in range(3))
    mask = (-2000 - torch.arange(float(n)))[:, None].expand(n, n).mT.double()
    with pytest.raises(qa.BudgetError) as refused:
        qa.attention(q, k, v, mask, budget=1)
    budget = refused.value.smallest_bytes
    used = usage(lambda: qa.attention(q, k, v, mask, budget=budget))
    assert used.peak <= budget
