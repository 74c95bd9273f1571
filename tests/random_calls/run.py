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
        outcome: "right", "refused", "ran out" (of memory, where allocations were inputs
            to fail), "wrong".
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
        return "\n  ".join(
            [f"{self.outcome}: {self.case}", *self.wrong, self.refusal]
        ).strip()


def check_seed(seed: int, device: str = "cpu", **options: Any) -> Verdict:
    """The verdict on the case of a seed; ``options``: of ``draw``. Where the check
    itself raises (in the reference, in torch's call, on a lost device) the case is
    wrong."""
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
    done = CallResults()
    inputs = make(case, compute if case.residency == "device" else torch.device("cpu"))
    try:
        _perform(case, inputs, compute, done)
        if compute.type == "cuda":
            torch.cuda.synchronize(compute)
    except Exception as error:
        _judge_error(verdict, error)
        is_expected = isinstance(error, (torch.OutOfMemoryError, *_REFUSALS))
        if not is_expected and is_lost(compute):
            return verdict
    if verdict.outcome == "right":
        _compare(verdict, inputs, done, compute)
    for memory in inputs.read_only:
        if memory.changed():
            verdict.add("input changed", memory.name)
    for memory in done.targets:
        if memory.changed():
            verdict.add("memory of others changed", memory.name)
    for name in done.misplaced:
        verdict.add("not where it was asked for", name)
    return verdict


def _judge_error(verdict: Verdict, error: Exception) -> None:
    """Whether a call may end with this error: out of memory that a case plans, or a
    refusal."""
    if isinstance(error, qa.BudgetError):
        # A budget here is what the call itself has named, or more.
        verdict.add("refuses the budget that it named", _first_line(error))
    elif isinstance(error, torch.OutOfMemoryError):
        if verdict.case.failure is not None and "sabotaged" in str(error):
            verdict.outcome = "ran out"
        else:
            verdict.add("out of memory", _first_line(error))
    elif isinstance(error, _REFUSALS):
        verdict.outcome = "refused"
        text = re.sub(r"\d+(\.\d+)?", "#", _first_line(error))
        verdict.refusal = f"{type(error).__name__}: {text}"
        if (
            "quorum_attention"
            not in traceback.extract_tb(error.__traceback__)[-1].filename
        ):
            # Raised by torch or Python on our behalf: no refusal, but an accident.
            verdict.add(f"raises {type(error).__name__}", _raised(error))
    else:
        verdict.add(f"raises {type(error).__name__}", _raised(error))


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
    where = " < ".join(
        f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames[-4:])
    )
    return f"{_first_line(error)} ({where})"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _compare(
    verdict: Verdict, inputs: CallInputs, done: CallResults, compute: torch.device
) -> None:
    case = verdict.case
    _compare_peaks(verdict, done.report)
    dtypes = _dtypes_asked_for(case, inputs)
    for name, deviation in _judged(case, inputs, done, compute):
        dtype = done.results[name].dtype
        if dtype != dtypes.get(name, dtype):
            verdict.add("dtype", f"{name} is {dtype}, not {dtypes[name]}")
        if deviation is None:
            continue
        if deviation.plausible and not _happens_again(case, inputs, name, compute):
            continue
        verdict.add(f"{name} {deviation.kind}", deviation.words)


def _compare_peaks(verdict: Verdict, report: qa.Report | None) -> None:
    """A pass without recoveries takes no more memory than was planned."""
    if report is None:
        return
    for run in (report.forward, report.backward):
        if run is None or run.recoveries or run.peak_bytes is None:
            continue
        if run.peak_bytes > run.planned_peak_bytes:
            words = f"{run.peak_bytes}, {run.planned_peak_bytes}"
            verdict.add("more memory than planned", words)


def _dtypes_asked_for(case: Case, inputs: CallInputs) -> dict[str, torch.dtype]:
    """The dtypes that results have to have, by name; others may have any."""
    dtype = DTYPES[case.dtype]
    grads_dtype = dtype
    if case.results.given and case.route == "pair" and case.results.grads:
        grads_dtype = DTYPES[case.results.grads]
    dtypes = dict.fromkeys(GRADIENTS, grads_dtype)
    dtypes["out"] = DTYPES[case.results.out] if case.results.out else dtype
    dtypes["grad_sinks"] = dtype
    if inputs.mask is not None:
        dtypes["grad_mask"] = inputs.mask.dtype
    return dtypes


def _judged(
    case: Case,
    inputs: CallInputs,
    done: CallResults,
    compute: torch.device,
    only: str = "",
) -> Iterator[tuple[str, Deviation | None]]:
    """Each result, or ``only`` one, and what is wrong with it."""
    results = done.results
    where = place(case, compute)
    gradients = [name for name in results if name.startswith("grad")]
    out_dtype = results["out"].dtype
    dtype = results[only or (gradients or ["out"])[0]].dtype
    reference = Reference(case, inputs, where)
    expected = reference.forward(out_dtype)
    if case.route != "forward":
        expected |= reference.backward(dtype, out_dtype)

    def cut() -> Cut | None:
        return _cut(case, inputs, compute, done)

    yardstick = Yardstick(case, inputs, (out_dtype, dtype), compute, cut)
    for name in [only] if only else results:
        result = results[name].detach().to(where)
        yield name, judge(name, result, expected[name], yardstick)


@dataclass(frozen=True)
class Deviation:
    """How a result differs from the exact one by more than it may.

    Attributes:
        kind: "shape", "not finite", "finite", "off", "rows without keys".
        words: where, and by how much.
        plausible: no further off than arithmetic with a rounded output may leave it.
    """

    kind: str
    words: str
    plausible: bool = False


