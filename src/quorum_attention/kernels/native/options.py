"""The changes that a native kernel makes to scores, by global positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.counts import real_number, shown, whole_number
from quorum_attention.kernels.torch_private import outside

UNLIMITED = (1 << 31) - 1
"""A distance that none exceeds; sums with it need 64 bits."""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Changes to the scores of a call; none by default.

    Attributes:
        left, right: a query at position i sees keys from ``i - left`` to ``i + right``; -1 is no
            limit.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none.
        slopes: (query heads,) fp32, ALiBi: ``slope * |i - j|`` is subtracted; None is none.
        signed: ``left`` and ``right`` may be below 0 (a band that begins beyond the query, or ends
            before it), and UNLIMITED is no limit.
    """

    left: int = -1
    right: int = -1
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    signed: bool = False

    @classmethod
    def of(
        cls,
        window: int | tuple[int, int] | None,
        softcap: float | None,
        alibi_slopes: torch.Tensor | None,
    ) -> ScoreOptions:
        """The options for the arguments that users give.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: a value that makes no sense.
        """
        pair = (-1, -1) if window is None else _pair(window)
        cap = 0.0 if softcap is None else real_number(softcap, "softcap")
        if softcap is not None and not cap > 0:
            raise ValueError(f"softcap must be a finite number above 0 or None, got {softcap!r}")
        if alibi_slopes is not None:
            if not isinstance(alibi_slopes, torch.Tensor):
                raise TypeError(
                    f"alibi_slopes must be a tensor or None, got {type(alibi_slopes).__name__}"
                )
            if alibi_slopes.ndim != 1 or not alibi_slopes.is_floating_point():
                raise ValueError(
                    "alibi_slopes must be floating-point, one for each query head, got "
                    f"{alibi_slopes.dtype} of shape {tuple(alibi_slopes.shape)}"
                )
            # Copied, because the backward has to read the same slopes as its forward.
            with outside():
                alibi_slopes = alibi_slopes.detach().to(torch.float32, copy=True)
        return cls(*pair, cap, alibi_slopes)

    @property
    def plain(self) -> bool:
        """Whether scores are unchanged."""
        return not self.windowed and self.softcap == 0.0 and self.slopes is None

    @property
    def windowed(self) -> bool:
        """Whether there is a sliding window. (A band with ``left`` below 0 has ``right`` above.)"""
        return self.left >= 0 or self.right >= 0

    @property
    def bounds(self) -> tuple[int, int]:
        """``left`` and ``right``, UNLIMITED where there is no limit."""
        if self.signed:
            return self.left, self.right
        return UNLIMITED if self.left < 0 else self.left, (
            UNLIMITED if self.right < 0 else self.right
        )

    @property
    def positional(self) -> bool:
        """Whether global positions matter."""
        return self.windowed or self.slopes is not None


def _pair(window: object) -> tuple[int, int]:
    both = window if isinstance(window, (tuple, list)) else (window, window)
    try:
        left, right = (whole_number(n, "window", -1) for n in both)
    except (TypeError, ValueError):
        raise ValueError(
            "window must be a number of tokens or (left, right), whole numbers from -1 "
            f"(no limit), got {shown(window)}"
        ) from None
    return left, right
