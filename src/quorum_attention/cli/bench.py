"""``bench``: repeat the paper's experiments on this machine, beside torch's kernels.
Calls are causal, as in the paper.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quorum_attention.bench.child import run_child
from quorum_attention.bench.experiments import (
    EXPERIMENTS,
    USUAL_METHODS,
    Section,
    row_of,
)
from quorum_attention.bench.measurement import Outcome, Spec
from quorum_attention.bench.methods import METHODS
from quorum_attention.bench.record import RunRecord, describe_run
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table, warn
from quorum_attention.plain_types import JsonObject
from quorum_attention.units import counted
from quorum_attention.writing import write_text

# The time that one measurement may take.
_LONGEST_SECONDS = 1800.0
_QUICK_METHODS = ("sdpa", "flash", "cudnn", "quorum")
# By kind of device and quickness: the shortest and the longest call of the cost
# experiment.
_LENGTHS = {
    ("cpu", False): (1_024, 16_384),
    ("cpu", True): (2_048, 4_096),
    ("cuda", False): (8_192, 1 << 20),
    ("cuda", True): (32_768, 65_536),
}


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = shared.add_command(
        commands, "bench", "repeat the paper's experiments", __doc__, _run
    )
    for name, choices in (("--only", list(EXPERIMENTS)), ("--methods", list(METHODS))):
        text = f"some of {', '.join(choices)} (default: all that can run)"
        parser.add_argument(name, nargs="+", choices=choices, metavar="NAME", help=text)
    count = shared.count_of
    shared.add(
        parser,
        ("--heads", count, "query heads (default: 8; 2 on a CPU)"),
        shared.KV_HEADS,
        shared.HEAD_DIM,
        shared.DTYPE,
        (
            "--tokens",
            count,
            "length of the accuracy experiment (default: 8K; 1K on a CPU)",
        ),
        (
            "--max-tokens",
            count,
            "longest call (default: 1M, or 64K with --quick; 16K, 4K on a CPU)",
        ),
        ("--quick", None, "fewer methods, lengths and passes: some minutes"),
        (
            "--output FOLDER",
            shared.name_of,
            "where results.json and report.md are written",
            "bench-results",
        ),
        shared.DEVICE,
        shared.JSON,
    )


def _run(options: argparse.Namespace) -> int:
    _complete(options)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    command = " ".join(["quorum-attention", *sys.argv[1:]])
    arguments = {
        name: value
        for name, value in vars(options).items()
        if name not in ("run", "parser")
    }
    run = describe_run(command, arguments, options.device)
    record = RunRecord(folder / "results.json", run)

    def measure(experiment: str, spec: Spec) -> Outcome:
        warn(
            f"{experiment}: {spec.method}, {counted(spec.tokens, 'token')}, "
            f"{spec.dtype}"
        )
        outcome = run_child(spec, _LONGEST_SECONDS)
        record.add(row_of(experiment, spec, outcome))
        return outcome

    report = folder / "report.md"
    sections: list[Section] = []
    for name in options.only or EXPERIMENTS:
        section = EXPERIMENTS[name](options, measure)
        sections.append(section)
        write_text(report, _markdown(run, sections))
        if not options.json:
            say(f"\n{section.title}\n{section.text}")
            show_table(section.columns, section.rows)
    files = [str(record.path), str(report)]
    if options.json:
        print_json({"files": files, "measurements": list(record.rows.values())})
    else:
        say("\n".join(f"wrote {file}" for file in files))
    return 0


def _markdown(run: JsonObject, sections: Sequence[Section]) -> str:
    """The report in Markdown."""
    versions = [f"{name} {version}" for name, version in run["versions"].items()]
    facts = [f"device {run['machine']}", *versions, f"date {run['date']}"]
    origin = ", ".join(facts)
    lines = ["# Benchmark report", "", origin, ""]
    for section in sections:
        lines += [f"## {section.title}", "", section.text, ""]
        rule = ["---"] * len(section.columns)
        for row in (section.columns, rule, *section.rows):
            cells = " | ".join(row)
            lines.append(f"| {cells} |")
        lines.append("")
    return "\n".join(lines)


def _complete(options: argparse.Namespace) -> None:
    """Fill in the defaults for the device."""
    device = shared.default_device(options.device).type
    on_cpu = device == "cpu"
    options.device = device
    options.methods = _methods(options, device)
    options.heads = options.heads or (2 if on_cpu else 8)
    options.kv_heads = shared.kv_heads(options.heads, options.kv_heads)
    dtype = options.dtype or shared.default_dtype(device)
    options.dtype = str(dtype).removeprefix("torch.")
    options.tokens = options.tokens or (1_024 if on_cpu else 8_192)
    first, last = _LENGTHS[device, options.quick]
    last = options.max_tokens or last
    options.lengths = min(first, last), last


def _methods(options: argparse.Namespace, device: str) -> list[str]:
    """The methods to measure, without repetitions. Ratios are against the first usual
    one."""
    usual = USUAL_METHODS[device]
    if options.quick:
        usual = [name for name in usual if name in _QUICK_METHODS]
    return list(dict.fromkeys([usual[0], *(options.methods or usual)]))
