"""What a rank remembers of a process group from call to call."""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from quorum_attention.distributed.board import Board

# Calls that a group has agreed on, remembered; when there are more, all are forgotten, by all ranks
# at the same call.
_MOST = 1024


def alive(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The group that was given once.

    What outlives a call holds no more than a weak reference to it: the last reference ends a
    group's threads, and one of Gloo's that is still there when Python ends may abort the process.

    Raises:
        RuntimeError: it has been destroyed.
    """
    found = group()
    if found is None:
        raise RuntimeError(
            "the process group of this attention has been destroyed; call, register or call "
            "sharded_positions again with the one that there is now"
        )
    return found


def member_of(group: Any) -> dist.ProcessGroup:
    """The argument ``group``; None is the default one.

    Raises:
        RuntimeError: there is none. ValueError: it is none of this process's.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("there is no process group: torch.distributed.init_process_group first")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup) or found.rank() < 0:
        raise ValueError("group must be a process group that this process is a member of")
    return found


@dataclass(slots=True)
class Peers:
    """What is remembered of one group.

    Attributes:
        made: the how manieth group of its name it is, as of ``Board``.
        monitored: whether all ranks meet before each message, under TORCH_DISTRIBUTED_DEBUG=DETAIL.
        passes: how many passes there were, the same number on all ranks.
        left: whether this rank raised an error of which others may have heard no more than a word.
        agreed: calls that the ranks have agreed on, with a number that is the same on all of them.
        ready: of calls that were agreed on, all that this rank has found out about them, by what it
            looks at; forgotten with them.
        begun: messages that this rank has not waited for.
    """

    made: int = 0
    monitored: bool = False
    passes: int = 0
    left: bool = False
    agreed: dict[Hashable, int] = field(default_factory=dict)
    ready: dict[Hashable, Any] = field(default_factory=dict)
    begun: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Peers:
        """Those of a group, as long as there is one."""
        found = _EVERY.get(group)
        if found is None:
            found = _EVERY[group] = cls(Board.made(group), _is_monitored(group))
        return found

    def agree(self, name: Hashable) -> None:
        """Remember that all ranks make the call that this one calls ``name``, of plain values."""
        if len(self.agreed) >= _MOST:
            self.agreed.clear()
            self.ready.clear()
        self.agreed[name] = zlib.crc32(repr(name).encode())


def begun(group: dist.ProcessGroup, work: Any) -> Any:
    """``work``, a message of the group that is on its way."""
    Peers.of(group).begun.append(work)
    return work


def keep_for_good(group: dist.ProcessGroup) -> None:
    """Never let a group go that has messages left over: its last reference would wait for them, in
    ``destroy_process_group`` or when Python ends, up to the group's time limit.

    Nor those messages. They fail when other processes end, and a thread of Gloo's that has the last
    reference to one lets go of its tensors, for which it asks for the interpreter: where that is
    ending, the process is aborted.
    """
    for one in (group, Peers.of(group).begun):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _is_monitored(group: dist.ProcessGroup) -> bool:
    """Whether torch has wrapped the group: a collective then begins with a barrier, for which
    whoever issues it waits."""
    wrapper = getattr(dist.distributed_c10d, "_ProcessGroupWrapper", None)
    if wrapper is None:
        return False
    with suppress(Exception):
        return isinstance(group._get_backend(torch.device("cpu")), wrapper)
    return False


_EVERY: WeakKeyDictionary[dist.ProcessGroup, Peers] = WeakKeyDictionary()

__all__ = ["Peers", "alive", "begun", "keep_for_good", "member_of"]
