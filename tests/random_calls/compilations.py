"""Counts what Triton compiles in this process, and what it finds compiled on disk."""

from __future__ import annotations

from typing import Any

_seen: list[dict[str, Any]] = []


def watch() -> None:
    """From now on; of a Triton without a listener nothing is heard."""
    try:
        from triton import knobs

        knobs.compilation.listener = _heard
    except (ImportError, AttributeError):
        return


def taken() -> list[dict[str, Any]]:
    """What was since the last question: kernel, seconds, whether it was on disk, and of what."""
    found = list(_seen)
    del _seen[: len(found)]
    return found


def _heard(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
    of = "" if cache_hit else f"{src.signature} {src.constants} {_multiples(src)}"
    _seen.append({"kernel": src.name, "seconds": times.total / 1e6, "held": cache_hit, "of": of})


def _multiples(src: Any) -> str:
    """Which arguments are taken for multiples of 16."""
    names = src.fn.arg_names
    return " ".join(names[key[0]] for key in src.attrs)
