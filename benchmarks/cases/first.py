"""First calls in new processes, over second ones: without any caches on disk, and with kept ones.

Caches are Triton's, this package's, and the bytecode of all that Python imports. Each process is
one of ``run.py plain``, which has initialised CUDA before, and has called torch's own backward. The
first process of a machine also reads libraries from its disk: one is run and thrown away. The case
"short" takes 0.2 s on a kernel that takes seconds to build. Needs a CUDA device.
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

from measure import ROOT


def in_a_new_process(case: str, caches: Path) -> list[list[float]]:
    """Seconds of forward and backward of two calls, in a process whose caches are in a folder."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(caches / "triton"), "QUORUM_ATTENTION_CACHE": str(caches / "own"),
        # An installed package has its bytecode; some machines forbid a process to write it.
        "PYTHONPYCACHEPREFIX": str(caches / "bytecode"), "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "found.json")
        asked = ["plain", "--cases", case, "--alone=", "--rounds=2", f"--json={made}"]
        command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *asked]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        found: list[list[float]] = json.loads(made.read_text("utf-8"))["cases"][case]["now"]
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default="262144,65536-gqa")


def run(options: argparse.Namespace, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each process: without caches, and twice with those that the first has left."""
    document: dict[str, Any] = {}
    for case in options.cases.split(","):
        with tempfile.TemporaryDirectory() as thrown, tempfile.TemporaryDirectory() as folder:
            in_a_new_process(case, Path(thrown))
            for caches in ("none", "kept", "kept"):
                calls = in_a_new_process(case, Path(folder))
                first, second = map(sum, calls)
                said = f"first {first:.2f} s, second {second:.3f} s"
                print(f"{case}, caches {caches}: {said}", flush=True)
                document.setdefault(case, []).append({"caches": caches, "calls": calls})
        yield document
