"""FlexAttention's modifications compiled on a GPU, a whole task at a time, against
float64."""

from __future__ import annotations

import pytest
import torch
from helpers.cuda import NAMES
from helpers.score_mods import cases, random, reference, run

import quorum_attention as qa
from quorum_attention.execution.routes.blockwise import Blockwise
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.kernels.kit import from_score_mod, sliding_window

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
N, WIDTH = 700, 64
# Of the norm; and of the undivided call's own error.
TINY = {torch.float16: 3e-4, torch.bfloat16: 3e-3, torch.float32: 2e-6}
LEVELS = ((), (7,), (3, 3))


def made(dtype: torch.dtype, **sizes: int) -> list[torch.Tensor]:
    return [t.to("cuda", dtype) for t in random(width=WIDTH, **sizes)]


def errors(found, tensors, case) -> dict[str, float]:  # type: ignore[no-untyped-def]
    right = [t.double().requires_grad_() for t in tensors[:3]]
    expected, _ = reference(*right, case)
    expected.backward(tensors[3].double())
    wanted = expected.detach(), *(t.grad for t in right)
    assert all(bool(t.isfinite().all()) for t in found)
    return {
        name: float((mine.double() - exact).norm() / exact.norm())
        for name, mine, exact in zip(NAMES, found, wanted, strict=True)
    }


def compare(case, tensors, levels=LEVELS, tiles=(16, 128)) -> None:  # type: ignore[no-untyped-def]
    kernel = from_score_mod(*case[:2], compiled=True)
    whole = None
    for cut in levels:
        for tile in tiles if cut else tiles[:1]:
            # Both ways: through slots, and on inputs as they lie.
            in_place = tile == tiles[-1] if len(cut) == 1 else None
            how = {
                "levels": cut,
                "tile": tile,
                "over_inputs": in_place,
                "inputs": "device",
            }
            out, _, grads = run(kernel, tensors, case[2], device="cuda", **how)
            found = errors((out, *grads), tensors, case)
            whole = whole or found
            for name, error in found.items():
                limit = 2 * whole[name] + TINY[tensors[0].dtype]
                assert error <= limit, (
                    f"{cut}, {tile}, {name}: {error:.2e}, uncut {whole[name]:.2e}"
                )
    assert max(whole.values()) < 20 * TINY[tensors[0].dtype]


@pytest.mark.parametrize("name", cases(N))
def test_cases(name: str) -> None:
    compare(cases(N, "cuda")[name], made(torch.float16, n=N))
    if name == "alibi":
        compare(cases(N, "cuda")[name], made(torch.float32, n=N), tiles=(16,))


@pytest.mark.parametrize("over_inputs", [True, False])
@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_a_cut_call_is_within_its_plan(
    backward: bool, over_inputs: bool
) -> None:
    n, heads = 40_000, 4
    kernel = from_score_mod(None, sliding_window(1500), compiled=True)
    tensors = made(torch.float16, n=n, heads=heads)
    common = {"is_causal": True, "kernel": kernel, "devices": "cuda"}
    plan = qa.plan(n, heads=heads, head_dim=WIDTH, dtype=torch.float16, levels=(7,),
                   is_causal=True, kernel=kernel, backward=backward, device="cuda",
                   inputs="device", over_inputs=over_inputs)  # fmt: skip
    assert isinstance(plan.schedule.route, Blockwise if over_inputs else Slots)
    out, lse = qa.attention_with_lse(*tensors[:3], **common)

    def call() -> None:
        if backward:
            qa.attention_backward(
                tensors[3], *tensors[:3], out, lse, plan=plan, **common
            )
        else:
            qa.attention_with_lse(*tensors[:3], plan=plan, **common)

    call()  # compiles, and tunes on tensors of its own
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    assert torch.cuda.max_memory_allocated() - before <= plan.peak_bytes
