"""What a mask function of Transformers keeps: called with symbols, it tells what it
compares.

Transformers composes a mask of functions of (batch, head, query, key). Called with
symbols of positions, a function that compares positions, or numbers that a tensor holds
for each token, is described completely: causal masks, windows, chunks, padding, packed
documents, and these joined by ``&`` and ``|``. A function that does anything else stays
a function.

Positions in a mask function count from the first token ever seen; a ``Mask`` counts
from the first query and the first key of the call. With a cache the two differ, by the
offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from quorum_attention.mask import Mask
from quorum_attention.plain_types import Keywords

# (batch, head, query position, key position) -> keep
MaskFunction = Callable[..., torch.Tensor]
PairIds = tuple[torch.Tensor, torch.Tensor]
"""Ids of queries and of keys, (1 or batch, tokens): pairs of equal ids are kept."""


class MaskSizes(NamedTuple):
    """The call that a mask is for, as Transformers hands it over; offsets are in
    tokens."""

    batch: int
    queries: int
    keys: int
    query_offset: int
    key_offset: int
    device: torch.device

    @property
    def offset(self) -> int:
        """The position of the first query relative to the first key."""
        return self.query_offset - self.key_offset


class UnknownError(Exception):
    """A mask function asks for more than symbols can tell."""


class _Symbol:
    """Something that a mask function may not decide by."""

    __hash__ = None  # type: ignore[assignment]
    device = None

    def to(self, *_: Any, **__: Any) -> Any:
        """Return the symbol itself, on any device and in any dtype."""
        return self

    def __bool__(self) -> bool:
        raise UnknownError

    def __eq__(self, _: object) -> Any:
        raise UnknownError

    def __ne__(self, _: object) -> Any:
        raise UnknownError


class _Entry(_Symbol):
    """The batch entry."""


class Near(NamedTuple):
    """Keys at most so many tokens before and after the query; None: no limit.

    Attributes:
        counts: (batch, tokens) that tokens are counted by; None: by position.
    """

    counts: torch.Tensor | None
    before: int | None
    after: int | None


class Equal(NamedTuple):
    """Pairs in the same chunk of so many tokens; or of the same number of ``ids``
    (batch, tokens), or in the same chunk by what those count."""

    ids: torch.Tensor | None
    chunk: int


class Either(NamedTuple):
    """Pairs that at least one of these keeps."""

    masks: tuple[KeptPairs, ...]


class KeptPairs(_Symbol):
    """Pairs that meet all conditions; it answers like a tensor.

    Attributes:
        conditions: ``Near``, ``Equal``, ``Either``; ``Numbers`` of bools: tokens that
            are kept.
    """

    def __init__(self, *conditions: Any) -> None:
        self.conditions = conditions

    def __and__(self, operand: Any) -> KeptPairs:
        return KeptPairs(*self.conditions, *_as_kept_pairs(operand).conditions)

    def __or__(self, operand: Any) -> KeptPairs:
        return KeptPairs(Either((self, _as_kept_pairs(operand))))


class _NoPair(_Symbol):
    """No pair, to which others are joined."""

    def __or__(self, operand: Any) -> KeptPairs:
        return _as_kept_pairs(operand)


def _as_kept_pairs(symbol: Any) -> KeptPairs:
    """The pairs that a mask function returned."""
    if isinstance(symbol, KeptPairs):
        return symbol
    if not isinstance(symbol, Numbers) or not symbol.is_plain:
        raise UnknownError
    if symbol.table is None or symbol.table.dtype != torch.bool:
        raise UnknownError
    return KeptPairs(symbol)


@dataclass(eq=False)
class Numbers(_Symbol):
    """A number of each query, or of each key: ``(table[entry, token] + shift) //
    divisor``; without a table its position."""

    of_key: bool
    table: torch.Tensor | None = None
    shift: int = 0
    divisor: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether these are the table's numbers, or the positions, themselves."""
        return self.shift == 0 and self.divisor == 1

    def new_ones(self, *_: Any, **__: Any) -> KeptPairs:
        """Return every pair."""
        return KeptPairs()

    def new_zeros(self, *_: Any, **__: Any) -> _NoPair:
        """Return no pair."""
        return _NoPair()

    def __add__(self, number: Any) -> Numbers:
        if not isinstance(number, int) or self.divisor != 1:
            raise UnknownError
        return replace(self, shift=self.shift + number)

    def __sub__(self, subtrahend: Any) -> Any:
        if isinstance(subtrahend, int):
            return self + -subtrahend
        return _Distance(self, subtrahend)

    def __floordiv__(self, number: Any) -> Numbers:
        if not isinstance(number, int) or self.divisor != 1:
            raise UnknownError
        return replace(self, divisor=number)

    def __and__(self, operand: Any) -> KeptPairs:
        return _as_kept_pairs(self).__and__(operand)

    def __eq__(self, operand: object) -> Any:
        partner = self._partner(operand)
        if self.shift or partner.shift or self.divisor != partner.divisor:
            raise UnknownError
        if self.table is None and self.divisor == 1:
            raise UnknownError  # the diagonal alone
        return KeptPairs(Equal(self.table, self.divisor))

    def _partner(self, operand: object) -> Numbers:
        """``operand``, if it is numbers of the other side of pairs, of the same
        table."""
        if not isinstance(operand, Numbers) or operand.of_key == self.of_key:
            raise UnknownError
        if self.table is not operand.table:
            raise UnknownError
        return operand

    def at_most(self, operand: Any, distance: int) -> KeptPairs:
        """Pairs with ``self <= operand + distance``."""
        partner = self._partner(operand)
        if self.divisor != 1 or partner.divisor != 1:
            raise UnknownError
        bound = partner.shift - self.shift + distance
        if bound < 0:
            raise UnknownError  # a band beside the diagonal
        if self.of_key:
            return KeptPairs(Near(self.table, None, bound))
        return KeptPairs(Near(self.table, bound, None))

    def __le__(self, operand: Any) -> KeptPairs:
        return self.at_most(operand, 0)

    def __lt__(self, operand: Any) -> KeptPairs:
        return self.at_most(operand, -1)

    def __ge__(self, operand: Any) -> KeptPairs:
        if isinstance(operand, Numbers):
            return operand.at_most(self, 0)
        if operand != 0 or not self.is_plain:
            raise UnknownError
        if self.table is None:
            return KeptPairs()  # no position is below 0
        return KeptPairs(Numbers(self.of_key, self.table >= 0))

    def __gt__(self, operand: Any) -> KeptPairs:
        if not isinstance(operand, Numbers):
            raise UnknownError
        return operand.at_most(self, -1)

    def values(self, sizes: MaskSizes) -> torch.Tensor:
        """The numbers of a call: (1 or batch, queries or keys)."""
        if self.of_key:
            start = sizes.key_offset
            stop = start + sizes.keys
        else:
            start = sizes.query_offset
            stop = start + sizes.queries
        if self.table is None:
            numbers = torch.arange(start, stop, device=sizes.device)[None]
        else:
            if self.table.is_floating_point() or self.table.dim() != 2:
                raise UnknownError
            n_entries, n_tokens = self.table.shape
            if n_entries < sizes.batch or n_tokens < stop:
                raise UnknownError
            numbers = self.table[: sizes.batch, start:stop].to(sizes.device)
        return (numbers + self.shift) // self.divisor


