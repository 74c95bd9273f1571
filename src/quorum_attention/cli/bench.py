"""``bench``: repeat the paper's experiments on this machine, beside torch's kernels. Calls are
causal, as in the paper.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quorum_attention.bench.child import run_child
from quorum_attention.bench.experiments import EXPERIMENTS, USUAL_METHODS, describe_machine
from quorum_attention.bench.measurement import Outcome, Spec
from quorum_attention.bench.methods import METHODS
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table, warn
from quorum_attention.units import counted
from quorum_attention.writing import write_text

# Of one measurement.
_LONGEST_SECONDS = 1800.0


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = shared.add_command(commands, "bench", "repeat the paper's experiments", __doc__, _run)
    for name, choices in (("--only", list(EXPERIMENTS)), ("--methods", list(METHODS))):
        text = f"some of {', '.join(choices)} (default: all that can run)"
        parser.add_argument(name, nargs="+", choices=choices, metavar="NAME", help=text)
    n = shared.count_of
    shared.add(
        parser,
        ("--heads", n, "query heads (default: 8; 2 on a CPU)"),
        shared.KV_HEADS,
        shared.HEAD_DIM,
        shared.DTYPE,
        ("--tokens", n, "length of the accuracy experiment (default: 8K; 1K on a CPU)"),
        ("--max-tokens", n, "longest call (default: 1M, or 64K with --quick; 16K, 4K on a CPU)"),
        ("--quick", None, "fewer methods, lengths and passes: some minutes"),
        ("--output FOLDER", shared.name_of, "where results.json and report.md are written",
         "bench-results"),
        shared.DEVICE,
        shared.JSON,
    )  # fmt: skip


def _run(options: argparse.Namespace) -> int:
    _complete(options)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "about": describe_machine(options.device),
        "command": ["quorum-attention", *sys.argv[1:]],
        "measurements": [],
    }

    def measure(experiment: str, spec: Spec) -> Outcome:
        warn(f"{experiment}: {spec.method}, {counted(spec.tokens, 'token')}, {spec.dtype}")
        measurement = run_child(spec, _LONGEST_SECONDS)
        report["measurements"].append(
            {"experiment": experiment, "spec": asdict(spec), "answer": asdict(measurement)}
        )
        write_text(folder / "results.json", json.dumps(report, indent=1))
        return measurement

    lines = ["# Benchmark report", "", ", ".join(map(" ".join, report["about"].items())), ""]
    for name in options.only or EXPERIMENTS:
        title, text, columns, rows = EXPERIMENTS[name](options, measure)
        lines += [f"## {title}", "", text, ""]
        table = [columns, ["---"] * len(columns), *rows]
        lines += [f"| {' | '.join(row)} |" for row in table] + [""]
        if not options.json:
            say(f"\n{title}\n{text}")
            show_table(columns, rows)
        write_text(folder / "report.md", "\n".join(lines))
    files = [str(folder / "results.json"), str(folder / "report.md")]
    if options.json:
        print_json({"files": files, "measurements": report["measurements"]})
    else:
        say("\n".join(f"wrote {file}" for file in files))
    return 0


def _complete(options: argparse.Namespace) -> None:
    """Defaults for the device."""
    options.device = device = shared.default_device(options.device).type
    on_cpu, quick = device == "cpu", options.quick
    few = ("sdpa", "flash", "cudnn", "quorum")
    usual = [name for name in USUAL_METHODS[device] if not quick or name in few]
    options.methods = list(dict.fromkeys([usual[0], *(options.methods or usual)]))
    options.heads = options.heads or (2 if on_cpu else 8)
    options.kv_heads = shared.kv_heads(options.heads, options.kv_heads)
    dtype = options.dtype or shared.default_dtype(device)
    options.dtype = str(dtype).removeprefix("torch.")
    options.tokens = options.tokens or (1_024 if on_cpu else 8_192)
    first, last = (1_024, 16_384) if on_cpu else (8_192, 1 << 20)
    if quick:
        first, last = (2_048, 4_096) if on_cpu else (32_768, 65_536)
    last = options.max_tokens or last
    options.lengths = min(first, last), last
