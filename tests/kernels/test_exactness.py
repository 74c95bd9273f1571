"""Every kernel that runs here, task by task, against float64: forward and all gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import Case, errors, exact, rms_errors, run

import quorum_attention as qa
from quorum_attention.kernels import get_kernel, why_not

CPU_KERNELS = ("cpu", "dense")
CUDA_KERNELS = ("cudnn", "flash", "efficient", "dense") if torch.cuda.is_available() else ()
KERNELS = [*((name, "cpu") for name in CPU_KERNELS), *((name, "cuda") for name in CUDA_KERNELS)]
# Share of the largest element. GPUs may compute fp32 products in TF32.
TOLERANCE = {("cpu", torch.float32): 1e-5, ("cuda", torch.float32): 5e-3}


def check(name: str, device: str, case: Case, slack: float = 1.3) -> None:
    """fp32 and fp64 against fixed bounds; 16-bit against the same kernel's undivided call."""
    kernel = get_kernel(name)
    reason = why_not(kernel, case.call(device))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    reference = exact(case)
    result = run(kernel, case, device)
    if case.dtype in (torch.float32, torch.float64):
        tolerance = 1e-12 if case.dtype == torch.float64 else TOLERANCE[device, case.dtype]
        tolerance *= max(1.0, case.spread)
        for what, error in errors(result, reference).items():
            assert error < tolerance, (what, error)
        return
    errors(result, reference)  # for what it says of NaN and infinities
    yardstick = rms_errors(run(kernel, replace(case, levels=()), device), reference)
    for what, error in rms_errors(result, reference).items():
        assert error <= slack * yardstick[what] + 1e-4, (what, error, yardstick[what])


@pytest.mark.parametrize(("name", "device"), KERNELS)
@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
@pytest.mark.parametrize(("factor", "levels"), [(0.0, (7,)), (-0.3, ()), (-2.0, (7,))], ids=str)
def test_scales_that_are_not_positive(
    name: str, device: str, causal: bool, factor: float, levels: tuple[int, ...]
) -> None:
    """Operators mask with -inf, and take maxima, before they multiply by the scale."""
    mask = torch.randn(1, 1, 140, 140) if causal is (factor == 0.0) else None
    dtype = torch.float64 if device == "cpu" else torch.float16
    case = Case(140, causal=causal, factor=factor, levels=levels, mask=mask, dtype=dtype)
    check(name, device, case)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1e-46), (torch.bfloat16, -1e-200), (torch.float16, 1e-44)],
    ids=str,
)
@pytest.mark.parametrize("depth", [None, 1])
def test_scales_that_fp32_does_not_hold(
    dtype: torch.dtype, scale: float, depth: int | None
) -> None:
    """Operators compute with 0 then: every key has the same weight."""
    three = [torch.randn(1, 2, 60, 16).to(dtype).requires_grad_() for _ in range(3)]
    options = {} if depth is None else {"depth": depth}
    out = qa.attention(*three, is_causal=True, scale=scale, devices="cpu", **options)
    wanted = three[2].detach().double().cumsum(2) / torch.arange(1, 61).unsqueeze(-1)
    assert (out.detach().double() - wanted).abs().max() <= 4 * torch.finfo(dtype).eps
    for gradient in torch.autograd.grad(out, three, torch.ones_like(out)):
        assert bool(gradient.isfinite().all())


