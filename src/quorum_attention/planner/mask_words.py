"""The pairs that a call keeps, in words."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from quorum_attention.mask import Mask


def mask_words(mask: Mask | None, is_causal: bool) -> str:
    """Return what a call keeps, such as "causal, window 4096"; "" is all pairs.

    Of tensors and functions the words only say that there are some.
    """
    words = ["causal"] if is_causal else []
    if mask is None:
        return ", ".join(words)
    for field in fields(Mask):
        words_of_field = _field_words(field.name, getattr(mask, field.name))
        # A mask can be causal as well as the call.
        if words_of_field and words_of_field not in words:
            words.append(words_of_field)
    return ", ".join(words)


def _field_words(name: str, value: Any) -> str:
    """Return a field of a mask in words; "" if it leaves out nothing."""
    label = name.replace("_", " ")
    if isinstance(value, torch.Tensor) or callable(value):
        return label
    if value is None:
        return ""
    if name == "documents":
        return label  # two tensors
    if value is True:
        return label
    if value in (False, ()):
        return ""
    if name in ("either", "every"):
        joint = " or " if name == "either" else " and "
        return joint.join(f"({mask_words(mask, False)})" for mask in value)
    if isinstance(value, (tuple, list)):
        numbers = ",".join(map(str, value))
        return f"{label} {numbers}"
    return f"{label} {value}"
