"""What a call should return, in float64, and how far off finite arithmetic may leave it.

The error bounds are first-order, element by element, from the data alone. With ``a`` the unit
roundoff of what is accumulated in (fp32, or fp64 for fp64 inputs) and ``w`` that of the inputs:

    scores           |ds_ij|   <= a C (|scale| |q_i|.|k_j| + |bias_ij| + |s_ij|)
    probabilities    |dP_ij|   <= P_ij (|ds_ij| + sum_j P_ij |ds_ij| + a C (1 + |lse_i|))
    output           |dO|      <= |dP| |V| + (w + a C) P |V|           (P and parts in 16 bits)
    dS               |d(dS)|   <= |dP| |dO.v - D| + w |dS| + a C P (|dO|.|v| + |dO|.|O|)
    gradients        their products likewise

and a last rounding to the result's dtype. Inputs of float64 are no more exact than this reference:
its own sums of n terms, off by n w at most, are added. An output that was rounded before
D = rowsum(dO * O) is formed costs more, ``w P |dO|.|O|``, which is not allowed by itself: only as
far as torch pays it too (``yardstick.py``).

The results themselves are those of ``helpers.equations``, which shares nothing with the package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import helpers.equations as equations
import torch

from random_calls.case import Case
from random_calls.tensors import DTYPES, Made, slopes_of

# Constant of the accumulated roundings: sums of some hundred terms, a few merges.
_C = 4.0
# Relative error of an exponential meant for 16-bit results (torch's on a CPU: 3e-5 seen).
_SHORT_EXP = 2.0**-13


@dataclass
class Wanted:
    """One result: its exact value, the bound, and the bound had D come from a rounded output."""

    exact: torch.Tensor
    bound: torch.Tensor
    loose: torch.Tensor


Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def unit(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def _least(dtype: torch.dtype) -> float:
    """What may be lost as too small: half the smallest subnormal number of fp16, but all below
    the smallest normal one of the others, which exponentials and processors take for zero."""
    info = torch.finfo(dtype)
    return info.smallest_normal * (info.eps / 2 if dtype == torch.float16 else 1.0)


# Pairs of queries and keys from which on a GPU is the quicker one: it takes 3 ms of any case on an
# H200, a core beside it 2 ms of 5,000 pairs, 7 of 60,000 and 20 of 145,000.
_MANY = 50_000


def place(case: Case, compute: torch.device) -> torch.device:
    """Where a reference is computed.

    On the CPU: of a small case each step takes some microseconds there, and a GPU that serves many
    processes has to be waited for at each question. Both agree to 1e-14 of the largest element.
    """
    return compute if case.pairs >= _MANY else torch.device("cpu")


class Reference:
    """The textbook of one case, heads expanded, all batch dimensions flattened.

    Computed on the device ``where``; default where the inputs are.
    """

    def __init__(self, case: Case, made: Made, where: torch.device | None = None) -> None:
        self.case, self.made = case, made if where is None else made.on(where)
        self.further = torch.ones(())
        made = self.made
        self.dtype = DTYPES[case.dtype]
        self.w = unit(self.dtype)
        self.a = unit(torch.float64 if self.dtype == torch.float64 else torch.float32) * _C
        shared = case.heads // case.kv_heads if case.kv_heads else 1
        self.shared = shared
        # The raw arguments of the call: no mask is rounded, and nothing left out.
        self.exact = equations.forward(
            made.query, made.key, made.value, made.attn_mask(made.mask),
            is_causal=case.is_causal, scale=case.scale, dropout_p=case.dropout,
            dropout_seed=case.seed, window=case.scores.window, softcap=case.scores.softcap,
            alibi_slopes=slopes_of(case.heads) if case.scores.alibi else None,
        )  # fmt: skip
        exact = self.exact
        self.q, self.k, self.v, self.scale = exact.query, exact.key, exact.value, exact.scale
        self.p, self.lse, self.z = exact.p, exact.lse, exact.factors
        self.slope = exact.slope
        self.empty = exact.lse == -math.inf
        self.do = made.grad_out.detach().double().reshape(exact.out.shape)
        # Z is 1 without dropout, and at most ``rescale``.
        self.rescale = 1 / (1 - case.dropout)
        # What sums of so many keys, or of the rows of a key, may be off by here.
        own = self.dtype == torch.float64
        self.by_keys = self.sums(case.n_keys) if own else 0.0
        self.by_rows = self.sums(case.n_queries * shared) if own else 0.0
        self.off = self.a * self._sizes_of_scores().masked_fill(~exact.kept, 0.0)

    def _sizes_of_scores(self) -> torch.Tensor:
        """The sizes of what a score is summed of, each of which is rounded; (b, h, n, m)."""
        case, exact = self.case, self.exact
        sizes = abs(self.scale) * (self.q.abs() @ self.k.abs().mT) + exact.products.abs()
        softcap = case.scores.softcap if case.rules is None else case.rules.softcap
        if softcap is not None:
            sizes = sizes + softcap
        if case.scores.alibi:
            i, j = (torch.arange(n, device=sizes.device) for n in sizes.shape[-2:])
            slopes = slopes_of(case.heads).to(sizes)[:, None, None]
            sizes = sizes + slopes * (i[:, None] - j).abs()
        return sizes if exact.bias is None else sizes + exact.bias.abs()

    def _grouped(self, t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (-1, self.shared)).sum(2) if self.shared > 1 else t

    def _shaped(self, t: torch.Tensor) -> torch.Tensor:
        return t.reshape(*self.case.batch, *t.shape[1:])

    def forward(self, out_dtype: torch.dtype) -> dict[str, Wanted]:
        """out and lse, both in float64."""
        p, off = self.p, self.off
        self.out_unit = unit(out_dtype)
        self.out = self.exact.out
        self.lse_off = (p * off).sum(-1)
        share = p * (off + (self.lse_off + 2 * self.a).unsqueeze(-1))
        tiny = _least(self.dtype) * (p > 0)
        each = self.w + self.a + 2 * self.by_keys  # of P, and of what it is summed with
        self.out_off = self.rescale * ((share + each * p + tiny) @ self.v.abs())
        self.out_least = _least(out_dtype)
        # A task's output is of the inputs' dtype.
        last = max(self.out_least, _least(self.dtype))
        bound = self.out_off + unit(out_dtype) * self.out.abs() + last
        loose = bound + self.rescale * self.sums(p.shape[-1]) * (p @ self.v.abs())
        lse_bound = self.lse_off + self.a * (2 + self.lse.masked_fill(self.empty, 0.0).abs())
        lse_bound = lse_bound + self.by_keys
        if self.dtype.itemsize == 2:
            # Kernels for 16-bit inputs use exponentials that are good to them, not to fp32.
            lse_bound = lse_bound + _SHORT_EXP
        return {
            "out": Wanted(*map(self._shaped, (self.out, bound, loose))),
            "lse": Wanted(*map(self._shaped, (self.lse, lse_bound, lse_bound))),
        }

    def _of_mask(self, ds: torch.Tensor, strict: torch.Tensor, rounded: torch.Tensor) -> Wanted:
        """The gradient of the scores, summed over what the mask broadcasts over."""
        mask = self.made.mask
        exact = self._shaped(ds).sum_to_size(mask.shape)
        summed = self._shaped(ds.abs()).sum_to_size(mask.shape)
        bound = self._shaped(_sane(strict)).sum_to_size(mask.shape) + 3 * self.a * summed
        last = mask.dtype
        bound = bound + unit(last) * exact.abs() + _least(last)
        if self.by_keys:
            bound = bound + self.sums(ds.numel() // max(1, exact.numel())) * summed
        return Wanted(exact, bound, bound + self._shaped(rounded).sum_to_size(mask.shape))

    def _parts(self) -> torch.Tensor:
        """What gradients of query heads that share a key, and of rectangles where nothing keeps
        them in range, lose each when they are rounded to the smallest numbers there are; (b, h, 1,
        1)."""
        own = self.case.kernel.startswith(("function", "scores"))
        lost = _least(self.dtype) * (8 * self.shared if own else self.shared)
        return lost * self._division()

    def _ds_bound(self) -> torch.Tensor:
        """The bound of |dS| by which the fp16 backward of a key head is scaled, 2 |dO| |V| of its
        largest rows, and twice |dO| at least; (b, h, 1, 1), 0 in other dtypes.

        The same arithmetic as in kernels/scaling.py, of the same rows. A gradient of the
        log-sum-exp is in three columns of dO, beside a column of 1 in V (call/lse_columns.py).
        """
        do, v = (_largest_rows(t) for t in (self.do, self.v))
        if self.dtype != torch.float16 or not do.numel() or not v.numel():
            return torch.zeros((*self.do.shape[:2], 1, 1), dtype=torch.float64, device=do.device)
        v = v.amax(-1, keepdim=True)
        if self.made.grad_lse is not None:
            size = self.made.grad_lse.double().reshape(do.shape).abs().masked_fill(self.empty, 0.0)
            # A power of two above it: 2**-14 where there is none, 2**15 at most.
            exponent = torch.frexp(size / v.clamp(1.0, 2.0**14)).exponent
            exponent = exponent.masked_fill(size == 0, -14).clamp(-14, 15)
            do = (do.square() + 3 * torch.ldexp(torch.ones_like(do), exponent).square()).sqrt()
            v = (v.square() + 1).sqrt()
        do = self._of_group(do.amax(-1, keepdim=True))
        return (do * (2 * v).clamp(min=2.0)).unsqueeze(-1)

    def _division(self) -> torch.Tensor:
        """By how much upstream gradients of a key head are divided before they are used, lest dS
        overflow; the smallest numbers count for as much more. (b, h, 1, 1), at least 1.

        The divisor is the power of two that brings the bound of |dS| to 2**15 at most, so to 2**14
        at least; steps for sums that overflow come on top.
        """
        return (self._ds_bound() * self.further / 2**14).clamp(min=1.0)

    def _further(self, *gradients: torch.Tensor) -> torch.Tensor:
        """By how much a key head is divided beyond that, lest sums overflow, (b, h, 1, 1).

        A gradient is a sum over pairs, and |dS| of one may be 2**15. Where the gradient in those
        units is beyond fp16's largest number, the head takes as many steps of 2**8 as bring it back
        (execution/scaling.py). Not one more: the gradient here is the whole sum, and a part of it
        that is larger than the whole is not allowed for.
        """
        bound = self._ds_bound()
        largest = torch.zeros_like(bound)
        for t in gradients:
            if t.numel():
                most = t.nan_to_num(0.0, 0.0, 0.0).abs().amax((-2, -1), keepdim=True)
                of_keys = most.shape[1] != bound.shape[1]
                most = most.repeat_interleave(self.shared, 1) if of_keys else most
                largest = torch.maximum(largest, self._of_group(most))
        over = torch.log2(largest * 2**15 / bound / torch.finfo(torch.float16).max)
        steps = torch.where((largest > 0) & (bound > 0), (over / 8).ceil().clamp(min=0.0), 0.0)
        return 2.0 ** (8 * steps)

    def _one_of_group(self, t: torch.Tensor) -> torch.Tensor:
        """(b, h, ...), equal in query heads that share a key head, by key head."""
        return t[:, :: self.shared]

    def _of_group(self, t: torch.Tensor) -> torch.Tensor:
        """The largest of (b, h, ...) among the query heads that share a key head, for each."""
        if self.shared <= 1:
            return t
        return t.unflatten(1, (-1, self.shared)).amax(2).repeat_interleave(self.shared, 1)

    def sums(self, terms: int) -> float:
        """How far off a sum of so many terms may be, as a share of that of their sizes: only torch
        is believed to need it (terms that are all alike are rounded alike)."""
        return self.a / _C * terms

    def _gradients(self, out: torch.Tensor | None = None) -> tuple[equations.Gradients, Three]:
        """All gradients where D = rowsum(dO * ``out``); those of query, key and value once more,
        as they are returned."""
        exact = equations.backward(self.exact, self.made.grad_out, self.made.grad_lse, out)
        return exact, (exact.query, self._grouped(exact.key), self._grouped(exact.value))

    def of_output(self, out: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients where D is formed of ``out``, which may be rounded; in float64."""
        names = ("grad_query", "grad_key", "grad_value")
        return dict(zip(names, map(self._shaped, self._gradients(out)[1]), strict=True))

    def backward(self, dtype: torch.dtype) -> dict[str, Wanted]:
        """The three gradients; ``forward`` comes first."""
        p, v, do = self.p, self.v, self.do
        exactly, gradients = self._gradients()
        apart, of_lse = exactly.apart, exactly.through_lse.unsqueeze(-1)
        of_scores = exactly.scores
        ds = of_scores * self.slope
        self.further = self._further(*gradients)
        lse = self.lse.masked_fill(self.empty, 0.0).abs()
        change = self.off + (self.lse_off + self.a * (1 + lse)).unsqueeze(-1)
        if self.dtype.itemsize == 2:
            change = change + _SHORT_EXP
        # Beyond that the exponential itself is anybody's guess: an lse that cannot tell.
        p_off = torch.where(change < 0.5, 1.5 * p * change, math.inf).masked_fill(p == 0, 0.0)
        sizes = self.rescale * (do.abs() @ v.abs().mT) + of_lse.abs()
        tiny = _least(self.dtype) * (p > 0)
        # Probabilities that are off are so in the output, and in D, before they are here.
        spread = _sane(p_off * apart.abs())
        ds_off = spread + p * spread.sum(-1, keepdim=True) + self.w * ds.abs()
        ds_off = ds_off + self.a * p * (sizes + (do * self.out).abs().sum(-1, keepdim=True))
        # A probability that is lost as too small takes what it is multiplied by along.
        ds_off = ds_off + tiny * (1.0 + _sane(apart.abs()))
        if isinstance(self.slope, torch.Tensor):
            ds_off = ds_off + self.a * p * apart.abs()
        if self.made.grad_out.dtype.itemsize > self.dtype.itemsize:
            # grad_out may be scaled and rounded to the inputs' dtype: one relative rounding, and
            # what that leaves of the smallest beside the largest of a head.
            largest = torch.maximum(do.abs(), 2 * of_lse.abs())
            lost = 2.0**-38 * self.further
            least = lost * largest.amax((-2, -1), keepdim=True) if do.numel() else lost
            each = self.w * do.abs() + least
            ds_off = ds_off + p * (
                self.rescale * (each @ v.abs().mT) + (each * self.out.abs()).sum(-1, keepdim=True)
            )
        else:
            each = torch.zeros_like(do)
        # D of an output with all of its own errors, the rounding to the inputs' dtype among them.
        out_off = self.out_off + self.w * self.out.abs() + _least(self.dtype)
        rounded = _sane(p * (do.abs() * out_off).sum(-1, keepdim=True))
        # A row of dO far below the largest of those that share its key head is divided with them,
        # and is among the smallest numbers then: each of its elements may lose half of the smallest
        # one. Not in the strict bound: only as far as torch, divided as much, pays it too.
        division = self._division()
        least = torch.where(division > 1, _least(self.dtype) * division, 0.0)
        sunk = least * torch.ones_like(do)
        rounded = rounded + _sane(
            p * (sunk @ v.abs().mT + (sunk * self.out.abs()).sum(-1, keepdim=True))
        )
        held = (do.abs() * self.out.abs()).sum(-1, keepdim=True)
        if self.out_unit > self.w:
            # Whoever asks for an output of fewer digits than the inputs have hands those back.
            least = self.out_least * do.abs().sum(-1, keepdim=True)
            ds_off = ds_off + p * (self.out_unit * held + least)
        if self.by_keys:
            ds_off = ds_off + 4 * self.rescale * self.by_keys * p * (do.abs() * (p @ v.abs())).sum(
                -1, keepdim=True
            )
        terms = self.sums(max(p.shape[-2:]) * self.shared)
        parts = (self.w + self.a + max(self.by_keys, self.by_rows)) * ds.abs()
        found, most = {}, abs(self.scale)
        # Each as a product of dS with keys, and with queries.
        for name, exact, product, lost in (
            ("grad_query", gradients[0], lambda x: most * (x @ self.k.abs()), self._parts()),
            (
                "grad_key",
                gradients[1],
                lambda x: self._grouped(most * (x.mT @ self.q.abs())),
                self._one_of_group(self._parts()),
            ),
        ):
            bound = product(_sane(ds_off + parts))
            bound = bound + unit(dtype) * exact.abs() + _least(dtype) + lost
            loose = bound + product(rounded) + terms * product(ds.abs())
            found[name] = Wanted(*map(self._shaped, (exact, bound, loose)))
        exact = gradients[2]
        share = self.w + self.a + self.by_keys + self.by_rows
        bound = (_sane(p_off) + share * p + tiny).mT @ do.abs() + p.mT @ each
        bound = self.rescale * self._grouped(bound) + unit(dtype) * exact.abs() + _least(dtype)
        bound = bound + self._one_of_group(self._parts())
        terms = self.sums(p.shape[-2] * self.shared)
        loose = bound + self.rescale * self._grouped(p.mT @ (terms * do.abs() + sunk))
        found["grad_value"] = Wanted(*map(self._shaped, (exact, bound, loose)))
        if self.case.mask_grad:
            found["grad_mask"] = self._of_mask(of_scores, ds_off, rounded)
        if exactly.sinks is not None:
            found["grad_sinks"] = self._of_sinks(exactly, lse)
        return found

    def _of_sinks(self, exactly: equations.Gradients, lse: torch.Tensor) -> Wanted:
        """The gradient of the sinks, summed over rows: P_sink (d lse - delta). Delta is of the
        output as it is returned."""
        share, exact = self.exact.p_sink, exactly.sinks
        assert share is not None
        assert exact is not None
        delta = (self.do * self.out).sum(-1)
        apart = (exactly.through_lse - delta).abs()
        sizes = (self.do * self.out).abs().sum(-1) + exactly.through_lse.abs()
        change = self.lse_off + self.a * (2 + lse)
        if self.dtype.itemsize == 2:
            change = change + _SHORT_EXP
        # Parts of an output are of the inputs' dtype, whatever the output's.
        out_off = self.out_off + (self.out_unit + self.w) * self.out.abs() + self.out_least
        of_delta = (self.do.abs() * (out_off + _least(self.dtype))).sum(-1)
        each = share * (2 * change * apart + self.a * sizes + of_delta)
        bound = each.sum((0, 2)) + self.w * exact.abs() + _least(self.dtype)
        if self.by_keys:
            bound = bound + self.sums(share.numel()) * (share * sizes).sum((0, 2))
        return Wanted(exact, bound, bound)


def _largest_rows(t: torch.Tensor) -> torch.Tensor:
    """The norms of the rows of (b, h, n, d), 0 where they are not finite."""
    return t.norm(dim=-1).nan_to_num(0.0, 0.0, 0.0)


def _sane(bound: torch.Tensor) -> torch.Tensor:
    """Infinite bounds as very large ones, so that 0 times them is 0."""
    return bound.clamp(max=1e200)
