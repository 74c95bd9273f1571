"""What a mask function of Transformers keeps: called with symbols, it tells what it compares.

Transformers composes a mask of functions of (batch, head, query, key). Called with symbols of
positions, a function that compares positions, or numbers that a tensor holds for each token, is
described completely: causal masks, windows, chunks, padding, packed documents, and these joined by
``&`` and ``|``. A function that does anything else stays a function.

Positions in a mask function count from the first token ever seen; a ``Mask`` counts from the first
query and the first key of the call. With a cache the two differ, by the offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from quorum_attention.mask import Mask

# (batch, head, query position, key position) -> keep
MaskFunction = Callable[..., torch.Tensor]


class MaskSizes(NamedTuple):
    """What a mask is for, as Transformers hands it over; offsets are in tokens."""

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
        """Itself."""
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
    left: int | None
    right: int | None


class Equal(NamedTuple):
    """Pairs in the same chunk of so many tokens; or of the same number of ``ids`` (batch, tokens),
    or in the same chunk by what those count."""

    ids: torch.Tensor | None
    chunk: int


class Either(NamedTuple):
    """Pairs that at least one of these keeps."""

    masks: tuple[KeptPairs, ...]


class KeptPairs(_Symbol):
    """Pairs that meet all conditions; it answers like a tensor.

    Attributes:
        parts: ``Near``, ``Equal``, ``Either``; ``Numbers`` of bools: tokens that are kept.
    """

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __and__(self, other: Any) -> KeptPairs:
        return KeptPairs(*self.parts, *_kept(other).parts)

    def __or__(self, other: Any) -> KeptPairs:
        return KeptPairs(Either((self, _kept(other))))


class _Nothing(_Symbol):
    """No pair, to which others are joined."""

    def __or__(self, other: Any) -> KeptPairs:
        return _kept(other)


def _kept(what: Any) -> KeptPairs:
    plain = isinstance(what, Numbers) and what.plain
    if plain and what.table is not None and what.table.dtype == torch.bool:
        return KeptPairs(what)
    if not isinstance(what, KeptPairs):
        raise UnknownError
    return what


@dataclass(eq=False)
class Numbers(_Symbol):
    """A number of each query, or of each key: ``(table[entry, token] + shift) // divisor``; without
    a table its position."""

    of_key: bool
    table: torch.Tensor | None = None
    shift: int = 0
    divisor: int = 1

    @property
    def plain(self) -> bool:
        """Whether these are the table's numbers, or the positions, themselves."""
        return self.shift == 0 and self.divisor == 1

    def new_ones(self, *_: Any, **__: Any) -> KeptPairs:
        """Every pair."""
        return KeptPairs()

    def new_zeros(self, *_: Any, **__: Any) -> _Nothing:
        """No pair."""
        return _Nothing()

    def __add__(self, number: Any) -> Numbers:
        if not isinstance(number, int) or self.divisor != 1:
            raise UnknownError
        return replace(self, shift=self.shift + number)

    def __sub__(self, other: Any) -> Any:
        return self + -other if isinstance(other, int) else _Distance(self, other)

    def __floordiv__(self, number: Any) -> Numbers:
        if not isinstance(number, int) or self.divisor != 1:
            raise UnknownError
        return replace(self, divisor=number)

    def __and__(self, other: Any) -> KeptPairs:
        return _kept(self).__and__(other)

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, Numbers) or other.of_key == self.of_key:
            raise UnknownError
        same = self.table is other.table and self.divisor == other.divisor
        if not same or self.shift or other.shift or (self.table is None and self.divisor == 1):
            raise UnknownError
        return KeptPairs(Equal(self.table, self.divisor))

    def _at_most(self, other: Any, more: int) -> KeptPairs:
        """Pairs with ``self <= other + more``."""
        if not isinstance(other, Numbers) or other.of_key == self.of_key:
            raise UnknownError
        bound = other.shift - self.shift + more
        if self.divisor * other.divisor != 1 or self.table is not other.table or bound < 0:
            raise UnknownError  # or a band beside the diagonal
        return KeptPairs(Near(self.table, *((None, bound) if self.of_key else (bound, None))))

    def __le__(self, other: Any) -> KeptPairs:
        return self._at_most(other, 0)

    def __lt__(self, other: Any) -> KeptPairs:
        return self._at_most(other, -1)

    def __ge__(self, other: Any) -> KeptPairs:
        if isinstance(other, Numbers):
            return other._at_most(self, 0)
        if other != 0 or not self.plain:
            raise UnknownError
        # No position is below 0.
        return (
            KeptPairs() if self.table is None else KeptPairs(Numbers(self.of_key, self.table >= 0))
        )

    def __gt__(self, other: Any) -> KeptPairs:
        if not isinstance(other, Numbers):
            raise UnknownError
        return other._at_most(self, -1)

    def values(self, sizes: MaskSizes) -> torch.Tensor:
        """(1 or batch, queries or keys) of a call."""
        start = sizes.key_offset if self.of_key else sizes.query_offset
        stop = start + (sizes.keys if self.of_key else sizes.queries)
        numbers = torch.arange(start, stop, device=sizes.device)[None]
        if self.table is not None:
            whole = not self.table.is_floating_point() and self.table.dim() == 2
            if not whole or self.table.shape[0] < sizes.batch or self.table.shape[1] < stop:
                raise UnknownError
            numbers = self.table[: sizes.batch, start:stop].to(sizes.device)
        return (numbers + self.shift) // self.divisor


