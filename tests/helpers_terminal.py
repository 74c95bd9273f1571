"""Programs in a terminal, and what is on its screen when they end."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

_PART = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def in_a_terminal(code: str, columns: int, stdout: str | None = None) -> str:
    """What a program shows in a terminal of so many columns; ``stdout``: a file for its output."""
    above, below = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    environment |= {"TERM": "xterm", "LINES": "40"}
    sent = f" > {stdout}" if stdout else ""
    command = [
        "bash",
        "-c",
        f'stty cols {columns} rows 40; exec "$@"{sent}',
        "-",
        sys.executable,
        "-c",
    ]
    done = subprocess.Popen(
        [*command, code], stdin=below, stdout=below, stderr=below, env=environment
    )
    os.close(below)
    shown = b""
    while True:
        try:
            part = os.read(above, 4096)
        except OSError:  # nobody writes any more
            break
        if not part:
            break
        shown += part
    os.close(above)
    assert done.wait(timeout=60) == 0, shown
    return shown.decode()


def screen(shown: str) -> list[str]:
    """The lines of a terminal that was sent ``shown``: carriage returns, lines up and lines erased
    are obeyed, colours left out."""
    lines, row, column = [""], 0, 0
    for match in _PART.finditer(shown):
        number, code, control, text = match.groups()
        if control == "\r":
            column = 0
        elif control == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif code == "A":
            row = max(0, row - int(number or 1))
        elif code == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]
