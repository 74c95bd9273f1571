"""A place for one order that waits at a worker, and that the pool may take back.

The worker takes it when it is done with the one before, without asking anybody; the pool takes it
back for another worker that has nothing to do. Whoever is first has it: a datagram is read whole,
and once, by one of the processes that have its socket open.
"""

from __future__ import annotations

import os
import pickle
import socket
from typing import Any

_MOST_BYTES = 1 << 17


class Shelf:
    """Holds one message.

    Attributes:
        outlet: what the worker's process gets, and takes from (``taken``).
    """

    def __init__(self) -> None:
        self._inlet, self.outlet = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        never_wait(self._inlet)
        never_wait(self.outlet)

    @classmethod
    def made(cls) -> Shelf | None:
        """One, where the system has such sockets and messages have no memory of their own."""
        here = hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX")
        return cls() if here else None

    def put(self, message: object) -> bool:
        """Lay a message down; False if it is too large, or the shelf is closed."""
        said = pickle.dumps(message)
        if len(said) > _MOST_BYTES:
            return False
        try:
            self._inlet.send(said, socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def take_back(self) -> bool:
        """Whether the message was still there; nobody else gets it now."""
        try:
            return taken(self.outlet) is not None
        except OSError:
            return True  # closed: its worker is gone

    def close(self) -> None:
        """Nothing is put or taken any more."""
        self._inlet.close()
        self.outlet.close()


def never_wait(end: socket.socket) -> None:
    """In every process that has it: a new socket waits as long as ``socket.setdefaulttimeout`` of
    the program says, whatever is asked of it, and then raises an error."""
    end.setblocking(False)


def taken(outlet: socket.socket) -> Any:
    """The message that waits, which nobody else gets then; None if there is none."""
    try:
        said = outlet.recv(_MOST_BYTES, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    return pickle.loads(said)


__all__ = ["Shelf", "never_wait", "taken"]
