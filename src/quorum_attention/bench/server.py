"""Gives every measurement a process of its own, without the seconds that a new process takes.

``python -m quorum_attention.bench.server PARENT`` imports what measurements need, and then forks a
process for each. The forked process has torch loaded, but no device, no memory and no running
thread of another measurement. A line on stdin asks for a measurement (a spec, in JSON). The first
line on stdout is its process number; the second says how it ended: ``{"status": ..., "answer": ...,
"said": ...}``, where "said" is the last line that it printed. If a process is killed, the processes
that work for it are killed, too, and no file is left.
"""

from __future__ import annotations

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

import torch.fx.experimental.symbolic_shapes  # noqa: F401 - the first gradient imports it

from quorum_attention.bench.child import measure
from quorum_attention.bench.spec import Spec
from quorum_attention.lifetime import end_with


def serve(parent: int) -> None:
    """Carry out the measurements that stdin asks for, one after the other, until stdin ends."""
    end_with(parent)
    # Ctrl-C reaches all processes; the parent decides which of them end.
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
    # Python warns of threads; the only ones are idle threads of numpy's OpenBLAS, which allows it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _whole(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _measure(server: int, spec: dict[str, Any], answered: BinaryIO, printed: BinaryIO) -> NoReturn:
    """In the forked process: measure, then end it."""
    status = 1
    try:
        end_with(server)
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


if __name__ == "__main__":
    serve(int(sys.argv[1]))
