"""One call of the kernel that is checked: its sizes, its inputs, and its results under
a cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.kernels import CallShape, InnerKernel
from quorum_attention.plain_types import Keywords
from quorum_attention.planner import Plan, plan

GRADIENTS = ("grad_query", "grad_key", "grad_value")
SHORT = 101
"""The most tokens of a call that laws are tried with."""
_TILE = 16

Results = dict[str, torch.Tensor]


class Cut(NamedTuple):
    """How a call is cut.

    Attributes:
        levels: chunk counts of each level; () leaves the tokens uncut.
        layout: how chunks are laid out, "aligned" or "balanced".
        heads_per_group: query heads that run together; None for all heads and batch
            entries.
    """

    levels: tuple[int, ...] = ()
    layout: str = "aligned"
    heads_per_group: int | None = None


UNCUT = Cut()


class TrialInputs(NamedTuple):
    """Query, key, value and the upstream gradient of a call."""

    query: torch.Tensor  # (b, h, n, d)
    key: torch.Tensor  # (b, h_kv, m, d)
    value: torch.Tensor  # (b, h_kv, m, d_v)
    grad_out: torch.Tensor  # (b, h, n, d_v)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSizes(CallShape):
    """The sizes of a call that a kernel is tried with."""

    device: torch.device

    @property
    def kind(self) -> str:
        """The kind of the call, in a word."""
        return "causal" if self.is_causal else "plain"

    @property
    def scale(self) -> float:
        """The usual factor of the scores."""
        return float(self.head_dim**-0.5)

    def inputs(self, seed: int, factor: float = 1.0) -> TrialInputs:
        """Draw normally distributed inputs times ``factor``."""
        generator = torch.Generator().manual_seed(seed)

        def drawn(heads: int, tokens: int, width: int) -> torch.Tensor:
            wide = torch.randn(
                (self.batch, heads, tokens, width),
                generator=generator,
                dtype=torch.float64,
                device="cpu",
            )
            scaled = wide * factor
            return scaled.to(self.dtype).to(self.device)

        return TrialInputs(
            drawn(self.heads, self.n_queries, self.head_dim),
            drawn(self.kv_heads, self.n_keys, self.head_dim),
            drawn(self.kv_heads, self.n_keys, self.value_dim),
            drawn(self.heads, self.n_queries, self.value_dim),
        )

    def in_widest_dtype(self, kernel: InnerKernel) -> CheckSizes:
        """The same sizes in the widest dtype that the kernel takes."""
        for dtype in (torch.float64, torch.float32):
            if torch.finfo(dtype).eps > torch.finfo(self.dtype).eps:
                continue
            wider = replace(self, dtype=dtype)
            if kernel.refusal(wider) is None:
                return wider
        return self

    def shortened(self) -> CheckSizes:
        """The same sizes with as many queries as keys, and at most ``SHORT`` of
        both."""
        length = min(SHORT, self.n_queries, self.n_keys)
        return replace(self, n_queries=length, n_keys=length)

    def with_grouped_heads(self) -> CheckSizes:
        """The same sizes with half as many key heads as query heads.

        An odd number of query heads shares one key head. Sizes whose heads are grouped
        already stay as they are.
        """
        if self.heads != self.kv_heads:
            return self
        return replace(self, kv_heads=self.heads // 2 if self.heads % 2 == 0 else 1)


def run_forward(
    kernel: InnerKernel,
    sizes: CheckSizes,
    inputs: Sequence[torch.Tensor],
    cut: Cut = UNCUT,
    scale: float | None = None,
) -> Results:
    """Compute "out" and "lse" of a call.

    Args:
        inputs: query, key and value, and possibly more.
        scale: the factor of the scores; the usual one by default.
    """
    query, key, value, *_ = inputs
    options = _call_options(kernel, sizes, scale)
    forward_plan = _plan(kernel, sizes, cut, backward=False)
    out, lse = attention_with_lse(query, key, value, plan=forward_plan, **options)
    return {"out": out, "lse": lse}


def run_backward(
    kernel: InnerKernel,
    sizes: CheckSizes,
    inputs: TrialInputs,
    rows: Results,
    cut: Cut = UNCUT,
) -> Results:
    """Compute the gradients of a call whose forward gave ``rows``, by their names."""
    query, key, value, grad_out = inputs
    options = _call_options(kernel, sizes, None)
    backward_plan = _plan(kernel, sizes, cut, backward=True)
    grads = attention_backward(
        grad_out,
        query,
        key,
        value,
        rows["out"],
        rows["lse"],
        plan=backward_plan,
        **options,
    )
    return dict(zip(GRADIENTS, grads, strict=True))


def run_call(
    kernel: InnerKernel, sizes: CheckSizes, inputs: TrialInputs, cut: Cut = UNCUT
) -> Results:
    """Compute out, lse and, if the sizes ask for them, the gradients."""
    results = run_forward(kernel, sizes, inputs, cut)
    if sizes.needs_grad:
        results |= run_backward(kernel, sizes, inputs, results, cut)
    return results


def _call_options(
    kernel: InnerKernel, sizes: CheckSizes, scale: float | None
) -> Keywords:
    return {
        "is_causal": sizes.is_causal,
        "scale": scale,
        "enable_gqa": sizes.heads != sizes.kv_heads,
        "kernel": kernel,
        "devices": sizes.device,
    }


def _plan(kernel: InnerKernel, sizes: CheckSizes, cut: Cut, *, backward: bool) -> Plan:
    return plan(
        sizes.n_queries,
        n_keys=sizes.n_keys,
        batch=sizes.batch,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        dtype=sizes.dtype,
        is_causal=sizes.is_causal,
        kernel=kernel,
        device=sizes.device,
        inputs="device",
        tile=_TILE,
        backward=backward,
        **cut._asdict(),
    )
