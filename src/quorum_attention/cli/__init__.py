"""The command ``quorum-attention``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

import quorum_attention
from quorum_attention.cli.parser import Parser
from quorum_attention.cli.process import (
    Stopped,
    complete_streams,
    ignore_broken_pipe,
    stoppable,
)
from quorum_attention.progress.lines import line

FAILED, USER_ERROR = 1, 2
COMMANDS = (
    "recover",
    "run",
    "plan",
    "estimate",
    "doctor",
    "check",
    "calibrate",
    "bench",
)


def parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The command line's parser, with the command that ``arguments`` name or else all
    commands.

    Commands import torch, which takes seconds. ``--version`` needs no command and
    imports none.
    """
    top = Parser(
        prog="quorum-attention",
        description="Exact attention inside a memory budget, "
        "for calls that ran out of memory.",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=28),
    )
    top.add_argument(
        "--version", action="version", version=quorum_attention.__version__
    )
    if "--version" in arguments[:1]:
        return top
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    named = next((word for word in arguments if not word.startswith("-")), None)
    for command in (named,) if named in COMMANDS else COMMANDS:
        import_module(f"{__name__}.{command}").add_to(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0, 1 (a check failed), 2 (the user's error), or 128 and the number of the signal
        that stopped it.
    """
    if arguments is None:
        complete_streams()
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with stoppable(signal.SIG_DFL):
            options = parser(words).parse_args(words)
        with stoppable():
            status: int = options.run(options)
            if sys.stdout is not None:  # it may be closed
                sys.stdout.flush()
    except Stopped as stopped:
        line(f"quorum-attention: stopped by {stopped.name}")
        return stopped.status
    except BrokenPipeError:
        ignore_broken_pipe()
        return 0
    except (ValueError, TypeError, NotImplementedError, OSError, ImportError) as error:
        return _user_error(error)
    except Exception as error:
        from quorum_attention.errors import CalibrationError, is_out_of_memory

        if isinstance(error, CalibrationError) or is_out_of_memory(error):
            return _user_error(error)
        raise
    return status


def _user_error(error: BaseException) -> int:
    reason = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        reason = f"{error.filename}: {error.strerror}"
    line(f"quorum-attention: {reason}")
    return USER_ERROR
