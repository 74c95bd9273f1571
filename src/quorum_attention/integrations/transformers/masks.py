"""What Transformers asks for masks, under this integration: a description, never N x
N."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch

from quorum_attention.call.block import CallBlock, WholeCall
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.integrations.substitutes import substitutes
from quorum_attention.integrations.transformers.mask_symbols import (
    MaskFunction,
    MaskSizes,
    UnknownError,
    conditions_of,
    mask_of_conditions,
    trace_mask,
)
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.torch_private import (
    capturing,
    restores_grad_and_autocast,
    uncompiled,
)
from quorum_attention.mask import Mask, map_tensors
from quorum_attention.plain_types import Keywords
from quorum_attention.units import counted


class DescribedMask:
    """A ``Mask`` with the shape that Transformers asks masks for.

    It is no ``BlockMask``, which Transformers would pass on as well: of one of those a
    model may leave out what it adds to other masks.

    Attributes:
        mask: what is kept.
        shape: (batch, 1, queries, keys), of the mask that a tensor would be.
        seen: keys from this one on no query sees.
        is_checked: whether packed documents were looked for.
    """

    ndim = 4

    def __init__(self, mask: Mask, shape: tuple[int, int, int, int], seen: int) -> None:
        self.mask = mask
        self.shape = shape
        self.seen = seen
        self._elsewhere: dict[torch.device, Mask] = {}
        self.is_checked = False

    def on(self, device: torch.device) -> Mask:
        """The mask with its tensors on ``device``: layers of a model may lie on
        several."""
        if device not in self._elsewhere:
            self._elsewhere[device] = map_tensors(
                self.mask, lambda tensor, _: tensor.to(device)
            )
        return self._elsewhere[device]

    def dim(self) -> int:
        """4, as of a mask that is a tensor."""
        return 4

    def to(self, *_: Any, **__: Any) -> DescribedMask:
        """Return itself: its tensors follow the call that it is given to."""
        return self

    contiguous = to

    def numel(self) -> int:
        """Pairs of the call."""
        return math.prod(self.shape)

    def __getitem__(self, index: Any) -> DescribedMask:
        """The description of some entries, queries and keys, which slices say.

        Raises:
            DescriptionError: other indices, as of an array that is no description.
        """
        spans = self._spans(index)
        entries, heads, queries, keys = spans
        if heads != (0, self.shape[1]):
            raise self._refusal("[...]")
        shape = (entries.length, heads.length, queries.length, keys.length)
        if shape == self.shape:
            return self
        n_seen = min(self.seen, keys.stop) - keys.start
        return DescribedMask(self._cut(CallBlock(*spans)), shape, max(0, n_seen))

    def _spans(self, index: Any) -> list[Interval]:
        """An index as half-open ranges of each dimension."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            parts[at : at + 1] = [slice(None)] * (self.ndim - len(parts) + 1)
        parts += [slice(None)] * (self.ndim - len(parts))
        if len(parts) != self.ndim or not all(
            isinstance(part, slice) for part in parts
        ):
            raise self._refusal("[...]")
        spans = []
        for part, size in zip(parts, self.shape, strict=True):
            start, stop, step = part.indices(size)
            if step != 1:
                raise self._refusal("[...]")
            spans.append(Interval(start, max(start, stop)))
        return spans

    @uncompiled
    def _cut(self, block: CallBlock) -> Mask:
        """The mask of a block of pairs."""
        batch, heads, queries, keys = self.shape
        sizes: Keywords = {
            "batch_shape": (batch,),
            "n_queries": queries,
            "n_keys": keys,
        }
        shape = CallShape("cpu", torch.float32, heads, heads, 1, 1, **sizes)
        mask, _ = WholeCall(shape, self.mask).mask_of(block)
        assert mask is not None
        return mask

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal(f".{name}")

    def _computed(self, *_: Any) -> Any:
        raise self._refusal(" in an expression")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = (
        _computed
    )
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = (
        __neg__
    ) = _computed
    __lt__ = __le__ = __gt__ = __ge__ = _computed

    def __eq__(self, operand: object) -> bool:
        if operand is None or isinstance(operand, DescribedMask):
            return self is operand
        raise self._refusal(" in an expression")  # a tensor compares its elements

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise cls._refusal(f", in torch's {getattr(function, '__name__', function)}")

    def __repr__(self) -> str:
        return f"DescribedMask({self.mask}, shape={self.shape})"

    @staticmethod
    def _refusal(expression: str) -> Exception:
        return DescriptionError(
            f"this model computes with its attention mask (mask{expression}), which "
            "under quorum attention is a description and not a tensor; give it a mask "
            "of four dimensions, or "
            'use attn_implementation="sdpa" or "eager"'
        )


