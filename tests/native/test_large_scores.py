"""Scores of thousands and more in 16 bits: a row of one key has that key's value, exactly.

A GPU scales a score and takes the row's maximum off it in one operation, rounded once; so the
largest probability was 1 only up to the rounding of the maximum, and was then rounded to 16 bits in
the product with the value, but not in the sum that divides it. Triton's interpreter rounds twice:
here it is made to round once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_harness import Case, errors, exact, run

import quorum_attention as qa
from quorum_attention.kernels.native import launch
from quorum_attention.kernels.native.config import Config

half, brain = torch.float16, torch.bfloat16


@pytest.fixture
def fused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiplications and additions in one, as on a GPU."""
    if device == "cuda":
        return
    from triton.runtime import interpreter

    def once(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(wide.astype(x.data.dtype), x.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", once)


def one_of_many(n_keys: int, size: float, dtype: torch.dtype, **more: Any) -> tuple[Case, Any]:
    """Queries that see a key each far above all others, with scores of about ``size``; which."""
    case = Case(40, n_keys, dtype, seed=int(size) + n_keys, factor=size / 64, **more)
    g = torch.Generator().manual_seed(1)
    key = 4 * torch.nn.functional.normalize(torch.randn(case.key.shape, generator=g), dim=-1)
    which = torch.randint(n_keys, (1, 2, 40, 1), generator=g).expand(1, 2, 40, 16)
    factor = 2 + 4 * torch.rand(1, 2, 40, 1, generator=g)
    case.query, case.key = (key.gather(2, which) * factor).to(dtype), key.to(dtype)
    return case, which


WAYS: dict[str, dict[str, Any]] = {
    "whole": {"levels": ()},
    "tasks": {"levels": (3,)},
    "negative scale": {"levels": ()},
    "mask": {"levels": (), "mask": torch.zeros(1, 1, 40, 70)},
    "soft cap": {"levels": ()},
    "window": {"levels": ()},
}
OPTIONS: dict[str, dict[str, Any]] = {"soft cap": {"softcap": 3e5}, "window": {"window": 100}}


@pytest.mark.parametrize("dtype", [half, brain], ids=str)
@pytest.mark.parametrize("size", [3e3, 1e5])
@pytest.mark.parametrize("n_keys", [1, 70])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("fused")
def test_a_row_of_one_key(
    way: str, n_keys: int, size: float, dtype: torch.dtype, device: str
) -> None:
    if device == "cpu" and dtype == brain:
        pytest.skip("Triton's interpreter has no bfloat16")
    case, which = one_of_many(n_keys, size, dtype, **WAYS[way])
    if way == "mask":
        case.mask = case.mask[..., :n_keys]
    if way == "negative scale":
        case.query, case.factor = -case.query, -case.factor
    found = run(qa.NativeKernel(**OPTIONS.get(way, {})), case, device, check=False)
    value = case.value.float().gather(2, which)
    assert torch.equal(found.out.cpu(), value)
    # dS is the difference of two equal sums of products, in fp32.
    off = (case.grad_out.float() * value).abs().sum(-1, keepdim=True) * 2.0**-20 * abs(case.scale)
    near = off * case.key.float().abs().amax((-1, -2), keepdim=True)
    assert bool((found.grad_query.cpu().abs() <= near).all())
    near = (off * case.query.float().abs()).sum(-2, keepdim=True)
    assert bool((found.grad_key.cpu().abs() <= near).all())


@pytest.mark.parametrize("dtype", [half, brain], ids=str)
@pytest.mark.usefixtures("fused")
def test_keys_that_are_all_alike(dtype: torch.dtype, device: str) -> None:
    """Rows of several equal largest scores: every P is rounded the same way."""
    if device == "cpu" and dtype == brain:
        pytest.skip("Triton's interpreter has no bfloat16")
    case = Case(40, 64, dtype, factor=1234.567, levels=())
    # Products of such numbers are alike in whatever order they are added up.
    case.query = torch.randint(-3, 4, (1, 2, 40, 16), generator=torch.Generator().manual_seed(1))
    case.key = case.query[:, :, :1].expand(1, 2, 64, 16).to(dtype)
    case.query = case.query.to(dtype)
    found = run(qa.NativeKernel(), case, device, check=False)
    wanted = case.value.double().mean(-2, keepdim=True)
    assert float((found.out.cpu().double() - wanted).abs().max()) < 2e-6


@pytest.mark.parametrize("levels", [(), (3,)])
@pytest.mark.usefixtures("fused")
def test_usual_rows_beside_such_a_row(levels: tuple[int, ...], device: str) -> None:
    """A block of rows is walked anew because of one of them: all are right."""
    case = Case(70, dtype=half, levels=levels, causal=True)
    case.query[..., 50, :] = 3e4 * case.key[..., 7, :].sign()
    found, right = run(qa.NativeKernel(), case, device, check=False), exact(case)
    assert errors(found, right)["out"] < 1e-3


def test_where_no_care_is_needed() -> None:
    """fp32 has no such rounding, a soft cap bounds scores: nothing more is compiled there. Nor for
    windows of wide heads, which would be slower by it (docs/native.md)."""
    query = torch.empty(1, 1, 1, 1)

    def far(query: torch.Tensor, width: int = 64, **options: Any) -> float:
        extras = launch.Extras(qa.NativeKernel(**options).options)
        return launch._far(query, extras, Config(128, 64, 4, 2), width)

    assert far(query) == far(query.half(), softcap=50.0) == 0
    assert far(query.half(), 128, window=9) == 0
    assert far(query.half()) == far(query.half(), softcap=1e4) == far(query.half(), 128) > 0
    assert far(query.half(), window=9) > 0
