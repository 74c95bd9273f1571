"""A rank's part in a pass of all ranks: how it waits for others, and what happens if one fails.

A rank that fails when the others count on it would leave them waiting until the group's time limit.
So it leaves a word in the group's store. A rank that has waited for a message for a while looks for
one there; while all is well nobody does.

Where a rank fails while it computes, the pass is still brought to its end. It holds back its next
message until all ranks have said that they know: each of them waits for that message, so none takes
what follows for a result. Then all exchange what is left of the pass, NaN in place of numbers, and
raise. No message is left over, and the group can be used again.

Where torch has all ranks meet before each message (TORCH_DISTRIBUTED_DEBUG=DETAIL), others wait for
a rank that holds back its message where they cannot look. There it leaves its word first, goes on
at once, and all look when they have what is left of the pass.

On a GPU the host does not wait for messages. There a rank that fails sends NaN in place of its
results, leaves its word and raises; others have NaN, and hear of it where their hosts next wait.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Hashable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from quorum_attention.distributed.board import Board, Word
from quorum_attention.distributed.peers import Peers, begun, keep_for_good
from quorum_attention.execution.device.lookup import on_host

# A rank that has waited for so long looks whether another has failed, and again after as long.
_LOOK_SECONDS = 1.0
# Ranks that wait for different things do so for good when each has said so for so many times.
_SAID_AGAIN = 5
# After so many looks it says and asks for what only every so manieth time: a store in a file keeps
# all that was ever said, and every rank asks for all others.
_LOOKS_OFTEN, _THEN_EVERY = 30, 10
# The failure of an earlier pass counts when the rank that failed has not come for so long.
_GONE_SECONDS = 10.0
# How often a rank that failed asks whether all others know, and how long it waits for that where
# it does not take part any more.
_ASK_SECONDS, _PARTING_SECONDS = 0.02, 3.0
# torch's backend for dry runs: what comes is what memory held.
_SENDS_NOTHING = "fake"
# Marks of one call differ from pass to pass: memory may still hold that of the pass before.
_ODD = 0x9E3779B97F4A7C15
_T = TypeVar("_T")


def in_host_memory(query: Any) -> bool:
    """Whether messages of a call come to host memory, if it is one."""
    return isinstance(query, torch.Tensor) and on_host(query.device)


def sends_nothing(group: dist.ProcessGroup) -> bool:
    """Whether what comes from a group's ranks is what memory held: a dry run."""
    return bool(dist.get_backend(group) == _SENDS_NOTHING)


