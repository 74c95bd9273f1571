"""fp16 gradients near the edges of fp16, drawn by the hundred, on every route, against float64."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import Inputs, exact
from helpers_fp16 import ROUTES, Way, drawn, sink, wrong
from helpers_kernels import Counted
from helpers_memory import usage
from helpers_plans import unpinned

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("route", ROUTES)
def test_no_infinity_that_float64_does_not_have(route: str) -> None:
    """Every result that fp16 can hold is finite and right (invariant 6)."""
    found = [wrong(drawn(seed), Way(route), seed) for seed in range(60)]
    assert [words for words in found if words is not None] == []


@pytest.mark.parametrize("n_cap", [1, 2, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("levels", [(3,), (7,)])
def test_a_sink_through_slots(n_cap: int, is_causal: bool, levels: tuple[int, ...]) -> None:
    """The sink's dV is a sum over all queries: 1, which overflows when it is scaled for other keys.
    By the time that is noticed, finished gradients have overwritten the inputs."""
    n = 1024
    made = sink(n)
    reference = exact(made, is_causal=is_causal, gradients=True)
    report = qa.Report()
    plan = qa.plan(
        n, heads=1, head_dim=64, dtype=torch.float16, is_causal=is_causal, levels=levels,
        over_inputs=False, n_cap=n_cap, backward=True, device="cpu",
    )  # fmt: skip
    got = qa.attention_backward(
        made.grad_out, *made.three, reference.out.half(), reference.lse.float(),
        is_causal=is_causal, plan=plan, report=report,
    )  # fmt: skip
    assert report.backward.repeated_units > 0
    for actual, wanted in zip(got, reference.grads, strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=2e-3, rtol=0)


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_a_broken_row_does_not_keep_other_heads_from_being_mended(broken: float) -> None:
    """Head 0 holds a number that is not finite, head 1 a sink, whose gradients come out right."""
    n = 512
    made = sink(n, heads=2)
    made.query[0, 0, 100, 3] = broken
    one = Inputs(*(t[:, 1:] for t in (*made.three, made.grad_out)))
    reference = exact(one, gradients=True)
    out, lse = qa.attention_with_lse(*made.three)
    plan = qa.plan(
        n, heads=2, head_dim=64, dtype=torch.float16, levels=(7,), over_inputs=False, n_cap=2,
        backward=True, device="cpu", heads_per_group=2,
    )  # fmt: skip
    got = qa.attention_backward(made.grad_out, *made.three, out, lse, plan=plan)
    assert not bool(got[1][0, 0].isfinite().all())
    for actual, wanted in zip(got, reference.grads, strict=True):
        torch.testing.assert_close(actual[:, 1:].double(), wanted, atol=2e-3, rtol=0)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_a_monolithic_call_that_overflows_stays_within_its_plan(heads: int, masked: bool) -> None:
    """dS is too large for fp16, dQ = dS K is not: only the scaled gradients are finite."""
    n, m = 3000, 2
    generator = torch.Generator().manual_seed(5)
    q, grad_out = (torch.randn(1, heads, n, 32, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, heads, m, 32, generator=generator) for _ in range(2))
    made = Inputs(q.half(), (k / 4).half(), v.half(), (grad_out * 2**14).clamp(-6e4, 6e4).half())
    mask = torch.randn(n, m).half() if masked else None
    reference = exact(made, mask=mask, gradients=True)
    out, lse = reference.out.half(), reference.lse.float()
    report = qa.Report()

    def call() -> tuple[torch.Tensor, ...]:
        return qa.attention_backward(
            made.grad_out, *made.three, out, lse, mask, depth=0, report=report
        )

    for actual, wanted in zip(call(), reference.grads, strict=True):
        fits = wanted.abs() < 65_000
        assert bool(actual[fits].isfinite().all())
        assert (actual.double() - wanted)[fits].abs().max() < 5e-3 * wanted.abs().max()
    assert report.backward.accumulator == "none"
    assert report.backward.repeated_units == 1
    assert usage(call).peak <= report.backward.planned_peak_bytes


@pytest.mark.parametrize("n_cap", [1, 2, 3])
def test_out_of_memory_while_a_unit_is_run_again(n_cap: int) -> None:
    """Any kernel call may fail, of the first run or a repeat: no partial result remains."""
    n = 256
    made = sink(n, heads=2)
    reference = exact(made, is_causal=True, gradients=True)
    kernel = Counted()
    call = {"is_causal": True, "kernel": kernel}
    made_plan = qa.plan(
        n, heads=2, head_dim=64, dtype=torch.float16, levels=(7,), tile=8, over_inputs=False,
        n_cap=n_cap, backward=True, device="cpu", heads_per_group=1, **call,
    )  # fmt: skip

    def computed(report: qa.Report) -> tuple[torch.Tensor, ...]:
        return qa.attention_backward(
            made.grad_out, *made.three, reference.out.half(), reference.lse.float(),
            plan=unpinned(made_plan), report=report, **call,
        )  # fmt: skip

    computed(qa.Report())  # it is tried out once
    kernel.arm(set())
    report = qa.Report()
    computed(report)
    assert report.backward.repeated_units > 0
    for number in range(0, kernel.n_calls, 5):
        kernel.arm({number, number + 4})
        report = qa.Report()
        got = computed(report)
        assert report.backward.recoveries
        for actual, wanted in zip(got, reference.grads, strict=True):
            torch.testing.assert_close(actual.double(), wanted, atol=2e-3, rtol=0)


@pytest.mark.parametrize("levels", [(), (7,)])
def test_an_overflow_beside_a_broken_value_is_seen(levels: tuple[int, ...]) -> None:
    """The sink's dV overflows at first and is mended, although dQ and dK cannot be."""
    n = 512
    made = sink(n)
    reference = exact(made, gradients=True)
    made.value[0, 0, 5, 5] = torch.nan
    out, lse = qa.attention_with_lse(*made.three)
    plan = qa.plan(
        n, heads=1, head_dim=64, dtype=torch.float16, levels=levels, over_inputs=False, n_cap=2,
        backward=True, device="cpu",
    )  # fmt: skip
    got = qa.attention_backward(made.grad_out, *made.three, out, lse, plan=plan)
    assert bool(got[0].isnan().all())
    torch.testing.assert_close(got[2].double(), reference.grads[2], atol=2e-3, rtol=0)
