"""What the ranks of a sharded call must agree on, and whether they do.

In host memory the ranks compare the call before each pass. On GPUs the host would have
to wait for that, so the ranks compare a call once for each kind of call if ``lengths``
are given.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from quorum_attention.argument_checks import one_of, shown, whole_number
from quorum_attention.distributed.groups import all_gather_objects, known_to_ranks
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.units import counted

CallSignature = Mapping[str, object]
"""What a call is, by the names of its arguments; the values are plain."""

# Calls that a group remembers. When there are more, all ranks forget all calls at the
# same call.
_MAX_CALLS = 1024
# Prepared calls that a group keeps: of 64 ranks, each takes 1.5 MB.
_MAX_PREPARED = 64


@dataclass(slots=True)
class AgreedCalls:
    """Calls on which the ranks of a group have agreed.

    Attributes:
        names: of the calls, the same on all ranks.
        prepared: what this rank keeps of such calls, by keys of its own.
    """

    names: set[str] = field(default_factory=set)
    prepared: dict[Hashable, Any] = field(default_factory=dict)

    def keep(self, key: Hashable, prepared: Any) -> None:
        """Keep what was prepared for a call."""
        if len(self.prepared) >= _MAX_PREPARED:
            self.prepared.clear()
        self.prepared[key] = prepared


_AGREED: WeakKeyDictionary[dist.ProcessGroup, AgreedCalls] = WeakKeyDictionary()


def agreed_calls(group: dist.ProcessGroup) -> AgreedCalls:
    """Return the calls on which the ranks of a group have agreed."""
    agreed = _AGREED.get(group)
    if agreed is None or len(agreed.names) >= _MAX_CALLS:
        agreed = _AGREED[group] = AgreedCalls()
    return agreed


def compare(
    group: dist.ProcessGroup, signature: CallSignature, *values: Any
) -> list[Any]:
    """Compare a call with those of the other ranks, and return the values of every
    rank.

    Raises:
        ValueError: the calls differ. All ranks raise it.
    """
    texts = {name: repr(value) for name, value in signature.items()}
    answers = all_gather_objects(group, (texts, values))
    texts_of_ranks, values_of_ranks = zip(*answers, strict=True)
    # The names in the order of the arguments; ranks may have others.
    names = dict.fromkeys(chain.from_iterable(texts_of_ranks))
    for name in names:
        arguments = [rank_texts.get(name) for rank_texts in texts_of_ranks]
        if len(set(arguments)) > 1:
            listed = ", ".join(
                f"rank {rank} has {argument}" for rank, argument in enumerate(arguments)
            )
            message = f"the ranks do not agree on {name}: {listed}"
            raise known_to_ranks(ValueError(message))
    return list(values_of_ranks)


def agree_on(
    group: dist.ProcessGroup, query: torch.Tensor, signature: CallSignature
) -> None:
    """Compare arguments that have no sizes, where the ranks have not agreed on them
    before.

    Raises:
        ValueError: the arguments differ. All ranks raise it.
    """
    name = repr(signature)
    if not _is_agreed(group, query, name):
        compare(group, signature)
        agreed_calls(group).names.add(name)


def agree_on_lengths(
    group: dist.ProcessGroup,
    query: torch.Tensor,
    signature: CallSignature,
    mask_widths: Sequence[int],
    lengths: Sequence[int] | str | None,
) -> tuple[int, ...]:
    """Return the rows of every rank, once all ranks make the same call.

    Args:
        query: (..., rows, head_dim) of this rank.
        mask_widths: the last size of each tensor of the mask that has a number for each
            token.
        lengths: the argument of the call.

    Raises:
        TypeError, ValueError: the lengths do not fit, or the ranks do not agree.
    """
    n_rows = query.shape[-2]
    checked_lengths = _checked_lengths(group, lengths, n_rows)
    name = _call_name(signature, mask_widths, checked_lengths)
    if _is_agreed(group, query, name) and checked_lengths is not None:
        return checked_lengths
    compared = {**signature, "lengths": checked_lengths}
    answers = compare(group, compared, n_rows, *mask_widths)
    rows_of_ranks, *widths_of_tensors = zip(*answers, strict=True)
    n_tokens = sum(rows_of_ranks)
    for widths in widths_of_tensors:
        is_whole_on_all = set(widths) == {n_tokens}
        if not is_whole_on_all and widths != rows_of_ranks:
            message = (
                "attn_mask.documents and attn_mask.key_padding must be for the rows "
                f"of each rank, {list(rows_of_ranks)}, or on all of them for all "
                f"{n_tokens}, got {list(widths)}"
            )
            raise known_to_ranks(ValueError(message))
    agreed_calls(group).names.add(name)
    return rows_of_ranks


def _call_name(
    signature: CallSignature,
    mask_widths: Sequence[int],
    lengths: tuple[int, ...] | None,
) -> str:
    """Return what identifies a call on which ranks may have agreed; it is the same on
    all ranks.

    The seed is left out: it may differ at every call.
    """
    is_whole: list[bool] | None = None
    if lengths:
        n_tokens = sum(lengths)
        is_whole = [max(lengths) < width == n_tokens for width in mask_widths]
    return repr((lengths, is_whole, {**signature, "dropout_seed": None}))


def _is_agreed(group: dist.ProcessGroup, query: torch.Tensor, name: str) -> bool:
    """Tell whether the ranks need not compare a call again."""
    return name in agreed_calls(group).names and not on_host(query.device)


def _checked_lengths(
    group: dist.ProcessGroup, lengths: Sequence[int] | str | None, n_rows: int
) -> tuple[int, ...] | None:
    """Return the argument ``lengths`` as the rows of every rank, or None if it is None.

    Raises:
        TypeError, ValueError: it does not fit the rows of this rank.
    """
    if lengths is None:
        return None
    if isinstance(lengths, str):
        one_of(lengths, "lengths", ("equal",))
        return (n_rows,) * group.size()
    if not isinstance(lengths, Iterable):
        raise TypeError(
            f"lengths must be 'equal' or the rows of every rank, got {shown(lengths)}"
        )
    rows_of_ranks = tuple([whole_number(n, "lengths", 0) for n in lengths])
    if len(rows_of_ranks) != group.size() or rows_of_ranks[group.rank()] != n_rows:
        raise ValueError(
            f"lengths must have an entry for each of {counted(group.size(), 'rank')}, "
            f"and {n_rows} for rank {group.rank()}, got {shown(list(rows_of_ranks))}"
        )
    return rows_of_ranks
