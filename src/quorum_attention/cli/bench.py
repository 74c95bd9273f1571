"""``bench``: the paper's experiments on this machine, side by side with torch's kernels."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table, warn

_DESCRIPTION = (
    "The paper's experiments on this machine, side by side with torch's kernels. Their calls are "
    "causal, as the paper's are."
)
_seconds = shared.number_of("seconds, a number above 0", lambda number: number > 0)
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
        ("min-tokens", "where sweeps begin (default: 8K, or 32K with --quick; 1K, 2K on a CPU)"),
        ("max-tokens", "where sweeps end (default: 1M, or 64K with --quick; 16K, 4K on a CPU)"),
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
    shared.add_budget(
        parser, "the capped budget, enforced (default: 1GiB, 64MiB with --quick; 48MiB on a CPU)"
    )
    parser.add_argument(
        "--method-seconds", type=_seconds, metavar="S",
        help="a sweep ends where a method's next length should take longer "
        "(default: 300; 20 with --quick)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=_seconds, default=1800.0, metavar="S", help="of one measurement, seconds"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few methods, lengths and passes: some minutes"
    )
    parser.add_argument(
        "--output",
        type=shared.name_of,
        metavar="FOLDER",
        default="bench-results",
        help="for results; what is measured there already is not measured again",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="set aside what is in the folder, and begin anew"
    )
    shared.add_device(parser)
    shared.add_json(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from quorum_attention.bench.results import Results, about, alone_in, set_aside

    settings = _settings(options)
    folder = Path(options.output)
    with alone_in(folder):
        if options.fresh:
            set_aside(folder)
        results = Results(folder, settings, about(settings.device))
        if results.records:
            warn(
                f"{results.path} has {len(results.records)} measurements, which are used; only "
                f"failed ones are repeated (--fresh sets all aside and begins anew)"
            )
        results.commands.append(shlex.join(["quorum-attention", *sys.argv[1:]]))
        results.write(results.records)
        try:
            files = _measured(options, settings, results)
        except KeyboardInterrupt:
            warn(f"{results.path} has what was measured; the same command goes on from there")
            raise
    if options.json:
        print_json({"files": [str(file) for file in files], "measurements": results.records})
    else:
        for file in files:
            say(f"wrote {file}")
    return 0


def _measured(options: argparse.Namespace, settings: Any, results: Any) -> list[Path]:
    """Carry out the experiments; the report has what is finished after each. Returns the files."""
    from quorum_attention.bench.cases import EXPERIMENTS as RUN
    from quorum_attention.bench.results import write_report
    from quorum_attention.progress import status_line

    if not options.json:
        say(", ".join(f"{name} {value}" for name, value in results.about.items()))
    # What other commands measured here stays in the report, where it is complete.
    sections: dict[str, list[Any]] = {}
    for name in {record["experiment"] for record in results.records}:
        with suppress(KeyError):
            sections[name] = RUN[name](settings, results.kept)
    files: list[Path] = []
    for name in options.only:
        # A status line has the terminal for itself: tables come after it.
        with status_line(name) as show:
            measure = partial(results.measure, timeout=options.timeout, show=show, done=show.done)
            sections[name] = RUN[name](settings, measure)
        for section in () if options.json else sections[name]:
            say(f"\n{section.title}\n{section.text}")
            show_table(section.columns, section.rows)
        ordered = [s for known in EXPERIMENTS for s in sections.get(known, ())]
        files = write_report(results.path.parent, ordered, results)
    return [results.path, *files]


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
    # Few tokens fit in much: a small limit is one that something reaches.
    usual_budget = (48 << 20) if on_cpu else ((64 << 20) if quick else (1 << 30))
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
        budget_bytes=usual_budget if options.budget is None else options.budget,
        repeats=1 if quick else options.repeats,
        draws=options.draws or (2 if quick else 10),
        method_seconds=options.method_seconds or (20.0 if quick else 300.0),
        quick=quick,
    )
