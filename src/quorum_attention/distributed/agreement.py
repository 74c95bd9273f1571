"""What the ranks of a sharded call must agree on, and whether they do.

In host memory the ranks tell each other the call before each pass. On GPUs, where the host would
have to wait for that, they do so once for each kind of call if ``lengths`` are given.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from quorum_attention.argument_checks import one_of, shown, whole_number
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.units import counted

# What a call is, by the names of its arguments; the values are plain.
Signature = Mapping[str, object]

# Calls that a group remembers; when there are more, all ranks forget all at the same call.
_MOST = 1024

# Calls that a group has agreed on; and groups in which a call has failed on this rank.
_AGREED: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
_FAILED: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def alive(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The group that was given once.

    What outlives a call holds no more than a weak reference to it: the last reference ends a
    group's threads, and one of Gloo's that is still there when Python ends may abort the process.

    Raises:
        RuntimeError: it has been destroyed, or a call over it has failed here.
    """
    found = group()
    if found is None:
        raise RuntimeError(
            "the process group of this attention has been destroyed; call, register or call "
            "sharded_positions again with the one that there is now"
        )
    return _usable(found)


def member_of(group: Any) -> dist.ProcessGroup:
    """The argument ``group``; None is the default one.

    Raises:
        RuntimeError: there is none, or a call over it has failed here.
        ValueError: it is none of this process's.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("there is no process group: torch.distributed.init_process_group first")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup) or found.rank() < 0:
        raise ValueError("group must be a process group that this process is a member of")
    return _usable(found)


def _usable(group: dist.ProcessGroup) -> dist.ProcessGroup:
    failed = _FAILED.get(group)
    if failed is None:
        return group
    raise RuntimeError(
        f"an attention over this process group failed on this rank ({failed}), and other ranks "
        "still wait for its messages: make another group"
    )


@contextmanager
def exchanging(group: dist.ProcessGroup) -> Iterator[None]:
    """The messages of a pass. After an error the ranks are at different messages, and a later one
    could be taken for a missing one: this rank does not use the group again."""
    try:
        yield
    except BaseException as error:
        if group.size() > 1:
            _FAILED[group] = f"{type(error).__name__}: {error}"
        raise


def check_kernel_of_parts(kernel: str | InnerKernel) -> None:
    """Check that a kernel can compute parts of a call.

    Raises:
        ValueError, TypeError: there is none of that name.
        NotImplementedError: it computes another attention, by positions in the whole call.
    """
    found = None if kernel == "auto" else get_kernel(kernel)
    if found and (
        found.plain_variant is not None or (found.own_attention and not found.position_free)
    ):
        raise NotImplementedError(
            f"kernel {found.name!r} computes another attention, of positions in the whole call; "
            "ranks have parts of it: give attn_mask, or a function that takes no positions"
        )


def told(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """What every rank says; the host waits for it. Through host memory if the group can send it: on
    a GPU the host would wait for all work before."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, mine, group=group)
    return every


def compare(group: dist.ProcessGroup, arguments: Signature, *mine: Any) -> list[Any]:
    """Compare a call with those of the other ranks; returns what else every rank says.

    Raises:
        ValueError: they differ; on all ranks.
    """
    listed = told(group, ({name: repr(value) for name, value in arguments.items()}, mine))
    for name in dict.fromkeys(name for named, _ in listed for name in named):
        values = [named.get(name) for named, _ in listed]
        if len(set(values)) > 1:
            different = ", ".join(f"rank {rank} has {v}" for rank, v in enumerate(values))
            raise ValueError(f"the ranks do not agree on {name}: {different}")
    return [more for _, more in listed]


def agreed_sizes(
    group: dist.ProcessGroup,
    query: torch.Tensor,
    arguments: Signature,
    columns: Sequence[int],
    lengths: Sequence[int] | str | None,
) -> tuple[int, ...]:
    """Rows of every rank, once all make the same call.

    Args:
        columns: of each tensor of the mask with a number for each token, how many those are.

    Raises:
        ValueError: the lengths do not fit, or the ranks do not agree.
    """
    rows = query.shape[-2]
    given = None if lengths is None else _given(group, lengths, rows)
    # The same on all ranks; without the seed, which may differ at every call.
    whole = given and [max(given) < n == sum(given) for n in columns]
    name = repr((given, whole, {**arguments, "dropout_seed": None}))
    if _is_known(group, query, name) and given is not None:
        return given
    listed = compare(group, {**arguments, "lengths": given}, rows, *columns)
    sizes, *columns_of_ranks = zip(*listed, strict=True)
    for widths in columns_of_ranks:
        if set(widths) != {sum(sizes)} and widths != sizes:
            raise ValueError(
                "attn_mask.documents and attn_mask.key_padding must be for the rows of each rank, "
                f"{list(sizes)}, or on all of them for all {sum(sizes)}, got {list(widths)}"
            )
    _AGREED[group].add(name)
    return sizes


def _is_known(group: dist.ProcessGroup, query: torch.Tensor, name: str) -> bool:
    """Whether the ranks need not compare a call again."""
    known = _AGREED.setdefault(group, set())
    if len(known) >= _MOST:
        known.clear()
    return name in known and not on_host(query.device)


def agree_on(group: dist.ProcessGroup, query: torch.Tensor, arguments: Signature) -> None:
    """Compare arguments that have no sizes, where the ranks have not agreed on them before.

    Raises:
        ValueError: they differ; on all ranks.
    """
    name = repr(arguments)
    if not _is_known(group, query, name):
        compare(group, arguments)
        _AGREED[group].add(name)


def _given(group: dist.ProcessGroup, lengths: Sequence[int] | str, rows: int) -> tuple[int, ...]:
    """The argument ``lengths``, checked against this rank's rows."""
    if isinstance(lengths, str):
        one_of(lengths, "lengths", ("equal",))
        return (rows,) * group.size()
    sizes = tuple([whole_number(n, "lengths", 0) for n in lengths])
    if len(sizes) != group.size() or sizes[group.rank()] != rows:
        raise ValueError(
            f"lengths must have an entry for each of {counted(group.size(), 'rank')}, and "
            f"{rows} for rank {group.rank()}, got {shown(list(sizes))}"
        )
    return sizes
