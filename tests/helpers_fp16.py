"""fp16 calls at the edges of what fp16 can hold, drawn; and what float64 makes of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from helpers_attention import Exact, Inputs, exact
from helpers_plans import passing

import quorum_attention as qa

ROUTES = ("direct", "over_inputs", "slots", "slots of a strided query", "passing")
_LARGEST = 65_504.0


@dataclass
class Drawn:
    """A call, and in words how it was drawn."""

    made: Inputs
    is_causal: bool
    words: str


def drawn(seed: int, *, few_sizes: bool = False) -> Drawn:
    """Sinks, few keys, loss-scaled gradients, large queries and values; of one head and more.

    Args:
        few_sizes: all of one width: what a GPU compiles, or tries out, for a size serves many
            calls.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    if few_sizes:
        n, m = rng.choice([(1, 1), (5, 5), (128, 128), (300, 300), (300, 2), (300, 5), (5, 300)])
        key_heads, shared = rng.choice([(2, 1), (1, 2)])
        d = dv = 64
    else:
        n = rng.choice([1, 2, 3, 5, 17, 60, 128, 300])
        m = rng.choice([n, n, n, 1, 2, 3, 5, rng.randint(1, 300)])
        key_heads, shared = rng.choice([1, 2]), rng.choice([1, 2])
        d = rng.choice([8, 16, 64])
        dv = rng.choice([d, d, 8])

    def normal(heads: int, rows: int, width: int) -> torch.Tensor:
        return torch.randn(1, heads, rows, width, generator=generator)

    q, k, v = normal(key_heads * shared, n, d), normal(key_heads, m, d), normal(key_heads, m, dv)
    grad_out = normal(key_heads * shared, n, dv)
    kinds = ["plain", "sink", "sink", "uniform", "large values"]
    kind = rng.choice(kinds if few_sizes else [*kinds, "large queries"])
    if kind == "sink":
        u = torch.nn.functional.normalize(torch.randn(d, generator=generator), dim=0)
        q = q / 2 + u * rng.choice([2, 6, 12])
        k[:, :, 0] = u * rng.choice([5, 20, 60])
        grad_out = rng.choice([torch.full_like(grad_out, 1 / n), grad_out, grad_out.abs()])
    elif kind == "uniform":
        grad_out = torch.full_like(grad_out, rng.choice([1 / n, 1.0, 100.0]))
    elif kind == "large queries":  # which leave the scores alone
        q[..., 0] *= rng.choice([50, 1000])
        k[..., 0] *= 1e-3
    elif kind == "large values":
        v *= rng.choice([30, 1000])
    size = rng.choice([0, 0, 0, -14, -8, 4, 8, 12, 14, 16])
    grad_out = (grad_out * 2.0**size).clamp(-_LARGEST, _LARGEST)
    made = Inputs(q.half(), k.half(), v.half(), grad_out.half())
    causal = rng.random() < 0.5
    words = f"seed {seed}: {kind}, {n} x {m}, heads {key_heads} x {shared}, gradient times 2^{size}"
    return Drawn(made, causal, words)


