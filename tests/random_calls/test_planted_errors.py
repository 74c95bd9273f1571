"""The random calls find what they are for: errors planted in a kernel, or around the call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.kernels import rectangles
from quorum_attention.kernels.kit import from_lse_function
from random_calls import call, kernels
from random_calls.case import Case, Orders, Planted
from random_calls.run import Verdict, check

pytestmark = pytest.mark.usefixtures("one_thread")


def attention(change: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Plain attention and its gradients, with one error."""

    def probabilities(query, key, is_causal, scale):  # type: ignore[no-untyped-def]
        work = torch.promote_types(query.dtype, torch.float32)
        if change == "scale left out":
            scale = 1.0
        scores = scale * (query.to(work) @ key.to(work).mT)
        if is_causal:
            first = {"one key too many": 2, "one key too few": 0}.get(change, 1)
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(first)
            later[0, 0] = False
            scores = scores.masked_fill(later, -torch.inf)
        if change == "last key dropped" and scores.shape[-1] > 1:
            scores[..., -1] = -torch.inf
        return scores

    def forward(query, key, value, *, is_causal, scale):  # type: ignore[no-untyped-def]
        scores = probabilities(query, key, is_causal, scale)
        lse = torch.logsumexp(scores, -1)
        out = torch.exp(scores - lse.unsqueeze(-1)) @ value.to(scores.dtype)
        if change == "lse in fp16":
            lse = lse.half().to(scores.dtype)
        if change == "lse of one row":
            lse[..., -1] += 0.05
        if change == "output not normalised":
            out = out * 1.01
        return out, lse

    def backward(grad_out, query, key, value, out, lse, *, is_causal, scale):  # type: ignore[no-untyped-def]
        scores = probabilities(query, key, is_causal, scale)
        q, k, v, do, o = (t.to(scores.dtype) for t in (query, key, value, grad_out, out))
        p = torch.exp(scores - lse.unsqueeze(-1))
        delta = (do * o).sum(-1, keepdim=True)
        if change == "D left out":
            delta = torch.zeros_like(delta)
        ds = p * (do @ v.mT - delta)
        dk = ds.mT @ q * (1.0 if change == "dK not scaled" else scale)
        dv = p.mT @ do
        if change == "dV of the last key":
            dv[..., -1, :] = 0
        return scale * (ds @ k), dk, dv

    return forward, backward


CHANGES = (
    "scale left out", "one key too many", "one key too few", "last key dropped", "lse in fp16",
    "lse of one row", "output not normalised", "D left out", "dK not scaled", "dV of the last key",
)  # fmt: skip


def calls(kernel: str, **change: Any) -> list[Verdict]:
    """Of twelve small calls, cut, with gradients; changed."""
    found = []
    for seed in range(12):
        r = random.Random(seed)
        kv_heads, shared, widths = r.choice([1, 2]), r.choice([1, 1, 2]), (8, 16, 33)
        sizes = [r.randint(20, 130) for _ in range(2)] + [r.choice(widths) for _ in range(2)]
        case = Case(
            seed, r.choice([(1,), (2,)]), kv_heads * shared, kv_heads, *sizes, is_causal=True,
            scale=0.4, content=r.choice(["normal", "one hot", "sink"]), kernel=kernel,
            grad=r.choice(["normal", "uniform", "positive"]),
            orders=Orders("plan", levels=(3,), tile=8),
        )  # fmt: skip
        found.append(check(replace(case, **change)))
    return found


# A function that is its own yardstick; scores of thousands in fp32, of which a right one itself has
# few digits left.
ITSELF = {"content": "large scores", "heads": 1, "kv_heads": 1, "head_dim": 8, "value_dim": 8}


@pytest.mark.parametrize(
    ("change", "kind", "options"),
    [*((change, "", {}) for change in CHANGES),
     *((change, "function explicit, ", ITSELF) for change in CHANGES[::4])],
)  # fmt: skip
def test_an_error_in_a_kernel_is_found(change, kind, options, monkeypatch) -> None:
    forward, backward = attention(change)
    name = f"{kind}{change}"
    monkeypatch.setitem(kernels.PLANTED, name, from_lse_function(forward, backward=backward))
    found = calls(name, **options)
    wrong = [one for one in found if one.outcome == "wrong"]
    assert len(wrong) > len(found) // 2, [str(one) for one in found]
    assert kind or all("off" in " ".join(one.kinds) for one in wrong)


@pytest.mark.parametrize(
    ("kind", "content"),
    [("", "normal"), *(("function explicit, ", content) for content in ("normal", "large scores"))],
)
def test_without_an_error_nothing_is_found(kind, content, monkeypatch) -> None:
    forward, backward = attention("nothing")
    monkeypatch.setitem(kernels.PLANTED, kind, from_lse_function(forward, backward=backward))
    for one in calls(kind, content=content):
        assert one.outcome == "right", str(one)


