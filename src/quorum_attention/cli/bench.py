"""``bench``: the paper's experiments on this machine, side by side with torch's kernels."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from quorum_attention.cli import options as shared
from quorum_attention.cli.output import console, print_json

EXPERIMENTS = ("accuracy", "cost", "recovery", "stages", "census", "boundary", "wrapped")


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("bench", help="the paper's experiments", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS), metavar="EXPERIMENT",
        help=f"some of {', '.join(EXPERIMENTS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--methods", help="comma-separated (default: all that can run)")
    parser.add_argument("--heads", type=shared.count_of, default=None, help="default 8; CPU 2")
    parser.add_argument("--kv-heads", type=shared.count_of, help="default: as --heads")
    parser.add_argument("--head-dim", type=shared.count_of, default=64, help="default 64")
    parser.add_argument("--dtype", type=shared.dtype_of, help="default float16; CPU float32")
    parser.add_argument("--tokens", type=shared.count_of, help="of the accuracy tables")
    parser.add_argument("--min-tokens", type=shared.count_of, help="where sweeps begin")
    parser.add_argument("--max-tokens", type=shared.count_of, help="where sweeps end")
    shared.add_budget(parser, "the capped budget, enforced (default 1GiB; CPU 48MiB)")
    parser.add_argument("--repeats", type=shared.count_of, default=3, help="default 3")
    parser.add_argument("--draws", type=shared.count_of, default=None, help="default 10")
    parser.add_argument(
        "--method-seconds", type=float, default=None,
        help="a sweep ends where a method's next length should take longer (default 300)",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=1800.0, help="of one measurement, seconds")
    parser.add_argument("--quick", action="store_true", help="small sizes: a few minutes on a CPU")
    parser.add_argument("--output", default="bench-results", help="folder (default bench-results)")
    shared.add_device(parser)
    shared.add_json(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from importlib import import_module

    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from quorum_attention.bench.about import about
    from quorum_attention.bench.report import write
    from quorum_attention.bench.runner import Runner
    from quorum_attention.bench.spec import Answer, Spec

    settings = _settings(options)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    out = console()
    with Progress(*columns, console=_stderr(), transient=True) as progress:
        shown = progress.add_task("starting", total=None)

        def told(spec: Spec, answer: Answer) -> None:
            passes = "forward+backward" if spec.backward else "forward"
            progress.update(
                shown,
                description=f"{spec.method} {passes} {spec.tokens} tokens: {answer.status}",
            )

        runner = Runner(options.timeout, told)
        sections = []
        for name in options.only:
            experiment = import_module(f"quorum_attention.bench.{name}")
            sections += experiment.run(settings, runner)
    command = shlex.join(["quorum-attention", *sys.argv[1:]])
    files = write(Path(options.output), sections, runner.records, about(settings.device), command)
    if options.json:
        print_json({"files": [str(file) for file in files], "measurements": runner.records})
        return 0
    out.print(files[0].read_text(encoding="utf-8"), markup=False, highlight=False)
    for file in files:
        out.print(f"wrote {file}", highlight=False)
    return 0


def _stderr() -> Any:
    from rich.console import Console

    return Console(stderr=True)


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
