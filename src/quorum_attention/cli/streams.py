"""The standard streams as a command needs them: there, and able to print any name."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper


def complete_streams() -> None:
    """Open what is missing of stdin, stdout and stderr on nothing, and have stdout print names that
    its encoding does not know.

    Who starts a command may close its streams. The next file that is opened gets such a number,
    so whatever a library wrote to stderr would be written into a result. And a name that cannot be
    printed is no reason to fail after its file is written.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def nobody_reads() -> None:
    """Whoever read stdout has had enough (``| head``): what is still printed goes nowhere, and work
    and exit status are what they would be."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


__all__ = ["complete_streams", "nobody_reads"]
