"""Which attention operators this torch has, and their arguments.

torch itself is asked, because builds of one release differ.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def operator_arguments(name: str) -> tuple[str, ...] | None:
    """Argument names of ``torch.ops.aten.<name>``, in order; None if there is no such operator."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    return tuple(argument.name for argument in packet.default._schema.arguments)


def operator_reason(*names: str) -> str | None:
    """Why these operators cannot be called here, in words; None if torch has all of them."""
    for name in names:
        if operator_arguments(name) is None:
            return f"this torch ({torch.__version__}) has no operator {name}"
    return None
