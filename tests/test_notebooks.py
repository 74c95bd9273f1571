"""What a notebook shows of a plan, an estimate and a report: the same words, escaped, in any
theme."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape

import pytest
import torch

import quorum_attention as qa
from quorum_attention.execution.report import PassReport
from quorum_attention.html_table import html_table

CALL = {"is_causal": True, "budget": "2GiB", "device": "cuda"}


def texts(html: str) -> list[str]:
    """The texts of a page that is well-formed, in order."""
    root = ET.fromstring(f"<div>{html}</div>")
    return [text.strip() for text in root.itertext() if text.strip()]


def words(html: str) -> str:
    return " ".join(texts(html.split('<div style="margin')[0]))


def test_a_plan_says_the_same_as_in_words() -> None:
    plan = qa.plan(1_048_576, levels=(7,), **CALL)
    html = plan._repr_html_()
    said = plan.describe().splitlines()
    assert said[0] in words(html)
    for line in said[1:]:
        label, _, text = line.partition(": ")
        assert label in texts(html)
        assert text in texts(html)


@pytest.mark.parametrize("levels", [(), (7,), (57,), (553,), (7, 7), (57, 57)])
def test_pictures_that_would_burden_a_page_are_left_out(levels: tuple[int, ...]) -> None:
    pytest.importorskip("matplotlib")
    html = qa.plan(1_048_576, levels=levels, **CALL)._repr_html_()
    assert len(html) < 400_000
    assert ("<img" in html) == (levels not in [(553,)])
    assert texts(html), "it is well-formed"


@pytest.mark.parametrize("name", ["matplotlib", "matplotlib.figure"])
def test_without_matplotlib_there_is_the_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed, or in a build that does not fit this NumPy: importing it is an error."""
    monkeypatch.setitem(sys.modules, name, None)
    html = qa.plan(1_048_576, levels=(7,), **CALL)._repr_html_()
    assert "<img" not in html
    assert "<table" in html


def test_an_estimate_has_both_plans_and_the_alternatives() -> None:
    found = qa.estimate(262_144, **CALL)
    shown = texts(found._repr_html_())
    for plan in (found.forward, found.backward):
        assert f"Plan: {plan.describe().splitlines()[0]}" in shown
    for other in found.alternatives:
        assert (" x ".join(map(str, other.levels)) or "none") in shown
    alone = replace(found, alternatives=())
    assert "none of the other levels" in words(alone._repr_html_())


def test_a_report_has_a_column_for_each_pass() -> None:
    report = qa.Report()
    assert "nothing has run yet" in report._repr_html_()
    q, k, v = (torch.randn(1, 2, 300, 8, requires_grad=True) for _ in range(3))
    out = qa.attention(q, k, v, depth=1, report=report, dropout_p=0.1, dropout_seed=3)
    assert "forward" in texts(report._repr_html_())
    assert "backward" not in texts(report._repr_html_())
    out.sum().backward()
    shown = texts(report._repr_html_())
    assert shown[1:3] == ["forward", "backward"]
    assert shown.count("0.1 of seed 3") == 2
    assert "1 forward, 1 backward, 2 of them cut" in texts(report.total._repr_html_())


def test_a_report_says_all_that_happened() -> None:
    part = PassReport(
        kernel="<b>", levels=(7,), planned_levels=(), n_groups=1, heads_per_group=2, n_cap=1,
        accumulator="host", recoveries=["one <i>", "two"], recovery_seconds=1.5, left_out=0.25,
        repeated_units=3, peak_bytes=1 << 20, budget_bytes=1 << 21,
    )  # fmt: skip
    report = qa.Report(forward=part, mask_gradient=["tile by tile"])
    html = report._repr_html_()
    assert "<b>" not in html
    assert "<i>" not in html
    shown = texts(html)
    for text in ("<b>", "one <i>; two", "1.50 s", "25%", "3", "1.00 MiB", "2.00 MiB"):
        assert text in shown
    assert "tile by tile" in shown


def test_tables_escape_and_fill_their_width() -> None:
    html = html_table("<c> & d", [("a", ["1", "<x>"]), ("b", ["one for both"])], ["p", 'q"'])
    assert 'colspan="2"' in html
    assert html.count("colspan") == 1
    assert texts(html) == ["<c> & d", "p", 'q"', "a", "1", "<x>", "b", "one for both"]
    assert "<x>" not in html
    assert unescape(html).count("<x>") == 1
    assert "color:#" not in html
    assert "background:#" not in html
