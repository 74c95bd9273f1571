"""What works for a process ends with it: it would take memory and time that others count on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_processes import until

import quorum_attention
from quorum_attention.bench import child

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux ends them")
SOURCE = str(Path(quorum_attention.__file__).parents[1])
# The beginning of a child of ``recover``, which tells its number, and then works for long.
WORK = (
    child.CODE.partition("from quorum_attention.bench.child")[0]
    + """
import os, time

os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
"""
)
PARENT = f"""
import os, subprocess, sys

subprocess.run([sys.executable, "-c", {WORK!r}, sys.argv[1] or str(os.getpid())])
"""


def run(parent: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    command = [sys.executable, "-c", PARENT, parent]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    with run() as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    until(lambda: not alive(child), 60)


def test_a_child_whose_parent_has_ended_before_ends_at_once() -> None:
    with run("1") as parent:  # not the one that started it
        assert parent.communicate(timeout=120)[0] == ""


def alive(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
