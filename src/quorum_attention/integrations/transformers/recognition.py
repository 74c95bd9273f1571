"""From a mask function of Transformers to a ``Mask``: a few numbers, and ids of tokens at most.

Transformers composes a mask out of functions that return functions (``masking_utils``): a causal
one, overlays for windows and chunks, one for padding, one for packed sequences, joined by ``and``
and ``or``. Such a function is known by its code, and what it was made with is in its closure.
Whatever is not known stays a function.

Positions in a mask function count from the first token ever seen; ours count from the first query
and the first key of the call. With a cache the two differ, by the offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch

from quorum_attention.mask import Mask

# (batch, head, query position, key position) -> keep
MaskFunction = Callable[..., torch.Tensor]

# Functions that return mask functions, with arguments to try them with. Not every version of
# Transformers has all of them: what is missing is not looked for.
_FACTORIES: dict[str, tuple[Any, ...]] = {
    "sliding_window_overlay": (1,),
    "sliding_window_bidirectional_overlay": (1,),
    "chunked_overlay": (1, None),
    "blockwise_overlay": (None,),
    "padding_mask_function": (None,),
    "packed_sequence_mask_function": (None,),
    "remap_positions_for_packed_sequence": (None, None),
    "add_offsets_to_mask_function": (None, 0, 0),
    "and_masks": (len, len),
    "or_masks": (len, len),
}
_FUNCTIONS = ("causal_mask_function", "bidirectional_mask_function")


@dataclass(frozen=True, eq=False)
class Known:
    """A mask function that is known: which one, and the arguments it was made with, by name."""

    name: str
    made_with: dict[str, Any]

    def __getitem__(self, argument: str) -> Any:
        return self.made_with[argument]

    @property
    def only(self) -> Any:
        """The argument, of a function made with one."""
        (value,) = self.made_with.values()
        return value


@cache
def _codes() -> dict[CodeType, str]:
    """The code of every function that is looked for, and its name."""
    from transformers import masking_utils

    found: dict[CodeType, str] = {}
    for name in _FUNCTIONS:
        function = getattr(masking_utils, name, None)
        if isinstance(function, FunctionType):
            found[function.__code__] = name
    for name, arguments in _FACTORIES.items():
        factory = getattr(masking_utils, name, None)
        made = factory(*arguments) if isinstance(factory, FunctionType) else None
        if isinstance(made, FunctionType):
            found[made.__code__] = name
    return found


def known(function: MaskFunction) -> Known | None:
    """What ``function`` is, or None if it is none of Transformers' own."""
    if not isinstance(function, FunctionType):
        return None
    name = _codes().get(function.__code__)
    if name is None:
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return Known(name, {variable: cell.cell_contents for variable, cell in cells})


@dataclass(frozen=True)
class Sizes:
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

    def query_positions(self) -> torch.Tensor:
        """(1, queries): positions in the whole sequence."""
        return torch.arange(self.queries, device=self.device)[None] + self.query_offset

    def key_positions(self) -> torch.Tensor:
        """(1, keys): positions in the whole sequence."""
        return torch.arange(self.keys, device=self.device)[None] + self.key_offset


@dataclass(eq=False)
class Parts:
    """The conditions that a pair must meet, all of them, as far as they are known."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    # Pairs whose two ids differ are masked: ids of queries and ids of keys, (1 or batch, tokens).
    ids: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    padding: list[torch.Tensor] = field(default_factory=list)
    unions: list[list[Parts]] = field(default_factory=list)
    others: list[MaskFunction] = field(default_factory=list)

    def near(self, left: int | None, right: int | None) -> None:
        """Only keys that are at most so many tokens to the left and to the right."""
        if left is not None:
            self.left = left if self.left is None else min(self.left, left)
        if right is not None:
            self.right = right if self.right is None else min(self.right, right)


def parts_of(function: MaskFunction, sizes: Sizes) -> Parts:
    """What ``function`` asks of a pair, taken apart."""
    parts = Parts()
    _gather(function, sizes, parts)
    return parts


def _gather(function: MaskFunction, sizes: Sizes, parts: Parts) -> None:
    what = known(function)
    if what is None:
        parts.others.append(function)
    elif what.name == "causal_mask_function":
        parts.causal = True
    elif what.name == "sliding_window_overlay":
        parts.near(int(what["sliding_window"]) - 1, None)
    elif what.name == "sliding_window_bidirectional_overlay":
        parts.near(int(what["sliding_window"]), int(what["sliding_window"]))
    elif what.name == "chunked_overlay":
        _chunks(what, sizes, parts)
    elif what.name == "padding_mask_function":
        _pad(what["padding_mask"], function, sizes, parts)
    elif what.name == "and_masks":
        if not _packed(what["mask_functions"], sizes, parts):
            for part in what["mask_functions"]:
                _gather(part, sizes, parts)
    elif what.name == "or_masks":
        parts.unions.append([parts_of(part, sizes) for part in what["mask_functions"]])
    elif what.name == "packed_sequence_mask_function" and _covers(what.only, sizes):
        parts.ids.append(_both(what.only, sizes))
    elif what.name == "blockwise_overlay" and _covers(what.only, sizes):
        queries, keys = _both(what.only, sizes)
        # A negative id is no block: two numbers that no token of the other kind has.
        parts.ids.append((queries.clamp(min=-1), keys.masked_fill(keys < 0, -2)))
    elif what.name != "bidirectional_mask_function":
        parts.others.append(function)


def _pad(mask: torch.Tensor, function: MaskFunction, sizes: Sizes, parts: Parts) -> None:
    start, stop = sizes.key_offset, sizes.key_offset + sizes.keys
    if mask.shape[0] < sizes.batch or mask.shape[1] < stop:
        parts.others.append(function)
    else:
        parts.padding.append(mask[: sizes.batch, start:stop].to(sizes.device, torch.bool))


def _covers(ids: torch.Tensor, sizes: Sizes) -> bool:
    """Whether there is an id for every query and every key."""
    last = max(sizes.query_offset + sizes.queries, sizes.key_offset + sizes.keys)
    return ids.dim() == 2 and ids.shape[0] >= sizes.batch and ids.shape[1] >= last


def _both(ids: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ids by position, those of the call's queries and those of its keys."""
    ids = ids[: sizes.batch].to(sizes.device)
    q, k = sizes.query_offset, sizes.key_offset
    return ids[:, q : q + sizes.queries], ids[:, k : k + sizes.keys]


