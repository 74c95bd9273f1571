"""First calls in new processes, over second ones: without any caches on disk, and with kept ones.

Caches are Triton's, this package's, and the bytecode of all that Python imports. Calls are those of
cases/plain.py. Each process has initialised CUDA before, and has called torch's own backward with a
gradient, which imports sympy (2 s by itself). The first process of a machine also reads libraries
from its disk: one is run and thrown away. The case "short" is a call under a tight budget that
takes 0.2 s on a kernel that takes seconds to build. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cases.plain import CASES, Case, drawn, ours, placed
from measure import ROOT, Version

SHORT = {"short": Case(1 << 15, 8, 8, 64, torch.float16, "16MiB")}


def in_this_process(case: Case, source: Path) -> list[list[float]]:
    """Seconds of forward and backward of two calls."""
    tensors = placed(case, drawn(case))
    torch.cuda.empty_cache()
    torch.zeros(2, requires_grad=True).mul(1).backward(torch.ones(2))
    run = ours(case, Version(source), tensors, [])
    return [run() for _ in range(2)]


def in_a_new_process(case: str, source: Path, caches: Path) -> list[list[float]]:
    """The same in a process whose caches are in a folder."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(caches / "triton"), "QUORUM_ATTENTION_CACHE": str(caches / "own"),
        # An installed package has its bytecode; some machines forbid a process to write it.
        "PYTHONPYCACHEPREFIX": str(caches / "bytecode"), "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip
    program = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "first", "--within", case]
    command = [*program, "--source", str(source)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default="262144,65536-gqa")
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="of the version")
    parser.add_argument("--within", help=argparse.SUPPRESS)


def run(options: argparse.Namespace, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each process: without caches, and twice with those that the first has left."""
    if options.within:
        print(json.dumps(in_this_process((CASES | SHORT)[options.within], options.source)))
        return
    document: dict[str, Any] = {}
    for case in options.cases.split(","):
        with tempfile.TemporaryDirectory() as thrown:
            in_a_new_process(case, options.source, Path(thrown))
        with tempfile.TemporaryDirectory() as folder:
            for caches in ("none", "kept", "kept"):
                calls = in_a_new_process(case, options.source, Path(folder))
                first, second = map(sum, calls)
                print(
                    f"{case}, caches {caches}: first {first:.2f} s, second {second:.3f} s",
                    flush=True,
                )
                document.setdefault(case, []).append({"caches": caches, "calls": calls})
        yield document
