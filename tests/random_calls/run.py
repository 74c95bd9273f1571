"""Runs one case and judges it."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import quorum_attention as qa
from random_calls.call import GRADIENTS, CallResults, perform
from random_calls.case import Case
from random_calls.draw import draw
from random_calls.reference import BoundedResult, Reference, place
from random_calls.tensors import DTYPES, CallInputs, make
from random_calls.yardstick import Cut, Yardstick, neighbour

# Times the larger of the bound and torch's own largest error in the head.
ALLOWED = 4.0
# Neighbours asked whether an error is one of many.
_AGAIN = 5
_REFUSALS = (ValueError, TypeError, NotImplementedError, qa.BudgetError)


@dataclass
class Verdict:
    """What became of a case.

    Attributes:
        outcome: "right", "refused", "ran out" (of memory, where allocations were inputs to fail),
            "wrong".
        wrong: one line for everything that is: its kind, a colon, and words.
        refusal: the message, its numbers taken out.
    """

    case: Case
    outcome: str = "right"
    wrong: list[str] = field(default_factory=list)
    refusal: str = ""

    def add(self, kind: str, words: str) -> None:
        """Something is wrong."""
        self.outcome = "wrong"
        self.wrong.append(f"{kind}: {words}")

    @property
    def kinds(self) -> list[str]:
        """Of what is wrong, to count by."""
        return [line.partition(":")[0] for line in self.wrong]

    def __str__(self) -> str:
        return "\n  ".join([f"{self.outcome}: {self.case}", *self.wrong, self.refusal]).strip()


def check_seed(seed: int, device: str = "cpu", **options: Any) -> Verdict:
    """The verdict on the case of a seed; ``options``: of ``draw``. Where the check itself raises
    (in the reference, in torch's call, on a lost device) the case is wrong."""
    case = draw(seed, device, **options)
    try:
        return check(case, device)
    except Exception as error:
        verdict = Verdict(case)
        verdict.add(f"the check raises {type(error).__name__}", _raised(error))
        return verdict


def check(case: Case, device: str = "cpu") -> Verdict:
    """Make the call of a case and hold it against float64."""
    verdict, compute, done = Verdict(case), torch.device(device), CallResults()
    inputs = make(case, compute if case.residency == "device" else torch.device("cpu"))
    try:
        _perform(case, inputs, compute, done)
        if compute.type == "cuda":
            torch.cuda.synchronize(compute)
    except qa.BudgetError as error:
        # A budget here is what the call itself has named, or more.
        verdict.add("refuses the budget that it named", _first_line(error))
    except torch.OutOfMemoryError as error:
        if case.failure is not None and "sabotaged" in str(error):
            verdict.outcome = "ran out"
        else:
            verdict.add("out of memory", _first_line(error))
    except _REFUSALS as error:
        verdict.outcome = "refused"
        text = re.sub(r"\d+(\.\d+)?", "#", _first_line(error))
        verdict.refusal = f"{type(error).__name__}: {text}"
        if "quorum_attention" not in traceback.extract_tb(error.__traceback__)[-1].filename:
            # Raised by torch or Python on our behalf: no refusal, but an accident.
            verdict.add(f"raises {type(error).__name__}", _raised(error))
    except Exception as error:
        verdict.add(f"raises {type(error).__name__}", _raised(error))
        if is_lost(compute):
            return verdict
    if verdict.outcome == "right":
        _compare(verdict, inputs, done, compute)
    for name in [one.name for one in inputs.read_only if one.changed()]:
        verdict.add("input changed", name)
    for name in [target.name for target in done.targets if target.changed()]:
        verdict.add("memory of others changed", name)
    for name in done.misplaced:
        verdict.add("not where it was asked for", name)
    return verdict


def is_lost(device: torch.device) -> bool:
    """Whether nothing can be computed on a device any more in this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _perform(
    case: Case, inputs: CallInputs, compute: torch.device, done: CallResults
) -> CallResults:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        perform(case, inputs, compute, done)
    return done


def _raised(error: BaseException) -> str:
    frames = list(traceback.extract_tb(error.__traceback__))
    where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames[-4:]))
    return f"{_first_line(error)} ({where})"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _compare(
    verdict: Verdict, inputs: CallInputs, done: CallResults, compute: torch.device
) -> None:
    case, results = verdict.case, done.results
    if done.report is not None:
        for one in (done.report.forward, done.report.backward):
            taken = None if one is None or one.recoveries else one.peak_bytes
            if taken is not None and taken > one.planned_peak_bytes:
                verdict.add("more memory than planned", f"{taken}, {one.planned_peak_bytes}")
    given = case.results.given and case.route == "pair"
    asked = {
        "out": DTYPES[case.results.out or case.dtype],
        "grad_mask": None if inputs.mask is None else inputs.mask.dtype,
        "grad_sinks": DTYPES[case.dtype],
        **dict.fromkeys(GRADIENTS, DTYPES[(case.results.grads if given else None) or case.dtype]),
    }
    for name, off in _judged(case, inputs, done, compute):
        dtype = results[name].dtype
        if dtype != asked.get(name, dtype):
            verdict.add("dtype", f"{name} is {dtype}, not {asked[name]}")
        if off and not (off.plausible and not _happens_again(case, inputs, name, compute)):
            verdict.add(f"{name} {off.kind}", off.words)


def _judged(
    case: Case, inputs: CallInputs, done: CallResults, compute: torch.device, only: str = ""
) -> Iterator[tuple[str, Off | None]]:
    """Each result, or one, and what is wrong with it."""
    results, where = done.results, place(case, compute)
    gradients = [name for name in results if name.startswith("grad")]
    dtypes = (results["out"].dtype, results[only or (gradients or ["out"])[0]].dtype)
    reference = Reference(case, inputs, where)
    wanted = reference.forward(dtypes[0])
    if case.route != "forward":
        wanted |= reference.backward(dtypes[1], dtypes[0])
    yardstick = Yardstick(case, inputs, dtypes, compute, lambda: _cut(case, inputs, compute, done))
    for name in [only] if only else results:
        yield name, judge(name, results[name].detach().to(where), wanted[name], yardstick)


@dataclass(frozen=True)
class Off:
    """What is wrong with one result.

    ``plausible``: no further off than arithmetic with a rounded output may leave it.
    """

    kind: str
    words: str
    plausible: bool = False


def judge(
    name: str, found: torch.Tensor, wanted: BoundedResult, yardstick: Yardstick
) -> Off | None:
    """What is wrong, or None; ``yardstick`` is asked only where the bound alone is exceeded."""
    exact, most = wanted.exact, torch.finfo(found.dtype).max
    if found.shape != exact.shape:
        return Off("shape", f"{tuple(found.shape)}, not {tuple(exact.shape)}")
    if found.numel() == 0:
        return None
    got = found.detach().to(exact)
    bound = torch.where(wanted.bound.isnan(), torch.inf, wanted.bound)
    # Minus infinity is a number of an lse: a row without keys.
    finite = exact.isfinite() | (name == "lse") & (exact == -torch.inf)
    broken = ~(got.isfinite() | (name == "lse") & (got == -torch.inf))
    if name == "lse":
        wrong = (got == -torch.inf) != (exact == -torch.inf)
        if bool(wrong.any()):
            return Off("rows without keys", _where(wrong, got, exact))
    # A number beyond the dtype's largest may be infinite, as far as torch's own error may reach.
    wrong = broken & finite & (exact.abs() + ALLOWED * bound < most)
    if bool(wrong.any()):
        for theirs_off in yardstick.errors(name, wanted):
            wrong &= exact.abs() + ALLOWED * torch.maximum(bound, theirs_off) < most
            if not bool(wrong.any()):
                break
        else:
            return Off("not finite", _where(wrong, got, exact))
    if bool((~finite & ~broken).any()):
        return Off("finite", _where(~finite & ~broken, got, exact))
    apart = torch.where(broken | ~exact.isfinite(), 0.0, (got - exact).abs())
    ratio, theirs_off = _ratio(apart, bound), None
    if float(ratio.max()) <= ALLOWED:
        return None
    for theirs_off in yardstick.errors(name, wanted):
        ratio = _ratio(apart, torch.maximum(bound, theirs_off))
        if float(ratio.max()) <= ALLOWED:
            return None
    words = _where(ratio > ALLOWED, got, exact, ratio)
    words += f"; largest error {float(apart.max()):.3g}"
    if theirs_off is not None:
        words += f", torch's {float(theirs_off.max()):.3g}"
    return Off("off", words, bool(((ratio <= ALLOWED) | (apart <= wanted.loose_bound)).all()))


def _ratio(apart: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    return (apart / bound).nan_to_num(nan=0.0, posinf=torch.inf)


def _where(
    bad: torch.Tensor, got: torch.Tensor, exact: torch.Tensor, ratio: torch.Tensor | None = None
) -> str:
    at = bad.nonzero()[0] if ratio is None else (ratio == ratio.max()).nonzero()[0]
    at = tuple(at.tolist())
    words = f"{int(bad.sum())} of {bad.numel()} elements, at {at} "
    words += f"{float(got[at]):.6g} for {float(exact[at]):.6g}"
    return words if ratio is None else f"{words}, {float(ratio.max()):.3g} times the bound"


def _happens_again(case: Case, inputs: CallInputs, name: str, compute: torch.device) -> bool:
    """Whether a result is as far off in most of its neighbours, by their own references.

    Rows that are all alike are rounded alike: their sum is a single draw of a rounding, and so is
    torch's, and of a hundred thousand pairs of draws some are far apart. What is less exact than
    torch is so again with values and upstream gradients some per cent apart. Asked only of errors
    that a rounded output accounts for.
    """
    case, found = replace(case, failure=None), 0
    for number in range(_AGAIN):
        other = neighbour(case, inputs, 100 + number)
        done = _perform(case, other, compute, CallResults())
        ((_, off),) = _judged(case, other, done, compute, name)
        found += off is not None
    return found > _AGAIN // 2


def _cut(case: Case, inputs: CallInputs, compute: torch.device, done: CallResults) -> Cut | None:
    """How the forward of a call was cut; it is made again where it was not reported."""
    if done.report is None:
        done = _perform(replace(case, reported=True, failure=None), inputs, compute, CallResults())
    ran = done.report.forward
    return None if ran is None else (ran.kernel, ran.levels)
