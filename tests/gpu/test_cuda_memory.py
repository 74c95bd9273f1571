"""Memory on a GPU: budgets kept, nothing left behind, real failures recovered from;
gradients of masks."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.attention import Inputs, assert_close, exact, inputs
from helpers.cuda import NAMES, both, errors
from helpers.fa4 import FA4
from helpers.memory import FailingAllocations
from helpers.plans import unpinned

import quorum_attention as qa
from quorum_attention import dispatch
from quorum_attention.kernels import get_kernel
from quorum_attention.kernels.limits import CallLimits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
N = 4000


@pytest.fixture(autouse=True)
def clean():  # type: ignore[no-untyped-def]
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def made(where: str, n: int = N, **sizes) -> Inputs:  # type: ignore[no-untyped-def]
    given = inputs(n, dtype=torch.float16, **{"heads": 4, "head_dim": 64, **sizes})
    return Inputs(*(t.to(where) for t in (*given.three, given.grad_out)))


def limited(room: int) -> None:
    """So many bytes may be reserved beyond what is."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + room) / total
    )


def smallest(*given, **call) -> int:  # type: ignore[no-untyped-def]
    """The smallest budget that works, from the error's own words."""
    with pytest.raises(qa.BudgetError) as refused:
        qa.attention(*given, **call, budget=1000)
    return refused.value.smallest_bytes  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kernel", [FA4, "cudnn", "flash", "efficient", "native", "dense"]
)
@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("accumulator", ["device", "host"])
def test_measured_peak_within_the_plan(kernel, where, depth, accumulator) -> None:
    """A second call, so that what an operator sets up once does not count as the
    call's."""
    given = made(where)
    call = {
        "depth": depth,
        "kernel": kernel,
        "accumulator": accumulator,
        "is_causal": True,
    }
    both(given, **call)
    report = qa.Report()
    both(given, report=report, **call)
    for part in (report.forward, report.backward):
        assert part.peak_bytes is not None
        assert 0 < part.peak_bytes <= part.planned_peak_bytes


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
def test_measured_peak_of_a_cut_call_within_the_plan(kernel) -> None:
    """What an operator cannot have in one call: one part at a time, and the results of
    all."""
    limited_kernel = type(get_kernel(kernel))()
    limited_kernel.forward_limits = CallLimits(heads=2)
    limited_kernel.backward_limits = CallLimits(heads=2)
    given = made("cuda")
    call = {"depth": 0, "kernel": limited_kernel, "is_causal": True}
    both(given, **call)
    report = qa.Report()
    both(given, report=report, **call)
    for part in (report.forward, report.backward):
        assert part.peak_bytes is not None
        assert 0 < part.peak_bytes <= part.planned_peak_bytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 64), (1, 2, 20), (3, 2, 64), (700, 2, 64)])
