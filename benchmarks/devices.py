"""One call on several GPUs of a machine, against one of them.

    python benchmarks/devices.py [--seconds 300] [--budgets 1GiB:8:4 128MiB:8:4] [--only-times]
                                 [--json FILE]

First a few calls are compared with one device's. Then 1,048,576 tokens, causal, fp16, inputs and
results in host memory, forward and backward within budgets (each with its number of heads and of
turns, and of tokens where it is another), after one device of the same machine, for which inputs
are page-locked as they are for workers; what the simulator says beside it. Then more calls
are compared: inputs on either device, heads that do not divide, masks, dropout, workers that
are killed. A step that would begin after ``--seconds`` is left out. Needs two CUDA devices.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import signal
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices import Pool
from quorum_attention.devices.buffers import room
from quorum_attention.devices.partition import Sizes
from quorum_attention.devices.report import PoolPass
from quorum_attention.devices.simulate import predicted, simulate

HALF = torch.float16


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGUN:6.1f}] {text}", flush=True)


BEGUN = time.perf_counter()


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random numbers in memory that workers share."""
    generator = torch.Generator("cuda:0").manual_seed(seed)
    made = room(shape, HALF)
    for entry in range(shape[0]):
        for head in range(shape[1]):
            made[entry, head] = torch.randn(
                shape[2:], dtype=HALF, device="cuda:0", generator=generator
            )
    return made


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)
    begun = time.perf_counter()
    made = call()
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)
    return time.perf_counter() - begun, made


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.double().cpu(), wanted.double().cpu()
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9))


def compared(
    devices: Any, shapes: tuple[tuple[int, ...], ...], where: str = "cpu", shared: bool = True,
    report: qa.Report | None = None, **options: Any,
) -> float:  # fmt: skip
    """The largest relative difference of a call and its gradients from one device's."""
    three = [torch.randn(shape, dtype=HALF).to(where) for shape in shapes]
    if shared and where == "cpu":
        three = [t.share_memory_() for t in three]
    found, grad = [], None
    for place in (devices, where if where != "cpu" else "cuda:0"):
        leaves = [t.detach().clone().requires_grad_() for t in three]
        more = {"report": report} if place is devices and report is not None else {}
        if place is not devices:
            options.pop("budget", None)
        out, lse = qa.attention_with_lse(*leaves, enable_gqa=True, devices=place, **options, **more)
        grad = torch.randn_like(out) if grad is None else grad
        out.backward(grad)
        found.append([out.detach(), lse.detach(), *(t.grad for t in leaves)])
    return max(error(a, b) for a, b in zip(*found, strict=True))


