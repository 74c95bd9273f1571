"""Runs measurements in processes of their own; the side that asks for them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType

from quorum_attention.bench.spec import FAILED, Answer, Spec


class Processes:
    """Carries out a spec in a fresh process; a crash or a timeout is an answer.

    Args:
        timeout: seconds after which a measurement is given up.

    It is a context manager; what still runs at its end is killed.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def measure(self, spec: Spec) -> Answer:
        """The answer of a process."""
        if self._server is None:
            # Unbuffered, because ``select`` does not see what a buffer holds.
            command = [sys.executable, "-m", "quorum_attention.bench.server", str(os.getpid())]
            self._server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        try:
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps(asdict(spec)).encode() + b"\n")
            number = int(self._line(None))
            line = self._line(time.monotonic() + self.timeout)
            if not line:
                with suppress(ProcessLookupError):  # it may have ended just now
                    os.kill(number, signal.SIGKILL)
                self._line(None)
                return Answer(FAILED, f"not done after {self.timeout:.4g} s")
            ended = json.loads(line)
        except (OSError, ValueError):
            said = f"what starts processes ended with {self._server.wait()}"
            self._close()
            return Answer(FAILED, said)
        except BaseException:
            self._close()
            raise
        if ended["answer"] is not None:
            return Answer(**ended["answer"])
        said = ended["said"] or "without a word"
        return Answer(FAILED, f"the process ended with {ended['status']}: {said}")

    def _line(self, until: float | None) -> bytes:
        """The server's next line; empty if there is none by ``until``.

        Raises:
            ValueError: the server has ended.
        """
        assert self._server is not None
        assert self._server.stdout is not None
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([self._server.stdout], [], [], left)[0]:
            return b""
        line = self._server.stdout.readline()
        if not line:
            raise ValueError("the server has ended")
        return line

    def _close(self) -> None:
        """Kill the server, and with it the measurement that it runs."""
        server, self._server = self._server, None
        if server is None:
            return
        server.kill()
        server.wait()
        for pipe in (server.stdin, server.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
