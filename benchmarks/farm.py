"""One head from files to files on a farm of this machine, forward and backward: 16,777,216 tokens.

    python benchmarks/farm.py --json F                    # a fraction of its tasks, on a GPU
    python benchmarks/farm.py --stages --json F           # and before that, one task step by step
    python benchmarks/farm.py --tokens 20000 --devices cpu --chunks 7 --all --check

Two worker processes a device, each with half of the budget, so that one loads and stores while the
other computes. Unless ``--all`` is given only about ``--units`` tasks of each pass are run. What
the head, and the paper's 8 heads on two devices, would take is then extrapolated from their pace,
without the first task of each worker, in which kernels are prepared. Output and log-sum-exp that
the backward reads are made up then (it takes as long with any); with ``--all`` they are the
forward's.

``--stages`` computes a few tasks in this process, and waits for the device before and after each
step, so that loading, computing and storing have times of their own. The tasks are the same, and so
are their states: the first leaves those that the second takes over.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

import quorum_attention as qa
from quorum_attention.devices.report import PoolPass, PoolReport
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.farm import Farm, compute
from quorum_attention.farm.crew import Alone
from quorum_attention.farm.processes import Processes
from quorum_attention.files import create_tensors, open_tensors
from quorum_attention.sizes import parse_bytes, parse_count

INPUTS = ("query", "key", "value", "grad_out")
RESULTS = ("out", "grad_query", "grad_key", "grad_value")


class EnoughError(Exception):
    """As many tasks as were wanted are done; others may end."""


class EndError(BaseException):
    """As many tasks as were wanted are done in the last pass; workers are ended at once."""


class Fraction(Processes):
    """Stops a pass after so many tasks."""

    units: int | None = None
    done = 0
    last = False

    def listen(self, workers: Sequence[Any], seconds: float | None) -> Any:
        """What workers say next, until it is enough."""
        if self.units is not None and self.done >= self.units:
            self.units = None
            raise EndError if self.last else EnoughError
        heard = super().listen(workers, seconds)
        self.done += len(heard)
        return heard


class Watch:
    """The most anonymous memory of each worker, and the most memory of the device, as it goes."""

    def __init__(self, pids: Sequence[int], device: torch.device) -> None:
        self._pids, self._device, self._over = pids, device, threading.Event()
        self.host = dict.fromkeys(pids, 0)
        self.used = 0
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            for pid in self._pids:
                try:
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                except FileNotFoundError:
                    continue  # it was ended
                found = [int(line.split()[1]) << 10 for line in lines if "RssAnon" in line]
                self.host[pid] = max([self.host[pid], *found])
            if self._device.type == "cuda":
                free, total = torch.cuda.mem_get_info(self._device)
                self.used = max(self.used, total - free)


def filled(path: Path, tokens: int, head_dim: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random inputs in a file, and what a forward could have given for them."""
    shape = (1, 1, tokens, head_dim)
    half = torch.float16
    made = create_tensors(
        path,
        {**dict.fromkeys((*INPUTS, "out"), (shape, half)), "lse": (shape[:3], torch.float32)},
    )
    block = 1 << 20
    for at in range(0, tokens, block):
        rows = slice(at, min(tokens, at + block))
        for name in (*INPUTS, "out"):
            drawn = torch.randn(made[name][:, :, rows].shape, dtype=half, device=device)
            made[name][:, :, rows] = drawn if name != "out" else 0.01 * drawn
        # Scores have a variance of 1.
        seen = torch.arange(rows.start + 1, rows.stop + 1, dtype=torch.float32)
        made["lse"][:, :, rows] = seen.log() + 0.5
    del made
    return open_tensors(path)


