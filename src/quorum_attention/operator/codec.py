"""Options and masks as a string, since operators take tensors and plain values only.

The string has literals. Whole numbers and tensors, which may differ from call to call
in one graph, are arguments of their own. Objects (a kernel, a plan, a report, a
function) cannot be encoded: a call with them is no operator.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

import torch

from quorum_attention.call.options import DEFAULT_OPTIONS, CallOptions
from quorum_attention.mask import FIELDS, Mask

# Fields of a Mask that are encoded; its bias and its sinks are arguments of their own.
_MASK_FIELDS = tuple([name for name in FIELDS if name not in ("bias", "sinks")])


def encode_call(
    options: CallOptions,
    mask: Mask | None,
    numbers: list[int],
    tensors: list[torch.Tensor],
) -> str:
    """Return options and mask as a string; whole numbers and tensors go into the lists.

    Raises:
        NotImplementedError: they have an object that cannot be encoded.
    """
    if mask is None and options.is_default:
        return ""
    # torch 2.8's compiler cannot cut a named tuple.
    values = list(options)
    values[-1] = mask
    return _text(_encode(tuple(values), numbers, tensors))


def decode_call(
    text: str, numbers: list[int], tensors: list[torch.Tensor]
) -> tuple[CallOptions, Mask | None]:
    """Return the options and the mask that were encoded."""
    if not text:
        return DEFAULT_OPTIONS, None
    *options, mask = _decode(_parse(text), numbers, tensors)
    return CallOptions(*options), mask


def _encode(value: Any, numbers: list[int], tensors: list[torch.Tensor]) -> Any:
    """Return ``value`` in literals, with places in the lists for whole numbers and
    tensors.

    torch's compiler traces this function.

    Raises:
        NotImplementedError: it has another object in it.
    """
    if value is None or isinstance(value, (str, bool, float)):
        # A key is a constant, also where torch's compiler would let a float vary.
        return next(iter({value: None}))
    if isinstance(value, int):
        numbers.append(value)
        return ("number", len(numbers) - 1)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    if isinstance(value, torch.device):
        return ("device", (value.type, value.index))
    kind = type(value).__name__
    items = value
    if isinstance(value, Mask):
        kind = "mask"
        items = [getattr(value, name) for name in _MASK_FIELDS]
    elif type(value) is not tuple and type(value) is not list:
        raise NotImplementedError(f"a {kind} cannot be said to an operator")
    encoded_items = [_encode(item, numbers, tensors) for item in items]
    return (kind, tuple(encoded_items))


def _decode(form: Any, numbers: list[int], tensors: list[torch.Tensor]) -> Any:
    """Return the value that was encoded as ``form``."""
    if not isinstance(form, tuple):
        return form
    kind, content = form
    if kind == "number":
        return int(numbers[content])
    if kind == "tensor":
        return tensors[content]
    if kind == "device":
        device_type, index = content
        return (
            torch.device(device_type)
            if index is None
            else torch.device(device_type, index)
        )
    items = [_decode(item, numbers, tensors) for item in content]
    if kind == "mask":
        return Mask(**dict(zip(_MASK_FIELDS, items, strict=True)))
    return items if kind == "list" else tuple(items)


def _text(form: tuple[Any, ...]) -> str:
    """Return a form of literals as a string."""
    return repr(form)


# torch.compiler.assume_constant_result sets this mark, but would load the compiler.
_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=1024)
def _parse(text: str) -> Any:
    """Return the form of literals that a string has."""
    return ast.literal_eval(text)
