"""What a user sees: in a terminal, in a pipe, in 60 columns; the same words everywhere."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import quorum_attention
import quorum_attention as qa
from quorum_attention.cli import main
from quorum_attention.cli.output import say, show_table


def test_the_version_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from quorum_attention.cli import main\n"
        "try:\n"
        "    main(['--version'])\n"
        "except SystemExit as ended:\n"
        "    assert ended.code == 0\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == qa.__version__


@pytest.mark.parametrize("columns", [40, 200])
def test_tables_fit_whatever_the_width(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    headings = [f"column {i}" for i in range(12)]
    rows = [[str(i) * 3 for i in range(12)] for _ in range(9)]
    show_table(headings, rows)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns
    assert "…" not in printed
    for word in " ".join([*headings, *itertools.chain(*rows)]).split():
        assert word in printed


def test_what_is_printed_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    say('pip install "quorum-attention[draw]" [bold]x[/bold]')
    assert '[draw]" [bold]x[/bold]' in capsys.readouterr().out
    show_table(["a"], [["[red]x[/red]"]])
    assert "[red]x[/red]" in capsys.readouterr().out


# What some library would write to a stream of the process, while results are computed. The command
# is changed when it is loaded, which is when it loads torch: streams are completed before.
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
RUN = ["run", "--device", "cpu", "q.npy", "k.npy", "v.npy"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "qkv":
        array = np.random.default_rng(ord(name)).standard_normal((1, 2, 40, 8))
        np.save(tmp_path / f"{name}.npy", array.astype(np.float32))
    return tmp_path


def run(folder: Path, out: str, closed: str = "", **environment: str) -> tuple[int, bytes]:
    shell = f'exec "$@" {closed}'
    # In another folder a relative path of this one would lead nowhere, or to another version.
    environment["PYTHONPATH"] = str(Path(quorum_attention.__file__).parents[1])
    done = subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-c", LOUD, *RUN, out],
        cwd=folder, env={**os.environ, **environment}, capture_output=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_what_libraries_say_goes_into_no_result_though_streams_are_closed(folder: Path) -> None:
    names = [str(folder / f"{name}.npy") for name in ("q", "k", "v", "whole")]
    assert main(["run", "--device", "cpu", *names]) == 0
    assert run(folder, "out.npy", "<&- >&- 2>&-")[0] == 0
    assert (folder / "out.npy").read_bytes() == (folder / "whole.npy").read_bytes()
