"""The command ``quorum-attention``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import quorum_attention
from quorum_attention.cli import bench, calibrate, check, doctor, plan, recover, run
from quorum_attention.execution.memory import is_out_of_memory

FAILED, USER_ERROR = 1, 2
_COMMANDS = (recover, run, plan, plan.Estimate, doctor, check, calibrate, bench)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="quorum-attention",
        description="Attention that never runs out of memory: exact, inside any memory budget.",
    )
    top.add_argument("--version", action="version", version=quorum_attention.__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 (a check failed) or 2 (the user's error)."""
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, NotImplementedError, OSError, ImportError) as error:
        return _user_error(error)
    except Exception as error:
        if is_out_of_memory(error):
            return _user_error(error)
        raise
    return status


def _user_error(error: BaseException) -> int:
    print(f"quorum-attention: {error}", file=sys.stderr)
    return USER_ERROR
