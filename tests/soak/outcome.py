"""What kinds of calls are made of: where they run, and what became of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Where:
    """Where a soak runs.

    Attributes:
        device: "cpu" or "cuda".
        folder: of temporary files; children have it as TMPDIR.
        source: the folder that has the package ``quorum_attention``, for children.
        tests: the folder of the tests, for children.
    """

    device: str
    folder: Path
    source: Path
    tests: Path

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


@dataclass
class Outcome:
    """Of one step of a kind.

    Attributes:
        calls: how many calls were made.
        wrong: a line for everything that is wrong.
        events: interrupts, kills and refusals, by name.
    """

    calls: int = 0
    wrong: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """A kind of calls.

    Attributes:
        name: in the report.
        share: of the time, relative to those of the others.
        step: makes some calls that a random source decides everything about.
        missing: why the kind cannot run, or "".
        beside: whether it runs in a thread beside the others, since it only waits for a child.
    """

    name: str
    share: float
    step: Callable[[Where, random.Random], Outcome]
    missing: Callable[[Where], str] = lambda where: ""
    beside: bool = False


TOLERANCE = {
    torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1,
}  # fmt: skip


def apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference, as a share of the largest element (at least 1); NaN is infinite."""
    found = found.detach().double().cpu()
    exact = exact.detach().double().cpu()
    if found.shape != exact.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    off = torch.where(found == exact, 0.0, (found - exact).abs())
    finite = exact[exact.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 1.0
    return float(off.nan_to_num(nan=torch.inf).max()) / max(1.0, largest)


def compare(
    name: str, found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, outcome: Outcome
) -> None:
    """Note where a result of inputs of ``dtype`` is further from the exact one than it may be."""
    off = apart(found, exact)
    if not off <= TOLERANCE[dtype]:
        outcome.wrong.append(f"{name} is off by {off:.3g} where {TOLERANCE[dtype]:.3g} is allowed")


def textbook(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    upstream: torch.Tensor | None,
    *,
    is_causal: bool,
) -> list[torch.Tensor]:
    """Output, log-sum-exp and, of an upstream gradient, the three gradients, in float64."""
    q, k, v = (t.detach().cpu().double().requires_grad_() for t in (query, key, value))
    shared = q.shape[-3] // k.shape[-3]
    keys, values = (t.repeat_interleave(shared, -3) for t in (k, v))
    scores = q @ keys.mT * q.shape[-1] ** -0.5
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    out = scores.softmax(-1) @ values
    exact = [out.detach(), scores.logsumexp(-1).detach()]
    if upstream is not None:
        exact += torch.autograd.grad(out, (q, k, v), upstream.detach().cpu().double())
    return exact


def drawn_inputs(
    draw: random.Random, dtype: torch.dtype, device: str, longest: int = 500
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value with grouped heads, requiring gradients, and an upstream gradient."""
    g = torch.Generator().manual_seed(draw.getrandbits(40))
    kv_heads, shared = draw.choice([1, 2]), draw.choice([1, 1, 2, 3])
    n, d = draw.choice([1, 17, 128, 200, draw.randint(1, longest)]), draw.choice([8, 16, 32])
    batch = draw.choice([1, 1, 2])
    shapes = [(batch, h, n, d) for h in (kv_heads * shared, kv_heads, kv_heads, kv_heads * shared)]
    *three, upstream = (torch.randn(s, generator=g).to(device, dtype) for s in shapes)
    return [t.requires_grad_() for t in three], upstream
