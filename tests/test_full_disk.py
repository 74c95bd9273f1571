"""A disk that is full, met by each that writes: what there was
stays as it was, nothing is left behind, and it is said, but of what only saves time."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers_full_disk import NO_MOUNT, WRITERS
from helpers_processes import run_python

_MAIN = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import helpers_full_disk
helpers_full_disk.main()
"""


@functools.cache
def found() -> Any:
    """What became of all writers."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_python(_MAIN, folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", list(WRITERS))
def test_without_room_nothing_changes(name: str) -> None:
    if found() == NO_MOUNT:
        pytest.skip(NO_MOUNT)
    became, writer = found()[name], WRITERS[name]
    assert became["before"][0] == became["after"][0] == "", became
    assert became["outcome"] == writer.outcome, became
    assert became["unchanged"], became["names"]
    assert writer.says in became["said"]
    assert writer.file in became["said"], "which file it was"
    assert became["said"].count("\n") == (writer.outcome == "2")
    # It would have been noticed if it could write.
    assert became["wrote"] or name == "scratch"
