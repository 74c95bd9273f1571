"""``bench``: the paper's experiments on this machine, side by side with torch's kernels."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table
from quorum_attention.writing import write_text

_DESCRIPTION = (
    "The paper's experiments on this machine, side by side with torch's kernels. Their calls are "
    "causal, as the paper's are."
)
_seconds = shared.number_of("seconds, a number above 0", lambda number: number > 0)
EXPERIMENTS = ("accuracy", "cost", "wrapped")


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = shared.add_command(commands, "bench", "the paper's experiments", _DESCRIPTION)
    parser.add_argument(
        "--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS), metavar="EXPERIMENT",
        help=f"some of {', '.join(EXPERIMENTS)} (default: all)",
    )  # fmt: skip
    n, of = shared.count_of, "of the accuracy tables, such as 8192 or 8K"
    shared.add(
        parser,
        ("--methods A,B", str, "comma-separated (default: all that can run)"),
        ("--heads", n, "query heads (default: 8; 2 on a CPU)"),
        shared.KV_HEADS,
        ("--tokens", n, f"{of} (default: 8K; 1K on a CPU)"),
        ("--min-tokens", n, "of sweeps (default: 8K, or 32K with --quick; 1K, 2K on a CPU)"),
        ("--max-tokens", n, "of sweeps (default: 1M, or 64K with --quick; 16K, 4K on a CPU)"),
        ("--draws", n, "inputs of an accuracy table (default: 10; 2 with --quick)"),
        shared.HEAD_DIM,
        ("--repeats", n, "of every measurement; 1 with --quick", 3),
        shared.DTYPE,
        ("--method-seconds S", _seconds, "a sweep ends where a method's next length should take "
         "longer (default: 300; 20 with --quick)"),
        ("--timeout S", _seconds, "of one measurement, seconds", 1800.0),
        ("--quick", None, "a few methods, lengths and passes: some minutes"),
        ("--output FOLDER", shared.name_of, "for results.json and report.md, which are replaced",
         "bench-results"),
        shared.DEVICE,
        shared.JSON,
    )  # fmt: skip
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from quorum_attention.bench.cases import about

    settings = _settings(options)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "about": about(settings.device), "command": ["quorum-attention", *sys.argv[1:]],
        "settings": asdict(settings), "measurements": [],
    }  # fmt: skip
    lines = ["# Benchmark report", "", ", ".join(map(" ".join, found["about"].items())), ""]
    for name in options.only:
        for section in _measured(name, settings, options, found):
            table = [section.columns, ["---"] * len(section.columns), *section.rows]
            lines += [f"## {section.title}", "", section.text, ""]
            lines += [f"| {' | '.join(row)} |" for row in table if row] + [""]
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


def _measured(
    name: str, settings: Any, options: argparse.Namespace, found: dict[str, Any]
) -> list[Any]:
    """The tables of an experiment; each measurement is written as soon as it is made."""
    from quorum_attention.bench.cases import EXPERIMENTS as RUN
    from quorum_attention.bench.cases import short, summary
    from quorum_attention.bench.child import run_child
    from quorum_attention.progress import status_line

    # A status line has the terminal for itself: tables come after it.
    with status_line(name) as show:

        def measure(experiment: str, spec: Any) -> Any:
            what = f"{experiment}: {spec.method}, {short(spec.tokens)} {spec.dtype}"
            show(what)
            answer = run_child(spec, options.timeout)
            # Printed first, so that it is not lost if it cannot be written.
            show.done(f"{what}: {summary(answer)}")
            measured = {"experiment": experiment, "spec": asdict(spec), "answer": asdict(answer)}
            found["measurements"].append(measured)
            write_text(Path(options.output) / "results.json", json.dumps(found, indent=1))
            return answer

        return RUN[name](settings, measure)


def _settings(options: argparse.Namespace) -> Any:
    from quorum_attention.bench.cases import Settings
    from quorum_attention.bench.methods import METHODS, default_methods, reference

    device = shared.default_device(options.device).type
    on_cpu, quick = device == "cpu", options.quick
    methods = (
        default_methods(device, quick) if options.methods is None else options.methods.split(",")
    )
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(f"--methods must be some of {', '.join(METHODS)}, got {unknown[0]!r}")
    if reference(device) not in methods:
        methods.insert(0, reference(device))
    heads = options.heads or (2 if on_cpu else 8)
    kv_heads = shared.kv_heads(heads, options.kv_heads)
    usual_max = (4_096 if quick else 16_384) if on_cpu else (65_536 if quick else 1 << 20)
    usual_min = (2_048 if quick else 1_024) if on_cpu else (32_768 if quick else 8_192)
    max_tokens = options.max_tokens or usual_max
    if options.max_tokens and (options.min_tokens or 0) > max_tokens:
        raise ValueError(
            f"--min-tokens must be at most --max-tokens, got {options.min_tokens} and {max_tokens}"
        )
    dtype = str(options.dtype or shared.default_dtype(device)).removeprefix("torch.")
    return Settings(
        device=device,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=options.head_dim,
        dtype=dtype,
        methods=tuple(methods),
        min_tokens=min(options.min_tokens or usual_min, max_tokens),
        max_tokens=max_tokens,
        accuracy_tokens=options.tokens or (1_024 if on_cpu else 8_192),
        repeats=1 if quick else options.repeats,
        draws=options.draws or (2 if quick else 10),
        method_seconds=options.method_seconds or (20.0 if quick else 300.0),
        quick=quick,
    )
