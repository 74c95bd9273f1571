"""What a mask function of Transformers is made of.

Transformers composes a mask out of functions that return functions (``masking_utils``): a causal
one, overlays for windows and chunks, one for padding, one for packed sequences, joined by ``and``
and ``or``. Such a function is known by its code, and what it was made with is in its closure.
Whatever is not known stays a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch

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


__all__ = ["Known", "MaskFunction", "known"]
