"""The kinds of calls that a soak makes in its own process."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from helpers_masks import exact as exact_under_mask
from helpers_masks import random_mask
from random_calls.call import Done, perform
from random_calls.case import Case
from random_calls.draw import draw as draw_case
from random_calls.kernels import kernel_of
from random_calls.pool import BLOCK
from random_calls.run import Verdict, check, judge_results
from random_calls.tensors import make

import quorum_attention as qa
from soak.outcome import Kind, Outcome, Where, compare, drawn_inputs, textbook

_SEEDS = 1 << 40
_THREADS = 3
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _cases(where: Where, draw: random.Random, count: int) -> Iterator[Case]:
    """Neighbouring seeds: on a GPU they share what has to be compiled.

    What freezes garbage or profiles memory would itself be a growth, and is left to random_calls.
    On a GPU no NaN and infinities: docs/random-calls.md names operators that spread them.
    """
    first = draw.randrange(_SEEDS) // BLOCK * BLOCK
    for seed in range(first, first + count):
        case = replace(draw_case(seed, where.device), looked_after=False, measured=False)
        if where.device != "cpu":
            case = replace(case, planted=None)
        yield case


def _note(verdict: Verdict, outcome: Outcome) -> None:
    outcome.calls += 1
    if verdict.outcome == "wrong":
        outcome.wrong.append(f"seed {verdict.case.seed}: {verdict}")
    elif verdict.outcome == "refused" and not _may_refuse(verdict.refusal):
        outcome.wrong.append(f"seed {verdict.case.seed} is refused: {verdict}")
    elif verdict.outcome != "right":
        outcome.events.append(verdict.outcome)


def _may_refuse(refusal: str) -> bool:
    return refusal.startswith("NotImplementedError: kernel '")


def calls(where: Where, draw: random.Random) -> Outcome:
    """Calls of tests/random_calls: routes, masks, strides, budgets, failing allocations."""
    outcome = Outcome()
    for case in _cases(where, draw, BLOCK):
        _note(check(case, where.device), outcome)
    return outcome


def masks(where: Where, draw: random.Random) -> Outcome:
    """``Mask`` of random fields, both passes, uncut and cut."""
    outcome = Outcome(calls=2)
    dtype = draw.choice(DTYPES)
    (q, k, v), upstream = drawn_inputs(draw, dtype, "cpu", 300)
    torch.manual_seed(draw.getrandbits(40))
    mask = random_mask(draw, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    exact = exact_under_mask(q, k, v, upstream, mask, 0.5)
    three = [t.detach().to(where.device).requires_grad_() for t in (q, k, v)]
    options: dict[str, Any] = {"depth": 1} if q.shape[2] >= 128 and draw.random() < 0.5 else {}
    out, lse = qa.attention_with_lse(
        *three, attn_mask=moved(mask, where.device), scale=0.5, enable_gqa=True, **options
    )
    grads = torch.autograd.grad(out, three, upstream.to(where.device))
    for name, found, wanted in zip(
        ("out", "lse", "dQ", "dK", "dV"), (out, lse, *grads),
        (exact.out, exact.lse, *exact.grads[:3]), strict=True,
    ):  # fmt: skip
        compare(f"{name} under {mask}", found, wanted, dtype, outcome)
    return outcome


def moved(mask: qa.Mask, device: str) -> qa.Mask:
    """The mask with its tensors on a device."""

    def to(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, qa.Mask):
            return moved(value, device)
        return tuple(map(to, value)) if isinstance(value, tuple) else value

    changes = {name: to(getattr(mask, name)) for name in mask.__dataclass_fields__}
    return replace(mask, **changes)


def closed_form(where: Where, draw: random.Random) -> Outcome:
    """Long causal calls of queries of 0: out, lse and dV are running means and sums."""
    outcome = Outcome(calls=2)
    long = 3000 if where.device == "cpu" else 60_000
    n, heads, d = draw.randint(long // 3, long), draw.choice([1, 2, 4]), draw.choice([16, 64])
    dtype = draw.choice((torch.float32, torch.float16) if where.device == "cpu" else DTYPES[:3])
    home = draw.choice(["cpu", where.device])
    g = torch.Generator().manual_seed(draw.getrandbits(40))
    k, v, upstream = (torch.randn(1, heads, n, d, generator=g).to(home, dtype) for _ in range(3))
    q = torch.zeros_like(k)
    options: dict[str, Any] = {"is_causal": True, "devices": where.device, "budget": 1}
    try:
        qa.attention(q, k, v, **options)
    except qa.BudgetError as error:
        options["budget"] = int(error.smallest_bytes * draw.choice([1.0, 1.5, 4.0]))
    out, lse = qa.attention_with_lse(q, k, v, **options)
    with contextlib.suppress(qa.BudgetError):
        qa.attention_backward(upstream, q, k, v, out, lse, **options | {"budget": 1})
    options.pop("budget")
    _, dk, dv = qa.attention_backward(upstream, q, k, v, out, lse, **options)
    count = torch.arange(1, n + 1, dtype=torch.float64)[:, None]
    running = v.cpu().double().cumsum(-2) / count
    compare("out", out, running, dtype, outcome)
    compare("lse", lse, count[:, 0].log().expand(1, heads, n), torch.float32, outcome)
    later = (upstream.cpu().double() / count).flip(-2).cumsum(-2).flip(-2)
    compare("dV", dv, later, dtype, outcome)
    compare("dK", dk, torch.zeros_like(later), dtype, outcome)
    return outcome


def threads(where: Where, draw: random.Random) -> Outcome:
    """Calls of several threads at once."""
    outcome = Outcome()
    cases = [_plain(case) for case in _cases(where, draw, _THREADS)]
    made = [make(case, _lives(case, where)) for case in cases]
    done = [Done() for _ in cases]
    raised: list[tuple[int, Exception]] = []

    def work(i: int) -> None:
        try:
            perform(cases[i], made[i], where.torch_device, done[i])
            if where.device != "cpu":
                torch.cuda.synchronize()
        except Exception as error:
            raised.append((i, error))

    for case, one in zip(cases, made, strict=True):
        kernel_of(case, one.slopes)  # made once, and not by several threads
    at_once = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in at_once:
            thread.start()
        for thread in at_once:
            thread.join()
    failed = dict(raised)
    for i, case in enumerate(cases):
        verdict = Verdict(case)
        if i in failed:
            _failed(verdict, failed[i])
        else:
            judge_results(verdict, made[i], done[i], where.torch_device)
        # A device's allocator counts what all threads take.
        others = [line for line in verdict.wrong if not line.startswith("more memory than")]
        if verdict.wrong and not others:
            verdict = Verdict(case)
        _note(verdict, outcome)
    return outcome


def _failed(verdict: Verdict, error: Exception) -> None:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, NotImplementedError) and _may_refuse(text):
        verdict.outcome, verdict.refusal = "refused", text
    else:
        verdict.add("raises", text)


def _plain(case: Case) -> Case:
    """Without what changes the process for all of its threads, or makes allocations fail."""
    return replace(case, calibrated=None, failure=None)


def _lives(case: Case, where: Where) -> torch.device:
    return where.torch_device if case.residency == "device" else torch.device("cpu")


class _Interrupt(KeyboardInterrupt):
    """Of the timer of this file, and of nobody's keyboard."""


