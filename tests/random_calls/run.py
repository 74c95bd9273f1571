"""Runs one case and judges it."""

from __future__ import annotations

import gc
import re
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import quorum_attention as qa
from random_calls.call import Done, perform
from random_calls.case import Case
from random_calls.compare import judge
from random_calls.draw import draw
from random_calls.kernels import kernel_of
from random_calls.parts import Cut
from random_calls.reference import Reference, place
from random_calls.tensors import DTYPES, Made, changed, make
from random_calls.yardstick import Yardstick, neighbour

# Neighbours asked whether an error is one of many.
_AGAIN = 5
_REFUSALS = (ValueError, TypeError, NotImplementedError, qa.BudgetError)


@dataclass
class Verdict:
    """What became of a case.

    Attributes:
        outcome: "right", "refused", "ran out" (of memory, where allocations were made to fail),
            "wrong".
        wrong: one line for everything that is.
        kinds: the same in a word each, to count by.
        refusal: the message, its numbers taken out.
        ratios: by result, the worst error as a share of what is allowed.
        ran: how each pass ran: (pass, way, levels, kernel).
        once: results that are further off than torch's, but were not again (``_happens_again``).
    """

    case: Case
    outcome: str = "right"
    wrong: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    refusal: str = ""
    ratios: dict[str, float] = field(default_factory=dict)
    ran: list[tuple[str, str, tuple[int, ...], str]] = field(default_factory=list)
    once: list[str] = field(default_factory=list)

    def add(self, kind: str, words: str) -> None:
        """Something is wrong."""
        self.outcome = "wrong"
        self.kinds.append(kind)
        self.wrong.append(f"{kind}: {words}")

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
    verdict = Verdict(case)
    compute = torch.device(device)
    lives = compute if case.residency == "device" else torch.device("cpu")
    made = make(case, lives)
    done = Done()
    kernel_of(case, made.slopes)  # made once, and kept
    if case.looked_after or case.measured:
        # What is made once (a kernel's trial) and kept (tables of a plan, slopes) is done before.
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            perform(case, make(case, lives), compute, Done())
        gc.collect()
        gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            perform(case, made, compute, done)
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
        _refused(verdict, error)
    except Exception as error:
        verdict.add(f"raises {type(error).__name__}", _raised(error))
        if is_lost(compute):
            return verdict
    judge_results(verdict, made, done, compute)
    if case.looked_after:
        done = Done()
        left, tries = _tensors(), 20
        while left > 0 and tries and compute.type == "cuda":
            # The thread that ran a backward on a GPU lets go a little later.
            time.sleep(0.02)
            left, tries = _tensors(), tries - 1
        if left > 0:
            verdict.add("tensors left", str(left))
    return verdict


def judge_results(verdict: Verdict, made: Made, done: Done, compute: torch.device) -> None:
    """Hold what a call has left in ``done`` against float64, inputs and neighbours included."""
    _ways(verdict, done)
    _peaks(verdict, done)
    if verdict.outcome == "right":
        _compare(verdict, made, done, compute)
    for name in changed(made.kept):
        verdict.add("input changed", name)
    for name in [target.name for target in done.targets if target.trespassed()]:
        verdict.add("memory of others changed", name)
    for name in done.untaken:
        verdict.add("not where it was asked for", name)