PLAIN = Case(
    5, (2,), 2, 2, 40, 40, 8, 8, results=replace(Case(0).results, given=True, layout="sliced"),
    layouts=("sliced",) * 4, looked_after=True,
)  # fmt: skip
NAN = Planted("nan", "query", True)
_LEFT: list[torch.Tensor] = []


def _around(monkeypatch: pytest.MonkeyPatch, harm: Callable[..., None]) -> None:
    usual = qa.attention_with_lse

    def harmful(query, key, value, *rest, **named):  # type: ignore[no-untyped-def]
        results = usual(query, key, value, *rest, **named)
        harm(query, results[0])
        return results

    monkeypatch.setattr(call.qa, "attention_with_lse", harmful)


@pytest.mark.parametrize(
    ("kind", "harm"),
    [
        ("input changed", lambda query, out: query[0, 0, 0].zero_()),
        ("memory of others changed", lambda query, out: out._base[0, 0, 0].zero_()),
        ("tensors left", lambda query, out: _LEFT.append(torch.ones(3))),
        ("out not finite", lambda query, out: out[0, 0, 3].fill_(torch.nan)),
        ("out off", lambda query, out: out[0, 0, 3, :1].add_(2e-5)),
    ],
)
def test_harm_around_a_call_is_found(kind, harm, monkeypatch) -> None:
    assert not check(PLAIN).wrong
    _around(monkeypatch, harm)
    assert kind in check(PLAIN).kinds
    _LEFT.clear()


def test_a_number_lost_or_made_up_is_found(monkeypatch) -> None:
    """A query of NaN whose row comes out as a number; and one whose NaN is in other rows too."""
    case = Case(3, (1,), 2, 2, 30, 30, 8, 8, planted=NAN, orders=Orders("depth", depth=1))
    assert check(case).outcome == "right"
    _around(monkeypatch, lambda query, out: out.nan_to_num_())
    assert "out finite" in check(case).kinds
    monkeypatch.undo()
    _around(monkeypatch, lambda query, out: out[0, 0].fill_(torch.nan))
    assert "out not finite" in check(case).kinds


def in_parts(seed: int, dtype: str) -> Case:
    return Case(
        seed, n_queries=150, n_keys=150, head_dim=8, value_dim=8, dtype=dtype,
        content="sink", grad="uniform",
        orders=Orders("plan", levels=(3,), tile=8, over_inputs=False),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "bits", "first"),
    [("float16", 8, 0), ("bfloat16", 5, 1)],  # in bfloat16 seed 0 shows nothing of it
)
def test_what_is_less_exact_than_torch_is_so_again(dtype, bits, first, monkeypatch) -> None:
    """Tasks' outputs of three digits less: within what a rounded output accounts for, and found.

    So what parts are allowed to cost (``parts.py``) hides no errors of its own kind.
    """
    usual, count, found = rectangles.merge_, 0, []

    def rounded(out, lse, out_i, lse_i):  # type: ignore[no-untyped-def]
        size = torch.ldexp(torch.ones(()), torch.frexp(out_i.float()).exponent - bits)
        usual(out, lse, ((out_i / size).round() * size).to(out_i.dtype), lse_i)

    monkeypatch.setattr(rectangles, "merge_", rounded)
    for seed in range(first, first + 6):
        verdict = check(in_parts(seed, dtype))
        found.append(str(verdict))
        count += verdict.outcome == "wrong"
    assert count == 6, found


DIVIDED = Case(
    8, n_queries=60, n_keys=60, dtype="float16", content="tiny", grad="wide range",
    is_causal=True, orders=Orders("plan", levels=(3,), tile=4),
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "results", "factor"),
    [
        # What the reference itself may be off by is far less: 1e-12 of 1.
        (replace(PLAIN, dtype="float64", looked_after=False), range(-1, 3), 1 + 2e-12),
        # Upstream gradients at fp16's end: digits lost by dividing them are allowed, no more.
        (DIVIDED, range(3), 1.1),
    ],
)
def test_an_error_of_a_few_digits_is_found(case, results, factor, monkeypatch) -> None:
    assert check(case).outcome == "right"
    for result in results:
        name = "attention_with_lse" if result < 0 else "attention_backward"
        usual, place = getattr(qa, name), max(0, result)

        def harmful(*given, usual=usual, at=place, **named):  # type: ignore[no-untyped-def]
            made = usual(*given, **named)
            made[at].mul_(factor)
            return made

        with monkeypatch.context() as patch:
            patch.setattr(call.qa, name, harmful)
            names = ("grad_query", "grad_key", "grad_value", "out")
            assert any(kind.startswith(names[result]) for kind in check(case).kinds)
