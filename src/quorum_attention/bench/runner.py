"""Runs measurements, each in a fresh process, and keeps every spec with its answer."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quorum_attention.bench.spec import FAILED, Answer, Spec

Told = Callable[[Spec, Answer], None]


class Runner:
    """Measures; remembers.

    Args:
        timeout: seconds after which a measurement is given up.
        told: called with every finished measurement.

    Attributes:
        records: every measurement as plain types, in order.
    """

    def __init__(self, timeout: float = 1800.0, told: Told | None = None) -> None:
        self.timeout = timeout
        self.records: list[dict[str, Any]] = []
        self._told = told

    def measure(self, spec: Spec, experiment: str) -> Answer:
        """The answer to ``spec``; a crash or a timeout is an answer."""
        with tempfile.TemporaryDirectory() as folder:
            asked, answered = Path(folder, "spec.json"), Path(folder, "answer.json")
            asked.write_text(json.dumps(asdict(spec)), encoding="utf-8")
            answer = self._run(asked, answered)
        self.records.append({"experiment": experiment, **asdict(spec), "answer": asdict(answer)})
        if self._told is not None:
            self._told(spec, answer)
        return answer

    def _run(self, asked: Path, answered: Path) -> Answer:
        command = [sys.executable, "-m", "quorum_attention.bench.child", str(asked), str(answered)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=self.timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return Answer(FAILED, f"not done after {self.timeout:.0f} s")
        if done.returncode == 0 and answered.exists():
            return Answer(**json.loads(answered.read_text(encoding="utf-8")))
        said = [line for line in done.stderr.splitlines() if line.strip()]
        last = said[-1].strip() if said else "without a word"
        return Answer(FAILED, f"the process ended with {done.returncode}: {last}")