@dataclass(eq=False)
class _Distance(_Symbol):
    """The distance between two positions, of which only the absolute value is of
    use."""

    minuend: Numbers
    subtrahend: Any
    is_absolute: bool = False

    def __abs__(self) -> _Distance:
        return replace(self, is_absolute=True)

    def __le__(self, limit: Any) -> KeptPairs:
        if not self.is_absolute or not isinstance(limit, int):
            raise UnknownError
        not_after = self.minuend.at_most(self.subtrahend, limit)
        not_before = self.subtrahend.at_most(self.minuend, limit)
        return not_after.__and__(not_before)


class _Lookups(TorchFunctionMode):
    """Symbols as indices of tensors: ``table[entry, token]``, and ``table[entry]`` of
    zeros (no padding on the left)."""

    def __torch_function__(
        self, function: Any, _: Any, args: Any = (), named: Any = None
    ) -> Any:
        if function is torch.Tensor.__getitem__:
            table, index = args
            entry, *tokens = index if isinstance(index, tuple) else (index,)
            if isinstance(entry, _Entry):
                looked_up = _look_up(table, tokens)
                if looked_up is not None:
                    return looked_up
        return function(*args, **(named or {}))


def _look_up(table: torch.Tensor, tokens: list[Any]) -> Numbers | int | None:
    """``table[entry, *tokens]``; None if it is of another number than the position
    itself."""
    if table.dim() != 1 + len(tokens):
        raise UnknownError
    if not tokens and not bool(table.any()):
        return 0
    (token,) = tokens
    if isinstance(token, Numbers) and token.is_plain and token.table is None:
        return Numbers(token.of_key, table)
    return None


