"""``Mask``: what an attention call keeps, and what becomes of its scores, in one
object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from quorum_attention.argument_checks import (
    check_callable,
    one_of,
    real_number,
    shown,
    whole_number,
)
from quorum_attention.keywords import helps_with_fields
from quorum_attention.plain_types import Keywords

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

    Give it as ``attn_mask`` of ``attention`` and its companions. A pair is kept if
    every given field keeps it. No tensor of queries times keys is made. Short calls on
    a GPU are the exception: they may make one of at most 64 MiB (docs/masks.md). Scores
    are scaled, then capped; then ``bias`` is added; then ``sinks`` take part in the
    softmax. A row without a kept key has output 0 and log-sum-exp -inf. With sinks its
    log-sum-exp is the sink.

    A mask may be given to many calls. If one of its tensors was changed in place, the
    next call reads it again. A replay of a CUDA graph would not. So a mask with
    documents, lengths or padding is refused while a CUDA graph is captured.

    Attributes:
        causal: keep keys at or before the key that the query stands at. With True or
            "upper_left" query i stands at key i, as with torch's ``is_causal``. With
            "lower_right" the last query stands at the last key (for queries that follow
            a cache of keys), as with ``offset="lower_right"``.
        offset: query i stands at key i + ``offset``, for ``causal``, ``window`` and
            ``chunk``. It is a number for all queries; integers (n_queries,), (batch,
            n_queries) or (batch, 1); or "lower_right". None: 0, or "lower_right" if
            ``causal`` is. "lower_right" aligns each document by itself, among the first
            ``key_lengths[b]`` keys of batch entry b: the last query of a document
            stands at the document's last key, the document's query before it at the
            document's key before, and so on. If a document has more queries than keys,
            its first queries see no key. FlashAttention's ``varlen`` and ``kvcache``
            functions align in this way. ``key_padding`` moves no query, nor do fields
            of other masks (``either``, ``every``, ``&``, ``|``).
        window: keep keys within this many tokens before and after the key that the
            query stands at: a number for both, or (left, right); -1 is no limit on that
            side.
        chunk: keep keys in the chunk that the query stands in. Each chunk has this many
            keys. The first begins at the first key of the call, also with documents.
        documents: keep pairs with equal ids: integers (N,) or (batch, N) for queries
            and keys; or a pair of such tensors, one for the queries and one for the
            keys. Ids may be in any order; long runs of equal ids are fastest.
        key_lengths: (batch,) integers: keep the first ``key_lengths[b]`` keys of batch
            entry b.
        key_padding: (batch, n_keys) or (n_keys,) bool: keep keys where it is True.
        keeps: any other rule, as FlexAttention's ``mask_mod(batch, head, query, key)``.
            Its arguments count from 0 in the whole call. It is evaluated tile by tile,
            unless it is a mask of ``quorum_attention.kernels.kit`` that knows its
            blocks. On a GPU a table of blocks is kept while the tensors in the
            function's closure stay the same (docs/masks.md).
        either: keep pairs that at least one of these masks keeps (``Mask | Mask``).
        every: keep pairs that all of these masks keep (``Mask & Mask``, where the two
            have the same field).
        bias: a tensor as ``attn_mask`` may be: additive, or boolean (True keeps).
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: (query heads,) one more logit in the softmax of each head, as if of a key
            whose value is 0; it may require a gradient.

    Raises:
        TypeError, ValueError: a field is wrong; the error names it.

    Examples:
        >>> lengths = torch.tensor([300, 200])
        >>> mask = qa.Mask(causal=True, window=(127, 0), key_lengths=lengths)
        >>> q = torch.randn(2, 4, 300, 16)
        >>> qa.attention(q, q, q, attn_mask=mask).shape
        torch.Size([2, 4, 300, 16])
        >>> prefix = qa.Mask(keeps=lambda b, h, query, key: key < 10)
        >>> prefix_lm = qa.Mask(causal=True) | prefix
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
        _check_offset(self.offset)
        if self.window is not None:
            _window_sides(self.window)
        if self.chunk is not None:
            whole_number(self.chunk, "Mask.chunk", 1, FAR)
        if isinstance(self.documents, tuple) and len(self.documents) != 2:
            raise ValueError(
                f"Mask.documents must be one tensor or two, got {len(self.documents)}"
            )
        for ids in (
            self.documents if isinstance(self.documents, tuple) else (self.documents,)
        ):
            _check_tensor(ids, "Mask.documents", "integers", (1, 2))
        _check_tensor(self.key_lengths, "Mask.key_lengths", "integers", (1,))
        _check_tensor(self.key_padding, "Mask.key_padding", "bool", (1, 2))
        _check_tensor(self.bias, "Mask.bias", None, None)
        _check_tensor(self.sinks, "Mask.sinks", "floating-point", (1,))
        check_callable(self.keeps, "Mask.keeps")
        _check_inner_masks(self.either, "Mask.either")
        _check_inner_masks(self.every, "Mask.every")
        if (
            self.softcap is not None
            and not real_number(self.softcap, "Mask.softcap") > 0
        ):
            raise ValueError(
                f"Mask.softcap must be above 0 or None, got {self.softcap!r}"
            )

    @property
    def is_structured(self) -> bool:
        """Whether any field but ``bias``, ``softcap`` and ``sinks`` says which pairs
        are kept."""
        names = self.set_fields().keys()
        return not names <= {"offset", *_SCORES}

    @property
    def sides(self) -> tuple[int, int]:
        """The window as (left, right); -1 is no limit."""
        if self.window is None:
            return (-1, -1)
        return _window_sides(self.window)

    @property
    def counts_from_last(self) -> bool:
        """Whether queries stand at the last keys ("lower_right")."""
        if self.offset is None:
            return self.causal == "lower_right"
        return isinstance(self.offset, str)

    def set_fields(self) -> Keywords:
        """Return the fields that are set, by name."""
        # By a tuple: torch's compiler knows no ``dataclasses.fields``.
        fields = {}
        for name in FIELDS:
            value = getattr(self, name)
            if value is None or value is False:
                continue
            # By its length: torch's compiler knows no ``not`` of a tuple.
            if not isinstance(value, tuple) or len(value) > 0:
                fields[name] = value
        return fields

    def __and__(self, mask: Mask) -> Mask:
        """Return a mask of pairs that both keep; bias, soft cap and sinks are of the
        one with them.

        Raises:
            ValueError: both have a bias, a soft cap or sinks.
        """
        if not isinstance(mask, Mask):
            return NotImplemented
        own_fields = self.set_fields()
        other_fields = mask.set_fields()
        for name in _SCORES:
            if name in own_fields and name in other_fields:
                raise ValueError(
                    f"Mask & Mask: both have {name}; give it in one of them"
                )
        fields = {**own_fields, **other_fields}
        counts_from_last = self.counts_from_last or mask.counts_from_last
        if _are_independent(own_fields, other_fields, counts_from_last):
            return Mask(**fields)
        scores = {name: fields[name] for name in _SCORES if name in fields}
        return Mask(
            every=(_pairs_mask(own_fields), _pairs_mask(other_fields)), **scores
        )

    def __or__(self, mask: Mask) -> Mask:
        """Return a mask of pairs that at least one keeps.

        Raises:
            ValueError: one has a bias, a soft cap or sinks.
        """
        if not isinstance(mask, Mask):
            return NotImplemented
        return Mask(either=(self, mask))


def _pairs_mask(fields: Keywords) -> Mask:
    """Return a mask of those fields that say which pairs are kept."""
    pairs = dict(fields)
    for name in _SCORES:
        pairs.pop(name, None)
    return Mask(**pairs)


def _are_independent(first: Keywords, second: Keywords, counts_from_last: bool) -> bool:
    """Tell whether the fields of two masks mean the same in one mask.

    No field may be in both. An offset, or "lower_right", of one mask must not hold for
    the other; and "lower_right" counts keys of the documents and lengths of its own
    mask alone.
    """
    if first.keys() & second.keys():
        return False
    fields = {**first, **second}
    if "offset" not in fields and fields.get("causal") != "lower_right":
        return True
    positional = _POSITIONAL | _COUNTED if counts_from_last else _POSITIONAL
    return not first.keys() & positional or not second.keys() & positional


def map_tensors(
    mask: Mask, change: Callable[[torch.Tensor, str], torch.Tensor]
) -> Mask:
    """Return the mask with other tensors in the fields that say which pairs are kept.

    The masks within it are changed too. If ``change`` (tensor, name of the field)
    returns what it is given, the mask itself is returned.
    """
    names = ("offset", "documents", "key_lengths", "key_padding", "either", "every")
    fields = {name: _map_value(getattr(mask, name), name, change) for name in names}
    if all(value is getattr(mask, name) for name, value in fields.items()):
        return mask
    return replace(mask, **fields)


def _map_value(
    value: Any, name: str, change: Callable[[torch.Tensor, str], torch.Tensor]
) -> Any:
    """Return a field's value with other tensors; the value itself if none has
    changed."""
    if isinstance(value, torch.Tensor):
        return change(value, name)
    if isinstance(value, Mask):
        return map_tensors(value, change)
    if not isinstance(value, tuple):
        return value
    items = tuple([_map_value(item, name, change) for item in value])
    if all(item is former for item, former in zip(items, value, strict=True)):
        return value
    return items


FIELDS = tuple(Mask.__dataclass_fields__)


def _check_offset(offset: Any) -> None:
    """Check ``Mask.offset``: a whole number, a tensor of them, "lower_right" or
    None."""
    if offset is None:
        return
    if isinstance(offset, torch.Tensor):
        _check_tensor(offset, "Mask.offset", "integers", (1, 2))
        return
    if not isinstance(offset, str):
        whole_number(offset, "Mask.offset", -FAR, FAR)
        return
    if offset != "lower_right":
        raise ValueError(
            "Mask.offset must be a whole number, a tensor of them or 'lower_right', "
            f"got {offset!r}"
        )


def _check_inner_masks(masks: Any, name: str) -> None:
    """Check that masks within a mask say which pairs are kept, and nothing else."""
    if not isinstance(masks, tuple) or not all(
        isinstance(mask, Mask) for mask in masks
    ):
        raise TypeError(f"{name} must be a tuple of masks, got {shown(masks)}")
    for mask in masks:
        for field in _SCORES:
            if getattr(mask, field) is not None:
                raise ValueError(
                    f"{name} says which pairs are kept: its masks have no {field}; "
                    "give it in the mask that holds them"
                )


def _check_tensor(
    value: Any, name: str, kind: str | None, dims: tuple[int, ...] | None
) -> None:
    """Check a tensor, if there is one.

    Args:
        kind: "integers", "bool" or "floating-point"; None: any.
        dims: the numbers of dimensions that it may have; None: any.
    """
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if dims is not None and value.dim() not in dims:
        words = " or ".join(map(str, dims))
        instead = ""
        if kind != "floating-point" and value.dim() > max(dims):
            end_dim = -1 if max(dims) == 1 else -2
            instead = (
                f": several batch dimensions count as one, tensor.flatten(0, {end_dim})"
            )
        raise ValueError(
            f"{name} must have {words} dimensions, got shape "
            f"{tuple(value.shape)}{instead}"
        )
    if kind is not None and kind != _kind_of(value):
        raise TypeError(f"{name} must be {kind}, got {value.dtype}")


def _kind_of(tensor: torch.Tensor) -> str:
    """Return what numbers a tensor has: "integers", "bool" or "floating-point"."""
    if tensor.is_floating_point() or tensor.is_complex():
        return "floating-point"
    return "bool" if tensor.dtype == torch.bool else "integers"


def _window_sides(window: Any) -> tuple[int, int]:
    """Return a window, checked, as (left, right)."""
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    try:
        before, after = (whole_number(side, "Mask.window", -1) for side in sides)
    except (TypeError, ValueError):
        raise ValueError(
            "Mask.window must be a number of tokens or (left, right), whole numbers "
            f"from -1 (no limit), got {shown(window)}"
        ) from None
    return before, after
