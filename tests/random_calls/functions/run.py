"""Makes one call with a function of the user's, and judges it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import quorum_attention as qa
from random_calls.functions.case import (
    TOLERANCE,
    FunctionCase,
    Inputs,
    draw,
    exact,
    inputs,
    other,
)
from random_calls.functions.places import PLACES, Read, keeps_by_global, keeps_of_zero
from random_calls.kernels import _attention, _gradients

REFUSALS = (ValueError, TypeError, NotImplementedError, RuntimeError)
_ANEW = "random-calls-anew"


@dataclass
class Verdict:
    """What became of a case: "right", "refused" (as it had to be), "wrong".

    ``said``: the refusal without its numbers; ``words``: what is wrong.
    """

    case: FunctionCase
    outcome: str = "right"
    words: list[str] = field(default_factory=list)
    said: str = ""

    def wrong(self, words: str) -> None:
        """Something is."""
        self.outcome = "wrong"
        self.words.append(words)

    def row(self) -> dict[str, Any]:
        """In plain types."""
        case = self.case
        return {
            "seed": case.seed, "outcome": self.outcome, "what": case.what, "place": case.place,
            "trap": case.trap or "none", "words": self.words, "said": self.said,
            "case": str(case) if self.words else "",
        }  # fmt: skip


@dataclass
class Call:
    """How a case is called: options, what requires gradients by name, how its trap is sprung."""

    options: dict[str, Any]
    learned: dict[str, torch.Tensor]
    spring: Callable[[], None]


def check_seed(seed: int, runner: str = "eager") -> Verdict:
    """The verdict on the case of a seed, in this process."""
    return check(draw(seed, runner))


def check(case: FunctionCase) -> Verdict:
    """Make the call of a case and hold it against float64."""
    verdict, given = Verdict(case), inputs(case)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = perform(case, given)
    except REFUSALS as error:
        refused(verdict, error)
        return verdict
    judge(verdict, found, exact(case, given))
    return verdict


def refused(verdict: Verdict, error: Exception) -> None:
    """Right for a trap, wrong without one."""
    line = (str(error).splitlines() or [""])[0]
    verdict.said = f"{type(error).__name__}: {re.sub(r'[0-9.]+', '#', line)[:160]}"
    verdict.outcome = "refused"
    if verdict.case.trap is None:
        verdict.wrong(f"refused: {verdict.said}")


def judge(
    verdict: Verdict, found: dict[str, torch.Tensor | None], wanted: dict[str, torch.Tensor]
) -> None:
    """Hold results against the exact ones."""
    for name, got in found.items():
        allowed = TOLERANCE[verdict.case.torch_dtype]
        if got is None:
            verdict.wrong(f"{name} is None: not trained")
            continue
        truth = wanted[name]
        got = got.detach().double().cpu()
        if got.shape != truth.shape:
            verdict.wrong(f"{name} is {tuple(got.shape)}, not {tuple(truth.shape)}")
            continue
        off = float((got - truth).abs().nan_to_num(nan=torch.inf).max()) if got.numel() else 0.0
        top = max(1.0, float(truth.abs().max()))
        if not off <= allowed * top:
            verdict.wrong(f"{name} is off by {off:.3g} of {top:.3g}")


def perform(case: FunctionCase, given: Inputs) -> dict[str, torch.Tensor | None]:
    """Output and gradients, the trap sprung between them."""
    call = call_of(case, given)
    three = {
        name: getattr(given, name).detach().clone().requires_grad_()
        for name in ("query", "key", "value")
    }

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return qa.attention(*tensors, **call.options)

    function = attend
    if case.runner == "compiled":
        torch._dynamo.reset()
        function = torch.compile(attend, backend="aot_eager")
    out = function(*three.values())
    result = out.detach().clone()
    call.spring()
    leaves = three | call.learned
    grads = torch.autograd.grad(out, list(leaves.values()), given.upstream, allow_unused=True)
    return {"out": result, **{f"grad of {n}": g for n, g in zip(leaves, grads, strict=True)}}


def call_of(case: FunctionCase, given: Inputs) -> Call:
    """The options of a case's call."""
    options: dict[str, Any] = {
        "is_causal": case.is_causal, "enable_gqa": case.heads != case.kv_heads, "scale": case.scale,
    }  # fmt: skip
    if case.depth is not None:
        options["depth"] = case.depth
    if case.runner == "devices":
        options["devices"] = ["cpu", "cpu"]
    learned = {}
    for name in ("bias", "sinks"):
        tensor = getattr(given, name)
        if tensor is not None:
            learned[name] = tensor.detach().clone().requires_grad_()
    if case.what == "bias":
        options["attn_mask"] = learned["bias"]
    elif case.what in ("mask bias", "sinks"):
        options["attn_mask"] = qa.Mask(**learned)
    if case.place == "none":
        return Call(options, learned, lambda: None)
    return _with_function(case, given, options)


def _with_function(case: FunctionCase, given: Inputs, options: dict[str, Any]) -> Call:
    numbers, learned = given.numbers.clone(), {}
    if case.trap == "learned":
        numbers = torch.nn.Parameter(numbers)
    read, _ = PLACES[case.place].make(numbers)
    if case.trap == "learned":
        learned = {"numbers": read()}
    spring: Callable[[], None] = lambda: None  # noqa: E731
    if case.what == "keeps":
        options["attn_mask"] = qa.Mask(keeps=_keeps(case, given, read))
        return Call(options, learned, spring)
    kernel = _kernel(case, read)
    options["kernel"] = kernel
    if case.trap == "anew":
        qa.register_kernel(kernel)
        options["kernel"] = _ANEW
        changed, _ = PLACES["closure"].make(other(case, given.numbers))
        spring = lambda: qa.register_kernel(_kernel(case, changed))  # noqa: E731
    return Call(options, learned, spring)


def _keeps(case: FunctionCase, given: Inputs, read: Read) -> Any:
    if case.runner == "devices":
        if case.trap is None:
            given.numbers.zero_()
            return keeps_of_zero
        return keeps_by_global
    return lambda b, h, i, j: ((i + j) % 4 != read()[h]) | (i == j)


def _kernel(case: FunctionCase, read: Read) -> Any:
    name = _ANEW if case.trap == "anew" else "random-calls"
    if case.what == "scores":

        def nearer(score, b, h, i, j):  # type: ignore[no-untyped-def]
            return score - 0.05 * read()[h].to(score.dtype) * (i - j).abs()

        return qa.from_score_mod(nearer, compiled=False, name=name)

    def factor() -> Any:
        return 0.5 + 0.5 * read().mean()

    def function(query, key, value, *, is_causal, scale):  # type: ignore[no-untyped-def]
        return _attention(query, key, value, is_causal=is_causal, scale=scale * factor())

    def gradients(*saved, is_causal, scale):  # type: ignore[no-untyped-def]
        return _gradients(*saved, is_causal=is_causal, scale=scale * factor())

    backward = gradients if case.what == "lse explicit" else None
    return qa.from_lse_function(function, backward=backward, name=name)
