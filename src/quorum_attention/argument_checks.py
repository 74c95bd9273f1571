"""Checks of numbers, switches and words among a call's arguments; errors name the
argument."""

from __future__ import annotations

import math
from operator import index
from typing import Any


def whole_number(value: Any, name: str, lowest: int, highest: int | None = None) -> int:
    """Return ``value`` as an int: a Python or NumPy integer, or any object with
    ``__index__``.

    Raises:
        TypeError: it is not an integer (a bool is not).
        ValueError: it is below ``lowest`` or above ``highest``.
    """
    try:
        if type(value) is int:  # also a length that torch's compiler lets vary
            number = value
        elif isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith(
            "bool"
        ):
            raise TypeError
        else:
            number = index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a whole number from {lowest}, got {shown(value)}"
        ) from None
    if number < lowest:
        raise ValueError(f"{name} must be at least {lowest}, got {shown(number)}")
    if highest is not None and number > highest:
        raise ValueError(f"{name} must be at most {highest}, got {shown(number)}")
    return number


def real_number(value: Any, name: str) -> float:
    """Return ``value`` as a finite float.

    Raises:
        TypeError: it is not a real number (a bool or a tensor that requires a gradient
            is not).
        ValueError: it is NaN or infinite.
    """
    # A float that torch's compiler lets vary says nothing more.
    if not isinstance(value, float) and not _stands_for_real_number(value):
        raise TypeError(f"{name} must be a real number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # of several elements
        raise TypeError(f"{name} must be a real number, got {shown(value)}") from None
    if not -math.inf < number < math.inf:
        raise ValueError(f"{name} must be finite, got {shown(value)}")
    return number


def _stands_for_real_number(value: Any) -> bool:
    """Tell whether an object that is no float has the value of one, and gets no
    gradient."""
    if isinstance(value, (bool, str, bytes, complex)) or not hasattr(
        value, "__float__"
    ):
        return False
    dtype = str(getattr(value, "dtype", ""))
    if "bool" in dtype or "complex" in dtype:
        return False
    return not getattr(value, "requires_grad", False)


def dropout_chance(dropout_p: Any) -> float:
    """Return ``dropout_p`` as a float from 0 to 1.

    Raises:
        TypeError: it is not a real number.
        ValueError: it is not from 0 to 1.
    """
    number = real_number(dropout_p, "dropout_p")
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"dropout_p must be from 0 to 1, got {shown(dropout_p)}")
    return number


def switch(value: Any, name: str) -> bool:
    """Return ``value`` as a bool.

    Raises:
        TypeError: it is not a Python or NumPy bool; the truth of other objects is not
            asked for.
    """
    kind = type(value)
    if kind is bool or (
        kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    ):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {shown(value)}")


def check_callable(value: Any, name: str) -> None:
    """Check that ``value`` is callable or None.

    Raises:
        TypeError: it is not.
    """
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable or None, got {shown(value)}")


def one_of(value: Any, name: str, allowed: tuple[Any, ...]) -> Any:
    """Return ``value``, if it is among ``allowed`` (strings, bools, and perhaps None).

    Raises:
        ValueError: it is not.
    """
    is_comparable = value is None or isinstance(value, (bool, str))
    if is_comparable and value in allowed:
        return value
    *first_words, last_word = map(repr, allowed)
    words = last_word
    if first_words:
        words = f"{', '.join(first_words)} or {last_word}"
    raise ValueError(f"{name} must be {words}, got {shown(value)}")


def shown(value: Any) -> str:
    """Return ``value`` as text for an error message: at most 80 characters or so."""
    if isinstance(value, int) and not isinstance(value, bool):
        # Python refuses to print numbers of thousands of digits.
        return str(value) if abs(value) < 10**40 else "a number of more than 40 digits"
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else value[:40] + "...")
    try:
        text = " ".join(repr(value).split())
    except Exception:  # whatever an object's own method does
        text = ""
    if text and len(text) <= 80:
        return text
    shape = getattr(value, "shape", None)
    of_shape = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"a {type(value).__name__}{of_shape}"
