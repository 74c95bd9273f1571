"""The random calls find what they are for: errors planted in a kernel, or around the
call."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers.attention import attention, masked
from helpers.planted_errors import FUNCTIONS, of_gradients, of_results, of_scores

import quorum_attention as qa
from quorum_attention import dispatch
from quorum_attention.execution import bias as execution_bias
from quorum_attention.kernels import task_calls
from quorum_attention.kernels.kit import from_lse_function
from random_calls import call, kernels
from random_calls.call import GRADIENTS as GRADIENT_NAMES
from random_calls.case import Case, Mask, Orders, Results
from random_calls.run import check

pytestmark = pytest.mark.usefixtures("one_thread")


def last(change, tensor):
    """The last row of each head, changed."""
    return torch.cat((tensor[..., :-1, :], change(tensor[..., -1:, :])), -2)


def lost(row):
    return torch.full_like(row, -torch.inf)


# Functions, or gradients of a right one.
CHANGES = {
    "scale left out": FUNCTIONS["no_scale"],
    "one key too many": FUNCTIONS["causal_one_too_many"],
    "one key too few": of_scores(lambda s, causal: masked(s, causal, 0)),
    "last key dropped": of_scores(
        lambda s, causal: last(lost, masked(s, causal).mT).mT
    ),
    "lse in fp16": FUNCTIONS["lse_rounded_to_fp16"],
    "lse of one row": of_results(
        lambda out, lse: (out, last(lambda row: row + 0.05, lse[..., None])[..., 0])
    ),
    "output not normalised": of_results(lambda out, lse: (out * 1.01, lse)),
    "nothing": attention,
}
GRADIENTS = {
    "D left out": of_gradients(
        lambda *grads: grads, lambda *given: (*given[:4], 0 * given[4], given[5])
    ),
    "dK not scaled": of_gradients(lambda dq, dk, dv: (dq, dk / 0.4, dv)),
    "dV of the last key": of_gradients(
        lambda dq, dk, dv: (dq, dk, last(torch.zeros_like, dv))
    ),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("change", [*CHANGES, *GRADIENTS])
def test_an_error_in_a_kernel_is_found(change, monkeypatch) -> None:
    kernel = from_lse_function(
        CHANGES.get(change, attention), backward=GRADIENTS.get(change)
    )
    monkeypatch.setitem(kernels.PLANTED, change, kernel)
    found = []
    for seed in range(8):
        r = random.Random(seed)
        kv_heads, shared, widths = r.choice([1, 2]), r.choice([1, 1, 2]), (8, 16, 33)
        sizes = [r.randint(20, 130) for _ in range(2)] + [
            r.choice(widths) for _ in range(2)
        ]
        found.append(check(Case(
            seed, r.choice([(1,), (2,)]), kv_heads * shared, kv_heads, *sizes, is_causal=True,
            scale=0.4, content=r.choice(["normal", "one hot", "sink"]), kernel=change,
            grad=r.choice(["normal", "uniform", "positive"]),
            orders=Orders("plan", levels=(3,), tile=8),
        )))  # fmt: skip
    wrong = [one for one in found if one.outcome == "wrong"]
    if change == "nothing":
        assert not wrong, [str(one) for one in wrong]
    else:
        assert len(wrong) > len(found) // 2, [str(one) for one in found]
        assert all("off" in " ".join(one.kinds) for one in wrong)


@pytest.mark.parametrize("content", ["alibi", "shifted"])
def test_a_mask_that_is_rounded_is_found(content, monkeypatch) -> None:
    """The reference reads the mask as it is handed over, so it cannot be rounded in
    both."""
    mask = Mask("float32", (False, True, True, True), content)
    sizes = {"heads": 2, "kv_heads": 2, "n_queries": 31, "n_keys": 47}
    cases = [Case(seed, **sizes, dtype="bfloat16", mask=mask) for seed in range(4)]
    assert {check(case).outcome for case in cases} == {"right"}
    monkeypatch.setattr(execution_bias, "is_rounded", lambda mask, inputs: False)
    dispatch._CACHE.clear()
    try:
        assert [check(case).outcome for case in cases].count("wrong") >= 3
    finally:
        dispatch._CACHE.clear()


PLAIN = Case(
    5,
    (2,),
    2,
    2,
    40,
    40,
    8,
    8,
    results=Results(True, layout="sliced"),
    layouts=("sliced",) * 4,
)


# Upstream gradients at fp16's end: digits lost by dividing them are allowed, no more.
DIVIDED = Case(
    8, n_queries=60, n_keys=60, dtype="float16", content="tiny", grad="wide range",
    is_causal=True, orders=Orders("plan", levels=(3,), tile=4),
)  # fmt: skip
# What the reference itself may be off by is far less: 1e-12 of 1.
DOUBLE = replace(PLAIN, dtype="float64")


@pytest.mark.parametrize(
    ("kind", "case", "harm"),
    [
        ("input changed", PLAIN, lambda query, made: query[0, 0, 0].zero_()),
        ("memory of others changed", PLAIN, lambda query, made: made[0]._base[0, 0, 0].zero_()),
        ("out not finite", PLAIN, lambda query, made: made[0][0, 0, 3].fill_(torch.nan)),
        ("out off", PLAIN, lambda query, made: made[0][0, 0, 3, :1].add_(2e-5)),
        ("out", DOUBLE, lambda query, made: made[0].mul_(1 + 2e-12)),
        *((name, case, lambda query, made, i=i, factor=factor: made[i].mul_(factor))
          for case, factor in ((DOUBLE, 1 + 2e-12), (DIVIDED, 1.1))
          for i, name in enumerate(GRADIENT_NAMES)),
    ],
)  # fmt: skip
def test_harm_around_a_call_is_found(kind, case, harm, monkeypatch) -> None:
    assert check(case).outcome == "right"
    name = "attention_backward" if kind in GRADIENT_NAMES else "attention_with_lse"
    usual = getattr(qa, name)

    def harmful(*given, **named):
        made = usual(*given, **named)
        harm(given[0], made)
        return made

    monkeypatch.setattr(call.qa, name, harmful)
    assert any(found.startswith(kind) for found in check(case).kinds)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("dtype", "bits", "first"),
    [("float16", 8, 0), ("bfloat16", 5, 1)],  # in bfloat16 seed 0 shows nothing of it
)
def test_what_is_less_exact_than_torch_is_so_again(
    dtype, bits, first, monkeypatch
) -> None:
    """Tasks' outputs of three digits less: within what a rounded output accounts for,
    and found.

    So what parts are allowed to cost (``yardstick.py``) hides no errors of its own
    kind.
    """
    usual, found = task_calls.merge_, []

    def rounded(out, lse, out_i, lse_i):
        size = torch.ldexp(torch.ones(()), torch.frexp(out_i.float()).exponent - bits)
        usual(out, lse, ((out_i / size).round() * size).to(out_i.dtype), lse_i)

    monkeypatch.setattr(task_calls, "merge_", rounded)
    for seed in range(first, first + 2):
        found.append(check(Case(
            seed, n_queries=150, n_keys=150, head_dim=8, value_dim=8, dtype=dtype,
            content="sink", grad="uniform",
            orders=Orders("plan", levels=(3,), tile=8, over_inputs=False),
        )))  # fmt: skip
    assert [one.outcome for one in found] == ["wrong"] * 2, [str(one) for one in found]
