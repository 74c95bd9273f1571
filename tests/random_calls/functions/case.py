"""One call with a function of the user's as plain data, and its results in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from random_calls.functions.places import PLACES

RUNNERS = ("eager", "compiled", "devices", "ranks")
# What the function is, and what it reads.
KERNELS = ("lse", "lse explicit", "scores")
PLAIN = ("keeps", "bias", "sinks", "mask bias")
_DTYPES = {"float16": 25, "bfloat16": 15, "float32": 45, "float64": 15}
TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1,
}  # fmt: skip


@dataclass(frozen=True)
class FunctionCase:
    """A call.

    Attributes:
        what: "lse", "lse explicit" (with ``backward=``), "scores", "keeps", "bias", "sinks",
            "mask bias".
        place: where the function reads its numbers (``places.PLACES``).
        trap: None: the call must be right. "learned": what the function reads requires a gradient.
            "anew": the kernel's name is registered anew between forward and backward. "stale": a
            worker may read other numbers.
            "positions": a rank has a part of the call, and positions of its own.
            Then the call must be refused, or right for the numbers of its forward.
        shape: of a bias: which of batch, heads and rows it spans.
    """

    seed: int
    runner: str
    what: str
    place: str
    trap: str | None
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: str
    is_causal: bool
    depth: int | None
    shape: tuple[bool, bool, bool]
    scale: float | None

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32


def draw(seed: int, runner: str) -> FunctionCase:
    """The case of a seed."""
    r = random.Random(f"{runner} {seed}")
    what = r.choice(PLAIN if runner == "devices" else KERNELS * 2 + PLAIN)
    trap = r.choice(_traps(what, runner)) if r.random() < 0.4 else None
    if runner == "ranks" and what == "scores":
        trap = "positions"
    place = r.choice(_places(what, trap, runner))
    kv_heads = r.choice([1, 1, 2, 3])
    tokens = r.choice([r.randint(2, 40), r.randint(2, 200), r.randint(128, 300), 128, 129, 257])
    return FunctionCase(
        seed=seed,
        runner=runner,
        what=what,
        place=place,
        trap=trap,
        batch=r.choice([1, 1, 2]),
        heads=kv_heads * r.choice([1, 1, 2]),
        kv_heads=kv_heads,
        tokens=tokens,
        head_dim=r.choice([8, 16, 32]),
        dtype=r.choices(list(_DTYPES), list(_DTYPES.values()))[0],
        is_causal=r.random() < 0.5,
        depth=r.choice([0, 1]) if tokens >= 128 and r.random() < 0.6 else None,
        shape=(r.random() < 0.5, r.random() < 0.6, r.random() < 0.7),
        scale=r.choice([None, None, 0.3]),
    )


def _traps(what: str, runner: str) -> list[str | None]:
    if what in KERNELS:
        found = [] if what == "lse explicit" else ["learned", "learned"]
        return [*found, *(["anew"] if runner in ("eager", "compiled") else [])] or [None]
    return ["stale"] if what == "keeps" and runner == "devices" else [None]


def _places(what: str, trap: str | None, runner: str) -> list[str]:
    if runner == "devices":
        return ["global"] if what == "keeps" else ["none"]
    if what not in (*KERNELS, "keeps"):
        return ["none"]
    return [
        name
        for name, kind in PLACES.items()
        if (trap != "learned" or kind.learns) and (what != "keeps" or kind.whole)
    ]


@dataclass
class Inputs:
    """The tensors of a call, the same each time.

    Attributes:
        numbers: (heads,) what the function reads: of keeps int64, else floats.
        bias: attn_mask or the bias of a Mask; None.
        sinks: (heads,) or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    upstream: torch.Tensor
    numbers: torch.Tensor
    bias: torch.Tensor | None
    sinks: torch.Tensor | None


def inputs(case: FunctionCase) -> Inputs:
    """Of a case."""
    g = torch.Generator().manual_seed(case.seed)
    b, n, d = case.batch, case.tokens, case.head_dim
    q, k, v, upstream = (
        torch.randn(b, h, n, d, generator=g).to(case.torch_dtype)
        for h in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )
    numbers = torch.rand(case.heads, generator=g).to(case.wide) + 0.2
    if case.what == "keeps":
        numbers = torch.randint(0, 4, (case.heads,), generator=g)
    bias = sinks = None
    if case.what in ("bias", "mask bias"):
        lead = [
            n_ if spans else 1 for n_, spans in zip((b, case.heads, n), case.shape, strict=True)
        ]
        bias = torch.randn(*lead, n, generator=g).to(case.wide)
    if case.what == "sinks":
        sinks = torch.randn(case.heads, generator=g).to(case.wide)
    return Inputs(q, k, v, upstream, numbers, bias, sinks)


def other(case: FunctionCase, numbers: torch.Tensor) -> torch.Tensor:
    """Numbers that change every row."""
    return (numbers + 1) % 4 if case.what == "keeps" else 3.0 - numbers


def exact(case: FunctionCase, given: Inputs) -> dict[str, torch.Tensor]:
    """Output and gradients in float64, with the numbers of the forward."""
    leaves = {
        name: t.detach().double().requires_grad_()
        for name in ("query", "key", "value", "bias", "sinks", "numbers")
        if (t := getattr(given, name)) is not None and (name != "numbers" or t.is_floating_point())
    }
    if given.bias is not None:  # as kernels read it
        leaves["bias"] = given.bias.to(case.torch_dtype).double().requires_grad_()
    q, shared = leaves["query"], case.heads // case.kv_heads
    k, v = (leaves[name].repeat_interleave(shared, 1) for name in ("key", "value"))
    numbers = leaves.get("numbers", given.numbers)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    if case.what in ("lse", "lse explicit"):
        scale = scale * (0.5 + 0.5 * numbers.mean())  # type: ignore[assignment]
    scores = q @ k.mT * scale
    n = case.tokens
    i, j, h = torch.arange(n)[:, None], torch.arange(n), torch.arange(case.heads)[:, None, None]
    if case.what == "scores":
        scores = scores - 0.05 * numbers[h] * (i - j).abs()
    if case.what == "keeps":
        scores = scores.masked_fill(~(((i + j) % 4 != numbers[h]) | (i == j)), -torch.inf)
    if "bias" in leaves:
        scores = scores + leaves["bias"]
    if case.is_causal:
        scores = scores.masked_fill(j > i, -torch.inf)
    if "sinks" in leaves:
        column = leaves["sinks"][None, :, None, None].expand(case.batch, case.heads, n, 1)
        scores = torch.cat([scores, column], -1)
    out = scores.softmax(-1)[..., :n] @ v
    grads = torch.autograd.grad(out, list(leaves.values()), given.upstream.double(),
                                allow_unused=True)  # fmt: skip
    found = {f"grad of {name}": g for name, g in zip(leaves, grads, strict=True) if g is not None}
    return {"out": out.detach(), **found}