class DescriptionError(AttributeError, TypeError):
    """A model computes with a mask that is a description."""


def quorum_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | DescribedMask | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> DescribedMask | torch.Tensor | None:
    """Describe a mask. Transformers' ``AttentionMaskInterface`` calls this function.

    Args:
        batch_size, q_length, kv_length: sizes of the call.
        q_offset, kv_offset: positions of its first query and its first key.
        mask_function: (batch, head, query position, key position) -> keep; None is
            causal.
        attention_mask: (batch, tokens) bool, True where a token is no padding.
        device: the device of the description's tensors (ids of packed documents,
            padding).
        options: further arguments of Transformers' mask functions (dtype, config, ...).

    Returns:
        A ``DescribedMask``. For one query, the mask for SDPA: a tensor (batch, 1, 1,
        kv_length) or None.

    Raises:
        ValueError: ``attention_mask`` is not two-dimensional.
    """
    from transformers import masking_utils

    prompt = substitutes.prompt
    if prompt is not None:
        q_length = kv_length = prompt.n_tokens
        q_offset = kv_offset = 0
        attention_mask = prompt.padding
    if attention_mask is not None and attention_mask.ndim not in (2, 4):
        raise ValueError(
            "attention_mask must be (batch, tokens), or (batch, heads, queries, "
            f"keys), got shape {tuple(attention_mask.shape)}"
        )
    if isinstance(attention_mask, DescribedMask):
        return attention_mask  # made before, by ``generate`` for a static cache
    query_offset: Any = q_offset
    sizes = MaskSizes(
        batch_size,
        q_length,
        kv_length,
        query_offset,
        kv_offset,
        torch.device(device),
    )
    causal = masking_utils.causal_mask_function
    function = mask_function or causal
    # Without padding there may be packed documents, and a tensor is asked for them.
    has_no_documents = attention_mask is not None or function is causal
    is_traced = torch.compiler.is_compiling() and not isinstance(q_offset, torch.Tensor)
    if is_traced and q_length != 1 and has_no_documents:
        with suppress(UnknownError):  # then the graph is left
            padding = _padding(attention_mask, sizes)
            mask = mask_of_conditions(conditions_of(function), sizes, padding)
            return _with_sizes(mask, sizes)
    description: DescribedMask | torch.Tensor | None
    description = _mask_outside_graphs(sizes, function, attention_mask, **options)
    return description


@uncompiled
@restores_grad_and_autocast
def _mask_outside_graphs(
    sizes: MaskSizes, function: Any, attention_mask: Any, **options: Any
) -> Any:
    """See ``quorum_mask``."""
    from transformers import masking_utils

    if sizes.queries == 1:
        return masking_utils.sdpa_mask(
            batch_size=sizes.batch,
            q_length=1,
            kv_length=sizes.keys,
            q_offset=sizes.query_offset,
            kv_offset=sizes.key_offset,
            mask_function=function,
            attention_mask=attention_mask,
            device=sizes.device,
            **options,
        )
    sizes = sizes._replace(query_offset=int(sizes.query_offset))
    padding = _padding(attention_mask, sizes)
    if padding is not None and capturing(padding.device):
        raise NotImplementedError(
            "attention_mask cannot be given while a CUDA graph is captured: every "
            "replay would mask by the values of now, because the host reads them; "
            "leave it out where nothing "
            'is padded, or capture the model with attn_implementation="sdpa"'
        )
    padding = (
        None if padding is None or bool(padding.all()) else padding.to(sizes.device)
    )
    return _with_sizes(trace_mask(function, sizes, padding), sizes)


def _padding(
    attention_mask: torch.Tensor | None, sizes: MaskSizes
) -> torch.Tensor | None:
    """(batch, keys) bool: the keys that are kept."""
    from transformers import masking_utils

    stop = sizes.key_offset + sizes.keys
    if attention_mask is None:
        return None
    padding: torch.Tensor = masking_utils.prepare_padding_mask(
        attention_mask, sizes.keys, sizes.key_offset
    )
    if padding.shape[0] < sizes.batch or padding.shape[1] < stop:
        raise ValueError(
            f"attention_mask must be for {counted(sizes.batch, 'row')} of "
            f"{counted(stop, 'token')}, got shape {tuple(padding.shape)}"
        )
    return padding[: sizes.batch, sizes.key_offset : stop].bool()


def _with_sizes(mask: Mask, sizes: MaskSizes) -> DescribedMask:
    n_seen = sizes.keys
    if mask.causal:
        n_seen = min(n_seen, sizes.queries + sizes.offset)
    shape = (sizes.batch, 1, sizes.queries, sizes.keys)
    return DescribedMask(mask, shape, max(n_seen, 0))
