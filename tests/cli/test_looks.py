"""What a user sees: in a terminal, in a pipe, in 60 columns; the same words
everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.docs import QWEN3_8B

import quorum_attention as qa
from quorum_attention.bench.measurement import Outcome
from quorum_attention.checking import check_kernel
from quorum_attention.cli import bench, check, doctor, main
from quorum_attention.cli.output import say, show_table


@pytest.mark.parametrize(
    "command",
    [
        "plan --tokens 128K --causal --device cuda --budget 128MiB --census",
        "estimate --tokens 128K --device cuda --budget 128MiB",
        "estimate --tokens 16K --device cuda --model config.json --memory 80GiB",
        "check dense --tokens 24",
        "doctor",
        "bench --max-tokens 1M --methods sdpa quorum-depth-1 --output out",
    ],
)
def test_sixty_columns_are_enough(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(QWEN3_8B))
    errors = {name: [1.234e-5] for name in ("out", "dQ", "dK", "dV")}
    measured = Outcome(errors=errors, forward_seconds=[1e-4], peak_bytes=1001 << 20)
    monkeypatch.setattr(bench, "run_child", lambda spec, timeout: measured)
    # Triton's interpreter would take ten seconds for the native one.
    without_native = {
        name: kernel for name, kernel in doctor.kernels().items() if name != "native"
    }
    monkeypatch.setattr(doctor, "kernels", lambda: without_native)
    # A kernel is checked once for both widths.
    monkeypatch.setattr(check, "check_kernel", cache(check_kernel))
    words = []
    for columns in (60, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(command.split()) == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= columns
        words.append(Counter(re.sub(r"[\d.]+(e-\d+)?|/\S*", "", printed).split()))
    assert words[0] == words[1]


def test_what_is_printed_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    say('pip install ".[draw]" [bold]x[/bold]')
    assert '[draw]" [bold]x[/bold]' in capsys.readouterr().out
    show_table(["a"], [["[red]x[/red]"]])
    assert "[red]x[/red]" in capsys.readouterr().out


def test_the_version_needs_no_torch() -> None:
    code = "import sys; sys.modules |= {'torch': None, 'numpy': None}\n"
    code += "from quorum_attention.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True
    )
    assert done.stdout.strip() == qa.__version__, done.stderr


# What some library would write to a stream of the process, while results are computed.
# The command is changed when it is loaded, which is when it loads torch: streams are
# completed before.
LOUD = """
import os, sys
from quorum_attention import cli

def changed(name):
    from quorum_attention.files.compute import compute_here

    def loud(work, parts):
        for part in compute_here(work, parts):
            for number in (1, 2):
                os.write(number, b"a warning of a library " * 20)
            yield part

    run = load(name)
    run._computer = lambda options: loud
    return run

load, cli.import_module = cli.import_module, changed
sys.exit(cli.main())
"""


@pytest.mark.slow
def test_what_libraries_say_goes_into_no_result_though_streams_are_closed(
    tmp_path: Path,
) -> None:
    for name in "qkv":
        array = np.random.default_rng(ord(name)).standard_normal(
            (1, 2, 40, 8), np.float32
        )
        np.save(tmp_path / f"{name}.npy", array)
    run = ["run", "--device", "cpu", *(f"{tmp_path}/{name}.npy" for name in "qkv")]
    assert main([*run, f"{tmp_path}/whole.npy"]) == 0
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", LOUD]
    environment = {**os.environ, "PYTHONPATH": str(Path(qa.__file__).parents[1])}
    subprocess.run([*closed, *run, f"{tmp_path}/out.npy"], env=environment, check=True)
    assert (tmp_path / "out.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