def opened(path: Path, given: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Results in a file."""
    shape, half = (1, 1, given.tokens, given.head_dim), torch.float16
    return create_tensors(
        path, {**dict.fromkeys(RESULTS, (shape, half)), "lse": (shape[:3], torch.float32)}
    )


def run(
    given: argparse.Namespace, farm: Farm, name: str, inputs: dict[str, torch.Tensor],
    of_forward: dict[str, torch.Tensor], results: dict[str, torch.Tensor], report: PoolReport,
) -> None:  # fmt: skip
    """Run a pass."""
    q, k, v, grad_out = (inputs[n] for n in INPUTS)
    options: Any = {"is_causal": True, "chunks": given.chunks, "report": report}
    if name == "forward":
        farm.attention_with_lse(q, k, v, out=results["out"], lse=results["lse"], **options)
    else:
        grads = tuple(results[f"grad_{n}"] for n in INPUTS[:3])
        out, lse = of_forward["out"], of_forward["lse"]
        farm.attention_backward(grad_out, q, k, v, out, lse, grads=grads, **options)


def needed(given: argparse.Namespace, name: str) -> float:
    """Operations that a pass of the head needs: two products of each pair it keeps, or five."""
    pairs = given.tokens * (given.tokens + 1) // 2
    return pairs * 2.0 * given.head_dim * (5 if name == "backward" else 2)


def passes(given: argparse.Namespace, farm: Farm, crew: Fraction, folder: Path) -> dict[str, Any]:
    """Run both passes; what they took, by name."""
    device = torch.device(given.devices[0])
    begun = time.perf_counter()
    inputs = filled(folder / "in", given.tokens, given.head_dim, device)
    print(f"inputs were made in {time.perf_counter() - begun:.0f} s", flush=True)
    found: dict[str, Any] = {}
    if given.stages:
        found["stages"] = stages(given, inputs, folder / "alone")
        save(given, found)
    results = opened(folder / "out", given)
    for name in given.passes:
        report = PoolReport()
        crew.last = name == given.passes[-1]
        crew.done, crew.units = 0, None if given.all else given.units
        pids = [worker.process.pid for worker in crew._workers]
        with Watch(pids, device) as watch, suppress(EnoughError, EndError):
            run(given, farm, name, inputs, results if given.all else inputs, results, report)
        done = getattr(report, name)
        found[name] = {
            **paced(done, len(pids), given.chunks, needed(given, name)),
            "host_anonymous_bytes": max(watch.host.values()),
            "device_used_bytes": watch.used,
        }
        print(name, json.dumps(found[name]), flush=True)
        save(given, found)
    if given.check:
        found["errors"] = errors(inputs, results, device, given.passes)
        print("errors", found["errors"])
    return found


class Timed:
    """The steps of tasks that are computed in this process, with the device awaited around each."""

    STEPS: ClassVar = {
        "moved": "copied", "read_state": "read", "write_state": "stored", "write_rows": "stored",
        "attention_with_lse": "computed", "attention_backward": "computed", "merge_": "merged",
        "add_": "merged",
    }  # fmt: skip

    def __init__(self, device: torch.device) -> None:
        self._backend = backend_of(device)
        self._device = device
        self._before: dict[str, Any] = {}
        self.seconds: dict[str, float] = dict.fromkeys(self.STEPS.values(), 0.0)

    def __enter__(self) -> Timed:
        for name, step in self.STEPS.items():
            self._before[name] = getattr(compute, name)
            setattr(compute, name, partial(self._timed, self._before[name], step))
        return self

    def __exit__(self, *error: object) -> None:
        for name, function in self._before.items():
            setattr(compute, name, function)

    def _timed(self, function: Any, step: str, *args: Any, **options: Any) -> Any:
        self._backend.synchronize(self._device)
        begun = time.perf_counter()
        found = function(*args, **options)
        self._backend.synchronize(self._device)
        self.seconds[step] += time.perf_counter() - begun
        return found


class OneByOne(Alone):
    """A worker in this process that stops after so many tasks, and keeps the steps of each."""

    def __init__(self, device: torch.device, budget: int, tasks: int) -> None:
        super().__init__(device, budget)
        self._place, self._left = device, tasks
        self.tasks: list[dict[str, float]] = []

    def listen(self, workers: Sequence[Any], seconds: float | None) -> Any:
        """Have it compute; what it took is kept."""
        if not self._left:
            raise EnoughError
        self._left -= 1
        begun = time.perf_counter()
        with Timed(self._place) as timed:
            heard = super().listen(workers, seconds)
        self.tasks.append({"all": time.perf_counter() - begun, **timed.seconds})
        return heard


def stages(given: argparse.Namespace, inputs: dict[str, torch.Tensor], out: Path) -> dict[str, Any]:
    """Seconds of the steps of single tasks, and the rate of what they compute."""
    device = torch.device(given.devices[0])
    found = {}
    for name in given.passes:
        crew = OneByOne(device, given.budget // given.workers, given.single)
        with suppress(EnoughError), Farm.of(crew) as farm:
            run(given, farm, name, inputs, inputs, opened(out, given), PoolReport())
        out.unlink()
        flops = needed(given, name) / given.chunks
        for at, task in enumerate(crew.tasks):
            task["tflops_computing"] = flops / task["computed"] / 1e12
            steps = ", ".join(f"{k} {v:.3f}" for k, v in task.items())
            print(f"{name}, task {at} alone, seconds: {steps}", flush=True)
        found[name] = crew.tasks
    return found


def paced(done: PoolPass, workers: int, tasks: int, flops: float) -> dict[str, Any]:
    """Seconds of a task, and of all tasks at that pace, if not all were run; the rate of that, in
    operations that are needed (``flops`` of the head)."""
    ran = sorted((r for r in done.ran if r.index < tasks), key=lambda r: r.start)
    each = [r.stop - r.start for r in ran]
    steady = each[workers:] or each
    mean = statistics.mean(steady)
    return {
        "tasks": tasks,
        "tasks_run": len(ran),
        "wall_seconds": done.seconds,
        "task_seconds": mean,
        "task_seconds_each": [round(seconds, 3) for seconds in each],
        "all_tasks": (whole := done.seconds if len(ran) == tasks else mean * tasks / workers),
        "tflops": flops / whole / 1e12,
    }


def errors(
    inputs: dict[str, torch.Tensor], results: dict[str, torch.Tensor], device: torch.device,
    ran: Sequence[str],
) -> dict[str, float]:  # fmt: skip
    """The largest differences from one call, over the largest value."""
    q, k, v, grad_out = (inputs[name].to(device) for name in INPUTS)
    out, lse = qa.attention_with_lse(q, k, v, is_causal=True)
    grads = qa.attention_backward(grad_out, q, k, v, out, lse, is_causal=True)
    wanted = {"out": out, "lse": lse}
    if "backward" in ran:
        wanted |= {f"grad_{n}": grad for n, grad in zip(INPUTS, grads, strict=False)}
    return {
        name: ((results[name].to(device) - one).abs().max() / one.abs().max()).item()
        for name, one in wanted.items()
    }


def save(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what is known so far: a run may be cut short."""
    if given.json:
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        about = {"device": where, "torch": torch.__version__, "tokens": given.tokens,
                 "budget": given.budget, "devices": given.devices,
                 "workers": given.workers, "chunks": given.chunks,
                 "head_dim": given.head_dim, "cores": os.cpu_count(),
                 "date": time.strftime("%Y-%m-%d"), "all": given.all}  # fmt: skip
        Path(given.json).write_text(json.dumps({"about": about, **found}, indent=1) + "\n")


def predicted(given: argparse.Namespace, backward: bool) -> float:
    """What the planner says for the head as one call."""
    return qa.plan(
        given.tokens, heads=1, head_dim=given.head_dim, is_causal=True, budget=given.budget,
        device=torch.device(given.devices[0]).type, backward=backward,
    ).predicted_seconds  # fmt: skip


def main() -> None:
    """Print a table; ``--json`` for all figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=parse_count, default=1 << 24)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=57, help="tasks of the head")
    parser.add_argument("--units", type=int, default=12, help="tasks that are run")
    parser.add_argument("--all", action="store_true", help="run all tasks")
    parser.add_argument("--stages", action="store_true", help="single tasks, step by step, first")
    parser.add_argument("--single", type=int, default=2, help="tasks of --stages, of each pass")
    parser.add_argument("--check", action="store_true", help="compare with one call; with --all")
    parser.add_argument("--budget", type=parse_bytes, default=8 << 30, help="of each device")
    parser.add_argument("--devices", nargs="+", default=["cuda:0"])
    parser.add_argument("--workers", type=int, default=2, help="processes on each device")
    parser.add_argument("--passes", nargs="+", default=["forward", "backward"])
    parser.add_argument("--folder", help="for the files")
    parser.add_argument("--json")
    given = parser.parse_args()
    begun = time.perf_counter()
    threads = 1 if given.devices[0] == "cpu" else None
    places = [device for device in given.devices for _ in range(given.workers)]
    crew = Fraction(places, given.budget // given.workers, threads)
    folder = Path(tempfile.mkdtemp(prefix="farm-", dir=given.folder))
    try:
        with Farm.of(crew) as farm:
            found = passes(given, farm, crew, folder)
    finally:
        shutil.rmtree(folder)
    table = {}
    for name in given.passes:
        found[name]["predicted_for_the_head"] = predicted(given, name == "backward")
        table[name] = found[name]["all_tasks"]
        print(
            f"{name:9} {found[name]['tasks_run']} of {found[name]['tasks']} tasks, "
            f"{found[name]['task_seconds']:.2f} s each on {len(places)} workers: the head "
            f"{table[name]:.1f} s, {found[name]['tflops']:.0f} TFLOP/s "
            f"(the planner: {found[name]['predicted_for_the_head']:.1f} s for "
            f"one call), {found[name]['host_anonymous_bytes'] / 2**30:.2f} GiB of host memory a "
            f"worker, {found[name]['device_used_bytes'] / 2**30:.2f} GiB of the device in use"
        )
    both = sum(table.values())
    said = "measured" if given.all else "extrapolated"
    eight = both * 8 * len(given.devices) / 2
    print(f"{' and '.join(table)}, {len(given.devices)} devices, 1 head: {both:.0f} s ({said}); "
          f"8 heads on two devices: {eight:.0f} s (extrapolated)")  # fmt: skip
    print(f"the script took {time.perf_counter() - begun:.0f} s")
    save(given, found)


if __name__ == "__main__":
    main()