def random_mask(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    kept = torch.rand(shape, generator=generator) < 0.7
    if shape[2] > 1:
        kept[:, :, [0, shape[2] // 2, shape[2] - 1]] = False
    if kind == "boolean":
        return kept
    values = torch.randn(shape, generator=generator)
    return values.masked_fill_(~kept, -torch.inf)


@pytest.mark.parametrize(("name", "device"), KERNELS)
@pytest.mark.parametrize(("kind", "causal"), [("boolean", False), ("additive", True)])
@pytest.mark.parametrize(
    "spans",
    [(0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 1), (0, 0, 1, 0), (1, 0, 0, 1), (0, 1, 1, 1)],
    ids=str,
)
def test_masks(name: str, device: str, kind: str, spans: tuple[int, ...], causal: bool) -> None:
    n = 71
    sizes = (2, 4, n, n)
    shape = tuple(size if span else 1 for size, span in zip(sizes, spans, strict=True))
    mask = random_mask(kind, shape)
    case = Case(n, batch=2, heads=4, key_heads=2, mask=mask, causal=causal, layout="balanced")
    check(name, device, case)


@pytest.mark.parametrize(("name", "device"), KERNELS)
@pytest.mark.parametrize("dead_keys", [40, 97])
def test_masked_keys_leave_whole_rectangles_empty(name: str, device: str, dead_keys: int) -> None:
    mask = (torch.arange(97) >= dead_keys).expand(1, 1, 97, 97)
    check(name, device, Case(97, mask=mask, causal=True))


@pytest.mark.parametrize(("name", "device"), KERNELS)
@pytest.mark.parametrize("shift", [6, 10])
def test_shift_changes_nothing_but_rounding(name: str, device: str, shift: int) -> None:
    dtype = torch.float64 if device == "cpu" else torch.float16
    check(name, device, Case(130, shift=shift, dtype=dtype))


def test_shift_rescues_small_half_precision_probabilities() -> None:
    # Gradients so small that fp16 loses them, as the true ones are at long sequences.
    case = Case(64, dtype=torch.float16, levels=(3,), tile=8)
    case.grad_out = case.grad_out * 2.0**-18
    reference = exact(case)
    plain = rms_errors(run(get_kernel("cpu"), case), reference)
    case.shift = 10
    shifted = rms_errors(run(get_kernel("cpu"), case), reference)
    assert shifted["grad_value"] < 0.2 * plain["grad_value"]


@pytest.mark.parametrize("name", CPU_KERNELS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_call(name: str, data: st.DataObject) -> None:
    draw = data.draw
    key_heads = draw(st.integers(1, 2))
    case = Case(
        draw(st.integers(0, 90)),
        draw(st.integers(0, 90)),
        dtype=torch.float64,
        batch=draw(st.integers(0, 2)),
        heads=key_heads * draw(st.integers(1, 3)),
        key_heads=key_heads,
        head_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        causal=draw(st.booleans()),
        levels=draw(st.sampled_from([(), (1,), (3,), (7,), (3, 3), (7, 3), (13,)])),
        layout=draw(st.sampled_from(["aligned", "balanced"])),
        tile=draw(st.sampled_from([1, 4, 16])),
        seed=draw(st.integers(0, 2**16)),
    )
    check(name, "cpu", case)


N, EMPTY = 24, (5, 11)


def masks() -> dict[str, object]:
    kept = torch.rand(N, N) < 0.6
    kept[list(EMPTY)] = False
    ids = torch.arange(N) // 4
    others = torch.where(torch.isin(torch.arange(N), torch.tensor(EMPTY)), -1, ids)
    return {
        "boolean": kept,
        "additive": torch.randn(N, N).masked_fill_(~kept, -torch.inf),
        "bias": qa.Mask(bias=kept),
        "documents": qa.Mask(documents=(others, ids)),
        "rule": qa.Mask(keeps=lambda b, h, q, k: ((q + k) % 3 == 0) & (q != 5) & (q != 11)),
        "bias and window": qa.Mask(bias=kept, window=6),
        "bias and causal": qa.Mask(bias=kept, causal=True),
    }


@pytest.mark.skipif("cpu" not in qa.kernels(), reason="torch has no such one")
@pytest.mark.parametrize(("depth", "value"), [(0, math.nan), (1, math.inf)], ids=str)
@pytest.mark.parametrize("where", ["key", "value", "query"])
def test_rows_that_a_mask_leaves_no_key(depth: int, value: float, where: str) -> None:
    for name, mask in masks().items():
        given = {what: torch.randn(1, 2, N, 8) for what in ("query", "key", "value")}
        given[where][0, 0, 5 if where == "query" else 9, 3] = value
        out, lse = qa.attention_with_lse(
            *given.values(), attn_mask=mask, kernel="cpu", depth=depth
        )  # fmt: skip
        for row in EMPTY:
            assert bool((out[0, :, row] == 0.0).all()), name
            assert bool((lse[0, :, row] == -torch.inf).all()), name
