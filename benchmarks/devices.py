"""One call on several devices of a machine, against one of them with the same kernel.

    python benchmarks/devices.py [--parts 1GiB,128MiB,killed,checks] [--seconds 240] [--json FILE]
        [--devices cuda:0 cuda:1] [--tokens 1048576] [--heads 8] [--rounds 4] [--kernel auto]

A part is a budget of each device: causal calls of ``--tokens`` from host memory, forward and
backward, the first of ``--rounds`` untimed, medians of the others. "killed": a worker is killed at
a random moment of a pass, ``--moments`` times each way; what came out, what was computed twice, the
seconds over an ideal (what was left at that moment, divided evenly among the devices that were
left), and what stayed behind at the end. "checks": small calls against one device's. Nothing begins
after ``--seconds``. On CPUs: ``--devices cpu cpu --tokens 3000``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import random
import signal
import statistics
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.devices import Pool
from quorum_attention.devices.buffers import room

BEGUN = time.perf_counter()
Results = tuple[torch.Tensor, ...]


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGUN:6.1f}] {text}", flush=True)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)
    begun = time.perf_counter()
    made = call()
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)
    return time.perf_counter() - begun, made


def error(got: Results, wanted: Results) -> float:
    """The largest difference, relative to the largest number of each tensor."""
    pairs = [(a.cpu().double(), b.cpu().double()) for a, b in zip(got, wanted, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-9)) for a, b in pairs)


class Bench:
    """The pool, the options, and what was found."""

    def __init__(self, given: argparse.Namespace, pool: Pool) -> None:
        self.given, self.pool, self.alone = given, pool, pool.devices[0]
        self.on_gpu = self.alone.startswith("cuda")
        self.dtype = torch.float16 if self.on_gpu else torch.float32
        self.results: dict[str, Any] = {}
        self.table: list[str] = []

    @property
    def over(self) -> bool:
        """Whether nothing may begin any more."""
        return time.perf_counter() - BEGUN > self.given.seconds

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        """Query, key, value and upstream gradient, in memory that workers share."""
        generator = torch.Generator(self.alone).manual_seed(0)
        made = [room((1, self.given.heads, tokens, 64), self.dtype) for _ in range(4)]
        for head in (head for tensor in made for head in tensor[0]):
            drawn = torch.randn(head.shape, device=self.alone, generator=generator)
            head.copy_(drawn)
        return made

    def passes(self, tensors: list[torch.Tensor], **options: Any) -> dict[str, Callable[..., Any]]:
        """Forward and backward of a causal call; the backward needs ``out`` and ``lse``."""
        q, k, v, grad = tensors
        same = {"is_causal": True, "kernel": self.given.kernel, **options}
        return {
            "forward": partial(qa.attention_with_lse, q, k, v, **same),
            "backward": partial(qa.attention_backward, grad, q, k, v, **same),
        }

    def times(self, budget: str) -> None:
        """Forward and backward of one device, then of all of them."""
        tensors = self.inputs(self.given.tokens)
        calls = self.passes(tensors, budget=budget)
        seconds: dict[str, list[tuple[float, float]]] = {}
        kept: dict[str, Results] = {}
        for name, devices in (("one", self.alone), ("all", self.pool)):
            # One after the other: idle workers unlock their memory after ten seconds. For one
            # device inputs are page-locked, as they are for workers.
            self.lock(tensors, name == "one")
            seconds[name] = []
            for turn in range(self.given.rounds):
                if self.over and turn > 1:
                    break
                report = qa.Report() if turn == 0 else None  # measuring stages takes time
                told = {"devices": devices, "report": report}
                first, (out, lse) = timed(partial(calls["forward"], **told))
                second, grads = timed(partial(calls["backward"], out=out, lse=lse, **told))
                seconds[name].append((first, second))
                say(f"{budget} {name}: {first:.3f} {second:.3f}")
                if report is not None:
                    parts = (report.forward, report.backward)
                    say(", ".join(f"{p.kernel} {p.levels}" for p in parts if p is not None))
                    say(str(report.pool or ""))
                    rows = slice(0, None, max(1, self.given.tokens // 4096))
                    kept[name] = tuple(t[:, :, rows].clone() for t in (out, *grads))
                del out, lse, grads
        one, every = (
            [statistics.median(pair) for pair in zip(*seconds[name][1:], strict=True)]
            for name in ("one", "all")
        )
        ratios = [a / b for a, b in zip((*one, sum(one)), (*every, sum(every)), strict=True)]
        differ = error(kept["all"], kept["one"])
        self.results[budget] = {"seconds": seconds, "ratios": ratios, "difference": differ}
        self.table.append(
            f"{budget}: {len(self.pool.devices)} devices are "
            + "; ".join(f"{ratio:.3f}" for ratio in ratios)
            + f" times one (forward; backward; both), {every[0]:.3f}; {every[1]:.3f} s, "
            f"difference {differ:.1e}"
        )

    def lock(self, tensors: list[torch.Tensor], locked: bool) -> None:
        """Page-lock tensors, or undo it."""
        for t in tensors if self.on_gpu else ():
            runtime: Any = torch.cuda.cudart()
            if locked:
                runtime.cudaHostRegister(t.data_ptr(), t.nbytes, 0)
            else:
                runtime.cudaHostUnregister(t.data_ptr())

    def killed(self) -> None:
        """Workers are killed at random moments of both passes."""
        draw = random.Random(self.given.seed)
        tensors = self.inputs(self.given.tokens // 2 if self.on_gpu else self.given.tokens)
        calls = self.passes(tensors)
        out, lse = calls["forward"](devices=self.alone)
        calls["backward"] = partial(calls["backward"], out=out, lse=lse)
        wanted = {"forward": (out, lse), "backward": calls["backward"](devices=self.alone)}
        for call in (*calls.values(), *calls.values()):
            call(devices=self.pool)
        before, found = self.held(), []
        for name in [name for name in calls for _ in range(self.given.moments)]:
            if self.over:
                break
            found.append(self.once(name, calls[name], wanted[name], draw))
            self.pool.mend()
        shares = [one["over ideal"] for one in found if one["over ideal"] is not None]
        worst = max((one["difference"] for one in found), default=0.0)
        self.results["killed"] = {"each": found, "held": [before, self.held()]}
        said = f"over ideal: median {statistics.median(shares):.3f}, most {max(shares):.3f}; "
        self.table.append(
            f"killed {len(found)} times, {len(shares)} in time, {said if shares else ''}"
            f"difference {worst:.1e}; files, device bytes, /dev/shm {before} -> {self.held()}"
        )
        assert worst < 1e-2, "a result is wrong"

    def once(
        self, name: str, call: Callable[..., Any], wanted: Results, draw: random.Random
    ) -> dict[str, Any]:
        """A pass in which a worker is killed, after one that is left alone, which also warms it."""
        usual = min(timed(partial(call, devices=self.pool))[0] for _ in range(2))
        number, at = draw.randrange(len(self.pool.workers)), draw.random() * usual
        worker, report, moment = self.pool.workers[number], qa.Report(), list[float]()

        def kill() -> None:
            os.kill(worker.process.pid, signal.SIGKILL)
            moment.append(time.perf_counter() - begun)

        timer = threading.Timer(at, kill)
        begun = time.perf_counter()
        timer.start()
        seconds, got = timed(partial(call, devices=self.pool, report=report))
        timer.join()
        worker.process.join()
        made = getattr(report.pool, name)
        assert sum(one.parts for one in made.ran) == made.parts, "parts"
        share, lost = None, moment[0] if made.history else seconds
        if lost < seconds:
            rest = [one for one in made.ran if one.device != number and one.stop > lost]
            work = sum(one.stop - max(lost, one.start) for one in rest)
            share = seconds / (lost + work / (len(made.devices) - 1))
        differ = error(got, wanted)
        say(
            f"{name}: {usual:.3f} s undisturbed, {seconds:.3f} s with {worker.device} killed after "
            f"{moment[0]:.3f}, over ideal {share}, difference {differ:.1e}"
        )
        return {
            "pass": name, "usual": usual, "seconds": seconds, "killed": moment[0],
            "over ideal": share, "difference": differ, "history": made.history,
        }  # fmt: skip

    def held(self) -> tuple[int, int, int]:
        """Open files, bytes on devices, names in /dev/shm."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.ipc_collect()
        count = torch.cuda.device_count()
        allocated = sum(torch.cuda.memory_allocated(number) for number in range(count))
        return len(os.listdir("/proc/self/fd")), allocated, len(os.listdir("/dev/shm"))

    def checks(self) -> None:
        """Calls and their gradients, against one device's."""
        gqa = ((2, 6, 3000, 64), (2, 2, 3000, 64), (2, 2, 3000, 64))
        odd, eight = ((1, 3, 8192, 64),) * 3, ((1, 8, 4096, 64),) * 3
        bias = torch.randn(3, 2000, 2000, dtype=self.dtype)
        places = self.pool.devices[:2] if self.on_gpu else []
        steps: dict[str, Callable[[], float]] = {
            "host memory": lambda: self.check(eight, is_causal=True),
            "query heads over 2": lambda: self.check(gqa),
            "3 heads": lambda: self.check(odd, is_causal=True),
            "dropout": lambda: self.check(gqa, dropout_p=0.2, dropout_seed=3),
            "window": lambda: self.check(odd, attn_mask=Mask(causal=True, window=700)),
            "bias": lambda: self.check(((1, 3, 2000, 64),) * 3, attn_mask=bias),
        }
        for place in places:
            steps[f"on {place}"] = partial(self.check, gqa, place, is_causal=True)
        found = self.results["checks"] = {}
        for name, step in steps.items():
            if not self.over:
                found[name] = step()
                say(f"{name}: {found[name]:.1e}")
        self.table.append(f"{len(found)} checks, largest difference {max(found.values()):.1e}")

    def check(self, shapes: tuple[Any, ...], where: str = "cpu", **options: Any) -> float:
        """The largest difference of a call and its gradients from one device's."""
        tensors = [torch.randn(shape, dtype=self.dtype).to(where) for shape in shapes]
        found: list[Results] = []
        for devices in (self.pool, self.alone if where == "cpu" else where):
            leaves = [t.detach().clone().requires_grad_() for t in tensors]
            out, lse = qa.attention_with_lse(*leaves, enable_gqa=True, devices=devices, **options)
            torch.manual_seed(1)
            out.backward(torch.randn(out.shape, dtype=out.dtype).to(out.device))
            found.append((out.detach(), lse.detach(), *(t.grad for t in leaves)))  # type: ignore[misc]
        return error(*found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="1GiB,128MiB,killed,checks", help="with commas")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--devices", nargs="+", default=["all"])
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4, help="calls of each, the first included")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--moments", type=int, default=3, help="workers killed in each pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names = "all" if given.devices == ["all"] else given.devices
    threads = None if torch.cuda.is_available() else 1
    with Pool(names, threads=threads) as pool:
        bench = Bench(given, pool)
        bench.results["about"] = {
            "devices": [worker.name for worker in pool.workers], "torch": torch.__version__,
            "kernel": given.kernel, "date": str(datetime.date.today()),
            "cores": len(os.sched_getaffinity(0)),
        }  # fmt: skip
        say(f"workers started: {bench.results['about']}")
        for part in given.parts.split(","):
            if bench.over:
                bench.table.append(f"{part}: left out, the time is over")
                continue
            try:
                step = {"killed": bench.killed, "checks": bench.checks}.get(part)
                step() if step is not None else bench.times(part)
            except Exception:
                bench.table.append(f"{part}: failed, {traceback.format_exc(limit=-1)}")
                traceback.print_exc()
            if given.json:
                given.json.write_text(json.dumps(bench.results, indent=1), encoding="utf-8")
        processes = [worker.process for worker in pool.workers]
    bench.table.append(f"workers left: {sum(process.is_alive() for process in processes)}")
    print("\n".join(bench.table))


if __name__ == "__main__":
    main()