def interrupts(where: Where, draw: random.Random) -> Outcome:
    """A call interrupted at a random instant leaves its inputs alone, and the next one is right."""
    outcome = Outcome()
    for case in map(_plain, _cases(where, draw, 4)):
        if "native" in case.kernel and where.device == "cpu":
            continue  # Triton's interpreter swaps parts of Triton for others as it runs
        began = time.perf_counter()
        verdict = check(case, where.device)
        _note(verdict, outcome)
        if verdict.outcome != "right":
            continue
        took = verdict.parts.get("call", time.perf_counter() - began)
        made, done = make(case, _lives(case, where)), Done()
        outcome.calls += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if _interrupted(case, made, done, where, draw.random() * took):
                outcome.events.append("interrupted")
        again = Verdict(case)
        if where.device != "cpu":
            torch.cuda.synchronize()
        for one in made.kept:
            if one.changed():
                again.add("an interrupt changed an input", one.name)
        for target in done.targets:
            if target.trespassed():
                again.add("an interrupt changed memory of others", target.name)
        _note(again if again.wrong else check(case, where.device), outcome)
    return outcome


def _interrupted(case: Case, made: Any, done: Done, where: Where, delay: float) -> bool:
    """Make the call; whether the interrupt came before its end."""

    def interrupt(*_: object) -> None:
        raise _Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-5, delay))
            perform(case, made, where.torch_device, done)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Interrupt:
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


