"""What the ranks of a sharded call must agree on, and whether they do."""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.call.validation import check_kind
from quorum_attention.counts import one_of, shown, whole_number
from quorum_attention.distributed.masks import columns_of, signature_of
from quorum_attention.distributed.peers import Peers
from quorum_attention.distributed.watch import Watch
from quorum_attention.execution.device.lookup import best_device
from quorum_attention.mask import Mask

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What the ranks tell each other, after their rows and the lengths that they were given.
_WORDS = (
    "batch size", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "is_causal", "scale",
    "attn_mask", "dropout_p", "dropout_seed", "gradients",
)  # fmt: skip
# Then, of so many tensors of the mask with a number for each token, how many numbers they have.
_COLUMNS = 8
# In place of the rows, where a rank raises an error of its own.
_REFUSED = -1


def check_shard(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> None:
    """Refuse a rank's tensors that do not fit each other.

    Raises:
        TypeError, ValueError: they do not; the message names the argument.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {shown(tensor)}")
        check_kind(tensor, name)
    _check_sizes(
        query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device, enable_gqa,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _check_sizes(
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    query_dtype: torch.dtype,
    key_dtype: torch.dtype,
    value_dtype: torch.dtype,
    query_device: torch.device,
    key_device: torch.device,
    value_device: torch.device,
    enable_gqa: bool,
) -> None:
    """``check_shard``, of what it looks at; those that passed are remembered."""
    for name, shape, dtype, device in (
        ("query", query, query_dtype, query_device),
        ("key", key, key_dtype, key_device),
        ("value", value, value_dtype, value_device),
    ):
        if len(shape) < 3:
            raise ValueError(
                f"{name} must be (..., heads, rows, head_dim), got shape {tuple(shape)}"
            )
        if dtype not in _DTYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {dtype}")
        if dtype != query_dtype or device != query_device:
            raise ValueError(
                f"{name} must have the query's dtype and device, {query_dtype} on "
                f"{query_device}, got {dtype} on {device}"
            )
        if (*shape[:-3], shape[-2]) != (*query[:-3], query[-2]):
            raise ValueError(
                f"{name} must have the query's batch dimensions and rows, "
                f"{(*query[:-3], query[-2])}, got shape {tuple(shape)}"
            )
    if key[-1] != query[-1] or key[-3] != value[-3]:
        raise ValueError(
            "key must have the query's head_dim and the value's heads, got shapes "
            f"{tuple(query)}, {tuple(key)}, {tuple(value)}"
        )
    heads, kv_heads = query[-3], key[-3]
    if not heads or not kv_heads or heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"there are {heads} query heads and {kv_heads} key/value heads, which "
            "enable_gqa=True allows"
        )


def home_of(group: dist.ProcessGroup) -> torch.device:
    """Where the numbers lie that ranks tell each other before a call: host memory if the group can
    send it, because the host waits for them, and on a GPU that would be for all work before them.

    The same on all ranks: a group has its backends on all of them.
    """
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return best_device()


def told(
    group: dist.ProcessGroup, numbers: Sequence[int], watch: Watch | None = None
) -> list[list[int]]:
    """The numbers of every rank; the host waits for them.

    Args:
        watch: the pass; None: one of its own.
    """
    if watch is None:
        with Watch(group, False) as alone:
            found = told(group, numbers, alone)
            alone.end()
            return found
    mine = torch.tensor(numbers, dtype=torch.int64, device=home_of(group))
    every = [torch.empty_like(mine) for _ in range(group.size())]
    watch.gather(every, mine)
    listed: list[list[int]] = torch.stack(every).tolist()
    return listed


def refuse(group: dist.ProcessGroup, lengths: object, watch: Watch) -> None:
    """Tell the ranks that agree on a call that this one raises an error, and with them all do.

    Where they may not ask it hears of it who waits for it.
    """
    if lengths is None:
        told(group, (_REFUSED,) + (0,) * (1 + len(_WORDS) + _COLUMNS), watch)
        watch.over()


class Said(NamedTuple):
    """What a rank says of its call.

    Attributes:
        dtype: of the kernels (autocast's, where that is on).
        dropout: chance and seed, as given.
        records: whether gradients are recorded: the way that tensors meet may depend on it.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dtype: torch.dtype
    is_causal: bool
    scale: float | None
    mask: Mask | None
    dropout: tuple[float, int | None]
    records: bool = False


class Agreed(NamedTuple):
    """What the ranks agree on.

    Attributes:
        sizes: rows of every rank.
        name: of the call, the same on all ranks, in plain values.
        mark: a number of it, if nobody was asked now.
    """

    sizes: tuple[int, ...]
    name: Hashable
    mark: int | None


def agreed(
    group: dist.ProcessGroup, said: Said, lengths: Sequence[int] | str | None, watch: Watch
) -> Agreed:
    """Rows of every rank, and whether all make the same call: asked, unless lengths are given and
    it was asked before.

    Raises:
        ValueError: the lengths do not fit, or the ranks do not agree, or one of them refused.
    """
    rows, peers, seed = said.query.shape[-2], Peers.of(group), said.dropout[1]
    given = None if lengths is None else _given(group, lengths, rows)
    if given is not None:
        name = _name(said, given)
        mark = peers.agreed.get(name)
        if mark is not None:
            mark ^= 0 if seed is None else seed
            watch.knows((name, seed), mark)
            return Agreed(given, name, mark)
    columns = [] if said.mask is None else columns_of(said.mask)
    shown_columns = [*columns, *[-1] * _COLUMNS][:_COLUMNS]
    listed = told(group, (rows, _number(given), *_numbers(said), *shown_columns), watch)
    try:
        sizes = _compared(group, said, listed)
    except ValueError:
        # All ranks raise.
        watch.over()
        raise
    name = _name(said, sizes)
    if name not in peers.agreed:
        peers.agree(name)
    watch.knows((name, seed))
    return Agreed(sizes, name, None)


def _compared(
    group: dist.ProcessGroup, said: Said, listed: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Rows of every rank, from what each has said; raises on all ranks or on none."""
    refused = [rank for rank, one in enumerate(listed) if one[0] == _REFUSED]
    if refused:
        raise ValueError(
            f"rank {refused[0]} refused the call before anything was sent; it says why"
        )
    sizes = tuple(one[0] for one in listed)
    wrong = [rank for rank, one in enumerate(listed) if one[1] not in (-1, _number(sizes))]
    if wrong:
        raise ValueError(
            f"the ranks do not agree on lengths: they have {list(sizes)} rows, and rank {wrong[0]} "
            "was given others"
        )
    for number, word in enumerate(_WORDS, start=2):
        if len({one[number] for one in listed}) > 1:
            raise ValueError(f"the ranks do not agree on {word}; {_words(group, said)}")
    for number in range(len(_WORDS) + 2, len(listed[0])):
        widths = [one[number] for one in listed]
        if not (set(widths) in ({-1}, {sum(sizes)}) or tuple(widths) == sizes):
            raise ValueError(
                "attn_mask.documents and attn_mask.key_padding must be for the rows of each rank, "
                f"{list(sizes)}, or on all of them for all {sum(sizes)}, got {widths}"
            )
    return sizes


def _name(said: Said, sizes: tuple[int, ...]) -> Hashable:
    """A call whose ranks have so many rows. Not its seed, which may be another at every call."""
    query, key, mask = said.query.shape, said.key.shape, said.mask
    of_mask: Hashable = None
    if mask is not None:
        tokens = sum(sizes)
        whole = tuple([n == tokens and max(sizes) < tokens for n in columns_of(mask)])
        of_mask = (signature_of(mask), whole)
    return (
        sizes, tuple(query[:-2]), key[-3], query[-1], said.value.shape[-1],
        _DTYPES.index(said.dtype), said.is_causal, said.scale, of_mask, said.dropout[0],
        said.records,
    )  # fmt: skip


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


def _numbers(said: Said) -> tuple[int, ...]:
    """What must be the same on all ranks, in the order of ``_WORDS``."""
    query, key, value = said.query, said.key, said.value
    mask = None if said.mask is None else signature_of(said.mask)
    p, seed = said.dropout
    return (
        math.prod(query.shape[:-3]), query.shape[-3], key.shape[-3], query.shape[-1],
        value.shape[-1], _DTYPES.index(said.dtype), int(said.is_causal), _number(said.scale),
        _number(mask), _number(p), _number(seed), int(said.records),
    )  # fmt: skip


def _words(group: dist.ProcessGroup, said: Said) -> str:
    return (
        f"rank {group.rank()} has query {tuple(said.query.shape)} {said.dtype}, key "
        f"{tuple(said.key.shape)}, is_causal={said.is_causal}, scale={said.scale}, "
        f"attn_mask={said.mask}, dropout_p={said.dropout[0]}, dropout_seed={said.dropout[1]}, "
        f"{'gradients' if said.records else 'no gradients'}"
    )


def _number(what: object) -> int:
    """The same on all ranks for what is written the same."""
    return -1 if what is None else zlib.crc32(repr(what).encode())


__all__ = ["Agreed", "Said", "agreed", "check_shard", "home_of", "refuse", "told"]
