"""Tiles by verdict (the paper's census; nothing is run for it)."""

from __future__ import annotations

from quorum_attention.bench.runner import Runner
from quorum_attention.bench.settings import Section, Settings, short
from quorum_attention.decomposition import Decomposition


def run(settings: Settings, runner: Runner) -> list[Section]:
    """Masked, clear and mixed tiles of 128 x 128 at c = 7, causal, both layouts."""
    rows = []
    for tokens in (65_536, 262_144, 1_048_576):
        for levels in ((7,), (7, 7)):
            cells = [short(tokens), str(len(levels))]
            for layout in ("balanced", "aligned"):
                found = Decomposition(tokens, levels, layout).census(True)
                shares = (found.masked, found.clear, found.mixed)
                cells.append(" / ".join(f"{100 * share:.2f}" for share in shares))
            rows.append(cells)
    text = "Masked / clear / mixed tiles of all tasks in %. The paper's layout is balanced."
    columns = ["tokens", "depth", "balanced", "aligned"]
    return [Section("census", "Tile census", text, columns, rows)]