def conditions_of(function: MaskFunction) -> KeptPairs:
    """Call a mask function with symbols, and return what it asks of a pair.

    Raises:
        UnknownError: it asks for more than symbols can tell.
    """
    # Inside a graph of torch.compile symbols know comparisons of positions alone.
    with nullcontext() if torch.compiler.is_compiling() else _Lookups():
        try:
            result = function(_Entry(), _Symbol(), Numbers(False), Numbers(True))
        except Exception:  # whatever it is, the function does more than compare
            result = None
        return _as_kept_pairs(result)


def trace_mask(
    function: MaskFunction, sizes: MaskSizes, padding: torch.Tensor | None = None
) -> Mask:
    """The description of a mask function; one that is not known stays a function."""
    try:
        return mask_of_conditions(conditions_of(function), sizes, padding)
    except UnknownError:
        pass
    query_offset = sizes.query_offset
    key_offset = sizes.key_offset

    def keeps(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return function(b, h, q + query_offset, k + key_offset)

    return Mask(keeps=keeps, key_padding=padding)


def mask_of_conditions(
    pairs: KeptPairs, sizes: MaskSizes, padding: torch.Tensor | None = None
) -> Mask:
    """The conditions as the fields of a ``Mask``, without those that mask nothing here.

    Args:
        padding: (batch, keys) bool, True where a key is kept.

    Raises:
        UnknownError: they cannot be described.
    """
    near: list[Near] = []
    chunk: int | None = None
    ids: list[PairIds] = []
    unions: list[tuple[Mask, ...]] = []
    for condition in pairs.conditions:
        if isinstance(condition, Near):
            _check_counts(condition, pairs, sizes)
            near.append(condition)
        elif isinstance(condition, Equal):
            if _is_field_chunk(condition, chunk, sizes):
                chunk = condition.chunk
            else:
                ids.append(_ids_of_chunks(condition, sizes))
        elif isinstance(condition, Either):
            unions.append(
                tuple(mask_of_conditions(mask, sizes) for mask in condition.masks)
            )
        elif condition.of_key:
            tokens = condition.values(sizes).bool()
            padding = tokens if padding is None else padding & tokens
        else:
            ids.append(_ids_of_queries(condition, sizes))
    return Mask(
        documents=_joined(ids),
        key_padding=padding,
        **_position_fields(near, chunk, sizes),
        **_union_fields(unions),
    )


def _position_fields(near: list[Near], chunk: int | None, sizes: MaskSizes) -> Keywords:
    """The fields of a ``Mask`` for pairs that positions alone tell."""
    before, after = _sides(near, sizes)
    causal = after == 0
    window = (before, -1 if causal else after)
    has_window = window != (-1, -1)
    needs_offset = causal or has_window or chunk is not None
    return {
        "causal": causal,
        "offset": sizes.offset if needs_offset and sizes.offset else None,
        "window": window if has_window else None,
        "chunk": chunk,
    }


def _is_field_chunk(condition: Equal, chunk: int | None, sizes: MaskSizes) -> bool:
    """Whether chunks can be ``Mask.chunk``, beside a chunk that is there already."""
    if condition.ids is not None or chunk not in (None, condition.chunk):
        return False
    return sizes.key_offset % condition.chunk == 0


def _ids_of_chunks(condition: Equal, sizes: MaskSizes) -> PairIds:
    """Ids of queries and keys that are equal in one chunk."""
    queries = Numbers(False, condition.ids, 0, condition.chunk)
    keys = Numbers(True, condition.ids, 0, condition.chunk)
    return queries.values(sizes), keys.values(sizes)


def _ids_of_queries(tokens: Numbers, sizes: MaskSizes) -> PairIds:
    """Ids of queries and keys that are equal for the queries that are kept."""
    is_kept = tokens.values(sizes).bool()
    keys = torch.zeros((1, sizes.keys), dtype=torch.int64, device=sizes.device)
    return (~is_kept).long(), keys


def _union_fields(unions: list[tuple[Mask, ...]]) -> Keywords:
    """The fields of a ``Mask`` for pairs that each of the unions keeps."""
    if len(unions) == 1:
        return {"either": unions[0]}
    return {"every": tuple(Mask(either=union) for union in unions)}


def _sides(near: list[Near], sizes: MaskSizes) -> tuple[int, int]:
    """The smallest limits before and after the query; -1: none."""
    last_query = sizes.queries - 1
    last_key = sizes.keys - 1
    before = _limit([condition.before for condition in near], last_query + sizes.offset)
    after = _limit([condition.after for condition in near], last_key - sizes.offset)
    return before, after


def _limit(limits: list[int | None], furthest: int) -> int:
    """The smallest limit; -1 if none is closer than the furthest key."""
    smallest = min([limit for limit in limits if limit is not None], default=-1)
    if torch.compiler.is_compiling():
        # In a graph sizes are symbols, and would become constants by a comparison.
        return smallest
    return -1 if smallest >= furthest else smallest


def _check_counts(near: Near, pairs: KeptPairs, sizes: MaskSizes) -> None:
    """Check that two tokens of one document are as far apart by counts as by position.

    Raises:
        UnknownError: they are not, or there are no documents.
    """
    counts = near.counts
    if counts is None:
        return
    for condition in pairs.conditions:
        if not isinstance(condition, Equal) or condition.ids is None:
            continue
        if (
            condition.chunk == 1
            and not sizes.offset
            and _counts_up(counts, condition.ids)
        ):
            return
    raise UnknownError


def _counts_up(counts: torch.Tensor, ids: torch.Tensor) -> bool:
    """Whether counts go up by one within documents, which are numbered one after the
    other."""
    if counts.shape != ids.shape:
        return False
    is_within = (ids.diff() == 0) & (counts.diff() == 1)
    is_next = ids.diff() == 1
    return bool((is_next | is_within).all())


def _joined(
    ids: list[PairIds],
) -> PairIds | None:
    """One pair of ids that is equal where all of them are."""
    if not ids:
        return None
    query_ids, key_ids = ids[0]
    for queries, keys in ids[1:]:
        lowest = torch.minimum(queries.min(), keys.min())
        highest = torch.maximum(queries.max(), keys.max())
        n_ids = highest - lowest + 1
        query_ids = query_ids * n_ids + (queries - lowest)
        key_ids = key_ids * n_ids + (keys - lowest)
    return query_ids, key_ids
