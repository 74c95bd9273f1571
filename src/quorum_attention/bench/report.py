"""Writes the report: Markdown with tables, figures where matplotlib is installed, raw JSON."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from quorum_attention.bench.settings import Section
from quorum_attention.pictures.canvas import new_figure, save
from quorum_attention.writing import write_text

FILES = ("report.md", "results.json")


def write(
    folder: Path,
    sections: list[Section],
    records: list[dict[str, Any]],
    about: dict[str, str],
    command: str,
) -> list[Path]:
    """Write ``report.md``, ``results.json`` and a PNG for every figure; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = _figures(folder, sections)
    lines = ["# Benchmark report", ""]
    lines += [", ".join(f"{name} {value}" for name, value in about.items()), "", f"`{command}`"]
    for section in sections:
        lines += ["", f"## {section.title}", "", section.text, ""]
        lines += table(section.columns, section.rows)
        if section.name in figures:
            lines += ["", f"![{section.title}]({figures[section.name].name})"]
    text, raw = (folder / name for name in FILES)
    write_text(text, "\n".join(lines) + "\n")
    write_text(
        raw, json.dumps({"about": about, "command": command, "measurements": records}, indent=1)
    )
    return [text, raw, *figures.values()]


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    if not columns:
        return []

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(columns), "|" + "---|" * len(columns), *(line(row) for row in rows)]


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
        save(figure, found[section.name], dpi=130)
    return found
