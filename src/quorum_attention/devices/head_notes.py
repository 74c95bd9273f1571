"""What a worker says of a block before the block is done: whose results are in place.

If the worker is lost, the others need not compute these heads again. A block has one
batch entry, and its head groups are computed in order, so a number of heads says which
ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from quorum_attention.devices.messages import StoredHeads
from quorum_attention.execution.head_groups import Group

# A note takes two processes some 0.1 ms.
_NOTE_SECONDS = 0.05


@dataclass(slots=True)
class HeadNotes:
    """The notes on one block.

    Attributes:
        pass_number: the number of the pass.
        n_heads: the block's key/value heads. That the last one is stored, the answer
            says.
        send: sends a note to the pool.
    """

    pass_number: int
    n_heads: int
    send: Callable[[StoredHeads], None]
    _n_stored: int = 0
    _last_time: float = field(default_factory=time.perf_counter)

    def add(self, group: Group) -> None:
        """Note that the results of a head group of the block are in place.

        Heads that come before their turn are computed again if the worker is lost, and
        so are those of the last few hundredths of a second.
        """
        if group.kv_start != self._n_stored:
            return
        self._n_stored = group.kv_stop
        now = time.perf_counter()
        if self._n_stored == self.n_heads or now - self._last_time < _NOTE_SECONDS:
            return
        self._last_time = now
        with suppress(OSError):  # the pool is gone; the answer ends the worker
            self.send(StoredHeads(self.pass_number, self._n_stored))
