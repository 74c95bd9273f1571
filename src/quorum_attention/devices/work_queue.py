"""The work items of a pass: who computes what next.

Each device has blocks of its own, the same ones in every call of the same sizes. A
device without blocks of its own takes from the end of the fullest.

A device has one work item at a time. Copies overlap with kernels inside an item;
between two items a device waits 5 to 8 ms for messages, of the seconds that an item
takes in long calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from quorum_attention.call.block import CallBlock
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.partition import pairs, partition
from quorum_attention.kernels.call_shape import CallShape


class WorkItem(NamedTuple):
    """A block that a device computes.

    Attributes:
        number: the number of the block.
        owner: the device that the block belongs to; another one may compute it.
        block: the block.
        pairs: its query-key pairs.
        start: when a device took it.
        n_stored: of how many of its key/value heads, from the first one on, the results
            are known to be in place.
    """

    number: int
    owner: int
    block: CallBlock
    pairs: int
    start: float = 0.0
    n_stored: int = 0


class BlockQueue:
    """The work items that wait and that run. It knows neither workers nor a clock.

    Args:
        shape: the call's sizes.
        speeds: the expected speed of each device that takes part, in pairs a second.
        pieces: into how many the share of each device is cut.

    Attributes:
        count: the number of all blocks.
        running: the work item of each device that has one.
        devices: the devices that take part.
    """

    def __init__(
        self, shape: CallShape, speeds: Mapping[int, float], pieces: int
    ) -> None:
        self.count = 0
        self.devices = set(speeds)
        self.running: dict[int, WorkItem] = {}
        self._shape = shape
        self._speeds = speeds
        self._waiting: dict[int, list[WorkItem]] = {}  # by owner
        shares = partition(shape, list(speeds.values()), pieces)
        for owner, blocks in zip(speeds, shares, strict=True):
            items: list[WorkItem] = []
            for block in blocks:
                items.append(
                    WorkItem(
                        self.count,
                        owner,
                        block,
                        pairs(shape, block),
                    )
                )
                self.count += 1
            self._waiting[owner] = items

    @property
    def is_finished(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.running and not any(self._waiting.values())

    def take(self, device: int, now: float) -> WorkItem | None:
        """Return the next work item of an idle device.

        Returns:
            None if there is no item that this device would end sooner than the item's
            owner.
        """
        own_items = self._waiting[device]
        item = own_items.pop(0) if own_items else self._take_over(device)
        if item is not None:
            item = item._replace(start=now)
            self.running[device] = item
        return item

    def _take_over(self, device: int) -> WorkItem | None:
        """Take the last item of the device that has most work waiting."""
        owner = max(self._waiting, key=self._waiting_pairs)
        items = self._waiting[owner]
        if not items:
            return None
        seconds = items[-1].pairs / self._speeds[device]
        owner_seconds = self._waiting_pairs(owner) / self._speeds[owner]
        if owner in self.devices and seconds > owner_seconds:
            return None
        return items.pop()

    def _waiting_pairs(self, owner: int) -> int:
        """Return the query-key pairs of the items of a device that wait."""
        return sum(item.pairs for item in self._waiting[owner])

    def note_stored(self, device: int, n_heads: int) -> None:
        """Note that the results of the first key/value heads of a device's work item
        are in place."""
        self.running[device] = self.running[device]._replace(n_stored=n_heads)

    def put_back(self, device: int) -> None:
        """Let other devices take what is left of the work item of a device."""
        item = self.running.pop(device, None)
        if item is not None:
            self._waiting[item.owner].insert(0, self._rest_of(item))

    def _rest_of(self, item: WorkItem) -> WorkItem:
        """Return a work item without the heads whose results are in place."""
        heads = item.block.heads
        n_query_heads = item.n_stored * self._shape.queries_per_key_head
        rest = Interval(heads.start + n_query_heads, heads.stop)
        block = item.block._replace(heads=rest)
        return item._replace(
            block=block,
            pairs=pairs(self._shape, block),
            n_stored=0,
        )

    def remove(self, device: int) -> None:
        """Let other devices take all work of a device, which takes part no more."""
        self.devices.discard(device)
        self.put_back(device)
