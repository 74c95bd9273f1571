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
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quorum_attention.decomposition import Rows
from quorum_attention.kernels.dropout import Dropout, dropped
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
        b = math.prod(case.batch)

        def flat(t: torch.Tensor) -> torch.Tensor:
            return t.detach().double().reshape(b, *t.shape[-3:])

        self.q, self.do = flat(made.query), flat(made.grad_out)
        self.k, self.v = (flat(t).repeat_interleave(shared, 1) for t in (made.key, made.value))
        self.scale = case.head_dim**-0.5 if case.scale is None else case.scale
        # What sums of so many keys, or of the rows of a key, may be off by here.
        own = self.dtype == torch.float64
        self.by_keys = self.sums(case.n_keys) if own else 0.0
        self.by_rows = self.sums(case.n_queries * shared) if own else 0.0
        self._scores()

    def _scores(self) -> None:
        case, made = self.case, self.made
        s = self.scale * (self.q @ self.k.mT)
        off = abs(self.scale) * (self.q.abs() @ self.k.abs().mT) + s.abs()
        slope = None
        nq, nk = s.shape[-2:]
        i = torch.arange(nq, device=s.device)[:, None]
        j = torch.arange(nk, device=s.device)[None]
        if case.scores.softcap is not None:
            cap = case.scores.softcap
            t = torch.tanh(s / cap)
            s, slope = cap * t, 1 - t * t
            off = off + cap
        if case.scores.alibi:
            bias = slopes_of(case.heads).to(s)[:, None, None] * (i - j).abs()
            s, off = s - bias, off + bias.abs()
        kept = torch.ones((nq, nk), dtype=torch.bool, device=s.device)
        if case.is_causal:
            kept = kept.tril()
        if case.scores.window is not None:
            left, right = case.scores.window
            kept = kept & ((left < 0) | (i - j <= left)) & ((right < 0) | (j - i <= right))
        kept = kept.expand(s.shape)
        if made.mask is not None:
            mask = made.mask
            whole = (*case.batch, case.heads, nq, nk)
            mask = mask.expand(whole).reshape(s.shape)
            if mask.dtype == torch.bool:
                kept = kept & mask
            else:
                bias = mask.to(self.dtype).double()
                kept = kept & (bias != -math.inf)
                bias = bias.masked_fill(bias == -math.inf, 0.0)
                s, off = s + bias, off + bias.abs()
        self.kept, self.slope = kept, slope
        s = s.masked_fill(~kept, -math.inf)
        self.s = s
        self.lse = s.logsumexp(-1) if nk else s.new_full(s.shape[:-1], -math.inf)
        self.empty = ~kept.any(-1)
        finite = self.lse.masked_fill(self.empty, 0.0).unsqueeze(-1)
        self.p = torch.exp(s - finite)
        # No key, no share, whatever the scores would have been.
        self.p = self.p.masked_fill(self.empty.unsqueeze(-1), 0.0)
        self.off = self.a * off.masked_fill(~kept, 0.0)
        # What probabilities are multiplied by, 1 without dropout; at most ``rescale``.
        self.z, self.rescale = torch.ones((), dtype=s.dtype, device=s.device), 1.0
        if case.dropout:
            rows = torch.arange(nq, device=s.device)
            lot = Dropout(case.dropout, case.seed)
            drops = dropped(lot, *s.shape[:2], rows, [Rows(0, nk, 0)])
            self.rescale = 1 / (1 - case.dropout)
            self.z = (~drops).to(s) * self.rescale

    def _grouped(self, t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (-1, self.shared)).sum(2) if self.shared > 1 else t

    def _shaped(self, t: torch.Tensor) -> torch.Tensor:
        return t.reshape(*self.case.batch, *t.shape[1:])

    def forward(self, out_dtype: torch.dtype) -> dict[str, Wanted]:
        """out and lse, both in float64."""
        p, off = self.p, self.off
        self.out_unit = unit(out_dtype)
        self.out = (p * self.z) @ self.v
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

    def _gradients(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """With D = rowsum(dO * ``out``): dP - D and what flows through the lse, that gradient of
        the lse, dS, and the gradients of query, key and value."""
        p, do = self.p, self.do
        delta = (do * out).sum(-1, keepdim=True)
        of_lse = torch.zeros_like(delta)
        if self.made.grad_lse is not None:
            of_lse = self.made.grad_lse.double().reshape(delta.shape)
            # Nothing flows into a row without keys.
            of_lse = of_lse.masked_fill(self.empty.unsqueeze(-1), 0)
        apart = (do @ self.v.mT) * self.z - delta + of_lse
        ds = p * apart * (1.0 if self.slope is None else self.slope)
        of_query = self.scale * (ds @ self.k)
        of_key = self._grouped(self.scale * (ds.mT @ self.q))
        of_value = self._grouped((p * self.z).mT @ do)
        return apart, of_lse, ds, of_query, of_key, of_value

    def of_output(self, out: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients where D is formed of ``out``, which may be rounded; in float64."""
        names = ("grad_query", "grad_key", "grad_value")
        return dict(zip(names, map(self._shaped, self._gradients(out)[3:]), strict=True))

    def backward(self, dtype: torch.dtype) -> dict[str, Wanted]:
        """The three gradients; ``forward`` comes first."""
        p, v, do = self.p, self.v, self.do
        apart, of_lse, ds, *gradients = self._gradients(self.out)
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
        if self.slope is not None:
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
            found["grad_mask"] = self._of_mask(ds, ds_off, rounded)
        return found


def _largest_rows(t: torch.Tensor) -> torch.Tensor:
    """The norms of the rows of (b, h, n, d), 0 where they are not finite."""
    return t.norm(dim=-1).nan_to_num(0.0, 0.0, 0.0)


def _sane(bound: torch.Tensor) -> torch.Tensor:
    """Infinite bounds as very large ones, so that 0 times them is 0."""
    return bound.clamp(max=1e200)
