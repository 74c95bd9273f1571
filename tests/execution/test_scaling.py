"""fp16 gradients that overflow, or are too small, are scaled: right on every route.
(Drawn ones: tests/test_invariants.py.)"""

from __future__ import annotations

import pytest
import torch
from helpers.attention import Inputs, assert_close, exact, inputs, sink
from helpers.kernels import Counted
from helpers.memory import usage
from helpers.passes import both_passes, pass_of
from helpers.plans import unpinned

import quorum_attention as qa
from quorum_attention.execution.scaling import all_finite

pytestmark = pytest.mark.usefixtures("one_thread")
N = 300
ROUTES = {
    "direct": {"levels": ()},
    "slots": {"levels": (7,), "over_inputs": False, "tile": 16, "n_cap": 2},
    "one slot": {"levels": (3,), "over_inputs": False, "tile": 16, "n_cap": 1},
    "over_inputs": {"levels": (7,), "over_inputs": True, "tile": 16},
}


def plan_of(made: Inputs, **more) -> qa.Plan:
    """A backward on a CPU."""
    q, k = made.query, made.key
    return qa.plan(
        q.shape[-2], heads=q.shape[-3], kv_heads=k.shape[-3], head_dim=q.shape[-1], dtype=q.dtype,
        batch=q.shape[:-3].numel(), device="cpu", backward=True, **more,
    )  # fmt: skip


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("n_cap", "is_causal", "levels"),
    [(1, False, (7,)), (2, True, (7,)), (2, False, (3,)), (3, True, (3,))],
)
def test_a_sink_through_slots(
    n_cap: int, is_causal: bool, levels: tuple[int, ...]
) -> None:
    """The sink's dV is a sum over all queries: 1, which overflows when it is scaled for
    other keys. By the time that is noticed, finished gradients have overwritten the
    inputs. Only tasks that overflow are run again."""
    usual = inputs(1024, heads=1, head_dim=64, dtype=torch.float16)
    for made, repeated in ((sink(1024), True), (usual, False)):
        reference = exact(made, is_causal=is_causal, gradients=True)
        report = qa.Report()
        plan = plan_of(
            made, is_causal=is_causal, levels=levels, over_inputs=False, n_cap=n_cap
        )
        got = qa.attention_backward(
            made.grad_out, *made.three, reference.out.half(), reference.lse.float(),
            is_causal=is_causal, plan=plan, report=report,
        )  # fmt: skip
        assert_close(got, reference.grads, 2e-3)
        assert (report.backward.repeated_units > 0) == repeated


def test_a_sum_that_has_to_go_down_two_steps() -> None:
    """Gradients of one column, beside small values: dV is 2000 times what scaling
    allows for."""
    usual, grad_out = sink(4096), torch.zeros(1, 1, 4096, 64).half()
    grad_out[..., 0] = 1.0
    key, value = (t[:, :, 500:540] for t in (usual.key, usual.value / 64))
    made = Inputs(usual.query, key.clone(), value.clone(), grad_out)
    reference, report = exact(made, gradients=True), qa.Report()
    plan = plan_of(made, n_keys=40, levels=(3,), over_inputs=False)
    grads = tuple(torch.empty(t.shape) for t in made.three)
    results = reference.out.half(), reference.lse.float()
    pass_of(made, True, results, plan=plan, grads=grads, report=report)()
    assert report.backward.repeated_units >= 2
    assert_close(grads[2], reference.grads[2], 1e-3)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_a_monolithic_call_that_overflows_stays_within_its_plan(
    heads: int, masked: bool
) -> None:
    """dS is too large for fp16, dQ = dS K is not: only the scaled gradients are
    finite."""
    made = inputs(3000, 2, heads=heads, head_dim=32, dtype=torch.float16)
    made.key /= 4
    made.grad_out = (made.grad_out.float() * 2**14).clamp(-6e4, 6e4).half()
    mask = torch.randn(3000, 2).half() if masked else None
    reference = exact(made, mask=mask, gradients=True)
    report, results = qa.Report(), (reference.out.half(), reference.lse.float())
    call = pass_of(made, True, results, attn_mask=mask, depth=0, report=report)
    for actual, wanted in zip(call(), reference.grads, strict=True):
        fits = wanted.abs() < 65_000
        assert bool(actual[fits].isfinite().all())
        assert (actual.double() - wanted)[fits].abs().max() < 5e-3 * wanted.abs().max()
    assert report.backward.accumulator == "none"
    assert report.backward.repeated_units == 1
    assert usage(call).peak <= report.backward.planned_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("n_cap", [1, 2, 3])
