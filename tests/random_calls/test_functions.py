"""Random calls with functions of the user's: what must be right is, and the harness sees what is
not. More of them: ``python -m random_calls.functions`` (docs/random-calls.md)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch

import quorum_attention as qa
from random_calls.functions import run
from random_calls.functions.__main__ import summary, text
from random_calls.functions.case import KERNELS, PLAIN, RUNNERS, draw, exact, inputs
from random_calls.functions.places import PLACES

pytestmark = pytest.mark.usefixtures("one_thread")
CALLS = 150


def cases(runner: str, trapped: bool) -> list[run.FunctionCase]:
    drawn = (draw(seed, runner) for seed in range(CALLS))
    return [case for case in drawn if (case.trap is not None) == trapped]


def test_what_must_be_right_is() -> None:
    wrong = [v.row() for v in map(run.check, cases("eager", trapped=False)) if v.words]
    assert not wrong


def test_compiled_calls_are_right() -> None:
    wrong = [v.row() for v in map(run.check, cases("compiled", trapped=False)[:6]) if v.words]
    torch._dynamo.reset()
    assert not wrong


def test_what_is_learned_or_registered_anew_is_refused_or_right() -> None:
    wrong = [v.row() for v in map(run.check, cases("eager", trapped=True)) if v.words]
    assert not wrong


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_case_is_its_seed_and_all_kinds_are_drawn(runner: str) -> None:
    found = [draw(seed, runner) for seed in range(3000)]
    assert found == [draw(seed, runner) for seed in range(3000)]
    whats = Counter(case.what for case in found)
    assert set(whats) == set(PLAIN if runner == "devices" else KERNELS + PLAIN)
    if runner != "devices":
        assert {case.place for case in found if case.trap == "learned"} == {
            name for name, place in PLACES.items() if place.learns
        }


@pytest.mark.parametrize("name", PLACES)
def test_a_place_reads_what_was_put_there(name: str) -> None:
    tensor, other = torch.rand(3), torch.rand(3)
    read, put = PLACES[name].make(tensor)
    assert torch.equal(read(), tensor)
    put(torch.nn.Parameter(other) if name == "parameter list" else other)
    assert torch.equal(read(), other)
    if PLACES[name].learns:
        learned = torch.nn.Parameter(tensor)
        assert PLACES[name].make(learned)[0]() is not None
        assert PLACES[name].make(learned)[0]().requires_grad


def test_a_kernel_that_is_a_little_off_is_wrong() -> None:
    case = next(c for c in cases("eager", trapped=False) if c.what == "lse")
    case = replace(case, dtype="float32", depth=None)
    assert run.check(case).outcome == "right"
    right = run._attention

    def off(*three: torch.Tensor, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*three, **named)
        return out * 1.01, lse

    with mock.patch.object(run, "_attention", off):
        verdict = run.check(case)
    assert verdict.outcome == "wrong"
    assert any(words.startswith("out is off") for words in verdict.words)


def test_a_refusal_is_wrong_without_a_trap_and_none_of_a_gradient_too() -> None:
    case = draw(0, "eager")
    verdict = run.Verdict(replace(case, trap=None))
    run.refused(verdict, ValueError("no"))
    assert verdict.outcome == "wrong"
    verdict = run.Verdict(replace(case, trap="learned"))
    run.refused(verdict, ValueError("no 12"))
    assert (verdict.outcome, verdict.said) == ("refused", "ValueError: no #")
    verdict = run.Verdict(replace(case, trap="learned"))
    run.judge(verdict, {"grad of numbers": None}, {"grad of numbers": torch.zeros(2)})
    assert verdict.words == ["grad of numbers is None: not trained"]
    shown = text(summary([verdict.row()]) | {"runner": "eager", "seconds": 1})
    assert "1 x trap: learned" in shown


def test_the_reference_is_torchs_where_torch_has_such_a_call() -> None:
    case = next(c for c in cases("eager", trapped=False) if c.what == "bias")
    case = replace(case, dtype="float64", is_causal=False)
    given = inputs(case)
    assert given.bias is not None
    three = [t.requires_grad_() for t in (given.query, given.key, given.value)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *three, given.bias, scale=case.scale, enable_gqa=True
    )
    found = [out, *torch.autograd.grad(out, three, given.upstream)]
    wanted = exact(case, given)
    for got, name in zip(found, ("out", "grad of query", "grad of key"), strict=False):
        assert torch.allclose(got, wanted[name], atol=1e-10)
    assert qa.attention(*three, given.bias, enable_gqa=True).shape == out.shape
