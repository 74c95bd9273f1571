"""Scores of thousands and more in 16 bits: a row of one key has that key's value to a
last place.

A GPU scales a score and takes the row's maximum off it in one operation, rounded once;
so the largest probability is 1 only up to the rounding of the maximum, and is rounded
to 16 bits in the product with the value, but not in the sum that divides it. Triton's
interpreter rounds twice: here it is made to round once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_harness import Case, errors, exact, run

import quorum_attention as qa

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


def one_of_many(
    n_keys: int, size: float, dtype: torch.dtype, **more: Any
) -> tuple[Case, Any]:
    """Queries that see a key each far above all others, with scores of about ``size``;
    which."""
    case = Case(40, n_keys, dtype, seed=int(size) + n_keys, factor=size / 64, **more)
    g = torch.Generator().manual_seed(1)
    key = 4 * torch.nn.functional.normalize(
        torch.randn(case.key.shape, generator=g), dim=-1
    )
    which = torch.randint(n_keys, (1, 2, 40, 1), generator=g).expand(1, 2, 40, 16)
    factor = 2 + 4 * torch.rand(1, 2, 40, 1, generator=g)
    case.query, case.key = (key.gather(2, which) * factor).to(dtype), key.to(dtype)
    return case, which


@pytest.mark.slow_but_first
@pytest.mark.parametrize("dtype", [half, brain], ids=str)
@pytest.mark.parametrize(("size", "n_keys"), [(3e3, 70), (1e5, 70), (1e5, 1)])
@pytest.mark.parametrize(
    "way", ["whole", "tasks", "negative scale", "mask", "soft cap", "window"]
)
@pytest.mark.usefixtures("fused")
def test_a_row_of_one_key(
    way: str, n_keys: int, size: float, dtype: torch.dtype, device: str
) -> None:
    if device == "cpu" and dtype == brain:
        pytest.skip("Triton's interpreter has no bfloat16")
    levels, mask = ((3,) if way == "tasks" else ()), None
    if way == "mask":
        mask = torch.zeros(1, 1, 40, n_keys)
    case, which = one_of_many(n_keys, size, dtype, levels=levels, mask=mask)
    if way == "negative scale":
        case.query, case.factor = -case.query, -case.factor
    options = {"soft cap": {"softcap": 3e5}, "window": {"window": 100}}.get(way, {})
    found = run(qa.NativeKernel(**options), case, device, check=False)
    value = case.value.float().gather(2, which)
    last_place = torch.finfo(dtype).eps * value.abs()
    assert bool(((found["out"].cpu() - value).abs() <= last_place).all())


@pytest.mark.parametrize("levels", [(), (3,)])
@pytest.mark.usefixtures("fused")
def test_usual_rows_beside_such_a_row(levels: tuple[int, ...], device: str) -> None:
    """One row of a block has such scores: all are right."""
    case = Case(70, dtype=half, levels=levels, causal=True)
    case.query[..., 50, :] = 3e4 * case.key[..., 7, :].sign()
    found, right = run(qa.NativeKernel(), case, device, check=False), exact(case)
    assert errors(found, right)["out"] < 1e-3