def sink(n: int, heads: int = 1) -> Inputs:
    """Every query attends to one key alone, and every gradient points the same way."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, n, 64, generator=generator) for _ in range(3))
    u = torch.nn.functional.normalize(torch.randn(64, generator=generator), dim=0)
    q, k[:, :, n // 8] = q / 2 + 6 * u, 20 * u
    # Values are small, so the bound of the scaling leaves the gradients large.
    return Inputs(q.half(), k.half(), (v / 8).half(), torch.full_like(q, 1 / n).half())


@dataclass
class Way:
    """How a call is computed: on a route, by a kernel, on a device.

    On a GPU inputs and results of the routes that have to load them lie in host memory.
    """

    route: str
    device: str = "cpu"
    kernel: str = "auto"

    @property
    def home(self) -> str:
        return self.device if self.route in ("direct", "over_inputs") else "cpu"

    def plan(self, made: Inputs, is_causal: bool, **more) -> qa.Plan:  # type: ignore[no-untyped-def]
        """A plan of the backward; ``more`` is what ``qa.plan`` takes."""
        q, k, v = made.three
        if self.route != "direct":
            more |= {"over_inputs": self.route == "over_inputs"}
        return qa.plan(
            q.shape[2], n_keys=k.shape[2], heads=q.shape[1], kv_heads=k.shape[1],
            head_dim=q.shape[3], value_dim=v.shape[3], dtype=q.dtype, is_causal=is_causal,
            device=self.device, inputs="device" if self.home == self.device else "host",
            kernel=self.kernel, backward=True, **more,
        )  # fmt: skip

    def gradients(
        self, made: Inputs, reference: Exact, is_causal: bool, plan: qa.Plan, **more
    ) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
        """The gradients, on the CPU, from the output and log-sum-exp of ``reference``."""
        q, k, v = (t.to(self.home) for t in made.three)
        if self.route == "slots of a strided query":
            q = q.mT.contiguous().mT
        out, lse = reference.out.half(), reference.lse.float()
        got = qa.attention_backward(
            made.grad_out.to(self.home), q, k, v, out.to(self.home), lse.to(self.home),
            is_causal=is_causal, enable_gqa=True, plan=plan, kernel=self.kernel,
            devices=self.device, **more,
        )  # fmt: skip
        return tuple(t.cpu() for t in got)


def wrong(call: Drawn, way: Way, seed: int) -> str | None:
    """What is wrong with the gradients of a drawn call on a way, in words; None is nothing.

    Raises:
        NotImplementedError: the kernel does not take such a call.
    """
    rng, made, route = random.Random(seed), call.made, way.route
    q, k, v = made.three
    reference = exact(made, is_causal=call.is_causal, gradients=True)
    assert reference.grads is not None
    levels = {
        "direct": [()],
        "over_inputs": [(3,), (7,), (13,)],
        "passing": [(7,)],
    }.get(route, [(), (1,), (3,), (7,), (3, 7)])
    more = {"levels": rng.choice(levels), "tile": rng.choice([8, 16, 128])}
    more |= {"layout": rng.choice(["aligned", "balanced"])}
    if route.startswith("slots"):
        more |= {"n_cap": rng.choice([1, 2, 3])}
    plan = way.plan(made, call.is_causal, **more)
    if route == "passing":
        sizes = [rng.choice([1, 16, 64, 100, 400]) for _ in range(2)]
        # As many sums as there are rows on one side; tens of thousands of units would be all alike.
        if -(-q.shape[2] // sizes[0]) * -(-k.shape[2] // sizes[1]) > 4_000:
            sizes[1] = max(sizes[1], k.shape[2] // 10)
        plan = passing(plan, *sizes, group=rng.randint(1, k.shape[1]), n_cap=rng.choice([1, 2, 3]))
        more["sizes"] = sizes
    dtype = torch.float16 if route == "direct" else rng.choice([torch.float16, torch.float32])
    # Whatever is not written stays NaN.
    grads = tuple(torch.full(t.shape, torch.nan, dtype=dtype, device=way.home) for t in (q, k, v))
    got = way.gradients(made, reference, call.is_causal, plan, grads=grads)
    for name, actual, wanted in zip(("query", "key", "value"), got, reference.grads, strict=True):
        size = float(wanted.abs().max())
        fits = wanted.abs() + 2e-3 * size < 0.99 * torch.finfo(dtype).max
        if not bool(actual[fits].isfinite().all()):
            return f"{call.words}; {way} {more}: the {name}'s gradient is not finite"
        # dQ and dK cancel (P (dP - delta)), so that what is asked of their size is little.
        allowed = 3e-3 * size if name == "value" else 0.02 * size + _terms(made)
        # An operator that adds up in fp16 rounds to its smallest step more than once.
        allowed += 6e-8 if more["levels"] else 4 * 6e-8
        off = float((actual.double() - wanted)[fits].abs().max()) if bool(fits.any()) else 0.0
        if off > allowed:
            return f"{call.words}; {way} {more}: the {name}'s gradient is off by {off:.2e}"
    return None


def _terms(made: Inputs) -> float:
    """What a rounding of the terms of dP - delta may come to in a gradient."""
    largest = [float(t.double().norm(dim=-1).max()) for t in (made.grad_out, made.value)]
    other = max(float(t.double().abs().max()) for t in (made.query, made.key))
    rows = made.query.shape[2]
    return 2e-3 * largest[0] * largest[1] * other * rows**0.5 * made.query.shape[3] ** -0.5
