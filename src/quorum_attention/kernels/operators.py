"""Which attention operators this torch has, and their arguments.

torch itself is asked, because builds of one release differ.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.attention


@functools.cache
def operator_arguments(name: str) -> tuple[str, ...] | None:
    """Argument names of ``torch.ops.aten.<name>``, in order; None if there is no such operator."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    return tuple(argument.name for argument in packet.default._schema.arguments)


def flash_implementation() -> str | None:
    """What torch's flash operators have been replaced by (``activate_flash_attention_impl``, from
    torch 2.11 or so on), by its name; None: they are torch's own."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    found: str | None = current()
    return found


def operator_reason(*names: str) -> str | None:
    """Why these operators cannot be called here, in words; None if torch has all of them."""
    for name in names:
        if operator_arguments(name) is None:
            return f"this torch ({torch.__version__}) has no operator {name}"
    return None
