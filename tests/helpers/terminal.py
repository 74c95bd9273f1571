"""Programs on a real pseudo-terminal, and what a person sees of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

ROWS = 50
# What most systems give a thread for its stack, which counts against a limit on memory.
_STACK_BYTES = 8 << 20
_NOT_PASSED_ON = (
    "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE",
    "TRITON_INTERPRET",
)  # fmt: skip
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|\x1b.|[^\x1b\r\n]+")


def in_a_terminal(
    arguments: Sequence[str], columns: int, folder: Path, **environment: str
) -> tuple[int, str]:
    """Run ``python ARGUMENTS`` on a terminal: its exit status, and all that it wrote.

    Triton's interpreter, which tests ask for, is not what a person has.
    """
    above, below = pty.openpty()
    fcntl.ioctl(above, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    variables = {
        name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON
    }
    program = subprocess.Popen(
        [sys.executable, *arguments], stdin=below, stdout=below, stderr=below, cwd=folder,
        env={**variables, "TERM": "xterm-256color", **environment}, preexec_fn=_usual_stacks,
    )  # fmt: skip
    os.close(below)
    written = b""
    try:
        with contextlib.suppress(OSError):  # nobody writes any more
            while part := os.read(above, 65536):
                written += part
        return program.wait(timeout=60), written.decode()
    finally:
        program.kill()
        os.close(above)


def _usual_stacks() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, most))


def seen(written: str) -> list[str]:
    """The lines that are on the screen in the end: what was erased is not."""
    lines, row, column = [""], 0, 0
    for part in _CONTROL.finditer(written):
        text, count, command = part[0], part[1], part[2]
        if text == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif text == "\r":
            column = 0
        elif command == "A":
            row = max(0, row - int(count or 1))
        elif command == "K":
            lines[row] = "" if count == "2" else lines[row][:column]
        elif not text.startswith("\x1b"):
            before = lines[row].ljust(column)
            lines[row] = before[:column] + text + before[column + len(text) :]
            column += len(text)
    return lines
