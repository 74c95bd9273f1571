from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition, Pairs
from quorum_attention.decomposition.bands import Band
from quorum_attention.pictures import draw_coverage
from quorum_attention.pictures.geometry import blocks

DECOMPOSITIONS = [
    Decomposition(1_048_576, (57, 57)),
    Decomposition(65_536, (3, 7), layout="balanced"),
    Decomposition(5, (7,)),
    Decomposition(0, (7,)),
]


def colours_of(path):
    image = pytest.importorskip("matplotlib.image").imread(path)
    return {tuple(row) for row in image[::7, ::7, :3].round(2).reshape(-1, 3).tolist()}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("decomposition", "n_queries", "n_keys"),
    [
        *((cut, cut.n_tokens, cut.n_tokens) for cut in DECOMPOSITIONS),
        *((Decomposition(4_096, (7,)), *n) for n in ((100, 4_096), (0, 4_096))),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_coverage_is_drawn(decomposition, n_queries, n_keys, is_causal, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "coverage.png"
    draw_coverage(decomposition, Pairs(n_queries, n_keys, is_causal), path)
    assert path.stat().st_size > 5_000
    assert min(n_queries, n_keys) < 4_000 or len(colours_of(path)) > 7


@pytest.mark.slow
def test_a_report_is_drawn(tmp_path):
    """One row a pass, wall clock and stages; after a monolithic call, that there are
    none."""
    pytest.importorskip("matplotlib")
    report, before = qa.Report(), "matplotlib.pyplot" in sys.modules
    with pytest.raises(ValueError, match="nothing has run yet"):
        report.draw(tmp_path / "none.svg")
    q, k, v = (torch.randn(1, 2, 300, 8, requires_grad=True) for _ in range(3))
    plan = qa.plan(300, heads=2, head_dim=8, dtype=torch.float32, levels=(7,), tile=16)
    out = qa.attention(q, k, v, plan=plan, report=report)
    report.draw(tmp_path / "forward.png")
    out.sum().backward()
    report.draw(tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 1.3 * (
        tmp_path / "forward.png"
    ).stat().st_size
    assert len(colours_of(tmp_path / "both.png")) > 8
    assert before or "matplotlib.pyplot" not in sys.modules, "pyplot is left alone"


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("layout", ["aligned", "balanced"])
@pytest.mark.parametrize("levels", [(), (7, 3), (13,)])
@pytest.mark.parametrize("window", [None, (9, 3)])
def test_blocks_cover_every_pair_once(levels, layout, is_causal, window):
    verdict = None if window is None else Band(-window[0], window[1]).verdict
    seen, q, k = np.zeros((60, 60), int), *np.ogrid[:60, :60]
    for task in Decomposition(60, levels, layout=layout, tile=2).tasks():
        for block in blocks(task, Pairs(50, 40, is_causal, verdict)):
            inside = (q >= block.query_start) & (q < block.query_stop)
            inside = inside & (k >= block.key_start) & (k < block.key_stop)
            seen += inside & (
                not block.causal or (k - block.key_start <= q - block.query_start)
            )
    wanted = (q < 50) & (k < 40) & ((not is_causal) | (k <= q))
    wanted = wanted & ((window is None) | ((q - k >= -3) & (q - k <= 9)))
    assert (seen == wanted).all()


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