class Watch:
    """One pass, on one rank. All ranks make one for each pass, in the same order.

    As a context, an error that leaves it before ``end`` was reached is told to the others.

    Args:
        host: whether the tensors that are sent are in host memory: then the host waits for
            messages.

    Attributes:
        mark: what the last rank sends the others with its first message; None: nothing.
    """

    def __init__(self, group: dist.ProcessGroup, host: bool) -> None:
        self._group, self._host, self.ranks = group, host, group.size()
        self._peers = peers = Peers.of(group)
        # Of this rank; and whether its word is what the others hear of.
        self._error: Exception | None = None
        self._told = False
        if peers.left:
            self._come_back()
        if peers.begun:
            peers.begun = [work for work in peers.begun if not work.is_completed()]
        peers.passes += 1
        self._number = peers.passes
        self._what: Hashable = None
        self.mark: int | None = None
        self._looks = 0
        # Of another rank that failed.
        self._word: Word | None = None
        # Whether what this rank raises is another's failure.
        self._heard = False
        self._sent = self._ended = False
        # Whether it waits, or has waited in vain, for a message that may never come.
        self._in_vain = False

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self._ended and self.ranks > 1:
            self._ended = True
            if self._host and (self._in_vain or not self._sent):
                keep_for_good(self._group)
            self._leave(error)

    def knows(self, what: Hashable, mark: int | None = None) -> None:
        """What this rank takes the pass to be; others must take it for the same.

        Args:
            mark: a number of that, to be sent with the first message (``mark``); None: the ranks
                have agreed.
        """
        self._what = what
        if mark is not None and self._host:
            self.mark = (mark + self._number * _ODD) % (1 << 63)

    def check(self, mark: int) -> None:
        """What came with the first message.

        Raises:
            ValueError: it is not this rank's ``mark``.
        """
        if mark != self.mark and not sends_nothing(self._group):
            raise ValueError(
                "the ranks do not agree on the call: the last rank's message is none of what rank "
                f"{self._group.rank()} takes part in, {self._what}; {_ENDED}"
            )

    def computed(
        self,
        make: Callable[[], _T],
        instead: Callable[[], _T],
        refused: tuple[type[Exception], ...] = (),
    ) -> _T:
        """What ``make`` returns; ``instead``, if it fails or a rank has failed before.

        Args:
            refused: errors after which this rank does not know what it should send.
        """
        if self._error is None and self._word is None:
            try:
                return make()
            except refused:
                raise
            except Exception as error:
                if self.ranks == 1:
                    raise
                if not self._fail(error):
                    self._error = None
                    raise
        return instead()

    def wait(self, work: Any, host: bool | None = None) -> None:
        """Wait for a message, as ``work.wait()`` does.

        Args:
            host: whether it comes to host memory; None: as those of the pass.

        Raises:
            RuntimeError: a rank has failed, and the message does not come.
        """
        if not (self._host if host is None else host):
            work.wait()
        else:
            self._in_vain, late = True, False
            try:
                work.wait(timedelta(seconds=_LOOK_SECONDS))
            except Exception:
                # Not in this block: the error of a rank that failed is no consequence of waiting.
                late = True
            if late:
                self._wait_long(work)
            self._in_vain = False
        if work in self._peers.begun:
            self._peers.begun.remove(work)

    def gather(self, every: list[torch.Tensor], mine: torch.Tensor) -> None:
        """``torch.distributed.all_gather``."""
        work = begun(self._group, dist.all_gather(every, mine, group=self._group, async_op=True))
        self.wait(work, on_host(mine.device))

    def all_sent(self) -> None:
        """All messages of this pass are on their way: the others need no more of this rank."""
        self._sent = True

    def over(self) -> None:
        """What this rank raises from here on, all others raise as well, or need not know of."""
        self._ended = True

    def end(self) -> None:
        """The pass is over.

        Raises:
            The error of this rank, if it failed; RuntimeError: another has failed.
        """
        self._ended = True
        if self._host and self._peers.monitored:
            self._meet()
        if self._error is None and self._word is None:
            return
        if self._error is not None:
            if self._host:
                self._come_back()
            # An error holds the frames that it went through, with the call's tensors: nothing in
            # these frames may hold the error.
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error
        assert self._word is not None
        raise RuntimeError(
            f"{_named(self._word)} in this call, and so none of the ranks has a result. All took "
            "part to the end: the process group can be used again"
        )

    # --- A rank that fails ------------------------------------------------------------------

    def _fail(self, error: Exception) -> bool:
        """Tell the others; they know when this returns, if their hosts wait for messages. False if
        they do not come to know."""
        self._error = error
        _clear(error)
        self._peers.left = True
        board = Board.of(self._group, self._peers.made)
        if board is None:
            return True
        try:
            first = board.first(self._number)
            if first:
                board.tell(self._said(error, drains=True))
                self._told = True
        except Exception:
            return True  # the store is gone; the others get NaN
        if not self._host:
            return True
        board.see(self._number)
        if self._peers.monitored:
            return True  # the others come to know when they have the messages that are left
        return not first or self._asked(board, board.seconds)

    def _leave(self, error: BaseException) -> None:
        """Tell the others that this rank takes no part any more."""
        board = Board.of(self._group, self._peers.made)
        if board is None:
            return
        with suppress(Exception):
            word = board.word()
            if self._heard and word is not None and not word.drains:
                return  # the others hear of the rank that failed, as this one has
            self._peers.left = True
            board.tell(self._said(error, drains=False))
            board.see(self._number)
            if self._host and not self._sent and isinstance(error, Exception):
                self._asked(board, _PARTING_SECONDS)

    def _said(self, error: BaseException, drains: bool) -> Word:
        text = f"{type(error).__name__}: {error}"
        return Word(self._number, self._group.rank(), text, drains, self._sent)

    def _asked(self, board: Board, seconds: float) -> bool:
        """Whether all others come to know of this pass's failure in so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if board.all_see(self._number):
                return True
            word = board.word()
            if word is not None and word.rank != self._group.rank() and not word.drains:
                return False  # that rank has left, and others with it
            time.sleep(_ASK_SECONDS)
        return False

    def _meet(self) -> None:
        """At the end of a pass in which all meet before each message: whoever failed has left its
        word before the last of them, so it is found; and it stays until all have looked."""
        board = Board.of(self._group, self._peers.made)
        if board is None:
            return
        with suppress(Exception):  # the store went with the rank that had it
            if self._told:
                self._asked(board, board.seconds)
            elif self._error is None and self._word is None:
                word = board.word()
                if word is not None and word.number == self._number and word.drains:
                    self._word, self._heard = word, True
                    board.see(self._number)

    def _come_back(self) -> None:
        self._peers.left = False
        board = Board.of(self._group, self._peers.made)
        # Others may still ask for what the rank that told of its failure waits for.
        told = self._told or self._error is None or not self._peers.monitored
        if board is not None and told:
            board.withdraw(self._peers.passes)

    # --- A rank that waits ------------------------------------------------------------------

    def _wait_long(self, work: Any) -> None:
        """Wait on, and look every now and then whether a rank has failed."""
        board, begun, seen = (
            Board.of(self._group, self._peers.made),
            time.monotonic(),
            dict[int, tuple[int, str]](),
        )
        while not work.is_completed():
            if board is None:
                work.wait()
                return
            self._look(board, time.monotonic() - begun, seen)
            with suppress(Exception):
                work.wait(timedelta(seconds=_LOOK_SECONDS))
        try:
            work.wait()
        except Exception as failed:
            word = None
            with suppress(Exception):
                word = None if board is None else board.word()
            if word is None or self._word is not None:
                raise
            self._heard = True
            raise RuntimeError(f"{_named(word)}; {_ENDED}") from failed

    def _look(self, board: Board, waited: float, seen: dict[int, tuple[int, str]]) -> None:
        """Raise if the message will not come.

        Args:
            seen: what other ranks said that they wait for, and for the how manieth time, when this
                rank looked before.
        """
        try:
            word, apart = board.word(), self._apart(board, seen)
        except Exception:
            return  # the store went with the rank that had it; then the message fails as well
        if word is not None and word.rank == self._group.rank():
            word = None
        if word is not None and word.number == self._number and not word.sent:
            self._word, self._heard = word, True
            with suppress(Exception):
                board.see(self._number)
            if not word.drains:
                raise RuntimeError(f"{_named(word)} in this call; {_ENDED}")
        elif apart is not None:
            raise ValueError(f"the ranks do not agree on the call: {apart}; {_ENDED}")
        elif word is not None and word.number < self._number and waited > _GONE_SECONDS:
            self._heard = True
            raise RuntimeError(
                f"{_named(word)} in an earlier call, and takes no part in this one; {_ENDED}"
            )

    def _apart(self, board: Board, seen: dict[int, tuple[int, str]]) -> str | None:
        """In words, that another rank waits in this pass for something else than this one does."""
        self._looks += 1
        if self._looks > _LOOKS_OFTEN and self._looks % _THEN_EVERY:
            return None
        mine = "what the ranks agree on" if self._what is None else repr(self._what)
        board.wait(self._number, self._looks, mine)
        for rank, (number, looks, theirs) in board.waiting().items():
            before = seen.get(rank)
            if number != self._number or theirs == mine:
                seen.pop(rank, None)
            elif before is None or before[1] != theirs:
                # It may have said that a while ago, or have been held up a little: only if it says
                # so again and again it waits in vain.
                seen[rank] = (looks, theirs)
            elif looks >= before[0] + _SAID_AGAIN:
                return f"rank {self._group.rank()} waits for {mine}, rank {rank} for {theirs}"
        return None


_ENDED = (
    "messages are left over: the process group cannot be used any more (make another, or end the "
    "process)"
)


def _named(word: Word) -> str:
    return f"rank {word.rank} failed ({word.text})"


def _clear(error: BaseException) -> None:
    """Let go of what an error's frames hold: room for the messages that are left."""
    one: BaseException | None = error
    met: set[int] = set()  # an error may be among its own causes
    while one is not None and id(one) not in met:
        met.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__


__all__ = ["Watch", "in_host_memory", "sends_nothing"]