def _chunks(what: Known, sizes: Sizes, parts: Parts) -> None:
    """Chunks count from the first token that is not padding, which differs between sequences."""
    size, left_padding = int(what["chunk_size"]), what["left_padding"].to(sizes.device)
    plain = sizes.key_offset % size == 0 and parts.chunk in (None, size)
    if plain and not bool(left_padding.any()):
        parts.chunk = size
        return
    first = left_padding[: sizes.batch, None]
    q, k = sizes.query_positions() - first, sizes.key_positions() - first
    parts.ids.append((q // size, k // size))


def _packed(functions: Sequence[MaskFunction], sizes: Sizes, parts: Parts) -> bool:
    """Packed documents whose mask counts from each document's own start; False if it is not that.

    Two tokens of one document are as far apart by those counts as they are by position, if the
    counts go up by one from token to token; so what only asks how far apart they are stays as it
    is. Chunks count from a document's start: they divide it further.
    """
    whats = [known(function) for function in functions]
    names = [what.name if what else "" for what in whats]
    if names != ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        return False
    assert whats[0] is not None
    assert whats[1] is not None
    ids, counts = whats[0]["packed_sequence_mask"], whats[1]["position_ids"]
    if counts.shape != ids.shape or not _covers(ids, sizes) or sizes.offset:
        return False
    if not bool(((ids.diff() == 1) | ((ids.diff() == 0) & (counts.diff() == 1))).all()):
        return False
    inside = Parts()
    _gather(whats[1]["mask_function"], sizes, inside)
    if inside.others or inside.padding or inside.ids or inside.unions:
        return False
    parts.causal |= inside.causal
    parts.near(inside.left, inside.right)
    parts.ids.append(_both(ids, sizes))
    if inside.chunk is not None:
        parts.ids.append(_both(counts // inside.chunk, sizes))
    return True


def mask_of(parts: Parts, sizes: Sizes) -> Mask:
    """The parts as the fields of a ``Mask``, without those that mask nothing here."""
    # How far a key can be to the left of a query, and to the right, in this call.
    furthest_left = sizes.queries - 1 + sizes.offset
    furthest_right = sizes.keys - 1 - sizes.offset
    left = -1 if parts.left is None or parts.left >= furthest_left else parts.left
    right = -1 if parts.right is None or parts.right >= furthest_right else parts.right
    causal = parts.causal and furthest_right > 0
    placed = causal or left >= 0 or right >= 0 or parts.chunk is not None
    either = [tuple(mask_of(one, sizes) for one in union) for union in parts.unions]
    return Mask(
        causal=causal,
        offset=sizes.offset if placed and sizes.offset else None,
        window=(left, right) if left >= 0 or right >= 0 else None,
        chunk=parts.chunk,
        documents=_joined(parts.ids),
        key_padding=_kept(parts.padding),
        keeps=_keeps(parts.others, sizes),
        either=either[0] if len(either) == 1 else (),
        every=tuple(Mask(either=union) for union in either) if len(either) > 1 else (),
    )


def _joined(
    ids: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One pair of ids that is equal where all of them are."""
    if not ids:
        return None
    queries, keys = ids[0]
    for q, k in ids[1:]:
        lowest = torch.minimum(q.min(), k.min())
        room = torch.maximum(q.max(), k.max()) - lowest + 1
        queries, keys = queries * room + (q - lowest), keys * room + (k - lowest)
    return queries, keys


def _kept(padding: list[torch.Tensor]) -> torch.Tensor | None:
    """Which keys are kept, (batch, keys); None if all are."""
    if not padding:
        return None
    kept = padding[0]
    for more in padding[1:]:
        kept = kept & more
    return None if bool(kept.all()) else kept


def _keeps(functions: list[MaskFunction], sizes: Sizes) -> MaskFunction | None:
    """Those functions in positions of the call, as FlexAttention's ``mask_mod`` has them."""
    if not functions:
        return None
    q_offset, k_offset = sizes.query_offset, sizes.key_offset

    def keeps(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        kept = functions[0](b, h, q + q_offset, k + k_offset)
        for function in functions[1:]:
            kept = kept & function(b, h, q + q_offset, k + k_offset)
        return kept

    return keeps


__all__ = ["Known", "MaskFunction", "Parts", "Sizes", "known", "mask_of", "parts_of"]
