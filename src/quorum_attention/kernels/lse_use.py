"""Whether anybody reads the log-sum-exp of the call that this thread runs.

An operator's lse may have to be corrected beside an output that is not finite. That takes launches,
which short calls feel, and where no gradient is wanted nor lse returned nobody sees it: an output
of NaN stays NaN whatever weight it is merged with.
"""

from __future__ import annotations

import threading

_here = threading.local()


class lse_use:  # noqa: N801
    """A context for a call of which the lse is ``wanted``, or not."""

    __slots__ = ("_before", "_wanted")

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        self._before = lse_is_used()
        _here.used = self._wanted

    def __exit__(self, *error: object) -> None:
        _here.used = self._before


def lse_is_used() -> bool:
    """Whether the lse is read, as far as is known here."""
    used: bool = getattr(_here, "used", True)
    return used
