"""Gives every measurement a process of its own, without the seconds that one takes to start.

``python -m quorum_attention.bench.server PARENT`` loads what measurements need and then forks: what
it forks has torch, and nothing of another measurement's: no device, no memory, no thread at work. A
line on stdin asks for one (a spec, in JSON); a line on stdout says its process number, and another
how it ended: ``{"status": ..., "answer": ..., "said": ...}``, the last the last line it printed.
Whoever is killed takes those down with him that work for him, and leaves no file.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from contextlib import suppress
from dataclasses import asdict
from typing import Any, BinaryIO, NoReturn

import torch.fx.experimental.symbolic_shapes  # noqa: F401 - the first gradient asks for it

from quorum_attention.bench.child import measure
from quorum_attention.bench.spec import Spec

_SET_PARENT_DEATH_SIGNAL = 1


def serve(parent: int) -> None:
    """Carry out what stdin asks for, one after another, until it ends."""
    _end_with(parent)
    # A Ctrl-C reaches everybody here; the parent says what is to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        server = os.getpid()
        with tempfile.TemporaryFile() as answered, tempfile.TemporaryFile() as printed:
            number = _fork()
            if not number:
                _measure(server, json.loads(line), answered, printed)
            print(number, flush=True)
            _, status = os.waitpid(number, 0)
            found = _whole(answered)
            told = [text.strip() for text in _whole(printed).splitlines()]
        ended = {
            "status": os.waitstatus_to_exitcode(status),
            "answer": json.loads(found) if found and not status else None,
            "said": next((text for text in reversed(told) if text), ""),
        }
        print(json.dumps(ended), flush=True)


def _fork() -> int:
    # Python warns of threads: the only ones are idle, of numpy's OpenBLAS, which expects forks.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _whole(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _measure(server: int, spec: dict[str, Any], answered: BinaryIO, printed: BinaryIO) -> NoReturn:
    """In the new process: measure, and end."""
    status = 1
    try:
        _end_with(server)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for place in (1, 2):
            os.dup2(printed.fileno(), place)
        answer = measure(Spec(**spec))
        answered.write(json.dumps(asdict(answer)).encode())
        answered.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _end_with(parent: int) -> None:
    """Be killed when ``parent`` ends, however it does, where the system has a way to ask for it."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before it could be asked for
        os._exit(1)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
