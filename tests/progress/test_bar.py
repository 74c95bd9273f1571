"""Progress bars behave: in a terminal, a pipe, a notebook, inside each other and in
threads; and leave nothing behind."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest

from quorum_attention.progress import progress_bar

# Bars wait less than half a second here.
START = (
    "import time, threading\n"
    "from quorum_attention.progress import bars, progress_bar\n"
    "bars._PATIENCE = 0.02\n"
)


def in_a_terminal(code: str, **streams: Any) -> tuple[int, subprocess.Popen[str]]:
    """A program whose output goes to a terminal, and that terminal."""
    above, below = pty.openpty()
    environment = {
        k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")
    }
    shell = 'stty cols 80 rows 40 <&2; exec "$@"'
    program = subprocess.Popen(
        ["bash", "-c", shell, "-", sys.executable, "-c", START + code],
        env=environment | {"TERM": "xterm", "LINES": "40"}, text=True,
        **dict.fromkeys(("stdin", "stdout", "stderr"), below) | streams,
    )  # fmt: skip
    os.close(below)
    return above, program


def shown_in_a_terminal(code: str) -> str:
    above, program = in_a_terminal(code)
    shown = b""
    with contextlib.suppress(OSError):  # nobody writes any more
        while part := os.read(above, 4096):
            shown += part
    os.close(above)
    assert program.wait(timeout=60) == 0, shown
    return shown.decode()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_work_goes_on_when_the_terminal_is_gone() -> None:
    """An ssh connection that ends, a closed window: writing to such a terminal is an
    error."""
    above, program = in_a_terminal(
        "with progress_bar() as update:\n"
        "    for done in range(100):\n"
        "        update(done, 100, 'forward'); time.sleep(0.001)\n"
        "    time.sleep(0.05)\n"
        "    print('drawn', flush=True)\n"
        "    input()\n"
        "    update(99, 100, 'another')\n"
        "print('done')\n",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert program.stdout is not None
    assert program.stdout.readline() == "drawn\n"
    assert os.read(above, 4096)
    os.close(above)
    assert program.communicate("\n", timeout=60)[0] == "done\n"
    assert program.returncode == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_terminal_shows_a_bar_and_keeps_nothing_of_it(fails: bool) -> None:
    """Neither of one whose work ends in the middle. No thread is started for it."""
    code = (
        "try:\n"
        "    with progress_bar() as update:\n"
        "        for done in range(5):\n"
        "            update(done + 1, 5, '[b]forward')\n"
        "            time.sleep(0.15)\n"
        "            assert threading.active_count() == 1\n"
        f"        assert not {fails}, 'after'\n"
        "    print('after')\n"
        "except AssertionError as error:\n"
        "    print(error)\n"
    )
    shown = shown_in_a_terminal(code)
    assert "━" in shown
    assert "5/5" in shown
    assert "[b]forward" in shown, "a label is no markup"
    assert "━" not in shown.rpartition("\x1b[2K")[2], "the bar is erased"


# How drawing may fail: at the first bar, and in the middle.
FAILURES = {
    "no thread": (
        'def refuse(thread): raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = refuse\n"
    ),
    "no memory for a module": "sys.modules['rich.progress'] = None\n",
    "no memory to start": "fails(rich.live.Live, 'start', MemoryError)\n",
    "no memory to draw": "fails(rich.live.Live, 'refresh', MemoryError)\n",
    "no memory in the middle": "fails(rich.live.Live, 'refresh', MemoryError, after=3)\n",
    "terminal in the middle": "fails(rich.console.Console, 'print', OSError, after=3)\n",
}
FAILS = (
    "import sys, rich.live, rich.console\n"
    "from quorum_attention.progress import lines\n"
    "lines._SECONDS = bars._REDRAW_SECONDS = 0.02\n"
    "def fails(kind, name, error, after=0):\n"
    "    usual, calls = getattr(kind, name), []\n"
    "    def maybe(*given, **more):\n"
    "        calls.append(name)\n"
    "        if len(calls) > after: raise error\n"
    "        return usual(*given, **more)\n"
    "    setattr(kind, name, maybe)\n"
)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_bar_that_cannot_be_drawn_ends_no_work(failure: str) -> None:
    """Lines follow, also those of a second call that shares the display; the cursor is
    back and streams are what they were."""
    code = (
        f"{FAILS}{FAILURES[failure]}"
        "streams = sys.stdout, sys.stderr\n"
        "with progress_bar() as update, progress_bar() as another:\n"
        "    for done in range(1, 11):\n"
        "        time.sleep(0.03)\n"
        "        update(done, 10, 'forward')\n"
        "        another(done, 20, 'backward')\n"
        "assert (sys.stdout, sys.stderr) == streams\n"
        "print('after')\n"
    )
    shown = shown_in_a_terminal(code)
    assert shown.endswith("after\r\n")
    assert shown.rfind("\x1b[?25h") >= shown.rfind("\x1b[?25l"), (
        "the cursor is seen again"
    )
    if failure == "no thread":
        assert "━" in shown
    else:
        assert "forward: 10 of 10 after" in shown
        assert re.search(r"backward: \d+ of 20 after", shown)


def test_a_pipe_gets_plain_lines(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar() as update:
        for done in range(1, 101):
            clock[0] += 1.0
            update(done, 100, "forward")
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == ""
    assert lines[0] == "forward: 10 of 100 after 10 s"
    assert lines[1] == "forward: 20 of 100 after 20 s, about 80 s left"
    assert lines[-1] == "forward: 100 of 100 after 100 s"
    assert len(lines) == 10
    assert "\x1b" not in printed.err
    with progress_bar() as update:
        update(1, 1, "forward")
        clock[0] += 90
        update(2, 1000, "backward")  # little is done, but it is time to say something
    assert capsys.readouterr().err == "backward: 2 of 1000 after 90 s\n"


@pytest.mark.parametrize("state", ["missing", "closed", "full"])
def test_a_log_that_cannot_be_written_ends_no_call(
    state: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    log = {"missing": None, "closed": io.StringIO(), "full": Full()}[state]
    if state == "closed":
        log.close()
    monkeypatch.setattr(sys, "stderr", log)
    with progress_bar() as update:
        clock[0] += 50
        update(1, 2, "forward")
