"""What the ranks of a sharded call must agree on, and whether they do.

In host memory the ranks compare a hash of the call before each pass. On GPUs, where the host would
have to wait for that, they compare each kind of call once if ``lengths`` are given.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from quorum_attention.call.validation import Sizes, check_kind, sizes_of
from quorum_attention.counts import one_of, shown, whole_number
from quorum_attention.distributed.masks import columns_of
from quorum_attention.execution.device.lookup import best_device, on_host
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.mask import Mask

# What a call is, by the names of its arguments; the values are plain.
Arguments = Mapping[str, object]

# The ranks compare the lengths of so many tensors of a mask with a number for each token.
_COLUMNS = 8
# In place of the rows, where a rank raises an error of its own.
_REFUSED = -1
# Calls that a group remembers; when there are more, all ranks forget all at the same call.
_MOST = 1024
# torch's backend for dry runs: what comes is what memory held.
_SENDS_NOTHING = "fake"

# Calls that a group has agreed on; and groups in which a call has failed on this rank.
_AGREED: WeakKeyDictionary[dist.ProcessGroup, set[object]] = WeakKeyDictionary()
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


def check_shard(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> Sizes:
    """The sizes of a rank's tensors.

    Raises:
        TypeError, ValueError: they do not fit each other; the message names the argument.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {shown(tensor)}")
        check_kind(tensor, name)
    sizes = sizes_of(query, key, value, enable_gqa)
    if sizes.n_queries != sizes.n_keys or not sizes.heads:
        raise ValueError(
            "key must have the query's rows, and there must be heads, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)}"
        )
    return sizes


def kernel_of_parts(kernel: str | InnerKernel) -> InnerKernel:
    """The kernel of that name, for calls that are parts of one.

    Raises:
        ValueError, TypeError: there is none.
        NotImplementedError: it computes another attention, by positions in the whole call.
    """
    found = get_kernel(kernel)
    if found.probed_as is not None or (found.own_attention and not found.position_free):
        raise NotImplementedError(
            f"kernel {found.name!r} computes another attention, of positions in the whole call; "
            "ranks have parts of it: give attn_mask, or a function that takes no positions"
        )
    return found


def home_of(group: dist.ProcessGroup) -> torch.device:
    """Where the numbers lie that ranks tell each other before a call: host memory if the group can
    send it, because the host waits for them, and on a GPU that would be for all work before them.

    The same on all ranks: a group has its backends on all of them.
    """
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return best_device()