def traces(where: Where, draw: random.Random) -> Outcome:
    """Compiled with aot_eager, in lengths that share a graph and in others."""
    outcome = Outcome()
    dtype, causal = draw.choice(DTYPES[:2]), draw.random() < 0.5
    options: dict[str, Any] = {"is_causal": causal, "enable_gqa": True}
    if draw.random() < 0.5:
        options["depth"] = draw.choice([0, 1])

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 2 * qa.attention(q * 1.0, k, v, **options)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        three, upstream = drawn_inputs(draw, dtype, where.device)
        if three[0].shape[2] < 128:
            options.pop("depth", None)
        out = compiled(*three)
        grads = torch.autograd.grad(out, three, upstream)
        exact = textbook(*three, upstream, is_causal=causal)
        outcome.calls += 2
        compare("compiled out", out / 2, exact[0], dtype, outcome)
        for name, found, wanted in zip("QKV", grads, exact[2:], strict=True):
            compare(f"compiled d{name}", found / 2, wanted, dtype, outcome)
    torch._dynamo.reset()
    return outcome


def sdpa(where: Where, draw: random.Random) -> Outcome:
    """torch's own function, patched in a block and for good, and then not any more."""
    outcome = Outcome()
    functional = torch.nn.functional
    own = functional.scaled_dot_product_attention
    for _ in range(4):
        dtype, causal = draw.choice(DTYPES), draw.random() < 0.5
        three, upstream = drawn_inputs(draw, dtype, where.device)
        report, options = qa.Report(), {"min_tokens": 0}
        for_good = draw.random() < 0.5
        if for_good:
            qa.patch_sdpa(**options, report=report)
        try:
            with (
                contextlib.nullcontext() if for_good else qa.patched_sdpa(**options, report=report)
            ):
                out = functional.scaled_dot_product_attention(
                    *three, is_causal=causal, enable_gqa=True
                )
                grads = torch.autograd.grad(out, three, upstream)
        finally:
            if for_good:
                qa.unpatch_sdpa()
        outcome.calls += 2
        if not report.total.forwards and three[0].shape[2] > 1:
            outcome.wrong.append(f"the patch did not take {[tuple(t.shape) for t in three]}")
        exact = textbook(*three, upstream, is_causal=causal)
        for name, found, wanted in zip(
            ("out", "dQ", "dK", "dV"), (out, *grads), (exact[0], *exact[2:]), strict=True
        ):
            compare(f"patched {name}", found, wanted, dtype, outcome)
    if functional.scaled_dot_product_attention is not own:
        outcome.wrong.append("torch's function is not back in its place")
    return outcome


KINDS = [
    Kind("calls", 30, calls),
    Kind("masks", 10, masks),
    Kind("closed form", 8, closed_form),
    Kind("threads", 10, threads),
    Kind("interrupts", 12, interrupts),
    Kind("traces", 6, traces),
    Kind("sdpa", 6, sdpa),
]
