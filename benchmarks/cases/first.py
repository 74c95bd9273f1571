"""First calls in new processes, over second ones: without any caches on disk, and with kept ones.

Caches are Triton's, this package's, and the bytecode of all that Python imports.

Plain calls (cases/plain.py): inputs in page-locked host memory, results made by the call, gradients
by autograd. Each process has initialised CUDA before, and has called torch's own backward with a
gradient, which imports sympy (2 s by itself). The first process of a machine also reads libraries
from its disk: one is run and thrown away, unless --read says that they have been read. With
--before an older version in turn; with --calls 1 the first call alone. The case "short" is
a call under a tight budget that takes 0.2 s on a kernel that takes seconds to build. Needs a CUDA
device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from measure import ROOT


def in_this_process(case: str, calls: int) -> list[tuple[float, float]]:
    """Seconds of forward and backward of each call."""
    import torch
    from cases.plain import CASES, Case, drawn, placed
    from measure import both

    import quorum_attention as qa

    short = {"short": Case(1 << 15, 8, 8, 64, torch.float16, "16MiB")}
    given = (CASES | short)[case]
    tensors = placed(given, drawn(given))
    torch.cuda.empty_cache()
    torch.zeros(2, requires_grad=True).mul(1).backward(torch.ones(2))

    def forward(*three: torch.Tensor) -> torch.Tensor:
        return qa.attention(*three, is_causal=True, enable_gqa=True, budget=given.budget)

    return [both(forward, tensors[:3], tensors[3]) for _ in range(calls)]


def in_a_new_process(case: str, calls: int, source: Path, caches: Path) -> dict[str, Any]:
    """Both in a process that imports the package from ``source``."""
    paths = [str(source), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(caches / "triton"),
        "QUORUM_ATTENTION_CACHE": str(caches / "own"),
        # An installed package has its bytecode; some machines forbid a process to write it.
        "PYTHONPYCACHEPREFIX": str(caches / "bytecode"), "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip
    program = str(ROOT / "benchmarks" / "run.py")
    done = subprocess.run(
        [sys.executable, program, "first", "--within", case, "--calls", str(calls)],
        env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default="262144,65536-gqa")
    parser.add_argument("--before", type=Path, help="src of an older version")
    parser.add_argument("--caches", default="none,kept,kept", help="of the processes, in order")
    parser.add_argument("--calls", type=int, default=2, help="in each process")
    parser.add_argument("--read", action="store_true", help="libraries have been read before")
    parser.add_argument("--within", help=argparse.SUPPRESS)


def run(options: argparse.Namespace, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each process."""
    if options.within:
        calls = in_this_process(options.within, options.calls)
        print(json.dumps({"calls": calls}))
        return
    versions = {} if options.before is None else {"before": options.before}
    versions["now"] = ROOT / "src"
    document: dict[str, Any] = {}
    for case in options.cases.split(","):
        if not options.read:
            with tempfile.TemporaryDirectory() as folder:
                in_a_new_process(case, 1, versions["now"], Path(folder))
        with tempfile.TemporaryDirectory() as folder:
            for caches, name in product(options.caches.split(","), versions):
                found = in_a_new_process(case, options.calls, versions[name], Path(folder) / name)
                calls = found["calls"]
                first = sum(calls[0])
                over = f"first {first:.2f} s"
                if options.calls > 1:
                    second = sum(calls[1])
                    over += f", over second {first - second:.2f} s, second {second:.3f} s"
                print(f"{case:15} {name:6} caches {caches}: {over}", flush=True)
                document.setdefault(case, {}).setdefault(name, []).append(
                    {"caches": caches, **found}
                )
        yield document
