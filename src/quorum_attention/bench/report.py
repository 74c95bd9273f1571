"""Writes the report: Markdown with tables, figures where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from quorum_attention.bench.results import REPORT, naming
from quorum_attention.bench.settings import Section
from quorum_attention.pictures.canvas import new_figure, own_style, save
from quorum_attention.writing import write_text


def write(
    folder: Path, sections: list[Section], about: dict[str, str], runs: list[dict[str, Any]]
) -> list[Path]:
    """Write ``report.md`` and a PNG for every figure; returns the files.

    Args:
        runs: the runs that measured (see ``results.Results``).
    """
    figures = _figures(folder, sections)
    lines = ["# Benchmark report", ""]
    lines += [", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += [f"`{run['command']}` (started {run['started']})  " for run in runs]
    for section in sections:
        lines += ["", f"## {section.title}", "", section.text, ""]
        lines += table(section.columns, section.rows)
        if section.name in figures:
            lines += ["", f"![{section.title}]({figures[section.name].name})"]
    path = folder / REPORT
    with naming(path):
        write_text(path, "\n".join(lines) + "\n")
    return [path, *figures.values()]


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    if not columns:
        return []

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(columns), "|" + "---|" * len(columns), *(line(row) for row in rows)]


@own_style()
def _figures(folder: Path, sections: list[Section]) -> dict[str, Path]:
    drawn = [section for section in sections if section.draw is not None]
    if not drawn or importlib.util.find_spec("matplotlib") is None:
        return {}
    found = {}
    for section in drawn:
        assert section.draw is not None
        figure = new_figure(8, 4.5)
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot()
        section.draw(axes)
        axes.set_title(section.title)
        found[section.name] = folder / f"{section.name}.png"
        with naming(found[section.name]):
            save(figure, found[section.name], dpi=130)
    return found
