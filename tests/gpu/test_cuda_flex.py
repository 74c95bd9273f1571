"""FlexAttention's modifications compiled on a GPU, a whole task at a time, against float64."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import Inputs
from helpers_cuda import both
from helpers_score_mods import cases, reference

import quorum_attention as qa
from quorum_attention.execution.routes.over_inputs import Blockwise
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.kernels.kit import from_score_mod, sliding_window

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
N, HEADS, WIDTH = 700, 2, 64
# Of the norm; and of the undivided call's own error.
TINY = {torch.float16: 3e-4, torch.bfloat16: 3e-3, torch.float32: 2e-6}
LEVELS = ((), (7,), (3, 3))


def random(n: int, dtype: torch.dtype, kv_heads: int = HEADS, heads: int = HEADS) -> list:  # type: ignore[type-arg]
    g = torch.Generator(device="cuda").manual_seed(0)
    return [
        torch.randn(1, h, n, WIDTH, generator=g, device="cuda", dtype=torch.float32).to(dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def run(kernel, tensors, is_causal: bool, **plan):  # type: ignore[no-untyped-def]
    q, k, *_ = tensors
    pins = [
        {"plan": qa.plan(q.shape[2], heads=q.shape[1], kv_heads=k.shape[1], head_dim=WIDTH,
                         dtype=q.dtype, is_causal=is_causal, kernel=kernel, backward=backward,
                         device="cuda", inputs="device", **plan)}
        for backward in (False, True)
    ]  # fmt: skip
    return both(Inputs(*tensors), pins, is_causal=is_causal, kernel=kernel)


def errors(found, tensors, case) -> dict[str, float]:  # type: ignore[no-untyped-def]
    right = [t.double().requires_grad_() for t in tensors[:3]]
    expected, _ = reference(*right, case)
    expected.backward(tensors[3].double())
    assert all(bool(t.isfinite().all()) for t in found.values())
    return {
        name: float((mine.double() - exact).norm() / exact.norm())
        for (name, mine), exact in zip(
            found.items(), (expected.detach(), *(t.grad for t in right)), strict=True
        )
    }


def compare(case, tensors, levels=LEVELS, tiles=(16, 128)) -> None:  # type: ignore[no-untyped-def]
    kernel = from_score_mod(*case[:2], compiled=True)
    whole = None
    for cut in levels:
        for tile in tiles if cut else tiles[:1]:
            # Both ways: through slots, and on inputs as they lie.
            in_place = tile == tiles[-1] if len(cut) == 1 else None
            how = {"levels": cut, "tile": tile, "over_inputs": in_place}
            found = errors(run(kernel, tensors, case[2], **how), tensors, case)
            whole = whole or found
            for name, error in found.items():
                limit = 2 * whole[name] + TINY[tensors[0].dtype]
                assert error <= limit, (
                    f"{cut}, {tile}, {name}: {error:.2e}, uncut {whole[name]:.2e}"
                )
    assert max(whole.values()) < 20 * TINY[tensors[0].dtype]


@pytest.mark.parametrize("name", cases(N))
def test_cases(name: str) -> None:
    compare(cases(N, "cuda")[name], random(N, torch.float16))
    if name == "alibi":
        compare(cases(N, "cuda")[name], random(N, torch.float32), tiles=(16,))


@pytest.mark.parametrize("over_inputs", [True, False])
@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_a_cut_call_is_within_its_plan(backward: bool, over_inputs: bool) -> None:
    n, heads = 40_000, 4
    kernel = from_score_mod(None, sliding_window(1500), compiled=True)
    tensors = random(n, torch.float16, heads=heads, kv_heads=heads)
    common = {"is_causal": True, "kernel": kernel, "devices": "cuda"}
    plan = qa.plan(n, heads=heads, head_dim=WIDTH, dtype=torch.float16, levels=(7,),
                   is_causal=True, kernel=kernel, backward=backward, device="cuda",
                   inputs="device", over_inputs=over_inputs)  # fmt: skip
    assert isinstance(plan.schedule.route, Blockwise if over_inputs else Slots)
    out, lse = qa.attention_with_lse(*tensors[:3], **common)

    def call() -> None:
        if backward:
            qa.attention_backward(tensors[3], *tensors[:3], out, lse, plan=plan, **common)
        else:
            qa.attention_with_lse(*tensors[:3], plan=plan, **common)

    call()  # compiles, and tunes on tensors of its own
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    assert torch.cuda.max_memory_allocated() - before <= plan.peak_bytes