def judge(
    name: str, result: torch.Tensor, expected: BoundedResult, yardstick: Yardstick
) -> Deviation | None:
    """Compare a result with its exact value.

    ``yardstick`` is asked only if the bound alone is exceeded.
    """
    exact = expected.exact
    if result.shape != exact.shape:
        return Deviation("shape", f"{tuple(result.shape)}, not {tuple(exact.shape)}")
    if result.numel() == 0:
        return None
    largest = torch.finfo(result.dtype).max
    got = result.detach().to(exact)
    bound = torch.where(expected.bound.isnan(), torch.inf, expected.bound)
    expected = replace(expected, bound=bound)
    if name == "lse":
        is_wrong = (got == -torch.inf) != (exact == -torch.inf)
        if bool(is_wrong.any()):
            return Deviation("rows without keys", _where(is_wrong, got, exact))
    is_broken = ~_is_number(name, got)
    is_number = _is_number(name, exact)
    deviation = _judge_infinite(
        name, got, is_broken & is_number, expected, largest, yardstick
    )
    if deviation is not None:
        return deviation
    is_wrong = ~is_number & ~is_broken
    if bool(is_wrong.any()):
        return Deviation("finite", _where(is_wrong, got, exact))
    is_compared = ~is_broken & exact.isfinite()
    errors = torch.where(is_compared, (got - exact).abs(), 0.0)
    return _judge_errors(name, got, errors, expected, yardstick)


def _is_number(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Finite elements. Minus infinity is a number of an lse: a row without keys."""
    if name != "lse":
        return tensor.isfinite()
    return tensor.isfinite() | (tensor == -torch.inf)


def _judge_infinite(
    name: str,
    got: torch.Tensor,
    is_broken: torch.Tensor,
    expected: BoundedResult,
    largest: float,
    yardstick: Yardstick,
) -> Deviation | None:
    """Judge elements that are infinite or NaN, and finite in the exact result.

    A number beyond the dtype's ``largest`` may be infinite, as far as torch's own error
    may reach.
    """
    sizes = expected.exact.abs()
    is_wrong = is_broken & (sizes + ALLOWED * expected.bound < largest)
    if not bool(is_wrong.any()):
        return None
    for torch_error in yardstick.errors(name, expected):
        allowed = ALLOWED * torch.maximum(expected.bound, torch_error)
        is_wrong &= sizes + allowed < largest
        if not bool(is_wrong.any()):
            return None
    return Deviation("not finite", _where(is_wrong, got, expected.exact))


def _judge_errors(
    name: str,
    got: torch.Tensor,
    errors: torch.Tensor,
    expected: BoundedResult,
    yardstick: Yardstick,
) -> Deviation | None:
    """Judge the errors of elements by their bounds, and by torch's own errors if these
    fail."""
    ratio = _ratio(errors, expected.bound)
    if float(ratio.max()) <= ALLOWED:
        return None
    torch_error = None
    for torch_error in yardstick.errors(name, expected):
        ratio = _ratio(errors, torch.maximum(expected.bound, torch_error))
        if float(ratio.max()) <= ALLOWED:
            return None
    words = _where(ratio > ALLOWED, got, expected.exact, ratio)
    words += f"; largest error {float(errors.max()):.3g}"
    if torch_error is not None:
        words += f", torch's {float(torch_error.max()):.3g}"
    is_plausible = (ratio <= ALLOWED) | (errors <= expected.loose_bound)
    return Deviation("off", words, bool(is_plausible.all()))


def _ratio(errors: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    return (errors / bound).nan_to_num(nan=0.0, posinf=torch.inf)


def _where(
    is_wrong: torch.Tensor,
    got: torch.Tensor,
    exact: torch.Tensor,
    ratio: torch.Tensor | None = None,
) -> str:
    """How many elements are wrong, and one of them: the first, or that of the largest
    ratio."""
    candidates = is_wrong if ratio is None else ratio == ratio.max()
    index = tuple(candidates.nonzero()[0].tolist())
    words = f"{int(is_wrong.sum())} of {is_wrong.numel()} elements, at {index} "
    words += f"{float(got[index]):.6g} for {float(exact[index]):.6g}"
    if ratio is None:
        return words
    return f"{words}, {float(ratio.max()):.3g} times the bound"


def _happens_again(
    case: Case, inputs: CallInputs, name: str, compute: torch.device
) -> bool:
    """Whether a result is as far off in most of its neighbours, by their own
    references.

    Rows that are all alike are rounded alike: their sum is a single draw of a rounding,
    and so is torch's, and of a hundred thousand pairs of draws some are far apart. What
    is less exact than torch is so again with values and upstream gradients some per
    cent apart. Asked only of errors that a rounded output accounts for.
    """
    case = replace(case, failure=None)
    n_deviations = 0
    for number in range(_AGAIN):
        neighbours_inputs = neighbour(case, inputs, 100 + number)
        done = _perform(case, neighbours_inputs, compute, CallResults())
        ((_, deviation),) = _judged(case, neighbours_inputs, done, compute, name)
        n_deviations += deviation is not None
    return n_deviations > _AGAIN // 2


def _cut(
    case: Case, inputs: CallInputs, compute: torch.device, done: CallResults
) -> Cut | None:
    """How the forward of a call was cut; the call is made again if it was not
    reported."""
    if done.report is None:
        reported = replace(case, reported=True, failure=None)
        done = _perform(reported, inputs, compute, CallResults())
    forward = done.report.forward
    return None if forward is None else (forward.kernel, forward.levels)
