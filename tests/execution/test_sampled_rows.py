"""Output and log-sum-exp that come from elsewhere are told from those of another call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_attention import inputs
from helpers_jobs import a_job

import quorum_attention as qa
from quorum_attention.execution.call import Job, MaskView, mask_shape
from quorum_attention.execution.problem import Workload
from quorum_attention.execution.sampled_rows import rows_differ

N, M = 70, 90
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def a_call(
    dtype: torch.dtype, *, causal: bool = False, masked: bool = False, spread: float = 1.0
) -> tuple[Job, torch.Tensor, torch.Tensor]:
    given = inputs(N, M, batch=(2,), heads=4, kv_heads=2, dtype=dtype, spread=spread)
    mask = torch.rand(4, N, M) > 0.5 if masked else None
    out, lse = qa.attention_with_lse(
        *given.three, mask, is_causal=causal, enable_gqa=True, kernel="cpu"
    )
    shape = None if mask is None else mask_shape(mask, 1)
    work = Workload((2,), 4, 2, N, M, 8, 8, dtype, causal, shape)
    return a_job(work, given.three, mask, 8**-0.5), out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", [None, 300_000])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_rows_of_the_same_call_are_the_same(
    dtype: torch.dtype, left: int | None, spread: float
) -> None:
    for causal in (False, True):
        for masked in (False, True):
            job, out, lse = a_call(dtype, causal=causal, masked=masked, spread=spread)
            for _ in range(5):
                assert not rows_differ(job, out, lse, left)


def flipped(job: Job, name: str) -> Job:
    return replace(job, tensors={**job.tensors, name: job.tensors[name].flip(-1)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_results_are_not_those_of_the_call(dtype: torch.dtype) -> None:
    job, out, lse = a_call(dtype, masked=True)
    assert job.mask is not None
    causal = replace(job.problem, work=replace(job.work, is_causal=True))
    other = [
        (job, torch.randn_like(out), lse),
        (job, 2 * out, lse),
        (job, out, lse + 0.01),
        (replace(job, scale=2 * job.scale), out, lse),
        (replace(job, problem=causal), out, lse),
        (replace(job, mask=MaskView(~job.mask.mask, 1)), out, lse),
        (flipped(job, "query"), out, lse),
        (flipped(job, "value"), out, lse),
    ]
    for number, one in enumerate(other):
        assert rows_differ(*one, None), number


def test_a_kernel_registered_anew_is_not_the_forwards() -> None:
    def kernel_of(factor: float) -> Any:
        def function(query: Any, key: Any, value: Any, *, is_causal: bool, scale: float) -> Any:
            scores = factor * scale * (query @ key.mT)
            if is_causal:
                later = torch.ones_like(scores).triu(1).bool()
                scores = scores.masked_fill(later, -torch.inf)
            return scores.softmax(-1) @ value, scores.logsumexp(-1)

        return qa.from_lse_function(function, name="registered anew")

    found = []
    for anew in (False, True):
        qa.register_kernel(kernel_of(1.0))
        torch.manual_seed(0)
        given = [
            torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
        ]
        out = qa.attention(*given, kernel="registered anew")
        if anew:
            qa.register_kernel(kernel_of(4.0))
        out.sum().backward()
        found.append(given[0].grad)
    assert torch.equal(*found)  # type: ignore[arg-type]
    by_name = torch.compile(
        lambda *three: qa.attention(*three, kernel="registered anew"), backend="aot_eager"
    )
    with pytest.raises(NotImplementedError, match="'registered anew'"):
        by_name(*given)
