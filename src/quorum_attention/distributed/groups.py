"""The process group of a call: what a caller gave, whether it can be used, and whole
objects sent over it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from quorum_attention.kernels.torch_private import no_torch_modes

# The error of each group in which a call has failed on this rank.
_FAILURES: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def resolve_group(group: Any) -> dist.ProcessGroup:
    """Return the argument ``group``, or the default group for None.

    Raises:
        RuntimeError: there is no process group, or a call over it has failed on this
            rank.
        ValueError: the argument is no group of this process.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: torch.distributed.init_process_group first"
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or group.rank() < 0:
        raise ValueError(
            "group must be a process group that this process is a member of"
        )
    _check_usable(group)
    return group


def deref_group(reference: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group of a weak reference.

    What outlives a call holds no more than a weak reference to its group: the last
    reference ends a group's threads, and a thread of Gloo's that is still there when
    Python ends may abort the process.

    Raises:
        RuntimeError: the group has been destroyed, or a call over it has failed on this
            rank.
    """
    group = reference()
    if group is None:
        raise RuntimeError(
            "the process group of this attention has been destroyed; call, register "
            "or call sharded_positions again with the one that there is now"
        )
    _check_usable(group)
    return group


def _check_usable(group: dist.ProcessGroup) -> None:
    failure = _FAILURES.get(group)
    if failure is not None:
        raise RuntimeError(
            f"an attention over this process group failed on this rank ({failure}), "
            "and other ranks still wait for its messages: make another group"
        )


class GroupMember(NamedTuple):
    """A process group, this process's rank in it, and how many ranks it has."""

    group: dist.ProcessGroup
    rank: int
    n_ranks: int


@contextmanager
def poison_group_on_error(group: dist.ProcessGroup) -> Iterator[None]:
    """Let this rank refuse the group from now on if the block raises an error.

    After an error the ranks are at different messages, and a later message could be
    taken for a missing one.
    """
    try:
        yield
    except BaseException as error:
        if group.size() > 1:
            _FAILURES[group] = f"{type(error).__name__}: {error}"
        raise


class _RankError(NamedTuple):
    """The message of a rank that has an error, in place of what it had to send."""

    text: str


def known_to_ranks(error: Exception) -> Exception:
    """Return an error with a mark: all ranks know of the error, and raise one."""
    error._known_to_ranks = True  # type: ignore[attr-defined]
    return error


@contextmanager
def tell_ranks_of_error(
    group: dist.ProcessGroup, *, is_awaited: bool = True
) -> Iterator[None]:
    """Tell the other ranks of an error of the block, so that they raise one too.

    Args:
        is_awaited: whether the other ranks wait for an object of this rank
            (``all_gather_objects``) as long as the block runs. So after the error all
            ranks are at the same message. If False, nobody is told.
    """
    try:
        yield
    except Exception as error:
        is_known = getattr(error, "_known_to_ranks", False)
        if is_awaited and not is_known and group not in _FAILURES:
            known_to_ranks(error)
            message = _RankError(f"{type(error).__name__}: {error}")
            # Modes and transformations are off, because messages take no part in them.
            # An error of the message would say less than the error of the block.
            with suppress(Exception), no_torch_modes():
                all_gather_objects(group, message)
        raise


def all_gather_objects(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return the value of every rank; the host waits for them.

    Objects go through host memory if the group can send it: on a GPU the host would
    wait for all work before.

    Raises:
        ValueError: another rank has an error (``tell_ranks_of_error``).
    """
    values: list[Any] = [None] * group.size()
    with poison_group_on_error(group):
        dist.all_gather_object(values, value, group=group)
    for rank, answer in enumerate(values):
        if isinstance(answer, _RankError):
            raise known_to_ranks(
                ValueError(
                    f"rank {rank} has an error, so no rank goes on: {answer.text}"
                )
            )
    return values