def told(group: dist.ProcessGroup, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of every rank; the host waits for them."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=home_of(group))
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    listed: list[list[int]] = torch.stack(every).tolist()
    return listed


def waits(group: dist.ProcessGroup, query: Any) -> bool:
    """Whether the host waits for the messages of a call in any case."""
    if isinstance(query, torch.Tensor):
        return on_host(query.device)
    return "cuda:" not in dist.get_backend_config(group)


@contextmanager
def refusing(group: dist.ProcessGroup, asks: bool) -> Iterator[None]:
    """The checks of a rank's arguments: where they fail, all ranks that ask raise."""
    try:
        yield
    except Exception:
        if asks:
            told(group, _message(_REFUSED, 0))
        raise


def compare(
    group: dist.ProcessGroup, arguments: Arguments, rows: int = 0, *more: int
) -> list[Sequence[int]]:
    """Compare a call with those of the other ranks; rows and further numbers of every rank.

    Raises:
        ValueError: they differ, or a rank refused; on all ranks.
    """
    mine = _message(rows, number_of(arguments), *more)
    listed: list[Sequence[int]] = [*told(group, mine)]
    if dist.get_backend(group) == _SENDS_NOTHING:
        return [mine] * group.size()
    refused = [rank for rank, one in enumerate(listed) if one[0] == _REFUSED]
    if refused:
        raise ValueError(
            f"rank {refused[0]} refused the call before anything was sent; it says why"
        )
    if len({one[1] for one in listed}) > 1:
        raise ValueError(f"the ranks do not agree on {_difference(group, arguments)}")
    return [(one[0], *one[2:]) for one in listed]


def _message(rows: int, number: int, *more: int) -> Sequence[int]:
    """Of one size for all passes, so that those of two passes can be compared."""
    return [rows, number, *more, *[-1] * (1 + _COLUMNS)][: 3 + _COLUMNS]


def number_of(what: object) -> int:
    """A hash of 64 bits, the same on all ranks for what is written the same."""
    written = repr(list(what.items()) if isinstance(what, Mapping) else what)
    digest = hashlib.blake2b(written.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _difference(group: dist.ProcessGroup, arguments: Arguments) -> str:
    """The first argument that differs, with its values: the ranks tell each other all of them."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, {n: repr(v) for n, v in arguments.items()}, group=group)
    for name in dict.fromkeys(name for one in every for name in one):
        values = [one.get(name) for one in every]
        if len(set(values)) > 1:
            return f"{name}: " + ", ".join(f"rank {r} has {v}" for r, v in enumerate(values))
    raise AssertionError("arguments are the same, and their hashes differ")


def agreed_sizes(
    group: dist.ProcessGroup,
    query: torch.Tensor,
    arguments: Arguments,
    mask: Mask | None,
    lengths: Sequence[int] | str | None,
) -> tuple[int, ...]:
    """Rows of every rank, once all make the same call.

    Raises:
        ValueError: the lengths do not fit, or the ranks do not agree, or one of them refused.
    """
    rows, known = query.shape[-2], _AGREED.setdefault(group, set())
    columns = [] if mask is None else columns_of(mask)
    given = None
    with refusing(group, lengths is None or waits(group, query)):
        if lengths is not None:
            given = _given(group, lengths, rows)
    if given is not None and not waits(group, query) and _name(arguments, columns, given) in known:
        return given
    number = -1 if given is None else number_of(given)
    listed = compare(group, arguments, rows, number, *columns)
    sizes = tuple(one[0] for one in listed)
    wrong = [rank for rank, one in enumerate(listed) if one[1] not in (-1, number_of(sizes))]
    if wrong:
        raise ValueError(
            f"the ranks do not agree on lengths: they have {list(sizes)} rows, and rank {wrong[0]} "
            "was given others"
        )
    for widths in zip(*(one[2:] for one in listed), strict=True):
        if not (set(widths) in ({-1}, {sum(sizes)}) or widths == sizes):
            raise ValueError(
                "attn_mask.documents and attn_mask.key_padding must be for the rows of each rank, "
                f"{list(sizes)}, or on all of them for all {sum(sizes)}, got {list(widths)}"
            )
    if len(known) >= _MOST:
        known.clear()
    known.add(_name(arguments, columns, sizes))
    return sizes


def _name(arguments: Arguments, columns: Sequence[int], sizes: tuple[int, ...]) -> object:
    """A call of such sizes, the same on all ranks. Not its seed, which may differ at every call."""
    tokens = sum(sizes)
    whole = tuple(n == tokens and max(sizes) < tokens for n in columns)
    return sizes, whole, number_of({n: v for n, v in arguments.items() if n != "dropout_seed"})


def agreed_number(group: dist.ProcessGroup, query: torch.Tensor, arguments: Arguments) -> int:
    """A number of a call without sizes of each rank, the same where ranks mean the same."""
    known, number = _AGREED.setdefault(group, set()), number_of(arguments)
    if waits(group, query) or number not in known:
        compare(group, arguments)
        if len(known) >= _MOST:
            known.clear()
        known.add(number)
    return number


def _given(group: dist.ProcessGroup, lengths: Sequence[int] | str, rows: int) -> tuple[int, ...]:
    """The argument ``lengths``, checked against this rank's rows."""
    if isinstance(lengths, str):
        one_of(lengths, "lengths", ("equal",))
        return (rows,) * group.size()
    sizes = tuple([whole_number(n, "lengths", 0) for n in lengths])
    if len(sizes) != group.size() or sizes[group.rank()] != rows:
        raise ValueError(
            f"lengths must have an entry for each of {group.size()} ranks, and {rows} for rank "
            f"{group.rank()}, got {shown(list(sizes))}"
        )
    return sizes


__all__ = [
    "Arguments", "agreed_number", "agreed_sizes", "alive", "check_shard", "compare", "exchanging",
    "kernel_of_parts", "member_of", "refusing", "told", "waits",
]  # fmt: skip
