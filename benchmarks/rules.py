"""Masks whose rules have to be tried (``keeps``, ``|``) on a GPU, beside compiled FlexAttention.

    python benchmarks/rules.py [--tokens N] [--rounds N] [--only a,b] [--json FILE]

Each rule is called as anyone would call it, on 8 heads of 64 in bf16, everything on the device:
milliseconds of a forward, and of a forward and a backward (medians), of the first call, which also
makes the table of blocks, and device bytes beyond inputs and results, without a budget and in one
of 1 GiB. FlexAttention gets its block lists beforehand (compiled; their seconds are given, too).
``--device cpu`` runs small sizes to see that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import quorum_attention as qa

Rule = Callable[[Any, Any, Any, Any], torch.Tensor]


def rules(tokens: int) -> dict[str, tuple[qa.Mask, Rule]]:
    """By name: a mask, and the same as FlexAttention's ``mask_mod``."""
    near, first, step, wide = tokens // 64, tokens // 2048, tokens // 256, tokens // 2048
    causal = qa.Mask(causal=True)

    def striped(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (q >= k) & ((q - k < near) | (k % step < wide))

    return {
        "window | first keys": (
            causal & (qa.Mask(window=(near - 1, -1)) | qa.Mask(keeps=lambda b, h, q, k: k < first)),
            lambda b, h, q, k: (q >= k) & ((q - k < near) | (k < first)),
        ),
        "window | documents": (
            causal & (qa.Mask(window=(near - 1, -1))
                      | qa.Mask(chunk=8 * near)),
            lambda b, h, q, k: (q >= k) & ((q - k < near) | (q // (8 * near) == k // (8 * near))),
        ),
        "stripes, a function": (qa.Mask(keeps=striped), striped),
    }  # fmt: skip


def timed(run: Callable[[], Any], device: str, rounds: int) -> float:
    """Median milliseconds; the first round is not timed."""
    found = []
    for round_ in range(rounds + 1):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        found += [1e3 * (time.perf_counter() - began)] if round_ else []
    return statistics.median(found)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak(run: Callable[[], Any], device: str) -> int:
    """Device bytes allocated at most while it runs, beyond those before."""
    if device != "cuda":
        run()
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def of_rule(name: str, mask: qa.Mask, rule: Rule, options: argparse.Namespace) -> dict[str, Any]:
    n, device, rounds = options.tokens, options.device, options.rounds
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = 8 if device == "cuda" else 1
    q, k, v, grad = (torch.randn(1, heads, n, 64, device=device, dtype=dtype) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    row: dict[str, Any] = {"rule": name, "tokens": n, "heads": heads, "results_bytes": q.nbytes}

    def forward(**settings: Any) -> torch.Tensor:
        with torch.no_grad():
            return qa.attention(q, k, v, mask, **settings)

    def both(**settings: Any) -> Any:
        return torch.autograd.grad(qa.attention(q, k, v, mask, **settings), (q, k, v), grad)

    row["first_call_ms"] = _once(forward, device)
    for words, settings in (("free", {}), ("1 GiB", {"budget": "1GiB"})):
        row[words] = {
            "forward_ms": timed(lambda s=settings: forward(**s), device, rounds),
            "both_ms": timed(lambda s=settings: both(**s), device, rounds),
            "forward_bytes": peak(lambda s=settings: forward(**s), device),
            "both_bytes": peak(lambda s=settings: both(**s), device),
        }
        print(name, words, row["first_call_ms"], json.dumps(row[words]), flush=True)
        if device == "cuda" and words == "free":
            row["flex"] = beside(q, k, v, grad, rule, forward, options)
            print(name, "flex", json.dumps(row["flex"]), flush=True)
    return row


def _once(run: Callable[[], Any], device: str) -> float:
    wait(device)
    began = time.perf_counter()
    run()
    wait(device)
    return 1e3 * (time.perf_counter() - began)


def beside(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, rule: Rule,
    forward: Callable[[], torch.Tensor], options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """FlexAttention on the same, and how far apart the outputs are."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = options.tokens
    began = time.perf_counter()
    blocks = create_block_mask(rule, None, None, n, n, device="cuda", _compile=True)
    wait("cuda")
    lists = time.perf_counter() - began
    flex = torch.compile(flex_attention, dynamic=False)

    def call() -> torch.Tensor:
        with torch.no_grad():
            return flex(q, k, v, block_mask=blocks)

    apart = (call().float() - forward().float()).abs().max().item()
    return {
        "lists_first_s": lists,
        "forward_ms": timed(call, "cuda", options.rounds),
        "both_ms": timed(
            lambda: torch.autograd.grad(flex(q, k, v, block_mask=blocks), (q, k, v), grad),
            "cuda", options.rounds,
        ),
        "apart": apart,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="rules whose names contain one of these")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for name, (mask, rule) in rules(options.tokens).items():
        if not options.only or any(part in name for part in options.only.split(",")):
            found.append(of_rule(name, mask, rule, options))
    if options.json:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        stamp = {"device": gpu, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        options.json.write_text(json.dumps({**stamp, "rules": found}, indent=1), encoding="utf-8")
    for row in found:
        free, tight, flex = row["free"], row["1 GiB"], row.get("flex", {})
        print(
            f"{row['rule']:<22} ms: first {row['first_call_ms']:.0f}, forward "
            f"{free['forward_ms']:.1f} (1 GiB {tight['forward_ms']:.1f}, flex "
            f"{flex.get('forward_ms', 0):.1f}), both {free['both_ms']:.1f} (1 GiB "
            f"{tight['both_ms']:.1f}, flex {flex.get('both_ms', 0):.1f}); MiB "
            f"{free['forward_bytes'] >> 20}, {free['both_bytes'] >> 20} (1 GiB "
            f"{tight['forward_bytes'] >> 20}, {tight['both_bytes'] >> 20}); apart "
            f"{flex.get('apart', 0):.1e}"
        )


if __name__ == "__main__":
    main()
