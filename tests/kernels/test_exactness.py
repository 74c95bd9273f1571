"""Every kernel that runs here, task by task, against float64: forward and all
gradients."""

from __future__ import annotations

import math
import random

import pytest
import torch
from kernel_harness import Case, errors, exact, random_case, rms_errors, run

import quorum_attention as qa
from quorum_attention.kernels import get_kernel

CHUNKS = [(), (1,), (3,), (7,), (3, 3), (7, 3), (13,)]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["cpu", "dense"])
def test_any_call(name: str) -> None:
    """Masks leave rows, and whole rectangles, no key. (On a GPU:
    test_cuda_exactness.py, and random calls.)"""
    r = random.Random(torch.initial_seed())
    for _ in range(30):
        dtype = r.choice([torch.float64, torch.float64, torch.float32])
        case = random_case(r, dtype, 90, False)
        case.levels, case.layout = r.choice(CHUNKS), r.choice(["aligned", "balanced"])
        case.shift, kind = (
            r.choice([0, 0, 6, 10]),
            r.choice(["as it is", "boolean", "first keys"]),
        )
        if kind == "first keys":
            case.mask = (torch.arange(case.n_keys) >= r.randint(0, 90)).expand(
                1, 1, 1, -1
            )
        elif case.mask is not None:
            case.mask[:, :, :: r.randint(2, 40)] = -torch.inf
            case.mask = case.mask > -0.5 if kind == "boolean" else case.mask
        found = errors(run(get_kernel(name), case), exact(case))
        assert max(found.values()) < (1e-12 if dtype == torch.float64 else 1e-5), (
            found,
            case,
        )


@pytest.mark.slow_but_first
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


def test_shift_rescues_small_half_precision_probabilities() -> None:
    # Gradients so small that fp16 loses them, as the true ones are at long sequences.
    case = Case(64, dtype=torch.float16, levels=(3,), tile=8)
    case.grad_out = case.grad_out * 2.0**-18
    reference = exact(case)
    plain = rms_errors(run(get_kernel("cpu"), case), reference)
    case.shift = 10
    shifted = rms_errors(run(get_kernel("cpu"), case), reference)
    assert shifted["grad_value"] < 0.2 * plain["grad_value"]


N, EMPTY = 24, [5, 11]


def masks() -> dict[str, object]:
    kept, ids = torch.rand(N, N) < 0.6, torch.arange(N) // 4
    kept[EMPTY] = False
    return {
        "boolean": kept,
        "additive": torch.randn(N, N).masked_fill_(~kept, -torch.inf),
        "documents": qa.Mask(
            documents=(ids.index_fill(0, torch.tensor(EMPTY), -1), ids)
        ),
        "rule": qa.Mask(
            keeps=lambda b, h, q, k: ((q + k) % 3 == 0) & (q != 5) & (q != 11)
        ),
        "bias and window": qa.Mask(bias=kept, window=6),
        "bias and causal": qa.Mask(bias=kept, causal=True),
    }


@pytest.mark.slow_but_first
@pytest.mark.skipif("cpu" not in qa.kernels(), reason="torch has no such one")
@pytest.mark.parametrize(("depth", "value"), [(0, math.nan), (1, math.inf)], ids=str)
@pytest.mark.parametrize("where", ["key", "value", "query"])
def test_rows_that_a_mask_leaves_no_key(depth: int, value: float, where: str) -> None:
    for name, mask in masks().items():
        given = {what: torch.randn(1, 2, N, 8) for what in ("query", "key", "value")}
        given[where][0, 0, 5 if where == "query" else 9, 3] = value
        out, lse = qa.attention_with_lse(
            *given.values(), mask, kernel="cpu", depth=depth
        )
        assert bool((out[0, :, EMPTY] == 0.0).all()), name
        assert bool((lse[0, :, EMPTY] == -torch.inf).all()), name
