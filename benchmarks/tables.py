"""The tables of figures in README and on the page of results, from raw files alone.

    python benchmarks/tables.py            writes them below their markers
    python benchmarks/tables.py --check    fails where they differ from the raw files

The paper's figures are in docs/data/paper.json. Ours are in benchmarks/results: of each
row a table shows the newest run, and names its commit. The census is counted anew.
Nothing is measured here.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import tables_of_accuracy
import tables_of_calls
import tables_of_devices
import tables_of_prompts
import tables_of_steps

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"

# By the names of their markers.
TABLES: dict[str, Callable[[], str]] = {
    "readme": tables_of_steps.readme,
    "accuracy": tables_of_accuracy.accuracy,
    "long_accuracy": tables_of_accuracy.long_accuracy,
    "cost": tables_of_calls.cost,
    "budgets": tables_of_calls.budgets,
    "beside_fa4": tables_of_calls.beside_fa4,
    "several": tables_of_devices.several,
    "ranks": tables_of_devices.ranks,
    "steps": tables_of_steps.steps,
    "longest": tables_of_steps.longest,
    "gradients": tables_of_steps.gradients,
    "estimates": tables_of_steps.estimates,
    "windows": tables_of_calls.windows,
    "native": tables_of_calls.native,
    "prompts": tables_of_prompts.prompts,
    "questions": tables_of_prompts.questions,
    "small": tables_of_calls.small,
    "entries": tables_of_calls.entries,
    "census": tables_of_accuracy.census,
    "wrapped": tables_of_accuracy.wrapped,
}
# A table reaches to the next heading, to the comment that ends it, or to the end of the
# page.
MARKED = re.compile(
    r"(<!-- table: (\w+) -->\n).*?(?=\n##+ |<!-- end of table -->|\Z)", re.DOTALL
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    is_check = parser.parse_args().check
    unmarked = set(TABLES)
    for path in (PAGE, README):
        text = path.read_text("utf-8")
        unmarked -= {name for _, name in MARKED.findall(text)}
        new_text = MARKED.sub(with_table, text)
        if not is_check:
            path.write_text(new_text, encoding="utf-8")
        elif new_text != text:
            sys.exit(f"{path.name} is out of date: python benchmarks/tables.py")
    typed = re.findall(r".*\d\.\d.*", MARKED.sub("", PAGE.read_text("utf-8")))
    if unmarked or typed:
        sys.exit(f"tables without a marker: {unmarked}; figures typed by hand: {typed}")


def with_table(match: re.Match[str]) -> str:
    """A marker with its table below."""
    marker, name = match.groups()
    return f"{marker}\n{TABLES[name]()}"


if __name__ == "__main__":
    main()