def test_out_of_memory_while_a_unit_is_run_again(n_cap: int) -> None:
    """Any kernel call may fail, of the first run or a repeat: no partial result
    remains."""
    made, kernel = sink(256, heads=2), Counted()
    reference = exact(made, is_causal=True, gradients=True)
    call = {"is_causal": True, "kernel": kernel}
    plan = plan_of(made, levels=(7,), tile=8, over_inputs=False, n_cap=n_cap, heads_per_group=1,
                   **call)  # fmt: skip

    run = pass_of(made, True, (reference.out.half(), reference.lse.float()), **call)

    def computed(*fails: int) -> qa.PassReport:
        kernel.arm(set(fails))
        report = qa.Report()
        for actual, right in zip(
            run(plan=unpinned(plan), report=report), reference.grads, strict=True
        ):
            torch.testing.assert_close(actual.double(), right, atol=2e-3, rtol=0)
        return report.backward

    for _ in range(2):  # it is tried out once
        assert computed().repeated_units > 0
    for number in range(n_cap, kernel.n_calls, 25):
        assert computed(number, number + 4).recoveries


@pytest.mark.parametrize("n_cap", [1, 2])
def test_a_head_that_is_not_finite_is_no_fault_of_a_smaller_group(n_cap: int) -> None:
    """A unit of two heads stays flagged for its second head. The last group has one
    head, which that flag is not of."""
    made = inputs(40, heads=3, head_dim=8, dtype=torch.float16)
    wanted = exact(made, gradients=True)
    made.grad_out[:, 1] = torch.nan
    sizes = {"levels": (3,), "tile": 8, "n_cap": n_cap, "heads_per_group": 2}
    plan = plan_of(made, over_inputs=False, **sizes)
    results = (wanted.out.half(), wanted.lse.float())
    grads = pass_of(made, True, results, plan=plan)()
    for grad, reference in zip(grads, wanted.grads, strict=True):
        assert bool(grad[:, 1].isnan().all())
        assert_close(grad[:, ::2], reference[:, ::2], 2e-3)


# --- Upstream gradients of a wider dtype than the inputs --------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("size", "dtype"), [(1e-12, torch.float64), (1e9, torch.float32)]
)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kernel", ["cpu", "dense"])
def test_gradients_that_fp16_cannot_hold(size, dtype, route: str, kernel: str) -> None:
    if kernel == "dense" and route == "over_inputs":
        pytest.skip("it takes tasks one by one")
    made = inputs(N, heads=4, kv_heads=2, batch=(2,), dtype=torch.float16)
    # Gradients of each head have another size, so each head is divided by another power
    # of two.
    sizes = torch.tensor([1.0, 1.0, 1e-6, 1e-6], dtype=torch.float64)[:, None, None]
    made.grad_out = (made.grad_out.double() * sizes * size).to(dtype)
    call = {"is_causal": True, "enable_gqa": True, "kernel": kernel}
    plan = plan_of(made, is_causal=True, kernel=kernel, **ROUTES[route])
    grads = tuple(torch.full(t.shape, torch.nan) for t in made.three)
    pass_of(made, True, plan=plan, grads=grads, **call)()
    reference = exact(made, is_causal=True, gradients=True)
    for actual, wanted in zip(grads, reference.grads, strict=True):
        half = actual.shape[1] // 2
        for heads in (slice(0, half), slice(half, None)):
            largest = wanted[:, heads].abs().max()
            assert_close(
                actual[:, heads].double() / largest, wanted[:, heads] / largest, 5e-3
            )


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kernel", ["cpu", "dense", "cpu with dropout", "a mask"])
def test_small_rows_beside_large_ones_keep_their_digits(
    kernel: str, depth: int
) -> None:
    """Row 0 sees key 0 alone, so the gradients of all other keys are of small numbers
    only."""
    n = 40
    made = inputs(n, head_dim=8, dtype=torch.float16)
    made.grad_out = made.grad_out.float() * 3e-7
    made.grad_out[..., 0, :] = 1.0
    call = {"is_causal": True, "kernel": kernel.split()[0], "devices": "cpu"}
    if kernel == "a mask":
        call = {
            "devices": "cpu",
            "attn_mask": qa.Mask(causal=True, window=(n, 0), softcap=1e4),
        }
    if "dropout" in kernel:
        call |= {"dropout_p": 1e-6, "dropout_seed": 1}
    grads = tuple(torch.empty_like(t, dtype=torch.float32) for t in made.three)
    each = {"out_dtype": torch.float32}, {"grads": grads, "depth": depth}
    *_, found = both_passes(made, each, **call)
    wanted = exact(made, is_causal=True, gradients=True).grads[2][..., 1:, :]
    off = (found[..., 1:, :].double() - wanted).abs().max()
    assert off <= 2e-3 * wanted.abs().max()


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_gradients_whose_sum_exceeds_fp16_are_finite_if_all_are(
    bad: float | None,
) -> None:
    """Gradients that are not finite are computed anew, scaled, which takes several times
    as long; that is for numbers, not for their sum."""
    gradients = [torch.full((1, 2, 300, 8), size).half() for size in (6e4, -6e4, 1.0)]
    assert not gradients[0].sum().isfinite()
    if bad is not None:
        gradients[1][0, 1, 7, 3] = bad
    assert all_finite(gradients) is (bad is None)
