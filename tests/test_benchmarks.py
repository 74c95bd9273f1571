"""The cases of ``benchmarks/run.py`` run, and write what they say."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers.docs import ROOT
from matplotlib.text import Text
from matplotlib.transforms import BboxBase

sys.path.insert(0, str(ROOT / "benchmarks"))
import pictures
import run
import tables
from runs import RESULTS, Row, Run
from table_text import Line, Table
from tables import present_text

FIGURES = pictures.figures()


@pytest.mark.slow_but_first
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "arguments",
    [
        ["small", "--seconds=0.001"],
        ["plain", f"--before={ROOT / 'src'}", "--cases=small", "--rounds=2"],
        ["wrapped", "--tokens=64", "--draws=1"],
        [
            "entries",
            "--share=0.001",
            "--rows=permuted,lengths",
            "--rounds=1",
            "--cpu-time",
        ],
        ["prompt", "--ways=offloaded,ours", "--tokens=300", "--generate=2"],
        [
            "devices",
            "--devices=cpu,cpu",
            "--tokens=600",
            "--rounds=2",
            "--budgets=1GiB",
            "--kill",
        ],
        [
            "ranks",
            "--ranks=2",
            "--divide=512",
            "--cases=8192-a-gpu",
            "--methods=ours",
            "--rounds=1",
        ],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_case_writes_raw_figures(arguments: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "results" / "of a case"
    run.main([*arguments, f"--results={folder}"])
    (file,) = folder.iterdir()
    content = json.loads(file.read_text(encoding="utf-8"))
    origin = content["run"]
    rows = content["rows"]
    assert origin["command"].startswith(f"python benchmarks/run.py {arguments[0]}")
    assert str(tmp_path) not in json.dumps(origin), (
        "a record names no place of a machine"
    )
    assert origin["versions"]["torch"] == torch.__version__
    assert file.name.startswith(f"{origin['date']}-cpu-{arguments[0]}-")
    case = arguments[0]
    if case == "small":
        assert rows["1 x 8 x 1 x 1000 float32"]["forward"]["ratio"] > 0
    elif case == "plain":
        assert set(rows["small"]) == {"before", "now", "peak_bytes"}
        assert len(rows["small"]["before"]) == 2
    elif case == "entries":
        assert all(row["difference"] < 1e-5 for row in rows.values())
    elif case == "wrapped":
        assert all(0 <= most < 1e-2 for most, _ in rows["dense float16"]["out"])
    elif case == "prompt":
        assert len(rows) == 2
        assert all(row["prefill_seconds"] > 0 for row in rows.values())
    elif case == "devices":
        assert len(rows["2 devices, 1GiB"]["all"]) == 2
        killed = rows["2 devices, 1GiB, a worker killed"]
        assert len(killed["over_ideal"]) == len(killed["moments"]) > 1
    else:
        assert all(s > 0 for s in rows["2 ranks, 8192-a-gpu"]["ours"])


def test_help_names_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    run.main(["--help"])
    text = capsys.readouterr().out
    for case in run.CASES:
        assert f"\n{case} " in text
        assert (ROOT / "benchmarks" / "cases" / f"{case}.py").is_file()


@pytest.mark.parametrize("name", FIGURES)
def test_no_label_of_a_picture_lies_outside(name: str) -> None:
    """A title or a number was cut off at the edge of the picture."""
    figure = FIGURES[name]
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert axes.get_title()
        assert axes.get_xlabel()
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            assert lies_in(text, figure.bbox), text
        assert axes.texts
        for text in axes.texts:
            assert lies_in(text, axes.bbox), text


def lies_in(text: Text, frame: BboxBase) -> bool:
    box = text.get_window_extent()
    corners = ((box.x0, box.y0), (box.x1, box.y1))
    return all(frame.contains(x, y) for x, y in corners)


def test_a_row_of_older_code_is_on_the_older_page_until_it_is_measured_again() -> None:
    paper = Line(["paper"])
    older = line_of("2 s", "2026-11-01")
    present = line_of("1 s", "2027-01-01")
    table = Table(["call"], [paper, older, present])
    assert table.of_age(is_old=True).lines == [paper, older]
    text = present_text(table, "A call, cut")
    assert "| 1 s | abc |" in text
    assert "2 s" not in text
    assert "(older-results.md#a-call-cut)" in text

    nothing_new = Table(["call"], [paper, older])
    text = present_text(nothing_new, "A call, cut")
    assert "|" not in text, "the paper's figures alone are no answer"
    assert "(older-results.md#a-call-cut)" in text

    measured_again = Table(["call"], [paper, present])
    assert "older" not in present_text(measured_again, "A call, cut")
    assert measured_again.of_age(is_old=True).runs() == []


def test_readme_and_results_show_the_present_code_alone() -> None:
    """README quoted figures of code that had changed since."""
    for page in (tables.README, tables.PAGE):
        links = re.findall(r"benchmarks/results/(\d[\w-]+[.]json)", page.read_text())
        assert links
        for name in links:
            content = json.loads((RESULTS / name).read_text(encoding="utf-8"))
            shown = Run(name, content["run"], {})
            assert not shown.is_old, f"{page.name} shows {name}"


def line_of(cell: str, date: str) -> Line:
    """A line with one measurement of a date."""
    versions = {"torch": "2.11.0"}
    origin = {"date": date, "commit": "abc", "command": "run", "versions": versions}
    run_of_date = Run(f"{date}.json", {**origin, "machine": "CPU"}, {})
    return Line([cell], [Row(None, run_of_date)])


@pytest.mark.slow
def test_a_long_step_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All three parts on a text so short that it takes seconds."""
    pytest.importorskip("transformers")
    step = importlib.import_module("cases.step")
    sizes = {"num_hidden_layers": 2, "vocab_size": 4096}
    monkeypatch.setitem(step.SHAPES, "small", {**step.SHAPES["small"], **sizes})
    monkeypatch.setattr("quorum_attention.recipes.step_estimate.LOSS_BYTES", 1 << 20)
    asked = (
        "equal-at=96 tokens=128 layers=1,2 first=32 most=256 memory=20MiB tile=64 "
        "longer=4"
    )
    run.main(
        [
            "step",
            "--device=cpu",
            *(f"--{word}" for word in asked.split()),
            f"--results={tmp_path}",
        ]
    )
    (file,) = tmp_path.iterdir()
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    equal = rows["small equal 96"]
    assert equal["equal"], equal
    # Of random weights: as likely one token as another.
    assert equal["loss"] == pytest.approx(math.log(4096), rel=0.2)
    assert [one["layers"] for one in rows["small long 128"]["steps"]] == [1, 2]
    assert not rows["small long 128"]["extrapolated"]
    ways = {way: rows[f"small {way} in {20 << 20}"] for way in ("sdpa", "everything")}
    assert ways["sdpa"]["ran"]
    assert ways["sdpa"]["points"][-1]["peak"] <= 20 << 20
    assert ways["everything"]["tokens"] >= 2 * ways["sdpa"]["tokens"]
    assert "by the line: not run" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_decoder_that_takes_its_attention_by_name_and_one_that_does_not() -> None:
    """``decoders.py`` says of both what ``docs/decoders.md`` says."""
    pytest.importorskip("transformers")
    decoders = importlib.import_module("decoders")

    rows = [decoders.try_kind(kind) for kind in ("llama", "bloom")]
    versions = {"transformers": "5.24.0", "torch": "2.13.0"}
    page = decoders.page([{"versions": versions, "rows": rows}])
    stored = (ROOT / "docs" / "decoders.md").read_text(encoding="utf-8")
    cells = {
        line.split(" | ")[0]: line.split(" | ")[1:]
        for line in page.splitlines()
        if line.startswith("| ")
    }
    assert cells["| llama"][:4] == ["right", "yes", "yes", "yes"]
    assert cells["| bloom"][0] == "-"
    for kind in ("llama", "bloom"):
        assert f"| {kind} | {cells[f'| {kind}'][0]} |" in stored
    assert "| `long_context`: wrong | 0 | 0 |" in stored
