"""A mask as it travels through a model of Transformers: a few numbers in place of a tensor."""

from __future__ import annotations

import math
from typing import Any

import torch

from quorum_attention.mask import Mask, map_tensors


class DescribedMask:
    """A ``Mask`` with the shape that Transformers asks masks for.

    It is no ``BlockMask``, which Transformers would pass on as well: of one of those a model may
    leave out what it adds to other masks.

    Attributes:
        mask: what is kept.
        shape: (batch, 1, queries, keys), of the mask that a tensor would be.
        seen: keys from this one on no query sees.
    """

    ndim = 4

    def __init__(self, mask: Mask, shape: tuple[int, int, int, int], seen: int) -> None:
        self.mask, self.shape, self.seen = mask, shape, seen
        self._elsewhere: dict[torch.device, Mask] = {}

    def on(self, device: torch.device) -> Mask:
        """The mask with its tensors on ``device``: layers of a model may lie on several."""
        if device not in self._elsewhere:
            self._elsewhere[device] = map_tensors(self.mask, lambda tensor, _: tensor.to(device))
        return self._elsewhere[device]

    def dim(self) -> int:
        """4, as of a mask that is a tensor."""
        return 4

    def contiguous(self) -> DescribedMask:
        """Itself: there is nothing that could be contiguous."""
        return self

    def to(self, *_: Any, **__: Any) -> DescribedMask:
        """Itself: what tensors it has follow the call that it is given to."""
        return self

    def numel(self) -> int:
        """Pairs of the call."""
        return math.prod(self.shape)

    def __getitem__(self, _: Any) -> Any:
        raise self._refusal("[...]")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal(f".{name}")

    def _computed(self, *_: Any) -> Any:
        raise self._refusal(" in an expression")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _computed
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __neg__ = _computed
    __lt__ = __le__ = __gt__ = __ge__ = _computed

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, DescribedMask):
            return self is other
        self._computed()  # a tensor compares its elements
        return False

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise cls._refusal(f", in torch's {getattr(function, '__name__', function)}")

    def __repr__(self) -> str:
        return f"DescribedMask({self.mask}, shape={self.shape})"

    @staticmethod
    def _refusal(what: str) -> Exception:
        return DescriptionError(
            f"this model computes with its attention mask (mask{what}), which under quorum "
            "attention is a description and not a tensor; give it a mask of four dimensions, or "
            'use attn_implementation="sdpa"'
        )


class DescriptionError(AttributeError, TypeError):
    """A model computes with a mask that is a description."""


__all__ = ["DescribedMask", "DescriptionError"]
