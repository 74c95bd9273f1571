"""A soak: random calls of all kinds for minutes or hours, each held against float64; whether the
process grows.

``PYTHONPATH=src:tests python -m soak --minutes 60 --seed 1``. Exit status 0: no call was wrong,
nothing grew, nothing was left.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

MIB = 1 << 20
# What each may grow by over the second half of a soak: the slope through its rows, times the time.
# A leak of 1 KB a call is 20 MiB in the second half of an hour. Less than these is what torch's
# allocators, its compiler's caches and glibc's free lists do by themselves.
LIMITS = {
    "anonymous": 48 * MIB, "device": 4 * MIB, "descriptors": 4, "threads": 4, "children": 1,
    "shared_files": 1, "temporary_files": 4,
}  # fmt: skip


def prepare(device: str) -> None:
    """The environment of this process and its children; before torch is imported."""
    quiet = {
        "OMP_NUM_THREADS": "1",
        # cuBLAS sets its workspace up once for every thread.
        "CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0",
        # oneDNN keeps compiled code for 1,024 shapes of products in bf16, 0.6 MB each.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32",
        # glibc gives each thread an arena, and what is freed stays in it in pieces.
        "MALLOC_ARENA_MAX": "1",
    }  # fmt: skip
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-8, 1)  # M_ARENA_MAX of this process, which has begun
    os.environ["QUORUM_ATTENTION_CACHE"] = tempfile.mkdtemp(prefix="cache-")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TRITON_INTERPRET", "1")


@dataclass
class Step:
    """What one step of a kind of calls drew and found."""

    draw: random.Random
    device: str
    calls: int = 0
    wrong: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def judge(self, verdict: Any) -> None:
        """Count a verdict of random_calls; only a kernel asked for by name may refuse."""
        self.calls += 1
        refused = verdict.outcome == "refused"
        if verdict.outcome == "wrong" or (
            refused and not verdict.refusal.startswith("NotImplementedError: kernel '")
        ):
            self.wrong.append(f"seed {verdict.case.seed}: {verdict}")

    def compare(self, names: str, found: Sequence[Any], exact: Sequence[Any]) -> None:
        """Note which results are further from the exact ones than their dtype explains."""
        import torch
        from helpers_attention import error

        allowed = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2}
        self.calls += 1
        for name, got, wanted in zip(names.split(), found, exact, strict=True):
            share, most = error(got, wanted), allowed.get(found[0].dtype, 1e-1)
            if not share <= most:
                self.wrong.append(f"{name} is off by {share:.3g} where {most} is allowed")

    def inputs(self, device: str, longest: int = 500) -> tuple[list[Any], Any, list[Any], bool]:
        """Query, key, value; the output's gradient; output and gradients in float64; causal?"""
        import torch
        from helpers_attention import exact, inputs

        draw = self.draw
        torch.manual_seed(draw.getrandbits(40))
        kv_heads = draw.choice([1, 2])
        with contextlib.redirect_stdout(None):
            given = inputs(
                draw.choice([1, 17, 128, 200, draw.randint(1, longest)]),
                batch=(draw.choice([1, 1, 2]),), heads=kv_heads * draw.choice([1, 1, 2, 3]),
                kv_heads=kv_heads, head_dim=draw.choice([8, 16, 32]),
                dtype=getattr(torch, draw.choice(["float32", "float16", "bfloat16", "float64"])),
            )  # fmt: skip
        causal = draw.random() < 0.6
        wanted = exact(given, is_causal=causal, gradients=True)
        three = [t.to(device).requires_grad_() for t in given.three]
        return three, given.grad_out.to(device), [wanted.out, *wanted.grads], causal

    def attend(self, function: Callable[..., Any], device: str, longest: int = 500) -> None:
        """A call of a function like torch's, and its gradients."""
        import torch

        three, upstream, wanted, causal = self.inputs(device, longest)
        out = function(*three, is_causal=causal, enable_gqa=True)
        found = (out, *torch.autograd.grad(out, three, upstream))
        self.compare("out dQ dK dV", found, wanted)


def cases(step: Step, count: int) -> Iterator[Any]:
    """Neighbouring seeds of random_calls: on a GPU they share what has to be compiled.

    Without what freezes garbage or profiles memory, which would be a growth by itself, and without
    NaN and infinity: docs/random-calls.md names operators that spread them.
    """
    from random_calls.draw import BLOCK, draw

    first = step.draw.randrange(1 << 40) // BLOCK * BLOCK
    for seed in range(first, first + count):
        case = draw(seed, step.device)
        yield replace(case, looked_after=False, measured=False, planted=None)


