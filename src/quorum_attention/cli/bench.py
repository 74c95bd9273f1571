"""``bench``: the paper's experiments on this machine, side by side with torch's kernels."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table, warn
from quorum_attention.writing import write_text

_DESCRIPTION = (
    "The paper's experiments on this machine, side by side with torch's kernels. Their calls are "
    "causal, as the paper's are."
)
EXPERIMENTS = ("accuracy", "cost", "wrapped")


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = shared.add_command(commands, "bench", "the paper's experiments", _DESCRIPTION)
    parser.add_argument(
        "--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS), metavar="EXPERIMENT",
        help=f"some of {', '.join(EXPERIMENTS)} (default: all)",
    )  # fmt: skip
    n = shared.count_of
    shared.add(
        parser,
        ("--methods A,B", str, "comma-separated (default: all that can run)"),
        ("--heads", n, "query heads (default: 8; 2 on a CPU)"),
        shared.KV_HEADS,
        shared.HEAD_DIM,
        shared.DTYPE,
        ("--tokens", n, "of the accuracy tables (default: 8K; 1K on a CPU)"),
        ("--max-tokens", n, "longest call (default: 1M, or 64K with --quick; 16K, 4K on a CPU)"),
        ("--timeout S", shared.number_of("seconds, a number above 0", lambda number: number > 0),
         "of one measurement, seconds", 1800.0),
        ("--quick", None, "a few methods, lengths and passes: some minutes"),
        ("--output FOLDER", shared.name_of, "for results.json and report.md, which are replaced",
         "bench-results"),
        shared.DEVICE,
        shared.JSON,
    )  # fmt: skip
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from quorum_attention.bench.cases import EXPERIMENTS as RUN
    from quorum_attention.bench.cases import about, short
    from quorum_attention.bench.child import run_child

    _complete(options)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "about": about(options.device), "command": ["quorum-attention", *sys.argv[1:]],
        "measurements": [],
    }  # fmt: skip

    def measure(experiment: str, spec: Any) -> Any:
        warn(f"{experiment}: {spec.method}, {short(spec.tokens)} {spec.dtype}")
        answer = run_child(spec, options.timeout)
        measured = {"experiment": experiment, "spec": asdict(spec), "answer": asdict(answer)}
        found["measurements"].append(measured)
        write_text(folder / "results.json", json.dumps(found, indent=1))
        return answer

    lines = ["# Benchmark report", "", ", ".join(map(" ".join, found["about"].items())), ""]
    for name in options.only:
        section = RUN[name](options, measure)
        table = [section.columns, ["---"] * len(section.columns), *section.rows]
        lines += [f"## {section.title}", "", section.text, ""]
        lines += [f"| {' | '.join(row)} |" for row in table] + [""]
        if not options.json:
            say(f"\n{section.title}\n{section.text}")
            show_table(section.columns, section.rows)
        write_text(folder / "report.md", "\n".join(lines))
    files = [str(folder / "results.json"), str(folder / "report.md")]
    if options.json:
        print_json({"files": files, "measurements": found["measurements"]})
    else:
        say("\n".join(f"wrote {file}" for file in files))
    return 0


def _complete(options: argparse.Namespace) -> None:
    """Defaults for the device."""
    from quorum_attention.bench.methods import METHODS, QUICK, USUAL

    options.device = device = shared.default_device(options.device).type
    on_cpu, quick = device == "cpu", options.quick
    usual = (QUICK if quick else USUAL)[device]
    methods = [*usual] if options.methods is None else options.methods.split(",")
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(f"--methods must be some of {', '.join(METHODS)}, got {unknown[0]!r}")
    options.methods = list(dict.fromkeys([usual[0], *methods]))
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
