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
from random_calls.reference import Reference, Wanted, place
from random_calls.tensors import DTYPES, Made, changed, make
from random_calls.yardstick import GRADIENTS, Yardstick, neighbour

# Neighbours asked whether an error is one of many.
_AGAIN = 5
_REFUSALS = (ValueError, TypeError, NotImplementedError, qa.BudgetError)


@dataclass
class Verdict:
    """What became of a case.

    Attributes:
        outcome: "right", "refused", "ran out" (of memory, where allocations were made to fail),
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
    verdict = Verdict(case)
    compute = torch.device(device)
    lives = compute if case.residency == "device" else torch.device("cpu")
    made = make(case, lives)
    done = Done()
    kernel_of(case, made.slopes)  # made once, and kept
    if case.looked_after or case.measured:
        # What is made once (a kernel's trial) and kept (tables of a plan, slopes) is done before.
        with suppress(Exception):
            _again(case, make(case, lives), compute)
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
    verdict.refusal = f"{type(error).__name__}: {text}"
    if "quorum_attention" not in traceback.extract_tb(error.__traceback__)[-1].filename:
        # Raised by torch or Python on our behalf: no refusal, but an accident.
        verdict.add(f"raises {type(error).__name__}", _raised(error))


def _raised(error: BaseException) -> str:
    frames = list(traceback.extract_tb(error.__traceback__))
    where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames[-4:]))
    return f"{_first_line(error)} ({where})"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _compare(verdict: Verdict, made: Made, done: Done, compute: torch.device) -> None:
    case, results = verdict.case, done.results
    gradients = [name for name in results if name.startswith("grad")]
    where = place(case, compute)
    dtypes = (results["out"].dtype, results[(gradients or ["out"])[0]].dtype)
    wanted = _wanted(case, made, dtypes, where)
    yardstick = Yardstick(case, made, dtypes, compute, lambda: _cut(case, made, compute, done))
    given = case.results.given and case.route == "pair"
    asked = {
        "out": DTYPES[case.results.out or case.dtype],
        "grad_mask": None if made.mask is None else made.mask.dtype,
        **dict.fromkeys(GRADIENTS, DTYPES[(case.results.grads if given else None) or case.dtype]),
    }
    for name, found in results.items():
        if found.dtype != asked.get(name, found.dtype):
            verdict.add("dtype", f"{name} is {found.dtype}, not {asked[name]}")
        off = judge(name, found.detach().to(where), wanted[name], yardstick)
        if off and not (off.plausible and not _happens_again(case, made, name, compute)):
            verdict.add(f"{off.name} {off.kind}", off.words)


def _wanted(
    case: Case, made: Made, dtypes: tuple[torch.dtype, torch.dtype], where: torch.device
) -> dict[str, Wanted]:
    reference = Reference(case, made, where)
    wanted = reference.forward(dtypes[0])
    return wanted if case.route == "forward" else wanted | reference.backward(dtypes[1])


def _happens_again(case: Case, made: Made, name: str, compute: torch.device) -> bool:
    """Whether a result is as far off in most of its neighbours, by their own references.

    Rows that are all alike are rounded alike: their sum is a single draw of a rounding, and so is
    torch's, and of a hundred thousand pairs of draws some are far apart. What is less exact than
    torch is so again with values and upstream gradients some per cent apart. Asked only of errors
    that a rounded output accounts for.
    """
    case, found = replace(case, failure=None, measured=False), 0
    for number in range(_AGAIN):
        other = neighbour(case, made, 100 + number)
        done = _again(case, other, compute)
        dtypes = (done.results["out"].dtype, done.results[name].dtype)
        cut = _cut(case, other, compute, done)
        yardstick = Yardstick(case, other, dtypes, compute, lambda cut=cut: cut)
        wanted = _wanted(case, other, dtypes, place(case, compute))
        found += judge(name, done.results[name], wanted[name], yardstick) is not None
    return found > _AGAIN // 2


def _again(case: Case, made: Made, compute: torch.device) -> Done:
    done = Done()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        perform(case, made, compute, done)
    return done


def _cut(case: Case, made: Made, compute: torch.device, done: Done) -> Cut | None:
    """How the forward of a call was cut; it is made again where it was not reported."""
    if done.report is None:
        again = replace(case, reported=True, failure=None, measured=False)
        done = _again(again, made, compute)
    ran = done.report.forward
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
