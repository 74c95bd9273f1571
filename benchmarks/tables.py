"""The tables of figures in README and on the pages of results, from raw files alone.

    python benchmarks/tables.py            writes them below their markers
    python benchmarks/tables.py --check    fails where they differ from the raw files

The paper's figures are in docs/data/paper.json. Ours are in benchmarks/results: of each
row a table shows the newest run, and names its commit. The census is counted anew.
Nothing is measured here.

README and docs/results.md show rows of the present code (``runs.py`` says since when).
Rows of older code are on docs/older-results.md, below the headings and questions of
docs/results.md, until somebody measures them again.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import readme
import tables_of_accuracy
import tables_of_calls
import tables_of_devices
import tables_of_prompts
import tables_of_steps
from table_text import Table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
OLDER_PAGE = ROOT / "docs" / "older-results.md"
README = ROOT / "README.md"

# By the names of their markers.
TABLES: dict[str, Callable[[], Table]] = {
    "accuracy": tables_of_accuracy.accuracy,
    "long_accuracy": tables_of_accuracy.long_accuracy,
    "cost": tables_of_calls.cost,
    "budgets": tables_of_calls.budgets,
    "beside_fa4": tables_of_calls.beside_fa4,
    "several": tables_of_devices.several,
    "killed": tables_of_devices.killed,
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
README_TEXTS: dict[str, Callable[[], str]] = {
    "headline": readme.headline,
    "prompt": readme.prompt,
    "measured": readme.measured,
}
HEADING = re.compile(r"^(?=##+ )", re.MULTILINE)
# A section with a table: its head (title, question and marker), and the table.
SECTION = re.compile(
    r"(?P<head>##+ (?P<title>[^\n]+)\n(?P<question>.*?)<!-- table: (?P<name>\w+) -->\n)"
    r"(?P<table>.*)",
    re.DOTALL,
)
IN_README = re.compile(
    r"(?P<head><!-- figures: (?P<name>\w+) -->\n).*?(?=<!-- end of figures -->)",
    re.DOTALL,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    is_check = parser.parse_args().check
    tables = {name: make_table() for name, make_table in TABLES.items()}
    for path, text in new_texts(tables).items():
        if not is_check:
            path.write_text(text, encoding="utf-8")
        elif text != path.read_text("utf-8"):
            sys.exit(f"{path.name} is out of date: python benchmarks/tables.py")
    check_page(PAGE.read_text("utf-8"))


def new_texts(tables: dict[str, Table]) -> dict[Path, str]:
    """The pages with these tables."""
    page = []
    older_page = HEADING.split(OLDER_PAGE.read_text("utf-8"))[:1]
    for section in HEADING.split(PAGE.read_text("utf-8")):
        match = SECTION.fullmatch(section)
        if match is None:
            page.append(section)
            continue
        table = tables[match["name"]]
        older = table.of_age(is_old=True)
        text = present_text(table, match["title"])
        page.append(f"{match['head']}\n{text}\n")
        if older.runs():
            title_and_question = f"## {match['title']}\n{match['question']}"
            older_page.append(f"{title_and_question}{older.text()}\n")
    return {
        PAGE: "".join(page).rstrip("\n") + "\n",
        OLDER_PAGE: "".join(older_page).rstrip("\n") + "\n",
        README: IN_README.sub(with_figures, README.read_text("utf-8")),
    }


def with_figures(match: re.Match[str]) -> str:
    """A marker of README with its text below."""
    return f"{match['head']}\n{README_TEXTS[match['name']]()}\n"


def present_text(table: Table, title: str) -> str:
    """The lines of the present code, and a link to those of older code."""
    present = table.of_age(is_old=False)
    if present == table:
        return table.text()
    anchor = re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
    link = f"[Rows measured on older code](older-results.md#{anchor})."
    if not present.runs():
        return f"Not yet measured on today's code. {link}\n"
    return f"{present.text()}\n{link}\n"


def check_page(page: str) -> None:
    """Fail if a table has no marker, or if figures are typed by hand."""
    matches = [SECTION.fullmatch(section) for section in HEADING.split(page)]
    unmarked = set(TABLES) - {match["name"] for match in matches if match}
    outside_tables = page
    for match in filter(None, matches):
        outside_tables = outside_tables.replace(match["table"], "")
    typed = re.findall(r".*\d\.\d.*", outside_tables)
    if unmarked or typed:
        sys.exit(f"tables without a marker: {unmarked}; figures typed by hand: {typed}")


if __name__ == "__main__":
    main()