@pytest.mark.parametrize("by_token", [False, True])
def test_measured_peak_of_grouped_heads_within_the_plan(
    dtype: torch.dtype, is_causal: bool, sizes: tuple[int, int, int], by_token: bool
) -> None:
    """Whole calls of an operator that takes no grouped heads."""
    batch, kv_heads, head_dim = sizes
    n = N if batch < 100 else 64
    given = inputs(
        n, batch=(batch,), heads=8, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    tensors = [t.to("cuda") for t in (*given.three, given.grad_out)]
    if by_token:
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    call = {"kernel": "efficient", "is_causal": is_causal, "enable_gqa": True}
    both(Inputs(*tensors), **call)
    report = qa.Report()
    both(Inputs(*tensors), report=report, **call)
    for part in (report.forward, report.backward):
        assert part.peak_bytes is not None
        assert 0 < part.peak_bytes <= part.planned_peak_bytes


@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("mask", ["none", "rows", "heads"])
def test_a_budget_is_kept(where, mask) -> None:
    given = made(where, kv_heads=2)
    tensor = {
        "none": None,
        "rows": torch.rand(N, N, device=where) > 0.2,
        "heads": torch.rand(4, 1, N, device=where),
    }[mask]
    call = {"attn_mask": tensor, "devices": "cuda", "enable_gqa": True}
    budget = smallest(*given.three, **call)
    report = qa.Report()
    for _ in range(2):
        out = qa.attention(*given.three, **call, budget=budget, report=report)
    assert report.forward.peak_bytes <= budget
    reference = exact(Inputs(*(t.cuda() for t in (*given.three, given.grad_out))),
                      mask=None if tensor is None else tensor.cuda())  # fmt: skip
    assert (out.cuda().double() - reference.out).norm() / reference.out.norm() < 2e-3


UPSTREAM = {
    "of a sum": lambda g: torch.ones((), dtype=g.dtype, device=g.device).expand(
        g.shape
    ),
    "of rows' sums": lambda g: g[..., :1].expand(g.shape),
    "transposed": lambda g: g.transpose(-1, -2).contiguous().transpose(-1, -2),
}


@pytest.mark.parametrize("upstream", list(UPSTREAM))
@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("room", [1.0, 4.0])
def test_backward_of_whatever_autograd_hands_over(upstream, where, room) -> None:
    """In the smallest budget that the forward lets through, and in a larger one."""
    given = made(where)
    grad_out = UPSTREAM[upstream](given.grad_out)
    leaves = [t.clone().requires_grad_() for t in given.three]
    call = {"devices": "cuda", "is_causal": True}
    budget = int(smallest(*leaves, **call) * room)
    report = qa.Report()
    for _ in range(2):
        out = qa.attention(*leaves, **call, budget=budget, report=report)
        grads = torch.autograd.grad(out, leaves, grad_out)
    assert report.backward.peak_bytes <= report.backward.planned_peak_bytes <= budget
    results = dict(zip(NAMES, (out.detach(), *grads), strict=True))
    off = errors(results, Inputs(*given.three, grad_out), is_causal=True)
    assert max(off.values()) < 3e-3


@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("end", ["success", "failure"])
def test_nothing_stays_allocated_or_page_locked(where, end) -> None:
    given = made(where, 40_000)  # 20 MiB a tensor: worth locking
    both(made(where, 500), depth=1)
    gc.collect()
    before = torch.cuda.memory_allocated()
    if end == "success":
        both(given, depth=1)
    else:
        with FailingAllocations(3, 10_000), pytest.raises(torch.OutOfMemoryError):
            qa.attention(*given.three, devices="cuda", depth=1)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    if where == "cpu":
        assert not any(t.is_pinned() for t in given.three)


def test_recovery_when_somebody_else_has_the_memory() -> None:
    """A plan made for memory that is then taken away: real failures of the allocator,
    fewer slots, a deeper decomposition, and the right result."""
    given = made("cpu", 32_768)
    qa.attention(
        *made("cpu", 2000).three, devices="cuda", depth=1
    )  # what is set up once
    plan = qa.plan(32_768, heads=4, levels=(3,), n_cap=2, heads_per_group=4, device="cuda",
                   inputs="host", is_causal=True)  # fmt: skip
    limited(plan.peak_bytes // 4 + (8 << 20))
    report = qa.Report()
    out = qa.attention(
        *given.three, is_causal=True, plan=unpinned(plan), devices="cuda", report=report
    )
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert report.forward.recoveries
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.cuda() for t in given.three), is_causal=True
    )
    assert (
        out.cuda().float() - expected.float()
    ).norm() / expected.float().norm() < 2e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_mask_gradient_is_bitwise_the_same_each_time(dtype: torch.dtype) -> None:
    given = inputs(3000, heads=4, head_dim=64, dtype=dtype, device="cuda")
    mask = torch.randn(4, 1, 3000, device="cuda").to(dtype)
    made = qa.attention_with_lse(*given.three, mask)
    first, second = (
        qa.attention_backward(
            given.grad_out, *given.three, *made, mask, grad_mask=True
        )[3]
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_a_mask_gradient_within_its_budget() -> None:
    """More than the budget of gradient in host memory, and tiles on the GPU."""
    n = 8192
    given = inputs(n, heads=4, head_dim=64, dtype=torch.bfloat16)
    mask = torch.randn(4, n, n, dtype=torch.bfloat16)
    budget = 96 << 20
    assert mask.nbytes > 4 * budget
    made = qa.attention_with_lse(*given.three, mask, budget=budget)
    torch.ones(64, 64, device="cuda") @ torch.ones(
        64, 64, device="cuda"
    )  # cuBLAS's own workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    *_, found = qa.attention_backward(
        given.grad_out, *given.three, *made, mask, grad_mask=True, budget=budget
    )
    assert torch.cuda.max_memory_allocated() - before <= budget
    assert found.device == mask.device
    assert found.isfinite().all()
    rows = slice(4000, 4064)
    q, k, v, do = (t[:, 1].double() for t in (*given.three, given.grad_out))
    s = q[:, rows] @ k.mT / 8 + mask[1, rows].double()
    p = s.softmax(dim=-1)
    dp = do[:, rows] @ v.mT
    assert_close(found[1, rows], (p * (dp - (p * dp).sum(-1, keepdim=True)))[0], 2e-3)


def test_where_memory_has_run_out_since_the_call_is_planned_anew() -> None:
    dispatch._CACHE.clear()
    # In fp16 at once: half of a freed tensor in fp32 would be room for another output.
    drawn = {"dtype": torch.float16, "device": "cuda"}
    q, k, v = (torch.randn(1, 8, 262_144, 64, **drawn) for _ in range(3))
    want = qa.attention(q, k, v, is_causal=True)
    assert torch.equal(want, qa.attention(q, k, v, is_causal=True))
    limited(32 << 20)  # less than an output
    with pytest.raises((qa.BudgetError, qa.OutOfMemoryError)):
        qa.attention(q, k, v, is_causal=True)
    torch.cuda.set_per_process_memory_fraction(1.0)
    for _ in range(2):
        assert torch.equal(want, qa.attention(q, k, v, is_causal=True))