def is_lost(device: torch.device) -> bool:
    """Whether nothing can be computed on a device any more in this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _refused(verdict: Verdict, error: Exception) -> None:
    verdict.outcome = "refused"
    text = re.sub(r"\d+(\.\d+)?", "#", _first_line(error))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "quorum_attention" in frame.filename
    verdict.refusal = f"{type(error).__name__}: {text}"
    if not place:
        # Raised by torch or Python on our behalf: no refusal, but an accident.
        verdict.add(f"raises {type(error).__name__}", _raised(error))


def _raised(error: BaseException) -> str:
    frames = list(traceback.extract_tb(error.__traceback__))
    where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames[-4:]))
    return f"{_first_line(error)} ({where})"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _ways(verdict: Verdict, done: Done) -> None:
    if done.report is None:
        return
    for name, one in (("forward", done.report.forward), ("backward", done.report.backward)):
        if one is None:
            continue
        way = "slots" if one.loaded_bytes else "whole" if one.accumulator == "none" else "in place"
        verdict.ran.append((name, way, one.levels, one.kernel))


def _compare(verdict: Verdict, made: Made, done: Done, compute: torch.device) -> None:
    case, results = verdict.case, done.results
    gradients = [name for name in results if name.startswith("grad")]
    where = place(case, compute)
    reference = Reference(case, made, where)
    wanted = reference.forward(results["out"].dtype)
    if gradients:
        wanted |= reference.backward(results[gradients[0]].dtype)
    results = {name: found.detach().to(where) for name, found in results.items()}
    last = results[gradients[0]].dtype if gradients else results["out"].dtype
    dtypes = (results["out"].dtype, last)
    yardstick = Yardstick(case, made, dtypes, compute, lambda: _cut(case, made, compute, done))
    out_dtype = DTYPES[case.results.out or case.dtype]
    for name, found in results.items():
        dtype = found.dtype
        asked = out_dtype if name == "out" else DTYPES[
            (case.results.grads if case.results.given and case.route == "pair" else None)
            or case.dtype
        ]  # fmt: skip
        if name == "grad_mask":
            asked = made.mask.dtype
        if name != "lse" and dtype != asked:
            verdict.add("dtype", f"{name} is {dtype}, not {asked}")
        off, ratio = judge(name, found, wanted[name], yardstick)
        again = off is None or not off.plausible or _happens_again(case, made, name, compute)
        verdict.ratios[name] = ratio
        if off is not None and not again:
            verdict.once.append(f"{off.name}: {off.words}")
            verdict.ratios[name] = 1.0
        elif off is not None:
            verdict.add(f"{off.name} {off.kind}", off.words)


def _happens_again(case: Case, made: Made, name: str, compute: torch.device) -> bool:
    """Whether a result is as far off in most of its neighbours, by their own references.

    Rows that are all alike are rounded alike: their sum is a single draw of a rounding, and so is
    torch's, and of a hundred thousand pairs of draws some are far apart. What is less exact than
    torch is so again with values and upstream gradients some per cent apart. Asked only of errors
    that a rounded output accounts for.
    """
    case, found = replace(case, failure=None, measured=False), 0
    for number in range(_AGAIN):
        other, done = neighbour(case, made, 100 + number), Done()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            perform(case, other, compute, done)
        reference = Reference(case, other, place(case, compute))
        wanted = reference.forward(done.results["out"].dtype)
        last = done.results[name].dtype
        if name.startswith("grad"):
            wanted |= reference.backward(last)
        dtypes, cut = (done.results["out"].dtype, last), _cut(case, other, compute, done)
        yardstick = Yardstick(case, other, dtypes, compute, lambda cut=cut: cut)
        found += judge(name, done.results[name], wanted[name], yardstick)[0] is not None
    return found > _AGAIN // 2


def _cut(case: Case, made: Made, compute: torch.device, done: Done) -> Cut | None:
    """How the forward of a call was cut; it is made again where it was not reported."""
    report = done.report
    if report is None:
        again, once = replace(case, reported=True, failure=None, measured=False), Done()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            perform(again, made, compute, once)
        report = once.report
    ran = None if report is None else report.forward
    return None if ran is None else Cut(ran.kernel, ran.levels)


def _tensors() -> int:
    """Tensors that Python knows of and that are younger than the last freeze."""
    gc.collect()
    # By type: asking for a class would wake modules that pretend to be objects.
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def _peaks(verdict: Verdict, done: Done) -> None:
    """What was taken at most, where it was measured, against what the plan said."""
    if done.report is None:
        return
    for name, one in (("forward", done.report.forward), ("backward", done.report.backward)):
        if one is None or one.recoveries:
            continue
        taken = done.peaks.get(name, one.peak_bytes)
        if taken is not None and taken > one.planned_peak_bytes:
            verdict.add("more memory than planned", f"{name}: {taken}, {one.planned_peak_bytes}")
