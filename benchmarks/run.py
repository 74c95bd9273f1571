"""Runs a case: measures, prints, and writes raw figures.

    python benchmarks/run.py CASE [options] [--json FILE]      (--help after CASE: its options)

plain     calls as a user writes them, under budgets, beside kernels alone and an older version
accuracy  errors of a long call against float64
step      a training step of a model: as it comes, recovered, with everything
small     small calls on a CPU beside torch's
wrapped   dense and LongNet kernels recovered, against themselves
devices   a call on several devices against one of them
ranks     a sequence sharded over ranks, beside one device and other ways
prompt    a long prompt in little device memory, beside other ways
entries   many small entries, and masks that keep pairs here and there, beside torch's

What is in FILE already is kept and added to.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from measure import about

CASES = re.findall(r"^([a-z]+)  +\w", __doc__, re.M)


def main(arguments: list[str]) -> None:
    """Run the case that the first argument names."""
    if not arguments or arguments[0] not in CASES:
        sys.exit(__doc__)
    case = importlib.import_module(f"cases.{arguments[0]}")
    parser = argparse.ArgumentParser(
        prog=f"run.py {arguments[0]}", description=case.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="raw figures")
    case.add_options(parser)
    options = parser.parse_args(arguments[1:])
    known = options.json and options.json.exists()
    found: dict[str, Any] = json.loads(options.json.read_text("utf-8")) if known else {}
    asked = re.sub(r" --(json|before)[= ]\S+", "", " ".join(arguments))
    found |= {"command": f"python benchmarks/run.py {asked}", **about()}
    for part in case.run(options, found):
        found |= part
        if options.json:
            options.json.write_text(lines(found) + "\n", encoding="utf-8")


def lines(value: Any, deep: int = 0) -> str:
    """JSON with a line for each case."""
    if deep > 1 or not isinstance(value, (dict, list)) or not value:
        return json.dumps(value)
    room = "\n" + " " * (deep + 1)
    if isinstance(value, list):
        return f"[{room}{f',{room}'.join(lines(each, 2) for each in value)}]"
    parts = (f"{json.dumps(name)}: {lines(each, deep + 1)}" for name, each in value.items())
    return f"{{{room}{f',{room}'.join(parts)}}}"


if __name__ == "__main__":
    main(sys.argv[1:])