def calls(step: Step) -> None:
    """Calls of random_calls: routes, masks, strides, budgets, failing allocations."""
    from random_calls.run import check

    for case in cases(step, 16):
        step.judge(check(case, step.device))


def masks(step: Step) -> None:
    """``Mask`` of random fields, both passes."""
    import torch
    from helpers_masks import exact, random_mask

    import quorum_attention as qa

    (q, k, v), upstream, _, _ = step.inputs("cpu", 300)
    mask = random_mask(step.draw, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    wanted = exact(*(t.detach() for t in (q, k, v)), upstream, mask, 0.5)
    out, lse = qa.attention_with_lse(q, k, v, mask, devices=step.device, scale=0.5, enable_gqa=True)
    found = (out, lse, *torch.autograd.grad(out, (q, k, v), upstream))
    step.compare("out lse dQ dK dV", found, (wanted.out, wanted.lse, *wanted.grads[:3]))


def at_once(step: Step) -> None:
    """Calls of three threads at once."""
    from random_calls.run import check

    # Without what changes the process for all of its threads.
    three = [replace(case, calibrated=None, failure=None) for case in cases(step, 3)]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: check(three[i], step.device)}))
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for verdict in found.values():
        # A device's allocator counts what all threads take.
        if not all(words.startswith("more memory than") for words in verdict.wrong or [""]):
            step.judge(verdict)
    if len(found) < 3:
        step.wrong.append(f"a thread raised: {[str(case) for case in three]}")


