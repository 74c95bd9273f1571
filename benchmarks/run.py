"""Runs a case: measures, prints, and writes a file of the run.

    python benchmarks/run.py CASE [options] [--results FOLDER]
    python benchmarks/run.py CASE --help

plain     calls as a user writes them, under budgets, beside kernels and an old version
accuracy  errors of a long call against float64
step      a training step of a model: as it comes, recovered, with everything
small     small calls on a CPU beside torch's
wrapped   dense and LongNet kernels recovered, against themselves
devices   a call on several devices against one of them
ranks     a sequence sharded over ranks, beside one device and other ways
prompt    a long prompt in little device memory, beside other ways
entries   many small entries, and masks that keep pairs here and there, beside torch's

With --results, the run writes FOLDER/DATE-MACHINE-CASE-COMMIT.json, row by row: its
arguments, commit, machine, versions and date, and what it measured. No run changes the
file of another.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

import torch
from runs import new_path

from quorum_attention.bench.record import RunRecord, describe_run

CASES = re.findall(r"^([a-z]+)  +\w", __doc__, re.M)
# Options that name places of one machine, or the source, or end a run that takes too
# long: a record's arguments are without these.
LOCAL = ("results", "commit", "before", "timeout")


def main(arguments: list[str]) -> None:
    """Run the case that the first argument names."""
    if arguments in (["--help"], ["-h"]):
        print(__doc__)
        return
    if not arguments or arguments[0] not in CASES:
        sys.exit(__doc__)
    name = arguments[0]
    case = importlib.import_module(f"cases.{name}")
    parser = argparse.ArgumentParser(
        prog=f"run.py {name}",
        description=case.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="where the run has its file"
    )
    parser.add_argument("--commit", help="of this source, where git does not know it")
    case.add_options(parser)
    options = parser.parse_args(arguments[1:])
    record = new_record(name, arguments, options)
    for rows in case.run(options):
        if record is not None:
            record.add(rows)


def new_record(
    name: str, arguments: list[str], options: argparse.Namespace
) -> RunRecord | None:
    """The file of this run, or None without a folder for it."""
    if options.results is None:
        return None
    options.results.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = " ".join(arguments)
    command = re.sub(rf" --({'|'.join(LOCAL)})[= ]\S+", "", words)
    of_case = {
        option: value for option, value in vars(options).items() if option not in LOCAL
    }
    run = describe_run(f"python benchmarks/run.py {command}", of_case, device)
    run["commit"] = run["commit"] or options.commit
    machine = "cpu"
    if device == "cuda":
        # "h200" of "NVIDIA H200".
        model = run["machine"].rpartition(" ")[2]
        machine = model.lower()
    path = new_path(options.results, f"{machine}-{name}", run)
    return RunRecord(path, run)


if __name__ == "__main__":
    main(sys.argv[1:])
