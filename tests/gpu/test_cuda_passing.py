"""The route ``passing`` and kept memory of results on a GPU: exact, within budget,
nothing left."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.attention import Inputs, exact, inputs, sink
from helpers.cuda import both, errors
from helpers.fa4 import FA4
from helpers.plans import passing

import quorum_attention as qa
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.execution.routes.streaming import Streaming

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ERRORS = {torch.float16: 3e-3, torch.bfloat16: 2e-2}


def plan(
    work, kernel: str, queries: int, keys: int, group: int, *, backward: bool
) -> dict:  # type: ignore[no-untyped-def,type-arg]
    made = qa.plan(**work, backward=backward, levels=(7,), kernel=kernel, device="cuda",
                   inputs="host", n_cap=1, accumulator="host")  # fmt: skip
    return {"plan": passing(made, queries, keys, group=group)}


@pytest.mark.parametrize("kernel", [FA4, "cudnn", "flash", "efficient"])
@pytest.mark.parametrize("dtype", list(ERRORS))
@pytest.mark.parametrize("is_causal", [True, False])
def test_it_is_exact_and_within_its_plan(kernel, dtype, is_causal) -> None:
    n, sizes = 1500, {"heads": 4, "kv_heads": 2, "head_dim": 64}
    given = inputs(n, dtype=dtype, **sizes)
    work = {"n_tokens": n, **sizes, "dtype": dtype, "is_causal": is_causal}
    plans = [
        plan(work, kernel, 640, 256, 1, backward=False),
        plan(work, kernel, 200, 512, 2, backward=True),
    ]
    report = qa.Report()
    found = both(given, plans, is_causal=is_causal, report=report)
    assert max(errors(found, given, is_causal=is_causal).values()) < ERRORS[dtype]
    for part in (report.forward, report.backward):
        assert not part.recoveries
        assert part.peak_bytes <= part.planned_peak_bytes


def test_a_tight_budget_is_planned_so() -> None:
    n, sizes = 1 << 17, {"heads": 2, "kv_heads": 2, "head_dim": 64}
    given = inputs(n, dtype=torch.float16, **sizes)
    report = qa.Report()
    with torch.device(
        "cuda"
    ):  # flags of overflow lie in page-locked memory all the same
        found = both(given, is_causal=True, budget="48MiB", report=report)
    made = qa.plan(n, heads=2, head_dim=64, dtype=torch.float16, is_causal=True, budget="48MiB",
                   backward=True)  # fmt: skip
    assert isinstance(made.schedule.route, Streaming)
    for part in (report.forward, report.backward):
        assert part.peak_bytes <= 48 << 20
        assert not part.recoveries
    usual = both(
        Inputs(*(t.cuda() for t in (*given.three, given.grad_out))), is_causal=True
    )
    for mine, theirs in zip(found.values(), usual.values(), strict=True):
        error = (mine.cuda().double() - theirs.double()).norm() / theirs.double().norm()
        assert float(error) < 1.5e-2  # of the uncut call: fp16 loses digits in its dV


@pytest.mark.parametrize("is_causal", [True, False])
def test_an_overflow_is_scaled_down_and_rows_that_are_not_finite_go_through_slots(
    is_causal,
) -> None:
    n, sizes = 1024, {"heads": 2, "kv_heads": 2, "head_dim": 64}
    work = {"n_tokens": n, **sizes, "dtype": torch.float16, "is_causal": is_causal}
    plans = [plan(work, "cudnn", *blocks, 2, backward=b)
             for b, blocks in ((False, (512, 256)), (True, (512, 512)))]  # fmt: skip
    given = sink(n, 2)
    report = qa.Report()
    found = both(given, plans, is_causal=is_causal, report=report)
    wanted = exact(given, is_causal=is_causal, gradients=True)
    assert wanted.grads is not None
    for mine, right in zip(found.values(), (wanted.out, *wanted.grads), strict=True):
        torch.testing.assert_close(mine.double(), right, atol=2e-3, rtol=0)
    assert report.backward.repeated_units > 0
    assert not report.backward.recoveries
    # Head 0 holds a number that is not finite; head 1 comes out right.
    given.query[0, 0, 100, 3] = float("nan")
    report = qa.Report()
    found = both(given, plans, is_causal=is_causal, report=report)
    assert not bool(found["query"][0, 0].isfinite().all())
    for mine, right in zip(found.values(), (wanted.out, *wanted.grads), strict=True):
        torch.testing.assert_close(
            mine[:, 1:].double(), right[:, 1:], atol=2e-3, rtol=0
        )


def test_memory_of_results_is_used_again_and_given_back() -> None:
    n, sizes = 1 << 15, {"heads": 4, "head_dim": 64}
    given = inputs(n, dtype=torch.float16, **sizes)
    leaves = [t.pin_memory().requires_grad_() for t in given.three]

    def call() -> torch.Tensor:
        return qa.attention(*leaves, is_causal=True, devices="cuda", budget="64MiB")

    first = call()
    wanted, address = first.detach().clone(), first.data_ptr()
    assert not first.is_pinned()
    del first
    second = call()
    assert second.data_ptr() == address
    assert second.is_pinned()
    assert torch.equal(second, wanted)
    # A copy that is under way when its source is freed gets the right bytes.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        copied = second.detach().to("cuda", non_blocking=True)
    del second
    third = qa.attention(*(t.detach() * 2 for t in leaves), is_causal=True, devices="cuda",
                         budget="64MiB")  # fmt: skip
    assert third.data_ptr() == address
    torch.cuda.synchronize()
    assert torch.equal(copied.cpu(), wanted)
    del third
    gc.collect()
    kept = BACKENDS["cuda"].pinned
    assert kept is not None
    kept.give_back()
    assert kept.take(1 << 24) is None