@contextmanager
def killed(pool: Pool, seconds: float) -> Iterator[None]:
    """One worker is killed after so many seconds; another one joins afterwards."""
    worker = next(worker for worker in pool.workers if worker.alive)
    timer = threading.Timer(seconds, os.kill, (worker.process.pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        worker.process.join()
        pool.mend()


class Steps:
    """Runs steps until the time is over; an error of one is printed, and the next one runs."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.results: dict[str, Any] = {}

    def run(self, name: str, step: Callable[[], Any]) -> None:
        """Run a step, if there is time."""
        if time.perf_counter() - BEGUN > self._seconds:
            say(f"{name}: left out, the time is over")
            return
        begun = time.perf_counter()
        try:
            found = step()
        except Exception:
            found = "failed"
            traceback.print_exc()
        self.results[name] = found
        say(f"{name}: {found} ({time.perf_counter() - begun:.1f} s)")


def check_first(steps: Steps, pool: Pool) -> None:
    eight = ((1, 8, 4096, 64),) * 3
    steps.run("host memory", lambda: compared(pool, eight, is_causal=True))
    steps.run("on cuda:0", lambda: compared(pool, eight, "cuda:0", is_causal=True))


def check_killed(steps: Steps, pool: Pool) -> None:
    steps.run("kill forward", lambda: kill(pool, backward=False))
    steps.run("kill backward", lambda: kill(pool, backward=True))
    steps.run("kill, on cuda:0", lambda: kill(pool, backward=True, where="cuda:0"))


def check_more(steps: Steps, pool: Pool) -> None:
    gqa = ((2, 6, 3000, 64), (2, 2, 3000, 64), (2, 2, 3000, 64))
    odd = ((1, 3, 8192, 64),) * 3
    steps.run("on cuda:1", lambda: compared(pool, gqa, "cuda:1", is_causal=True))
    steps.run(
        "on cuda:0, 64 MiB",
        lambda: compared(pool, ((1, 4, 65536, 64),) * 3, "cuda:0", is_causal=True, budget="64MiB"),
    )
    steps.run("ordinary memory, query heads over 2", lambda: compared(pool, gqa, shared=False))
    steps.run("3 heads", lambda: compared(pool, odd, is_causal=True))
    steps.run("by name", lambda: compared("all", gqa, is_causal=True))
    steps.run(
        "one budget each",
        lambda: compared(
            ["cuda:0", "cuda:1"],
            ((1, 4, 65536, 64),) * 3,
            is_causal=True,
            budget=["256MiB", "64MiB"],
        ),
    )
    steps.run("dropout", lambda: compared(pool, gqa, dropout_p=0.2, dropout_seed=3))
    steps.run("window", lambda: compared(pool, odd, attn_mask=Mask(causal=True, window=700)))
    steps.run(
        "bias",
        lambda: compared(
            pool, ((1, 3, 2000, 64),) * 3, attn_mask=torch.randn(3, 2000, 2000, dtype=HALF)
        ),
    )
    steps.run("a CPU beside", beside_a_cpu)


def beside_a_cpu() -> float:
    with Pool(["cuda:0", "cpu"]) as pool:
        return compared(pool, ((1, 4, 2048, 64),) * 3, is_causal=True)


def kill(pool: Pool, backward: bool, where: str = "cpu") -> str:
    """A worker is killed in the middle; what comes out is right, and memory comes back."""
    three = [torch.randn(1, 8, 131072, 64, dtype=HALF).to(where).share_memory_() for _ in range(4)]
    alone = "cuda:0" if where == "cpu" else where
    out, lse = qa.attention_with_lse(*three[:3], is_causal=True, devices=alone)
    before = torch.cuda.memory_allocated()

    def call(devices: Any, report: qa.Report | None = None) -> Any:
        if backward:
            return qa.attention_backward(
                three[3], *three[:3], out, lse, is_causal=True, devices=devices, report=report
            )
        return qa.attention_with_lse(*three[:3], is_causal=True, devices=devices, report=report)

    wanted = call(alone)
    usual, _ = timed(lambda: call(pool))
    report = qa.Report()
    with killed(pool, usual * 0.6):
        seconds, got = timed(lambda: call(pool, report))
    worst = max(error(a, b) for a, b in zip(got, wanted, strict=True))
    del got, wanted
    gc.collect()
    torch.cuda.ipc_collect()
    left = torch.cuda.memory_allocated() - before
    which = report.pool.backward if backward else report.pool.forward
    return (
        f"error {worst:.1e}, {usual:.3f} s whole, {seconds:.3f} s with one killed, "
        f"{left} bytes left on the device, {which.history}"
    )


def orders_of(one: PoolPass) -> str:
    """What each device computed: heads, and seconds of its worker."""
    said = []
    for device in range(len(one.devices)):
        orders: dict[int, list[float]] = {}
        for ran in one.ran:
            if ran.device == device:
                found = orders.setdefault(ran.index, [0.0, 0.0])
                for at, more in enumerate((1, ran.worked)):
                    found[at] += more
        each = [f"{n:.0f} in {worked:.3f}" for n, worked in orders.values()]
        said.append(f"device {device}: {', '.join(each)}")
    return "; ".join(said)


@contextmanager
def passes_of(pool: Pool) -> Iterator[list[PoolPass]]:
    """Reports of a pool's passes, in which nothing is timed but whole orders."""
    found: list[PoolPass] = []
    run = pool.run

    def noted(begin: Any, parts: Any, report: PoolPass, *rest: Any) -> None:
        run(begin, parts, report, *rest)
        found.append(report)

    pool.run = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        pool.run = run  # type: ignore[method-assign]


def measure(
    steps: Steps,
    pool: Pool,
    tokens: int,
    heads: int,
    budget: str,
    rounds: int,
    alone: int,
) -> None:
    """Forward and backward, of one device (in so many turns), then of all of them."""
    shape = (1, heads, tokens, 64)
    q, k, v, grad = (drawn(shape, seed) for seed in range(4))
    say(f"inputs of {q.nbytes >> 20} MiB each")
    found: dict[str, list[tuple[float, float]]] = {"one": [], "all": []}
    details: list[Any] = []
    same: dict[str, Any] = {"is_causal": True, "budget": budget}
    kept: dict[str, Any] = {}
    # One after the other: workers that have nothing to do for ten seconds unlock their memory.
    turns = [("one", "cuda:0", n) for n in range(min(alone, rounds))]
    turns += [("all", pool, n) for n in range(rounds)]
    runtime = torch.cuda.cudart()
    for tensor in (q, k, v, grad):
        runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    with passes_of(pool) as passes:
        for name, devices, turn in turns:
            if name == "all" and turn == 0:
                for tensor in (q, k, v, grad):
                    runtime.cudaHostUnregister(tensor.data_ptr())
            report = qa.Report()
            # A report measures stages, which takes time: not in all turns.
            watched = name == "all" and turn == rounds - 1 and turn > 2
            told = {"report": report} if watched else {}
            forward = partial(qa.attention_with_lse, q, k, v, **same, devices=devices, **told)
            first, (out, lse) = timed(forward)
            after = (grad, q, k, v, out, lse)
            second, grads = timed(
                partial(qa.attention_backward, *after, **same, devices=devices, **told)
            )
            found[name].append((first, second))
            say(f"{budget} {name}: {first:.3f} {second:.3f}")
            for one in passes[-2:] if name == "all" else ():
                say(f"  {orders_of(one)}")
            if told:
                details.append(report.to_dict()["pool"])
                say(str(report.pool))
                for one in report.pool.forward.ran:
                    if one.report.forward is not None:
                        say("  " + "; ".join(one.report.forward.lines()))
                for one in report.pool.backward.ran:
                    if one.report.backward is not None:
                        say("  " + "; ".join(one.report.backward.lines()))
            if turn == 0:
                rows = slice(0, tokens, max(1, tokens // 4096))
                kept[name] = [t[:, :, rows].clone() for t in (out, *grads)]
            del out, lse, grads, after
    differ = max(error(a, b) for a, b in zip(kept["one"], kept["all"], strict=True))
    # Of warm calls, the one that measured its stages left out; of several devices not the second
    # either, in which they see how quick each is.
    several = found["all"]
    warm = {
        "one": found["one"][1:],
        "all": several[2:-1] if rounds > 3 else several[1:],
    }
    best = {
        name: [statistics.median(one[i] for one in rows or found[name]) for i in (0, 1)]
        for name, rows in warm.items()
    }
    both = {name: sum(rows) for name, rows in best.items()}
    simulated = simulated_seconds(tokens, heads, budget, len(pool.devices))
    over = {
        name: [best[one][i] / simulated[name][n] for n, one in enumerate(("one", "all"))]
        for i, name in enumerate(("forward", "backward"))
    }
    name = f"{budget}, {heads} heads of {tokens}"
    steps.results[name] = {
        "heads": heads, "seconds": found, "parts": details, "difference": differ,
        "orders": [one.to_dict() for one in passes],
        "simulated": simulated, "medians": best, "over simulated": over,
        "forward": best["one"][0] / best["all"][0],
        "backward": best["one"][1] / best["all"][1],
        "both": both["one"] / both["all"],
    }  # fmt: skip
    print_simulated({name: steps.results[name]})


def simulated_seconds(tokens: int, heads: int, budget: str, devices: int) -> dict[str, Any]:
    """What the planner and the simulator say, forward and backward, of one and of all devices."""
    sizes = Sizes(1, heads, heads, tokens, tokens, True)
    call: dict[str, Any] = {"head_dim": 64, "dtype": HALF, "budget": budget, "device": "cuda"}
    found: dict[str, Any] = {}
    for backward in (False, True):
        one = predicted(sizes, backward=backward, **call)
        # One device computes all heads in one call, without a worker.
        whole = sizes.block(0, Interval(0, heads), Interval(0, tokens))
        together = simulate(sizes, [("H200", 1.0)] * devices, one)
        found["backward" if backward else "forward"] = [one(whole), together.seconds]
    return found


def print_simulated(results: dict[str, Any]) -> None:
    """Measured over simulated, of each setting."""
    rows = [
        (f"{name}, {way}, {count}", measured, one["simulated"][way][n])
        for name, one in results.items()
        if isinstance(one, dict) and "over simulated" in one
        for i, way in enumerate(("forward", "backward"))
        for n, (count, which) in enumerate((("one", "one"), ("all", "all")))
        for measured in [one["medians"][which][i]]
    ]
    for name, measured, simulated in rows:
        print(f"{name:50s} measured {measured:.3f} s, simulated {simulated:.3f}, "
              f"measured / simulated {measured / simulated:.3f}")  # fmt: skip
    for name, one in results.items():
        if isinstance(one, dict) and "both" in one:
            quicker = "; ".join(f"{n} {one[n]:.2f}" for n in ("forward", "backward", "both"))
            print(f"{name}: all quicker than one by {quicker}")
    off = [abs(measured / simulated - 1) for _, measured, simulated in rows]
    if off:
        print(f"{len(off)} settings: {sum(o <= 0.05 for o in off)} within 5 %, most {max(off):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--budgets", nargs="*", default=["1GiB:8:4", "128MiB:8:4"])
    parser.add_argument("--alone", type=int, default=3, help="turns of one device")
    parser.add_argument("--only-times", action="store_true", help="compare nothing else")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps = Steps(options.seconds)
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    steps.results["about"] = {
        "devices": names, "torch": torch.__version__, "python": platform.python_version(),
        "system": platform.release(), "date": str(datetime.date.today()),
        "cores": len(os.sched_getaffinity(0)),
    }  # fmt: skip
    say(str(steps.results["about"]))
    begun = time.perf_counter()
    with Pool("all") as pool:
        say(f"workers started in {time.perf_counter() - begun:.1f} s: {pool.names}")
        if not options.only_times:
            check_first(steps, pool)
        for turn, asked in enumerate(options.budgets):
            if turn == 1 and not options.only_times:
                check_killed(steps, pool)
            budget, heads, rounds, *others = asked.split(":")
            tokens = int(others[0]) if others else options.tokens
            step = partial(
                measure, steps, pool, tokens, int(heads), budget,
                int(rounds), options.alone,
            )  # fmt: skip
            steps.run(f"times at {budget}, {heads} heads of {tokens}", step)
            if options.json:
                options.json.write_text(json.dumps(steps.results, indent=1, default=str))
        if not options.only_times:
            check_more(steps, pool)
    qa.pool.close()
    left = [name for name in os.listdir("/dev/shm") if "torch" in name]
    say(f"left in /dev/shm: {left}")
    if options.json:
        options.json.write_text(json.dumps(steps.results, indent=1, default=str))
    for name, found in steps.results.items():
        if isinstance(found, dict) and "both" in found:
            kept = {n: round(found[n], 4) for n in ("forward", "backward", "both", "difference")}
            print(name, kept, "measured", found["seconds"])
        elif name != "rates":
            print(name, found)
    print_simulated(steps.results)


if __name__ == "__main__":
    main()
