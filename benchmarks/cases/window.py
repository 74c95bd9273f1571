"""A causal window of 4,096 tokens and a plain causal call, as ``Mask`` and as FlexAttention's rule,
beside torch's compiled FlexAttention with its block lists made beforehand, and not timed.

Forward, and forward with backward; medians of calls in turn. "uncut", "depth 1" (7 chunks, in
place), "slots" and "1 GiB" (from and to page-locked host memory) are of a FlexAttention kernel that
is recovered; "mask" is what a user writes. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from measure import in_turn, timed
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import quorum_attention as qa
from quorum_attention.kernels.kit import from_score_mod, sliding_window

WINDOW = 4096
SHAPES = {"8 heads of 64": (8, 8, 64, torch.float16), "32/8 of 128": (32, 8, 128, torch.bfloat16)}
WAYS: dict[str, dict[str, Any]] = {
    "uncut": {"levels": ()},
    "depth 1": {"levels": (7,)},
    "slots": {"levels": (7,), "over_inputs": False},
    "1 GiB": {"budget": "1GiB"},
}
Run = Callable[[bool], Any]


def with_autograd(attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Run:
    """A function, and its backward by autograd."""
    *three, grad = tensors

    def call(backward: bool) -> None:
        leaves = [t.detach().requires_grad_(backward) for t in three]
        out = attend(*leaves)
        if backward:
            torch.autograd.grad(out, leaves, grad)

    return call


def flex(tensors: list[torch.Tensor], windowed: bool) -> Run:
    """FlexAttention alone."""
    n = tensors[0].shape[2]

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < WINDOW) if windowed else q >= k

    block_mask = create_block_mask(rule, None, None, n, n, "cuda")
    grouped = tensors[0].shape[1] != tensors[1].shape[1]
    attend = torch.compile(flex_attention)
    return with_autograd(partial(attend, block_mask=block_mask, enable_gqa=grouped), tensors)


def masked(tensors: list[torch.Tensor], windowed: bool) -> Run:
    """Ours, as a user calls it."""
    mask = qa.Mask(causal=True, window=(WINDOW - 1, -1) if windowed else None)
    return with_autograd(partial(qa.attention, attn_mask=mask, enable_gqa=True), tensors)


def recovered(tensors: list[torch.Tensor], windowed: bool, **how: Any) -> Run:
    """A FlexAttention kernel, planned."""
    host = "budget" in how
    query, key, value, grad = (t.cpu().pin_memory() for t in tensors) if host else tensors
    kernel = from_score_mod(None, sliding_window(WINDOW) if windowed else None, compiled=True)
    plans = [
        qa.plan(
            query.shape[2], heads=query.shape[1], kv_heads=key.shape[1], head_dim=query.shape[3],
            dtype=query.dtype, is_causal=True, kernel=kernel, backward=backward, device="cuda",
            inputs="host" if host else "device", **how,
        )
        for backward in (False, True)
    ]  # fmt: skip
    options: dict[str, Any] = {
        "is_causal": True, "enable_gqa": True, "kernel": kernel, "devices": "cuda",
    }  # fmt: skip

    def call(backward: bool) -> None:
        out, lse = qa.attention_with_lse(query, key, value, plan=plans[0], **options)
        if backward:
            qa.attention_backward(grad, query, key, value, out, lse, plan=plans[1], **options)

    return call


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ways", default=",".join(["mask", *WAYS]))
    parser.add_argument("--rounds", type=int, default=9)


def run(options: argparse.Namespace, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each shape, mask and pass."""
    rows: list[dict[str, Any]] = []
    ways = options.ways.split(",")
    for shape in options.shapes.split(","):
        heads, kv_heads, width, dtype = SHAPES[shape]
        tensors = [
            torch.randn(1, h, options.tokens, width, device="cuda", dtype=dtype)
            for h in (heads, kv_heads, kv_heads, heads)
        ]
        for windowed in (False, True):
            runs = {"flex": flex(tensors, windowed)}
            if "mask" in ways:
                runs["mask"] = masked(tensors, windowed)
            runs |= {w: recovered(tensors, windowed, **WAYS[w]) for w in ways if w in WAYS}
            for backward in (False, True):
                for call in runs.values():
                    call(backward)
                turns = {n: lambda c=c: timed(lambda: c(backward))[0] for n, c in runs.items()}  # noqa: B023
                found = in_turn(turns, options.rounds)
                middle = {name: sorted(times)[len(times) // 2] for name, times in found.items()}
                what = "window" if windowed else "causal"
                passes = "forward+backward" if backward else "forward"
                rows.append({"shape": shape, "mask": what, "passes": passes, "seconds": middle})
                ratios = (f"{n} {t / middle['flex']:.3f}" for n, t in middle.items())
                print(f"{shape}, {what}, {passes}: {', '.join(ratios)}", flush=True)
                yield {"tokens": options.tokens, "rows": rows}