@dataclass(eq=False)
class _Distance(_Symbol):
    """From one position to another, of which only the absolute value is of use."""

    one: Numbers
    other: Any
    absolute: bool = False

    def __abs__(self) -> _Distance:
        return replace(self, absolute=True)

    def __le__(self, most: Any) -> KeptPairs:
        if not self.absolute or not isinstance(most, int):
            raise UnknownError
        return _kept(self.one._at_most(self.other, most) & self.other._at_most(self.one, most))


class _Lookups(TorchFunctionMode):
    """Symbols as indices of tensors: ``table[entry, token]``, and ``table[entry]`` of zeros (no
    padding on the left)."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        if function is torch.Tensor.__getitem__:
            table, index = args
            entry, *tokens = index if isinstance(index, tuple) else (index,)
            if isinstance(entry, _Entry):
                if table.dim() != 1 + len(tokens):
                    raise UnknownError
                if not tokens and not bool(table.any()):
                    return 0
                # Of the position itself alone.
                (token,) = tokens
                if isinstance(token, Numbers) and token.plain and token.table is None:
                    return Numbers(token.of_key, table)
        return function(*args, **(named or {}))


def conditions_of(function: MaskFunction) -> KeptPairs:
    """What ``function`` asks of a pair.

    Raises:
        UnknownError: it asks for more than symbols can tell.
    """
    # Inside a graph of torch.compile symbols know comparisons of positions alone.
    with nullcontext() if torch.compiler.is_compiling() else _Lookups():
        try:
            kept = function(_Entry(), _Symbol(), Numbers(False), Numbers(True))
        except Exception:  # whatever it is, the function does more than compare
            kept = None
        return _kept(kept)


def mask_of(function: MaskFunction, sizes: MaskSizes, padding: torch.Tensor | None = None) -> Mask:
    """The description of a mask function; one that is not known stays a function."""
    try:
        return described(conditions_of(function), sizes, padding)
    except UnknownError:  # a function of positions in the call
        q_at, k_at = sizes.query_offset, sizes.key_offset
        return Mask(
            keeps=lambda b, h, q, k: function(b, h, q + q_at, k + k_at), key_padding=padding
        )


def described(kept: KeptPairs, sizes: MaskSizes, padding: torch.Tensor | None = None) -> Mask:
    """The conditions as the fields of a ``Mask``, without those that mask nothing here.

    Args:
        padding: (batch, keys) bool, True where a key is kept.

    Raises:
        UnknownError: they cannot be described.
    """
    near: list[Near] = []
    chunk: int | None = None
    ids: list[tuple[torch.Tensor, ...]] = []
    unions: list[tuple[Mask, ...]] = []
    for part in kept.parts:
        if isinstance(part, Near):
            if part.counts is not None:
                _check_counts(part.counts, kept, sizes)
            near.append(part)
        elif isinstance(part, Equal):
            plain = part.ids is None and chunk in (None, part.chunk)
            if plain and sizes.key_offset % part.chunk == 0:
                chunk = part.chunk
            else:
                both = (Numbers(side, part.ids, 0, part.chunk) for side in (False, True))
                ids.append(tuple(numbers.values(sizes) for numbers in both))
        elif isinstance(part, Numbers):
            tokens = part.values(sizes).bool()
            if part.of_key:
                padding = tokens if padding is None else padding & tokens
            else:
                none = torch.zeros((1, sizes.keys), dtype=torch.int64, device=sizes.device)
                ids.append(((~tokens).long(), none))
        else:
            unions.append(tuple(described(one, sizes) for one in part.masks))
    left = _limit([part.left for part in near], sizes.queries - 1 + sizes.offset)
    right = _limit([part.right for part in near], sizes.keys - 1 - sizes.offset)
    causal = right == 0
    window = (left, -1 if causal else right)
    placed = causal or window != (-1, -1) or chunk is not None
    return Mask(
        causal=causal,
        offset=sizes.offset if placed and sizes.offset else None,
        window=None if window == (-1, -1) else window,
        chunk=chunk,
        documents=_joined(ids),
        key_padding=padding,
        either=unions[0] if len(unions) == 1 else (),
        every=tuple(Mask(either=union) for union in unions) if len(unions) > 1 else (),
    )


def _limit(limits: list[int | None], furthest: int) -> int:
    """The smallest limit; -1 if none is closer than the furthest key."""
    smallest = min([n for n in limits if n is not None], default=-1)
    # In a graph sizes are symbols, and would become constants here.
    far = not torch.compiler.is_compiling() and smallest >= furthest
    return -1 if far else smallest


def _check_counts(counts: torch.Tensor, kept: KeptPairs, sizes: MaskSizes) -> None:
    """Nothing, if two tokens of one document are as far apart by ``counts`` as by position.

    Raises:
        UnknownError: they are not, or there are no documents.
    """
    for part in kept.parts:
        if isinstance(part, Equal) and part.ids is not None and not sizes.offset:
            ids = part.ids
            if part.chunk == 1 and counts.shape == ids.shape:
                inside = (ids.diff() == 0) & (counts.diff() == 1)
                if bool(((ids.diff() == 1) | inside).all()):
                    return
    raise UnknownError


def _joined(ids: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One pair of ids that is equal where all of them are."""
    if not ids:
        return None
    queries, keys = ids[0]
    for q, k in ids[1:]:
        lowest = torch.minimum(q.min(), k.min())
        room = torch.maximum(q.max(), k.max()) - lowest + 1
        queries, keys = queries * room + (q - lowest), keys * room + (k - lowest)
    return queries, keys