def interrupts(step: Step) -> None:
    """A call interrupted at a random instant leaves its inputs alone, and the next is right."""
    import torch
    from random_calls.call import Done, perform
    from random_calls.run import Verdict, check
    from random_calls.tensors import make

    class Interrupt(KeyboardInterrupt):
        """Of this timer."""

    def interrupt(*_: object) -> None:
        raise Interrupt

    for case in cases(step, 4):
        if "native" in case.kernel and step.device == "cpu":
            continue  # Triton's interpreter swaps parts of Triton for others as it runs
        case = replace(case, calibrated=None, failure=None)
        lives = torch.device(step.device if case.residency == "device" else "cpu")
        began = time.perf_counter()
        step.judge(check(case, step.device))
        took = (time.perf_counter() - began) / 2
        made, done = make(case, lives), Done()
        before = signal.signal(signal.SIGALRM, interrupt)
        # A call that is refused is refused again.
        try:
            with contextlib.suppress(NotImplementedError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                signal.setitimer(signal.ITIMER_REAL, max(1e-5, step.draw.random() * took))
                perform(case, made, torch.device(step.device), done)
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            step.events.append("interrupted")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        again = Verdict(case)
        if step.device != "cpu":
            torch.cuda.synchronize()
        for one in made.kept:
            if one.changed():
                again.add("an interrupt changed an input", one.name)
        for target in done.targets:
            if target.trespassed():
                again.add("an interrupt changed memory of others", target.name)
        step.judge(again if again.wrong else check(case, step.device))


def compiled(step: Step) -> None:
    """Compiled with aot_eager, in three lengths."""
    import torch

    import quorum_attention as qa

    for _ in range(3):
        step.attend(torch.compile(qa.attention, backend="aot_eager", fullgraph=True), step.device)


def sdpa(step: Step) -> None:
    """torch's own function, patched in a block; afterwards it is torch's again."""
    from torch.nn import functional

    import quorum_attention as qa

    own = functional.scaled_dot_product_attention
    for _ in range(4):
        with qa.patched_sdpa(min_tokens=0):
            step.attend(functional.scaled_dot_product_attention, step.device)
    if functional.scaled_dot_product_attention is not own:
        step.wrong.append("torch's function is not back in its place")


def devices(step: Step) -> None:
    """Calls on two devices, a process each; some workers are killed in the middle."""
    import quorum_attention as qa

    for _ in range(4):
        workers = [p.pid for p in multiprocessing.active_children() if p.pid is not None]
        timer = None
        if len(workers) > 1 and step.draw.random() < 0.15:
            kill = functools.partial(os.kill, step.draw.choice(workers), signal.SIGKILL)
            timer = threading.Timer(step.draw.random() * 0.05, kill)
            timer.start()
            step.events.append("worker killed")
        try:
            step.attend(functools.partial(qa.attention, devices=["cpu", "cpu"]), "cpu", 900)
        finally:
            if timer is not None:
                timer.join()


# Each with its share of the time.
KINDS: dict[Callable[[Step], None], int] = {
    calls: 30, masks: 10, at_once: 10, interrupts: 12, compiled: 6, sdpa: 6, devices: 10,
}  # fmt: skip


@dataclass
class Soak:
    """One run: what was called and found so far, and rows of what the process held."""

    device: str
    seed: int
    rows: list[dict[str, float]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _spent: Counter[str] = field(default_factory=Counter)
    _steps: Counter[str] = field(default_factory=Counter)

    def run(self, seconds: float, every: float) -> bool:
        """Whether no call was wrong and nothing grew."""
        import torch

        torch.set_num_threads(1)
        for kind in KINDS:  # the warm-up: what is made once is made
            self.step(kind)
        began = shown = time.monotonic()
        self._row(0.0)
        while (now := time.monotonic()) - began < seconds:
            self.step(min(KINDS, key=lambda kind: self._spent[kind.__name__] / KINDS[kind]))
            if now - shown > every:
                shown = now
                self._row(now - began)
        self._row(time.monotonic() - began)
        self.wrong += grown(self.rows)
        return not self.wrong

    def step(self, kind: Callable[[Step], None], number: int | None = None) -> None:
        """Some calls of a kind; seed and number decide which."""
        name, began = kind.__name__, time.monotonic()
        number = self._steps[name] if number is None else number
        step = Step(random.Random(zlib.crc32(f"{self.seed} {name} {number}".encode())), self.device)
        try:
            kind(step)
        except Exception:
            step.wrong.append(traceback.format_exc())
        self._steps[name] += 1
        self._spent[name] += time.monotonic() - began
        self.calls[name] += step.calls
        self.events.update(step.events)
        for words in step.wrong:
            self.wrong.append(f"--only {name} --step {number} --seed {self.seed}: {words}")
            print(f"WRONG {self.wrong[-1]}", flush=True)

    def _row(self, seconds: float) -> None:
        row = {"seconds": round(seconds, 1), "calls": self.calls.total(), **held()}
        self.rows.append(row)
        print(", ".join(f"{name} {number:,}" for name, number in row.items()), flush=True)


def held() -> dict[str, float]:
    """What this process holds by itself, workers ended and caches of bounded size emptied."""
    import torch

    from quorum_attention import pool

    pool.close()
    torch._dynamo.reset()
    for found in gc.get_objects():
        if (
            type(found) is functools._lru_cache_wrapper
            and (found.__module__ or "").startswith(("quorum_attention", "random_calls"))
            and found.cache_parameters()["maxsize"] is not None
        ):
            found.cache_clear()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    device = 0
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        device = torch.cuda.memory_allocated()
    pages = list(map(int, Path("/proc/self/statm").read_text().split()))
    shared = Path("/dev/shm")
    own = [p for p in shared.iterdir() if str(os.getpid()) in p.name] if shared.is_dir() else []
    return {
        "anonymous": (pages[1] - pages[2]) * os.sysconf("SC_PAGE_SIZE"),
        "device": device,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(multiprocessing.active_children()),
        "shared_files": len(own),
        "temporary_files": len(os.listdir(tempfile.gettempdir())),
    }


def grown(rows: Sequence[dict[str, float]]) -> list[str]:
    """What grew over the second half, in words.

    The slope is the median of those through all pairs of rows (Theil and Sen): a few rows that
    jump move it little.
    """
    half, found = rows[len(rows) // 2 :], []
    for name, limit in LIMITS.items():
        slopes = [
            (b[name] - a[name]) / (b["seconds"] - a["seconds"])
            for a, b in combinations(half, 2)
            if b["seconds"] > a["seconds"]
        ]
        added = median(slopes or [0.0]) * (half[-1]["seconds"] - half[0]["seconds"])
        if added > limit:
            found.append(f"{name} grew by {added:,.0f} in the second half; {limit:,} is allowed")
    return found


def main() -> int:
    """0 where nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="which calls (default 0)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="file for the rows and counts")
    parser.add_argument("--only", choices=[kind.__name__ for kind in KINDS], help="with --step")
    parser.add_argument("--step", type=int, help="this step of one kind alone")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        prepare(given.device)
        soak = Soak(given.device, given.seed)
        if given.only:
            (kind,) = (kind for kind in KINDS if kind.__name__ == given.only)
            soak.step(kind, given.step)
            passed = not soak.wrong
        else:
            seconds = 60 * given.minutes
            passed = soak.run(seconds, min(60.0, seconds / 12))
        print(f"{dict(soak.calls)} {dict(soak.events)}")
        print("passed" if passed else f"FAILED: {len(soak.wrong)}, the last {soak.wrong[-1]}")
        if given.json:
            counts = {"calls": dict(soak.calls), "events": dict(soak.events), "wrong": soak.wrong}
            given.json.write_text(json.dumps(counts | {"rows": soak.rows}, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
