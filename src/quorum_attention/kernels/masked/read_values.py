"""Tells whether a number that a function of the user's can read changed between the
forward and its backward.

The backward calls the function again, and would compute the gradients of another call.
A value that can be read may have no effect, such as a counter of steps. So it is a
warning.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from quorum_attention.kernels.masked.captured_tensors import plain_values
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.torch_private import no_torch_modes

# Names of values: a warning has said that these changed.
_NAMED: set[str] = set()
# Values of the last forwards, by the hashes that autograd saves. Without an entry, a
# graph that is kept for longer gets no warning.
_MAX_RECORDS = 4096
_RECORDS: OrderedDict[int, dict[str, str]] = OrderedDict()
# Python refuses to write larger numbers in decimal digits.
_MAX_DECIMAL_BITS = 4096


def functions_of(kernel: Any) -> Sequence[Callable[..., Any]]:
    """Return the user's functions that a kernel, or one of that name, calls."""
    return () if kernel == "auto" else get_kernel(kernel).called_back()


def record_values(functions: Sequence[Any]) -> torch.Tensor:
    """Return a hash (1,) of the values that ``functions`` can read now, in int64.

    It is a tensor, so that autograd saves it: a checkpoint that runs the forward again
    gives the backward that of the second run. It has one size, whatever the values are:
    a checkpoint refuses others.
    """
    values = _texts(functions)
    number = _hash_of(values)
    _RECORDS.pop(number, None)
    _RECORDS[number] = values
    # In one step, as other threads record values too.
    if len(_RECORDS) > _MAX_RECORDS:
        _RECORDS.popitem(last=False)
    # By NumPy, because a default device does not apply to its tensors.
    return torch.from_numpy(np.array([number], np.int64))


def warn_of_changed_values(functions: Sequence[Any], recorded: torch.Tensor) -> None:
    """Warn of each value that ``functions`` can read and that is not as it was
    ``recorded``, once for a name."""
    with no_torch_modes():
        number = int(recorded.cpu().numpy()[0])
    values = _texts(functions)
    if number == _hash_of(values):
        return
    for name, before in _RECORDS.get(number, {}).items():
        after = values.get(name, "gone")
        # The items of a container are one name, however many there are.
        container, _, _ = name.partition("[")
        if after == before or container in _NAMED:
            continue
        _NAMED.add(container)
        warnings.warn(
            "a number that the mask's function can read changed between the forward "
            f"and its backward: {name}, {before} then {after}; if the function reads "
            "it, gradients are wrong. Let it change after the backward, or make "
            "another function",
            stacklevel=2,
        )


def _texts(functions: Sequence[Any]) -> dict[str, str]:
    """Return the values that ``functions`` can read as texts, by name."""
    return {
        name: ", ".join(map(_text_of, values))
        for name, values in plain_values(functions).items()
    }


def _text_of(value: Any) -> str:
    is_long = isinstance(value, int) and value.bit_length() > _MAX_DECIMAL_BITS
    return hex(value) if is_long else repr(value)


def _hash_of(values: dict[str, str]) -> int:
    """Return a hash of the texts of values and their names. Numbers would not do: those
    of -1 and -2 are the same."""
    return hash(tuple(values.items()))
