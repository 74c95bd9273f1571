"""``results.json`` holds every measurement as soon as it is made; ``report.md`` has the tables."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import quorum_attention
from quorum_attention.bench.cases import Section, Settings, short
from quorum_attention.bench.child import FAILED, Answer, Spec, run_child
from quorum_attention.sizes import format_bytes, format_seconds
from quorum_attention.writing import write_text

NAME, REPORT = "results.json", "report.md"
# The entries of ``about`` that may differ between runs that add to one file.
_MAY_DIFFER = ("date", "matplotlib")


def about(device: str) -> dict[str, str]:
    """What is measured on: device, versions and date, nothing that names a particular machine."""
    found = {"device": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    source = hashlib.sha256()  # tells apart versions with the same number
    for path in sorted(Path(quorum_attention.__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    if device != "cpu":
        found = {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda),
                 "cudnn": str(torch.backends.cudnn.version())}  # fmt: skip
    found |= {
        "quorum-attention": quorum_attention.__version__, "source": source.hexdigest()[:12],
        "torch": torch.__version__, "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    for package in ("triton", "stream-cqsa", "matplotlib"):
        if importlib.util.find_spec(package.replace("-", "_")):
            found[package] = importlib.metadata.version(package)
    return found


class Results:
    """The measurements in a folder; all have one machine, one version and the same settings.

    Attributes:
        records: every measurement as plain types, in order.
        commands: those that measured.
    """

    def __init__(self, folder: Path, settings: Settings, about: dict[str, str]) -> None:
        self.path, self.about = folder / NAME, about
        self.commands: list[str] = []
        self.records: list[dict[str, Any]] = []
        self._settings = _plain(asdict(settings))
        if self.path.exists():
            self._take_over()

    def kept(self, experiment: str, spec: Spec) -> Answer:
        """The stored answer to ``spec``.

        Raises:
            KeyError: there is none.
        """
        asked = _plain(asdict(spec))
        for record in self.records:
            if record["spec"] == asked:
                return Answer(**record["answer"])
        raise KeyError(experiment)

    def measure(
        self, experiment: str, spec: Spec, *, timeout: float, show: Callable[[str], None],
        done: Callable[[str], None],
    ) -> Answer:  # fmt: skip
        """The stored answer, or that of a new process; one that failed is measured again."""
        try:
            found = self.kept(experiment, spec)
        except KeyError:
            found = Answer(FAILED)
        if found.status != FAILED:
            return found
        passes = "forward+backward" if spec.backward else "forward"
        within = "" if spec.limit_bytes is None else f" within {format_bytes(spec.limit_bytes)}"
        what = f"{experiment}: {spec.method}, {short(spec.tokens)} {spec.dtype}, {passes}{within}"
        show(what)
        answer = run_child(spec, timeout)
        # Printed first, so that it is not lost if it cannot be written.
        done(f"{what}: {_summary(answer)}")
        self.add(experiment, spec, answer)
        return answer

    def add(self, experiment: str, spec: Spec, answer: Answer) -> None:
        """Add a measurement; it replaces an earlier one of the same spec.

        Raises:
            OSError: it cannot be written; the file is unchanged.
        """
        asked = _plain(asdict(spec))
        kept = [record for record in self.records if record["spec"] != asked]
        found = {"experiment": experiment, "spec": asked, "answer": _plain(asdict(answer))}
        self.write([*kept, found])

    def write(self, records: list[dict[str, Any]]) -> None:
        """Replace the file's measurements."""
        whole = {
            "about": self.about, "settings": self._settings, "commands": self.commands,
            "measurements": records,
        }  # fmt: skip
        with _named(self.path, "; what it had before this it still has"):
            write_text(self.path, json.dumps(whole, indent=1))
        self.records = records

    def _take_over(self) -> None:
        """Read the file, if this run can add to it."""
        way_out = "name another --output, or --fresh sets it aside and begins anew"
        try:
            there = json.loads(self.path.read_text(encoding="utf-8"))
            then = {**there["settings"], **there["about"]}
            self.commands, self.records = list(there["commands"]), list(there["measurements"])
            for record in self.records:
                Spec(**record["spec"])
                Answer(**record["answer"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{self.path} cannot be added to, it is no file of this version's bench: {way_out}"
            ) from error
        now = {**self._settings, **self.about}
        for name in sorted(then.keys() | now.keys()):
            if name not in _MAY_DIFFER and then.get(name) != now.get(name):
                raise ValueError(
                    f"{self.path} was measured with {name} {then.get(name)}, and here it is "
                    f"{now.get(name)}: {way_out}"
                )


def _summary(answer: Answer) -> str:
    if not answer.ok:
        return f"{answer.status}: {answer.reason}" if answer.reason else answer.status
    parts = [format_seconds(sum(answer.first_seconds))] if answer.first_seconds else []
    if answer.peak_bytes is not None:
        parts.append(f"peak {format_bytes(answer.peak_bytes)}")
    parts += [f"{name} {max(errors):.1e}" for name, errors in answer.errors.items()]
    for name, apart in answer.differences.items():
        parts.append(f"{name} {max(largest for largest, _ in apart):.1e}")
    return ", ".join(parts) or answer.status


@contextmanager
def _named(path: Path, more: str = "") -> Iterator[None]:
    """Have an error name the file that could not be written."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it names the file already
            raise
        raise OSError(f"{path} cannot be written: {error.strerror}{more}") from error


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock ``folder`` during the block, so that no other run adds to its results.

    Raises:
        ValueError: another run has locked it.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"another run is adding to {folder}: name another --output") from None
    finally:
        os.close(handle)


def set_aside(folder: Path) -> None:
    """Move results, report and figures into a new folder inside ``folder``."""
    names = [NAME, REPORT, *(path.name for path in folder.glob("cost-*.png"))]
    there = [name for name in names if (folder / name).exists()]
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    for name in there:
        (folder / f"earlier-{number}").mkdir(exist_ok=True)
        os.rename(folder / name, folder / f"earlier-{number}" / name)


def write_report(folder: Path, sections: list[Section], results: Results) -> list[Path]:
    """Write ``report.md`` and a figure for every section with lines; returns the files."""
    lines = ["# Benchmark report", ""]
    lines += [", ".join(f"{name} {value}" for name, value in results.about.items()), ""]
    lines += [f"`{command}`  " for command in results.commands]
    figures = []
    for section in sections:
        lines += ["", f"## {section.title}", "", section.text, "", *table(section)]
        if section.lines and importlib.util.find_spec("matplotlib") is not None:
            kind = "both" if "backward" in section.title else "forward"
            figures.append(folder / f"cost-{kind}.png")
            _draw(section, figures[-1])
            lines += ["", f"![{section.title}]({figures[-1].name})"]
    with _named(folder / REPORT):
        write_text(folder / REPORT, "\n".join(lines) + "\n")
    return [folder / REPORT, *figures]


def table(section: Section) -> list[str]:
    """Lines of a Markdown table."""
    cells = [section.columns, ["---"] * len(section.columns), *section.rows]
    shown = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in cells]
    return [f"| {row} |" for row in shown] if section.columns else []


def _draw(section: Section, path: Path) -> None:
    from quorum_attention.pictures.canvas import new_figure, own_style, save

    with own_style():
        figure = new_figure(8, 4.5)
        axes = figure.add_subplot()
        for label, points in (section.lines or {}).items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens of the sequence")
        axes.set_ylabel("time over the reference's (lower is faster)")
        axes.set_title(section.title)
        axes.legend()
        with _named(path):
            save(figure, path, dpi=130)


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """``value`` as it is after a round trip through JSON."""
    found: dict[str, Any] = json.loads(json.dumps(value))
    return found
