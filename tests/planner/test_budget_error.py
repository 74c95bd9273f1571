"""A budget too small names the smallest that works, and that one does work."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import assert_close, exact, inputs
from helpers_memory import usage

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIGURATIONS = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"is_causal": True}, {}, id="causal"),
    pytest.param({"depth": 1}, {}, id="pinned"),
    pytest.param({"kernel": "dense"}, {}, id="dense"),
    pytest.param({"enable_gqa": True}, {"kv_heads": 1, "value_dim": 12}, id="grouped"),
    pytest.param({"attn_mask": torch.rand(1100, 1100) > 0.3}, {}, id="mask"),
    pytest.param({}, {"dtype": torch.float16}, id="half"),
]


@pytest.mark.parametrize(("call", "sizes"), CONFIGURATIONS)
@pytest.mark.parametrize("backward", [False, True])
def test_exactly_the_smallest_budget_works(call, sizes, backward) -> None:
    given = inputs(1100, **sizes)
    out, lse = qa.attention_with_lse(*given.three, **call)

    def run(budget: int):  # type: ignore[no-untyped-def]
        if backward:
            return qa.attention_backward(
                given.grad_out, *given.three, out, lse, **call, budget=budget
            )
        return (qa.attention(*given.three, **call, budget=budget),)

    with pytest.raises(qa.BudgetError) as refused:
        run(1000)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    text = str(refused.value)
    assert f"({smallest} bytes)" in text
    assert "(1000 bytes)" in text
    with pytest.raises(qa.BudgetError):
        run(smallest - 1)
    results = run(smallest)
    reference = exact(
        given, mask=call.get("attn_mask"), is_causal=call.get("is_causal", False), gradients=True
    )
    wanted = reference.grads if backward else (reference.out,)
    for actual, expected in zip(results, wanted, strict=True):
        assert_close(actual, expected, 1e-2 if sizes.get("dtype") else 5e-5)
    assert usage(lambda: run(smallest)).peak <= smallest


def test_pinned_levels_are_named() -> None:
    with pytest.raises(qa.BudgetError, match=r"at levels \(7,\)"):
        qa.plan(5000, levels=(7,), budget=10, device="cpu")
    with pytest.raises(qa.BudgetError, match="at depth 2"):
        qa.plan(5000, depth=2, budget=10, device="cpu")
