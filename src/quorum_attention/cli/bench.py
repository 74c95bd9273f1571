"""``bench``: the paper's experiments on this machine, side by side with torch's kernels."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table

_DESCRIPTION = (
    "The paper's experiments on this machine, side by side with torch's kernels. Their calls are "
    "causal, as the paper's are."
)
EXPERIMENTS = ("accuracy", "cost", "recovery", "stages", "census", "boundary", "wrapped")


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = shared.add_command(commands, "bench", "the paper's experiments", _DESCRIPTION)
    parser.add_argument(
        "--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS), metavar="EXPERIMENT",
        help=f"some of {', '.join(EXPERIMENTS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--methods", metavar="A,B", help="comma-separated (default: all that can run)"
    )
    for name, text in (
        ("heads", "query heads (default: 8; 2 on a CPU)"),
        ("kv-heads", "key/value heads (default: as --heads)"),
        ("tokens", "of the accuracy tables, such as 8192 or 8K (default: 8K; 1K on a CPU)"),
        ("min-tokens", "where sweeps begin (default: 8K; 1K on a CPU)"),
        ("max-tokens", "where sweeps end (default: 1M, 1,048,576; 16K on a CPU)"),
        ("draws", "random inputs of an accuracy table (default: 10; 2 with --quick)"),
    ):
        parser.add_argument(f"--{name}", type=shared.count_of, metavar="N", help=text)
    parser.add_argument(
        "--head-dim", type=shared.count_of, default=64, metavar="N", help="numbers in a head"
    )
    parser.add_argument(
        "--repeats", type=shared.count_of, default=3, metavar="N",
        help="of every measurement; 1 with --quick",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", type=shared.dtype_of, metavar="DTYPE",
        help=f"one of {', '.join(shared.DTYPES)} (default: float16; float32 on a CPU)",
    )  # fmt: skip
    shared.add_budget(parser, "the capped budget, enforced (default: 1GiB; 48MiB on a CPU)")
    parser.add_argument(
        "--method-seconds", type=float, metavar="S",
        help="a sweep ends where a method's next length should take longer "
        "(default: 300; 20 with --quick)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S", help="of one measurement, seconds"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: a few minutes on a CPU")
    parser.add_argument("--output", metavar="FOLDER", default="bench-results", help="for results")
    shared.add_device(parser)
    shared.add_json(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from importlib import import_module

    from quorum_attention.bench.about import about
    from quorum_attention.bench.report import FILES, write
    from quorum_attention.bench.runner import Runner
    from quorum_attention.bench.spec import Answer, Spec
    from quorum_attention.progress import status_line
    from quorum_attention.writing import check_target

    settings = _settings(options)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        check_target(folder / name)
    with status_line("starting") as show:

        def told(spec: Spec, answer: Answer) -> None:
            passes = "forward+backward" if spec.backward else "forward"
            show(f"{spec.method} {passes} {spec.tokens} tokens: {answer.status}")

        runner = Runner(options.timeout, told)
        sections = []
        for name in options.only:
            experiment = import_module(f"quorum_attention.bench.{name}")
            sections += experiment.run(settings, runner)
    known = about(settings.device)
    command = shlex.join(["quorum-attention", *sys.argv[1:]])
    files = write(folder, sections, runner.records, known, command)
    if options.json:
        print_json({"files": [str(file) for file in files], "measurements": runner.records})
        return 0
    say(", ".join(f"{name} {value}" for name, value in known.items()))
    for section in sections:
        say(f"\n{section.title}\n{section.text}")
        if section.columns:
            show_table(section.columns, section.rows)
    for file in files:
        say(f"wrote {file}")
    return 0


def _settings(options: argparse.Namespace) -> Any:
    from quorum_attention.bench.methods import METHODS, reference, usual
    from quorum_attention.bench.settings import Settings

    device = shared.default_device(options.device).type
    on_cpu, quick = device == "cpu", options.quick
    methods = usual(device) if options.methods is None else options.methods.split(",")
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(f"--methods must be some of {', '.join(METHODS)}, got {unknown[0]!r}")
    if reference(device) not in methods:
        methods.insert(0, reference(device))
    heads = options.heads or (2 if on_cpu else 8)
    usual_max = (4_096 if quick else 16_384) if on_cpu else (65_536 if quick else 1 << 20)
    usual_min = 1_024 if on_cpu else 8_192
    max_tokens = options.max_tokens or usual_max
    dtype = str(options.dtype).removeprefix("torch.") if options.dtype else None
    return Settings(
        device=device,
        heads=heads,
        kv_heads=options.kv_heads or heads,
        head_dim=options.head_dim,
        dtype=dtype or ("float32" if on_cpu else "float16"),
        methods=tuple(methods),
        min_tokens=min(options.min_tokens or usual_min, max_tokens),
        max_tokens=max_tokens,
        accuracy_tokens=options.tokens or (1_024 if on_cpu else 8_192),
        budget_bytes=options.budget or ((48 << 20) if on_cpu else (1 << 30)),
        repeats=1 if quick else options.repeats,
        draws=options.draws or (2 if quick else 10),
        method_seconds=options.method_seconds or (20.0 if quick else 300.0),
    )
