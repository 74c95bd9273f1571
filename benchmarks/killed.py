"""Workers of a pool are killed at random moments, forward and backward.

    python benchmarks/killed.py [--devices cpu cpu] [--moments 20] [--tokens 3000] [--seed 0]

Each time a worker of the pool is killed while a call runs. It says of each pass whether the result
is right, which parts ran twice (none that was done), how long it took against an ideal one (what
was left at that moment, on the devices that were left, at the pace of this pass), and at the end
what stayed behind: processes, shared memory, open files, memory of devices.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import threading
import time
from typing import Any

import torch

import quorum_attention as qa
from quorum_attention.devices import Pool


def files_open() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def device_bytes() -> int:
    count = torch.cuda.device_count()
    return sum(torch.cuda.memory_allocated(number) for number in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    torch.manual_seed(options.seed)
    on_cpu = all(name == "cpu" for name in options.devices)
    dtype = torch.float32 if on_cpu else torch.float16
    shape = (1, options.heads, options.tokens, 64)
    q, k, v, grad = (torch.randn(shape).to(dtype).share_memory_() for _ in range(4))
    alone = options.devices[0]
    out, lse = qa.attention_with_lse(q, k, v, is_causal=True, devices=alone)
    three = qa.attention_backward(grad, q, k, v, out, lse, is_causal=True, devices=alone)
    passes: dict[str, Any] = {
        "forward": (
            lambda **more: qa.attention_with_lse(q, k, v, is_causal=True, **more), (out, lse)
        ),
        "backward": (
            lambda **more: qa.attention_backward(grad, q, k, v, out, lse, is_causal=True, **more),
            three,
        ),
    }  # fmt: skip
    with Pool(options.devices, threads=1 if on_cpu else None) as pool:
        for call, _ in passes.values():
            for _ in range(2):
                call(devices=pool)
        gc.collect()
        before = files_open(), device_bytes(), len(os.listdir("/dev/shm"))
        slower = []
        for name, (call, wanted) in passes.items():
            for moment in range(options.moments):
                slower.append(once(pool, name, moment, draw, call, wanted))
                pool.mend()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
        after = files_open(), device_bytes(), len(os.listdir("/dev/shm"))
        print("open files, bytes on devices, names in /dev/shm:", before, "->", after)
        processes = [worker.process for worker in pool.workers]
    print("workers alive after the end:", sum(process.is_alive() for process in processes))
    known = sorted(share for share in slower if share is not None)
    if known:
        print(f"makespan over ideal: median {known[len(known) // 2]:.3f}, most {known[-1]:.3f}")


def once(
    pool: Pool, name: str, moment: int, draw: random.Random, call: Any, wanted: Any
) -> float | None:
    """A pass in which a worker is killed; its time over the ideal one."""
    begun = time.perf_counter()
    call(devices=pool)
    usual = time.perf_counter() - begun
    number = draw.randrange(len(pool.workers))
    worker = pool.workers[number]
    at = draw.random() * usual
    killed: list[float] = []

    def kill() -> None:
        os.kill(worker.process.pid, signal.SIGKILL)
        killed.append(time.perf_counter())

    report = qa.Report()
    timer = threading.Timer(at, kill)
    begun = time.perf_counter()
    timer.start()
    got = call(devices=pool, report=report)
    seconds = time.perf_counter() - begun
    timer.join()
    worker.process.join()
    worst = max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(got, wanted, strict=True)
    )
    made = getattr(report.pool, name)
    indices = sorted(one.index for one in made.ran)
    assert indices == list(range(made.parts)), "a part is missing, or ran twice"
    share = None
    at = killed[0] - begun
    if made.history and at < seconds:
        # What the one that was killed had done counts, and what the others had begun.
        share = seconds / ideal(made, number, at)
    said = "killed too late" if share is None else f"{share:.3f} of the ideal time"
    print(
        f"{name} {moment}: killed after {at:.3f} of {usual:.3f} s, took {seconds:.3f} s, {said}, "
        f"difference {worst:.1e}",
        flush=True,
    )
    assert worst < 1e-2
    return share


def ideal(made: Any, number: int, at: float) -> float:
    """Seconds of a pass in which exactly what was not done at a moment is divided evenly among
    those that are left."""
    left = len(made.devices) - 1
    work = sum(one.stop - max(at, one.start) for one in made.ran if one.device != number
               and one.stop > at)  # fmt: skip
    return at + work / left


if __name__ == "__main__":
    main()
