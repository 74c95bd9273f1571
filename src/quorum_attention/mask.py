"""``Mask``: what an attention call keeps, and what becomes of its scores, in one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from quorum_attention.argument_checks import one_of, real_number, shown, whole_number
from quorum_attention.keywords import helps_with_fields

Documents = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Keeps = Callable[[Any, Any, Any, Any], torch.Tensor]

FAR = 1 << 62
"""The largest position. (Positions and their sums are 64-bit integers.)"""
_CAUSAL = (False, True, "upper_left", "lower_right")
# The fields that change scores or results; the others say which pairs are kept.
_SCORES = ("bias", "softcap", "sinks")
_POSITIONAL = frozenset({"causal", "offset", "window", "chunk"})
# The fields that say which keys "lower_right" counts.
_COUNTED = frozenset({"documents", "key_lengths"})


@helps_with_fields
@dataclass(frozen=True, eq=False)
class Mask:
    """Which pairs of queries and keys a call keeps, and what changes their scores.

    Give it as ``attn_mask`` of ``attention`` and its companions. A pair is kept if every given
    field keeps it. No tensor of queries times keys is made, but in short calls on a GPU, of
    at most 64 MiB (docs/masks.md). Scores are scaled, then capped; then ``bias`` is added; then
    ``sinks`` take part in the softmax. A row without a kept key has output
    0 and log-sum-exp -inf; with sinks, its log-sum-exp is the sink.

    A mask may be given to many calls. If one of its tensors was changed in place, the next call
    reads it again. A replay of a CUDA graph would not: while one is captured, a mask with
    documents, lengths or padding is refused.

    Attributes:
        causal: keep keys at or before the place of the query. True or "upper_left" places query i
            at key i, as torch's ``is_causal`` does. "lower_right" places the last query at the last
            key (queries that follow a cache of keys), as ``offset="lower_right"`` does.
        offset: the place of a query among the keys less the query's number, for ``causal``,
            ``window`` and ``chunk``: a number for all queries; integers (n_queries,), (batch,
            n_queries) or (batch, 1); or "lower_right". None: 0, or "lower_right" where ``causal``
            says so. "lower_right" counts tokens of each document alone, and the first
            ``key_lengths[b]`` keys alone: the last query of a document stands at its last key, the
            query before at the key before, and so on; queries that no key is left for stand before
            the document's first key. So documents are what calls of their own would be, as in
            FlashAttention's ``varlen`` functions, and entries end where their keys do, as in its
            ``kvcache`` function. ``key_padding`` moves no query, nor do fields of other masks
            (``either``, ``every``, ``&``, ``|``).
        window: keep keys within this many tokens before and after the place of the query: a number
            for both, or (left, right); -1 is no limit on that side.
        chunk: keep keys in the chunk of this many keys in which the place of the query lies. Chunks
            are counted from the first key of the call, also with documents.
        documents: keep pairs with equal ids: integers (N,) or (batch, N) for queries and keys, or
            one such tensor for the queries and one for the keys. Ids may be in any order; long runs
            of equal ids are fastest.
        key_lengths: (batch,) integers: keep the first ``key_lengths[b]`` keys of batch entry b.
        key_padding: (batch, n_keys) or (n_keys,) bool: keep keys where it is True.
        keeps: any other rule, as FlexAttention's ``mask_mod(batch, head, query, key)``, in numbers
            of the whole call (queries and keys each counted from 0). It is evaluated tile by tile,
            unless it is a mask of ``quorum_attention.kernels.kit`` that knows its blocks. On a GPU
            the table of blocks is kept while the tensors it closes over stay the same
            (docs/masks.md).
        either: keep pairs that at least one of these masks keeps (``Mask | Mask``).
        every: keep pairs that all of these masks keep (``Mask & Mask``, where the two have the same
            field).
        bias: a tensor as for ``attn_mask``: additive, or boolean (True keeps).
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: (query heads,) one logit for each head, which takes part in the softmax without a
            value; it may require a gradient.

    Raises:
        TypeError, ValueError: a field that makes no sense, by name.

    Examples:
        >>> mask = qa.Mask(causal=True, window=(127, 0), key_lengths=torch.tensor([300, 200]))
        >>> q = torch.randn(2, 4, 300, 16)
        >>> qa.attention(q, q, q, attn_mask=mask).shape
        torch.Size([2, 4, 300, 16])
        >>> prefix = qa.Mask(causal=True) | qa.Mask(keeps=lambda b, h, query, key: key < 10)
    """

    causal: bool | Literal["upper_left", "lower_right"] = False
    offset: int | Literal["lower_right"] | torch.Tensor | None = None
    window: int | tuple[int, int] | None = None
    chunk: int | None = None
    documents: Documents | None = None
    key_lengths: torch.Tensor | None = None
    key_padding: torch.Tensor | None = None
    keeps: Keeps | None = None
    either: tuple[Mask, ...] = ()
    every: tuple[Mask, ...] = ()
    bias: torch.Tensor | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        one_of(self.causal, "Mask.causal", _CAUSAL)
        if isinstance(self.offset, torch.Tensor):
            _check(self.offset, "Mask.offset", "integers", (1, 2))
        elif isinstance(self.offset, str):
            if self.offset != "lower_right":
                raise ValueError(
                    "Mask.offset must be a whole number, a tensor of them or 'lower_right', got "
                    f"{self.offset!r}"
                )
        elif self.offset is not None:
            whole_number(self.offset, "Mask.offset", -FAR, FAR)
        if self.window is not None:
            _window(self.window)
        if self.chunk is not None:
            whole_number(self.chunk, "Mask.chunk", 1, FAR)
        if isinstance(self.documents, tuple) and len(self.documents) != 2:
            raise ValueError(f"Mask.documents must be one tensor or two, got {len(self.documents)}")
        for ids in self.documents if isinstance(self.documents, tuple) else (self.documents,):
            _check(ids, "Mask.documents", "integers", (1, 2))
        _check(self.key_lengths, "Mask.key_lengths", "integers", (1,))
        _check(self.key_padding, "Mask.key_padding", "bool", (1, 2))
        _check(self.bias, "Mask.bias", None, None)
        _check(self.sinks, "Mask.sinks", "floating-point", (1,))
        if self.keeps is not None and not callable(self.keeps):
            raise TypeError(f"Mask.keeps must be callable or None, got {shown(self.keeps)}")
        _masks(self.either, "Mask.either")
        _masks(self.every, "Mask.every")
        if self.softcap is not None and not real_number(self.softcap, "Mask.softcap") > 0:
            raise ValueError(f"Mask.softcap must be above 0 or None, got {self.softcap!r}")

    @property
    def is_structured(self) -> bool:
        """Whether any field but ``bias``, ``softcap`` and ``sinks`` says which pairs are kept."""
        return not self.set_fields().keys() <= {"offset", *_SCORES}

    @property
    def sides(self) -> tuple[int, int]:
        """The window as (left, right); -1 is no limit."""
        return (-1, -1) if self.window is None else _window(self.window)

    @property
    def counts_from_last(self) -> bool:
        """Whether queries stand at the last keys ("lower_right")."""
        if self.offset is None:
            return self.causal == "lower_right"
        return isinstance(self.offset, str)

    def set_fields(self) -> dict[str, Any]:
        """The fields that say anything."""
        # By a tuple: torch's compiler knows no ``dataclasses.fields``.
        return {name: getattr(self, name) for name in FIELDS if _given(getattr(self, name))}

    def __and__(self, mask: Mask) -> Mask:
        """Pairs that both keep; bias, soft cap and sinks are those of the one that has them.

        Raises:
            ValueError: both have a bias, a soft cap or sinks.
        """
        if not isinstance(mask, Mask):
            return NotImplemented
        mine, others = self.set_fields(), mask.set_fields()
        for name in _SCORES:
            if name in mine and name in others:
                raise ValueError(f"Mask & Mask: both have {name}; give it in one of them")
        both = {**mine, **others}
        # What "lower_right" or an offset means in one of them it must not mean in the other; and
        # "lower_right" counts keys of the documents and lengths beside it alone.
        shifted = "offset" in both or both.get("causal") == "lower_right"
        positional = {*_POSITIONAL}
        if self.counts_from_last or mask.counts_from_last:
            positional |= _COUNTED
        apart = not mine.keys() & positional or not others.keys() & positional
        if not mine.keys() & others.keys() and (apart or not shifted):
            return Mask(**both)
        scores = {name: both[name] for name in _SCORES if name in both}
        kept = [{n: v for n, v in one.items() if n not in _SCORES} for one in (mine, others)]
        return Mask(every=(Mask(**kept[0]), Mask(**kept[1])), **scores)

    def __or__(self, mask: Mask) -> Mask:
        """Pairs that at least one keeps.

        Raises:
            ValueError: one has a bias, a soft cap or sinks.
        """
        if not isinstance(mask, Mask):
            return NotImplemented
        return Mask(either=(self, mask))


def map_tensors(mask: Mask, change: Callable[[torch.Tensor, str], torch.Tensor]) -> Mask:
    """The mask with other tensors in the fields that say which pairs are kept, also of the masks
    within it; the mask itself, if ``change`` (tensor, name of the field) returns what it is given.
    """

    def changed(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value, name)
        if isinstance(value, Mask):
            return map_tensors(value, change)
        if not isinstance(value, tuple):
            return value
        made = tuple([changed(one, name) for one in value])
        return value if all(a is b for a, b in zip(made, value, strict=True)) else made

    names = ("offset", "documents", "key_lengths", "key_padding", "either", "every")
    fields = {name: changed(getattr(mask, name), name) for name in names}
    same = all(value is getattr(mask, name) for name, value in fields.items())
    return mask if same else replace(mask, **fields)


FIELDS = tuple(Mask.__dataclass_fields__)


def _given(value: Any) -> bool:
    """Whether a field says anything."""
    # By its length: torch's compiler knows no ``not`` of a tuple.
    empty = isinstance(value, tuple) and len(value) == 0
    return value is not None and value is not False and not empty


def _masks(masks: Any, name: str) -> None:
    if not isinstance(masks, tuple) or not all(isinstance(one, Mask) for one in masks):
        raise TypeError(f"{name} must be a tuple of masks, got {shown(masks)}")
    for one in masks:
        for field in _SCORES:
            if getattr(one, field) is not None:
                raise ValueError(
                    f"{name} says which pairs are kept: its masks have no {field}; give it in the "
                    "mask that holds them"
                )


def _check(value: Any, name: str, kind: str | None, dims: tuple[int, ...] | None) -> None:
    """Check a tensor, if there is one: that it is "integers", "bool" or "floating-point", and its
    number of dimensions; None: any."""
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if dims is not None and value.dim() not in dims:
        words = " or ".join(map(str, dims))
        instead = ""
        if kind != "floating-point" and value.dim() > max(dims):
            last = -1 if max(dims) == 1 else -2
            instead = f": several batch dimensions count as one, tensor.flatten(0, {last})"
        raise ValueError(
            f"{name} must have {words} dimensions, got shape {tuple(value.shape)}{instead}"
        )
    found = "bool" if value.dtype == torch.bool else "integers"
    if value.is_floating_point() or value.is_complex():
        found = "floating-point"
    if kind not in (None, found):
        raise TypeError(f"{name} must be {kind}, got {value.dtype}")


def _window(window: Any) -> tuple[int, int]:
    both = window if isinstance(window, (tuple, list)) else (window, window)
    try:
        left, right = (whole_number(n, "Mask.window", -1) for n in both)
    except (TypeError, ValueError):
        raise ValueError(
            "Mask.window must be a number of tokens or (left, right), whole numbers from -1 "
            f"(no limit), got {shown(window)}"
        ) from None
    return left, right
