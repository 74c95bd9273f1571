"""The paper's figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "docs" / "data" / "paper.json"
PAPER: dict[str, Any] = json.loads(PATH.read_text("utf-8"))
