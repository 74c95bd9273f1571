"""Code in a process of its own, without importing torch for it once more.

``python -c`` of a program that uses torch takes 1.4 s of a processor before its first
line, and more to end. Here one process imports torch, and every program runs in a fork
of it: it has imported nothing else, shares nothing with other programs, and ends as
``python -c`` does.
"""

from __future__ import annotations

import json
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

# Also by what helpers/leftovers.py knows that process.
NEST = "quorum_attention_nest"

_FORKS = f"""
{NEST} = True
import sys, types
if __name__ == "__main__":
    def fork_for_each_line():
        import gc, json, os, threading, torch

        assert threading.active_count() == 1, "a fork has only the thread that forks"
        gc.collect()
        # A process that ends looks at all of it time and again.
        gc.freeze()
        for line in sys.stdin:
            told = json.loads(line)
            number = os.fork()
            if not number:
                os.chdir(told["folder"])
                os.environ.clear()
                os.environ.update(told["environment"])
                for stream, path in (1, told["out"]), (2, told["err"]):
                    opened = os.open(path, os.O_WRONLY)
                    os.dup2(opened, stream)
                    os.close(opened)
                opened = os.open(os.devnull, os.O_RDONLY)
                os.dup2(opened, 0)
                os.close(opened)
                sys.argv = ["-c", *told["arguments"]]
                return told["code"]
            status = os.waitpid(number, 0)[1]
            print(os.waitstatus_to_exitcode(status), flush=True)
    code = fork_for_each_line()
    if code is not None:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__builtins__ = __builtins__
        exec(compile(code, "<string>", "exec"), main.__dict__)
"""


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for it."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(1e-3)


_nests: list[subprocess.Popen[str]] = []


def run_python(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """``python -c code`` with ``arguments``, where torch has been imported already.

    With a GPU it is that, since a fork can use none. For programs of which it matters
    when torch is imported, or in which environment, call ``subprocess.run``.
    """
    command = [sys.executable, "-c", code, *map(str, arguments)]
    if torch.cuda.is_available():
        return subprocess.run(command, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        out.touch()
        err.touch()
        told = {
            "code": code, "arguments": command[3:], "out": str(out), "err": str(err),
            "folder": os.getcwd(), "environment": dict(os.environ),
        }  # fmt: skip
        nest = _started()
        assert nest.stdin is not None
        assert nest.stdout is not None
        nest.stdin.write(json.dumps(told) + "\n")
        nest.stdin.flush()
        try:
            said = nest.stdout.readline()
        except BaseException:  # a program that takes too long, as pytest-timeout says
            os.killpg(nest.pid, signal.SIGKILL)
            nest.wait()
            raise
        assert said, "the process that forks has ended"
        return subprocess.CompletedProcess(
            command, int(said), out.read_text(), err.read_text()
        )


def _started() -> subprocess.Popen[str]:
    """The process that forks; it ends when this one does, whose end of the pipe is
    closed then."""
    if not _nests or _nests[-1].poll() is not None:
        command, pipe = [sys.executable, "-c", _FORKS], subprocess.PIPE
        _nests.append(
            subprocess.Popen(
                command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
            )
        )
    return _nests[-1]


# Workers of a pool, started without importing torch for each.
_WARM = ("torch", "torch._dynamo", "quorum_attention.devices.worker_process")


def warm_forks() -> Any:
    """A context of multiprocessing whose processes are forks of one that has imported
    torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_WARM))
    return context


@contextmanager
def quick_workers() -> Iterator[None]:
    """In here a worker is the fork of a process that has imported what a worker
    imports, and has done nothing else; a started one takes two seconds of a processor
    for that.

    With a GPU workers are started, as everywhere else: a fork can use none.
    """
    if torch.cuda.is_available() or not sys.platform.startswith("linux"):
        yield
        return
    get_context = torch.multiprocessing.get_context

    def quick(method: str | None = None) -> Any:
        return warm_forks() if method == "spawn" else get_context(method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.multiprocessing, "get_context", quick)
        yield


def forks_workers() -> int | None:
    """The number of the process that quick workers are forked from, if there is one."""
    number: int | None = multiprocessing.forkserver._forkserver._forkserver_pid
    return number
