"""Quorum attention inside a model, on one GPU: a window, a decoder layer's step, its longest text.

    python benchmarks/model.py [--only window,layer,longest] [--tokens N] [--memory 16GiB]
        [--most N] [--times N] [--rounds N] [--json FILE]

``window``: a causal window of 4,096 tokens as anyone would call it, beside torch's compiled
FlexAttention whose block lists are made beforehand and not timed, and the same on cuDNN by plain
rectangles and triangles; everything on the device, in turn, medians. ``layer``: a decoder layer of
Qwen3-8B's shape in bf16, forward and a backward that recomputes it (gradient checkpointing),
attention by SDPA, by quorum attention and by it in a budget of 2 GiB; floating-point operations are
counted with the recomputation. Attention's working memory is what a forward and a backward of it
alone take at most beyond q, k, v, o and their gradients.
``longest``: the longest text that one such layer can be trained on in so much device memory: as it
comes with SDPA; and with everything that goes token by token done in tiles, tensors in host memory,
and attention in half of the memory. With ``--times 8`` the second is tried at eight times the
first's length and no other. The layer is written out in plain torch, so nothing but torch and this
package is needed. Needs a CUDA device; ``--device cpu`` runs small sizes to see that it works.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa
from quorum_attention.sizes import format_bytes, parse_bytes, parse_count
from quorum_attention.writing import write_text

_WINDOW, _TILE = 4096, 8192
# Heads, key/value heads, head dimension.
_WINDOWED = ((8, 8, 64), (32, 8, 128))
# Of a device's memory, what is left of it beside the tiles, for attention.
_ATTENTION_SHARE = 0.5
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """A decoder layer of Qwen3-8B's shape, random weights: (batch, tokens, 4096) to the same."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = (4, 2, 16) if small else (32, 8, 128)
        hidden, inner = (64, 192) if small else (4096, 12288)
        self.hidden = hidden
        linear = {"bias": False}
        self.q = nn.Linear(hidden, self.heads * self.width, **linear)
        self.k = nn.Linear(hidden, self.kv_heads * self.width, **linear)
        self.v = nn.Linear(hidden, self.kv_heads * self.width, **linear)
        self.o = nn.Linear(self.heads * self.width, hidden, **linear)
        self.gate, self.up = (nn.Linear(hidden, inner, **linear) for _ in range(2))
        self.down = nn.Linear(inner, hidden, **linear)
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q_norm, self.k_norm = nn.RMSNorm(self.width), nn.RMSNorm(self.width)

    def project(self, x: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values of the tokens from ``first`` on: (batch, heads, tokens, width)."""
        h = self.before(x)
        shape = (*x.shape[:2], -1, self.width)
        q, k = self.q_norm(self.q(h).view(shape)), self.k_norm(self.k(h).view(shape))
        positions = torch.arange(first, first + x.shape[1], device=x.device)
        q, k = (rotated(each.transpose(1, 2), positions) for each in (q, k))
        return q, k, self.v(h).view(shape).transpose(1, 2)

    def rest(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What follows attention; ``attended``: (batch, heads, tokens, width)."""
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.between(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    def forward(self, x: torch.Tensor, attend: Attention) -> torch.Tensor:
        """(batch, tokens, hidden) to the same."""
        return self.rest(x, attend(*self.project(x)))

    def operations(self, tokens: int) -> float:
        """Of a forward, a recomputed one and a backward: 2 + 2 + 4 for each multiplication."""
        linear = 8 * tokens * sum(p.numel() for p in self.parameters() if p.dim() == 2)
        # Half of the square; the backward computes the scores once more.
        pairs = tokens * tokens / 2 * self.heads * self.width
        return linear + (4 + 4 + 10) * pairs


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = positions[:, None].float() * torch.pow(torch.tensor(1e6, device=x.device), -steps)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def quorum(budget: str | int | None) -> Attention:
    return lambda q, k, v: qa.attention(q, k, v, is_causal=True, enable_gqa=True, budget=budget)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def in_turn(
    runs: dict[str, Callable[[], Any]], device: str, rounds: int, calls: int = 1
) -> dict[str, float]:
    """Median seconds of a call of each, in turn; the first round is not timed."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            wait(device)
            began = time.perf_counter()
            for _ in range(calls):
                run()
            wait(device)
            if round_:
                found[name].append((time.perf_counter() - began) / calls)
    return {name: statistics.median(times) for name, times in found.items()}


def window(tokens: int, device: str, rounds: int, calls: int, out: Console) -> list[dict[str, Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = []
    for heads, kv_heads, width in _WINDOWED if device == "cuda" else ((2, 1, 16),):
        sizes = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
        q, k, v, grad = (
            torch.randn(1, h, tokens, width, **sizes) for h in (heads, kv_heads, kv_heads, heads)
        )
        for tensor in (q, k, v):
            tensor.requires_grad_()
        near = min(_WINDOW, tokens // 4)
        mask = qa.Mask(causal=True, window=(near - 1, -1))
        runs = {"quorum": lambda q=q, k=k, v=v, m=mask: qa.attention(q, k, v, m, enable_gqa=True)}
        if device == "cuda":
            runs["quorum on cudnn"] = lambda q=q, k=k, v=v, m=mask: qa.attention(
                q, k, v, m, enable_gqa=True, kernel="cudnn"
            )
            blocks = create_block_mask(
                lambda b, h, i, j, near=near: (j <= i) & (i - j < near),
                None, None, tokens, tokens, device=device, _compile=True,
            )  # fmt: skip
            torch.compiler.reset()  # or the second shape would get kernels for any size
            flex = torch.compile(flex_attention, dynamic=False)
            runs["flex"] = lambda q=q, k=k, v=v, b=blocks, flex=flex: flex(
                q, k, v, block_mask=b, enable_gqa=True
            )
        with torch.no_grad():
            forward = in_turn(runs, device, rounds, calls)
        both = in_turn(
            {
                name: lambda run=run, q=q, k=k, v=v, g=grad: torch.autograd.grad(
                    run(), (q, k, v), g
                )
                for name, run in runs.items()
            },
            device,
            rounds,
            calls,
        )
        row = {"heads": heads, "kv_heads": kv_heads, "width": width, "tokens": tokens,
               "window": near, "calls_in_a_row": calls, "forward": forward,
               "forward+backward": both}  # fmt: skip
        rows.append(row)
        out.print(row)
        for name in ("forward", "forward+backward"):
            if "flex" in row[name]:
                out.print(f"{name}: {row[name]['quorum'] / row[name]['flex']:.3f} of flex")
    return rows


def working_memory(tokens: int, model: Layer, attend: Attention) -> int:
    """Device bytes of attention alone, forward and backward, beyond its tensors and gradients."""
    here = next(model.parameters())
    heads = (model.heads, model.kv_heads, model.kv_heads, model.heads)
    q, k, v, grad = (
        torch.randn(1, h, tokens, model.width, device=here.device, dtype=here.dtype) for h in heads
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for tensor in (q, k, v):
        tensor.requires_grad_()
    attend(q, k, v).backward(grad)
    # Of q, k, v and o there are the gradients of three, and o.
    made = q.nbytes + sum(t.nbytes for t in (q, k, v))
    return torch.cuda.max_memory_allocated() - before - made


def layer(tokens: int, device: str, rounds: int, out: Console) -> list[dict[str, Any]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Layer(device == "cpu").to(device, dtype)
    rows = []
    ways = {"sdpa": sdpa, "quorum": quorum(None), "quorum in 5 GiB": quorum("5GiB")}
    for name, attend in ways.items():
        row: dict[str, Any] = {"attention": name, "tokens": tokens}
        try:
            # It is also the first call, which compiles and plans.
            row["working_bytes"] = (
                working_memory(tokens, model, attend) if device == "cuda" else None
            )
            x = torch.randn(1, tokens, model.hidden, device=device, dtype=dtype, requires_grad=True)
            grad = torch.randn_like(x)

            def step(
                attend: Attention = attend, x: torch.Tensor = x, grad: torch.Tensor = grad
            ) -> None:
                made: torch.Tensor = checkpoint(model, x, attend, use_reentrant=False)
                made.backward(grad)
                x.grad = None
                model.zero_grad(set_to_none=True)

            row["seconds"] = in_turn({name: step}, device, rounds)[name]
        except (torch.OutOfMemoryError, qa.BudgetError) as error:
            out.print(f"{name}: {str(error).splitlines()[0]}")
            continue
        row["tflops"] = model.operations(tokens) / row["seconds"] / 1e12
        rows.append(row)
        out.print(row, f"36 layers: {36 * row['seconds']:.1f} s")
    return rows


def host_step(model: Layer, x: torch.Tensor, grad: torch.Tensor, budget: int, device: str) -> Any:
    """A step of the layer on text in host memory: tiles of tokens, and attention in between.

    Weights get their gradients; returns the gradient of ``x``, in host memory.
    """
    tokens, pinned = x.shape[1], device == "cuda"
    tiles = [slice(i, min(i + _TILE, tokens)) for i in range(0, tokens, _TILE)]
    shapes = [(1, h, tokens, model.width) for h in (model.heads, model.kv_heads, model.kv_heads)]
    qkv = [torch.empty(shape, dtype=x.dtype, pin_memory=pinned) for shape in shapes]
    with torch.no_grad():
        for tile in tiles:
            made = model.project(x[:, tile].to(device), tile.start)
            for there, here in zip(qkv, made, strict=True):
                there[:, :, tile].copy_(here)
    common: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "budget": budget}
    out, lse = qa.attention_with_lse(*qkv, devices=device, **common)
    grad_out, grad_x = (torch.empty_like(t, pin_memory=pinned) for t in (out, x))
    for tile in tiles:
        a, b = (
            each.to(device).requires_grad_() for each in (x[:, tile], out[:, :, tile].contiguous())
        )
        model.rest(a, b).backward(grad[:, tile].to(device))
        grad_x[:, tile].copy_(a.grad)
        grad_out[:, :, tile].copy_(b.grad)
    grads = qa.attention_backward(grad_out, *qkv, out, lse, devices=device, **common)
    for tile in tiles:
        a = x[:, tile].to(device).requires_grad_()
        made = model.project(a, tile.start)
        torch.autograd.backward(made, [g[:, :, tile].to(device) for g in grads])
        grad_x[:, tile] += a.grad.to("cpu")
    return grad_x


def longest(
    memory: int, most: int, times: int | None, device: str, out: Console
) -> list[dict[str, Any]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Layer(device == "cpu").to(device, dtype)

    def as_it_comes(tokens: int) -> None:
        x = torch.randn(1, tokens, model.hidden, device=device, dtype=dtype, requires_grad=True)
        model(x, sdpa).sum().backward()

    def everything(tokens: int) -> None:
        # One tile of random numbers again and again, with other positions: drawing them takes long.
        tile = torch.randn(1, min(_TILE, tokens), model.hidden, device=device, dtype=dtype).cpu()
        x = torch.empty(1, tokens, model.hidden, dtype=dtype, pin_memory=device == "cuda")
        for first in range(0, tokens, _TILE):
            part = x[:, first : first + _TILE]
            part.copy_(tile[:, : part.shape[1]])
        grad = torch.ones(1, dtype=dtype).expand(x.shape)
        host_step(model, x, grad, int(memory * _ATTENTION_SHARE), device)

    rows = []
    for name, step in (("sdpa", as_it_comes), ("quorum, tiles, host memory", everything)):
        fits, too_long, tokens = 0, most + 1, min(_TILE, most)
        if rows and times:
            most = tokens = times * rows[0]["tokens"]
            too_long = most + 1
        while tokens > fits:
            began = time.perf_counter()
            done = runs(step, tokens, memory, device)
            model.zero_grad(set_to_none=True)
            took = time.perf_counter() - began
            out.print(f"{name}: {tokens:,} tokens {'ran' if done else 'did not fit'}, {took:.1f} s")
            fits, too_long = (tokens, too_long) if done else (fits, tokens)
            # Doubled while it fits, halved towards the limit after that, to an eighth of it.
            tokens = (
                min(2 * fits, most) if too_long > most else (fits + too_long) // 2 // 1024 * 1024
            )
            if too_long <= most and too_long - fits <= max(fits // 8, 1024):
                break
        rows.append({"what": name, "tokens": fits, "memory": memory, "stopped_at": most})
    if rows[0]["tokens"]:
        out.print(f"{rows[1]['tokens'] / rows[0]['tokens']:.1f} times SDPA's length")
    return rows


def runs(step: Callable[[int], None], tokens: int, memory: int, device: str) -> bool:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(memory / total)
    try:
        step(tokens)
        wait(device)
    except (torch.OutOfMemoryError, qa.BudgetError, qa.OutOfMemoryError):
        return False
    finally:
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="window,layer,longest")
    parser.add_argument("--tokens", type=parse_count, default=262_144)
    parser.add_argument("--most", type=parse_count, default=2_097_152, help="longest that is tried")
    parser.add_argument("--times", type=int, help="of SDPA's length, tried and no other")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1, help="of a window, one after the other")
    parser.add_argument("--memory", type=parse_bytes, default=16 << 30)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    out = Console(width=120)
    chosen = options.only.split(",")
    found: dict[str, Any] = {"torch": torch.__version__, "version": qa.__version__}
    if options.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    if "window" in chosen:
        found["window"] = window(options.tokens, options.device, options.rounds, options.calls, out)
    if "layer" in chosen:
        found["layer"] = layer(options.tokens, options.device, options.rounds, out)
    if "longest" in chosen:
        out.print(f"longest length in {format_bytes(options.memory)}")
        found["longest"] = longest(options.memory, options.most, options.times, options.device, out)
    if options.json:
        write_text(options.json, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
