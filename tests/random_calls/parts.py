"""What the parts of a cut call of 16 bits cost: each is rounded before they are merged.

Operators return the output of a part of a row's keys in the inputs' dtype. So the output O of a row
that is cut into parts, with shares of its softmax w_p and outputs O_p, becomes

    O' = round(sum_p w_p round(O_p)),

and a backward forms D = rowsum(dO * O') of it. docs/limits.md and docs/random-calls.md say so. In
a row of nearly one key, w_p is 1 and dP - D is little but those roundings; in rows that are alike
they are alike, too, and add up in the key's gradient. Uncut there is one rounding, cut there are
two, and torch's error of the uncut call says nothing of the second.

Here gradients are computed in float64 from O', of the very parts that a call is cut into: nothing
but these roundings is in their error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.decomposition import Decomposition
from random_calls.case import Case
from random_calls.reference import Reference

# Kernels of vendors. What else there is merges in fp32.
_ROUNDING = ("cpu", "fa4", "cudnn", "flash", "efficient")


@dataclass(frozen=True)
class Cut:
    """How a forward was cut: its kernel's name and its levels."""

    kernel: str
    levels: tuple[int, ...]

    def rounds(self, case: Case) -> bool:
        """Whether parts are rounded to 16 bits."""
        narrow = case.dtype in ("float16", "bfloat16") and not case.dropout
        return narrow and bool(self.levels) and self.kernel in _ROUNDING


def output_of_parts(reference: Reference, cut: Cut) -> torch.Tensor:
    """O' in float64, (b, h, n_queries, value_dim); ``reference.forward`` comes first."""
    case, p, v = reference.case, reference.p, reference.v
    orders = case.orders
    # Where the planner has chosen, the edges of chunks may be others: as many, and as large.
    layout, tile = (orders.layout, orders.tile) if orders.how == "plan" else ("aligned", 128)
    n = max(case.n_queries, case.n_keys)
    found = torch.zeros_like(reference.out)
    for task in Decomposition(n, cut.levels, layout, tile).tasks():
        tokens = torch.cat([torch.arange(r.start, r.stop) for r in task.runs] or [torch.empty(0)])
        tokens = tokens.long().to(p.device)
        for r in task.rectangles(case.is_causal, case.n_queries, case.n_keys):
            rows = tokens[r.query_start : r.query_stop]
            keys = tokens[r.key_start : r.key_stop]
            part = p[..., rows, :][..., keys]
            share = part.sum(-1, keepdim=True)
            out = (part @ v[..., keys, :]) / share.masked_fill(share == 0, 1.0)
            found[..., rows, :] += share * out.to(reference.dtype).double()
    return found.to(reference.dtype).double()
