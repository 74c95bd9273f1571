"""What a notebook shows of plans, estimates and reports: their words, escaped, and a picture."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

import pytest
import torch

import quorum_attention as qa

CALL = {"is_causal": True, "budget": "2GiB", "device": "cuda"}


def words(html: str) -> str:
    """The text of a page that is well-formed."""
    return "".join(ET.fromstring(f"<div>{html}</div>").itertext())


def test_they_say_the_same_as_in_words() -> None:
    report = qa.Report()
    assert words(report._repr_html_()) == "nothing has run yet"
    q, k, v = (torch.randn(1, 2, 300, 8, requires_grad=True) for _ in range(3))
    qa.attention(q, k, v, depth=1, report=report).sum().backward()
    report.mask_gradient = ["<b> & tile by tile"]
    found = qa.estimate(262_144, **CALL)
    for shown in (found, found.forward, report, report.total):
        assert words(shown._repr_html_()) == str(shown)
    assert "1 forward, 1 backward, 2 of them cut" in str(report.total)


@pytest.mark.parametrize("levels", [(), (7,), (57,), (553,), (7, 7), (57, 57)])
def test_pictures_that_would_burden_a_page_are_left_out(levels: tuple[int, ...]) -> None:
    pytest.importorskip("matplotlib")
    html = qa.plan(1_048_576, levels=levels, **CALL)._repr_html_()
    assert len(html) < 400_000
    assert ("<img" in html) == (levels not in [(553,)])
    assert words(html), "it is well-formed"


@pytest.mark.parametrize("name", ["matplotlib", "matplotlib.figure"])
def test_without_matplotlib_there_are_the_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed, or in a build that does not fit this NumPy: importing it is an error."""
    monkeypatch.setitem(sys.modules, name, None)
    plan = qa.plan(1_048_576, levels=(7,), **CALL)
    assert words(plan._repr_html_()) == plan.describe()
