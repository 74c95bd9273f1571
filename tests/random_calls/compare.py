"""Holds results against the reference: which element is too far off, and how far."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from random_calls.reference import Wanted
from random_calls.yardstick import Yardstick

# Times the larger of the bound and torch's own largest error in the head.
ALLOWED = 4.0


@dataclass(frozen=True)
class Off:
    """What is wrong with one result.

    ``plausible``: no further off than arithmetic with a rounded output may leave it.
    """

    name: str
    kind: str
    words: str
    plausible: bool = False


def judge(name: str, found: torch.Tensor, wanted: Wanted, yardstick: Yardstick) -> Off | None:
    """What is wrong, or None; ``yardstick`` is asked only where the bound alone is exceeded."""
    exact, bound = wanted.exact, wanted.bound
    if found.shape != exact.shape:
        return Off(name, "shape", f"{tuple(found.shape)}, not {tuple(exact.shape)}")
    if found.numel() == 0:
        return None
    got = found.detach().to(exact)
    bound = torch.where(bound.isnan(), torch.inf, bound)
    must, may = _not_finite(exact, wanted, torch.finfo(found.dtype).max, bound)
    broken = ~got.isfinite()
    if name == "lse":
        # Minus infinity is a number here: a row without keys.
        wrong = (got == -torch.inf) != (exact == -torch.inf)
        if wanted.may is not None:
            wrong &= ~wanted.may
        must, may, broken = (t & (exact != -torch.inf) for t in (must, may, broken))
        if bool(wrong.any()):
            return Off(name, "rows without keys", _where(wrong, got, exact))
    wrong = broken & ~may
    if bool(wrong.any()):
        # As far as torch's own error there may reach, a number beyond the dtype's largest may be.
        for theirs_off in yardstick.errors(name, wanted):
            reach = ALLOWED * torch.maximum(bound, theirs_off)
            wrong &= exact.abs() + reach < torch.finfo(found.dtype).max
            if not bool(wrong.any()):
                break
    if bool(wrong.any()):
        itself = yardstick.itself().get(name)
        if itself is not None:
            wrong &= itself.to(wrong.device).isfinite()
    if bool(wrong.any()):
        theirs = yardstick.results().get(name)
        same = theirs is not None and bool((~theirs.to(wrong.device).isfinite() & wrong).any())
        kind = "not finite, torch neither" if same else "not finite"
        return Off(name, kind, _where(wrong, got, exact))
    if bool((must & ~broken).any()):
        return Off(name, "finite", _where(must & ~broken, got, exact))
    apart = torch.where(broken | ~exact.isfinite(), 0.0, (got - exact).abs())
    ratio, theirs_off = _ratio(apart, bound), None
    if float(ratio.max()) <= ALLOWED:
        return None
    for theirs_off in yardstick.errors(name, wanted):
        ratio = _ratio(apart, torch.maximum(bound, theirs_off))
        if float(ratio.max()) <= ALLOWED:
            return None
    words = _where(ratio > ALLOWED, got, exact, ratio)
    words += f"; largest error {float(apart.max()):.3g}"
    if theirs_off is not None:
        words += f", torch's {float(theirs_off.max()):.3g}"
    return Off(name, "off", words, bool(((ratio <= ALLOWED) | (apart <= wanted.loose)).all()))


def _ratio(apart: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    return (apart / bound).nan_to_num(nan=0.0, posinf=torch.inf)


def _not_finite(
    exact: torch.Tensor, wanted: Wanted, most: float, bound: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a result has to be, and may be, not finite: beyond the dtype's largest number too."""
    finite = exact.isfinite()
    must = ~finite if wanted.must is None else wanted.must
    may = ~finite if wanted.may is None else wanted.may
    near = finite & (exact.abs() + ALLOWED * bound >= most)
    return must, may | near


def _where(
    bad: torch.Tensor, got: torch.Tensor, exact: torch.Tensor, ratio: torch.Tensor | None = None
) -> str:
    at = bad.nonzero()[0] if ratio is None else (ratio == ratio.max()).nonzero()[0]
    at = tuple(at.tolist())
    words = f"{int(bad.sum())} of {bad.numel()} elements, at {at} "
    words += f"{float(got[at]):.6g} for {float(exact[at]):.6g}"
    return words if ratio is None else f"{words}, {float(ratio.max()):.3g} times the bound"
