"""The scaled backward: fp16 gradients stay right where an unscaled kernel loses or breaks them."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import Inputs
from helpers_attention import exact as textbook

import quorum_attention as qa

N, D = 896, 32
LEVELS = (7,)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def inputs(heads: int = 2) -> list[torch.Tensor]:
    return [random(1, heads, N, D, seed=seed) for seed in range(4)]


def exact(tensors: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    return list(textbook(Inputs(*tensors), is_causal=causal, gradients=True).grads)


def computed(
    tensors: list[torch.Tensor], causal: bool, dtype: torch.dtype, report: qa.Report | None = None
) -> tuple[torch.Tensor, ...]:
    """Gradients in ``dtype``; fp32 shows how exact sums of fp16 partial results are."""
    q, k, v, grad = tensors
    sizes = {
        "heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": D, "dtype": q.dtype,
        "is_causal": causal, "levels": LEVELS,
    }  # fmt: skip
    out, lse = qa.attention_with_lse(
        q, k, v, is_causal=causal, enable_gqa=True, plan=qa.plan(N, **sizes)
    )
    grads = tuple(torch.empty(t.shape, dtype=dtype) for t in (q, k, v))
    plan = qa.plan(N, backward=True, **sizes)
    return qa.attention_backward(
        grad, q, k, v, out, lse, is_causal=causal, enable_gqa=True, plan=plan, grads=grads,
        report=report,
    )  # fmt: skip


def errors(got: tuple[torch.Tensor, ...], right: list[torch.Tensor]) -> dict[str, float]:
    assert all(torch.isfinite(g).all() for g in got)
    return {
        name: float((g.double() - r).norm() / r.norm())
        for name, g, r in zip(("query", "key", "value"), got, right, strict=True)
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e3])
def test_loss_scaled_gradients(size: float, causal: bool) -> None:
    tensors = inputs()
    # What a loss scale does to an fp16 gradient: at 1e-6 the inputs themselves are subnormal.
    tensors[3] = (tensors[3].float() * size).half()
    found = errors(computed(tensors, causal, torch.float32), exact(tensors, causal))
    assert max(found.values()) < 1e-3, found


def test_only_tasks_that_overflow_are_run_again() -> None:
    report = qa.Report()
    computed(inputs(), True, torch.float16, report)
    assert report.backward is not None
    assert report.backward.repeated_units == 0
    assert report.backward.units == 2 * 7 / (report.backward.heads_per_group)


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_broken_number_keeps_no_other_column_from_being_mended(broken: float, depth: int) -> None:
    """One key that all rows attend to, so sums overflow; the number is of one column of dV."""
    q, grad = random(1, 1, 214, D, seed=0), random(1, 1, 214, D, seed=1).abs()
    k, v = 1e-3 * random(1, 1, 1, D, seed=2), 1e-3 * random(1, 1, 1, D, seed=3)
    grad[0, 0, 100, 3] = broken
    call = {"kernel": "cpu", "devices": "cpu"}
    out, lse = qa.attention_with_lse(q, k, v, **call)
    found = qa.attention_backward(grad, q, k, v, out, lse, depth=depth, **call)[2][0, 0, 0]
    wanted = grad.double().sum(dim=2)[0, 0]
    others = wanted.isfinite()
    assert int(others.sum()) == D - 1
    torch.testing.assert_close(found.double()[others], wanted[others], rtol=2e-3, atol=0)
    assert not bool(found[~others].isfinite())


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_broken_inputs_stay_broken_and_end(broken: float) -> None:
    tensors = inputs()
    tensors[3][0, 0, 100, 3] = broken
    report = qa.Report()
    got = computed(tensors, True, torch.float32, report)
    assert not torch.isfinite(got[2][0, 0, :100]).all()
    # The other head and the other queries of this head stay as they are.
    assert all(torch.isfinite(part[0, 1]).all() for part in got)
    wanted = exact(tensors, True)[0]
    assert torch.equal(torch.isfinite(got[0]), torch.isfinite(wanted))
    right = torch.isfinite(wanted)
    torch.testing.assert_close(got[0][right].double(), wanted[right], atol=2e-3, rtol=0)
    assert report.backward is not None
    assert report.backward.repeated_units <= report.backward.units
