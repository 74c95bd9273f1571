"""Calls of many small entries, and of masks that keep pairs here and there, beside torch's own.

Each row is a forward with its backward by autograd, in seconds: torch's call with the same pairs as
a tensor (built beforehand), and ours, whose mask is new to it in every call. The methods take
turns; medians. --share 0.1 takes a tenth of the entries, --share 7 more than 100,000 of them;
--pass forward leaves the backward out; --cpu-time counts what one thread computes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from measure import timed
from torch.nn.functional import scaled_dot_product_attention

import quorum_attention as qa

WORDS = {
    "permuted": "16,000 entries of a table's columns by rows, which do not flatten",
    "narrow": "16,384 entries of 16 heads of 16 tokens, bf16",
    "bias-8": "20,000 windows of 8, with the gradient of a shared bias",
    "bias-49": "1,024 windows of 49, 8 heads, with the gradient of a shared bias",
    "lengths": "`key_lengths` of 20,000 sets of 12",
    "padding": "`key_padding` of 20,000 sets of 12",
    "shifted": "512 shifted windows of 49, documents by entry",
    "scattered": "400 documents in any order, 4,096 tokens",
    "missing": "half of 4,096 keys padded, anywhere",
    "windows": "20,000 windows of 49",
}


@dataclass
class Row:
    """One call.

    Attributes:
        inputs: query, key and value, (*batch, heads, n, d), on the device that computes.
        mask: makes ``attn_mask`` of our call.
        dense: ``attn_mask`` of torch's call: bool, or additive.
        learned: the bias whose gradient is asked for as well.
    """

    inputs: list[torch.Tensor]
    mask: Callable[[], Any] = lambda: None
    dense: torch.Tensor | None = None
    learned: list[torch.Tensor] = field(default_factory=list)


def drawn(*shape: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Query, key and value of one shape."""
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3)]


def permuted(entries: int, dtype: torch.dtype, device: str) -> Row:
    """TabPFN's tables: rows by columns in memory, and a call by columns and rows."""
    shape = entries // 8, 8, 16, 4, 16
    three = [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3)]
    return Row([t.permute(1, 0, 3, 2, 4) for t in three])


def narrow(entries: int, dtype: torch.dtype, device: str) -> Row:
    """Entries of 16 heads, 16 tokens of 16 numbers, in 16 bits."""
    return Row(drawn(entries, 16, 16, 16, dtype=torch.bfloat16, device=device))


def shared_bias(entries: int, heads: int, tokens: int, dtype: torch.dtype, device: str) -> Row:
    """Windows that share a learned bias."""
    bias = torch.randn(heads, tokens, tokens, device=device).to(dtype).requires_grad_()
    three = drawn(entries, heads, tokens, 16, dtype=dtype, device=device)
    return Row(three, lambda: bias, bias, [bias])


def lengths(entries: int, dtype: torch.dtype, device: str) -> Row:
    """Sets of at most 12, each of its own length."""
    counts = torch.randint(1, 13, (entries,), device=device)
    dense = torch.arange(12, device=device) < counts[:, None]
    three = drawn(entries, 4, 12, 16, dtype=dtype, device=device)
    return Row(three, lambda: qa.Mask(key_lengths=counts.clone()), dense[:, None, None])


def padding(entries: int, dtype: torch.dtype, device: str) -> Row:
    """Sets of 12 of which any may be missing, but for the first."""
    there = torch.rand(entries, 12, device=device) < 0.7
    there[:, 0] = True
    three = drawn(entries, 4, 12, 16, dtype=dtype, device=device)
    return Row(three, lambda: qa.Mask(key_padding=there.clone()), there[:, None, None])


def shifted(images: int, dtype: torch.dtype, device: str) -> Row:
    """Swin's shifted windows: 64 of an image, by their regions; those at its edges hold several."""
    ids = torch.zeros(8, 8, 7, 7, dtype=torch.int64)
    ids[-1, :, 4:] += 1
    ids[:, -1, :, 4:] += 2
    ids = ids.view(64, 49).repeat(images, 1).to(device)
    dense = (ids[:, :, None] == ids[:, None])[:, None]
    three = drawn(64 * images, 4, 49, 32, dtype=dtype, device=device)
    return Row(three, lambda: qa.Mask(documents=ids.clone()), dense)


def scattered(tokens: int, dtype: torch.dtype, device: str) -> Row:
    """400 documents whose tokens lie in any order."""
    ids = torch.randint(0, 400, (tokens,), device=device)
    three = drawn(1, 4, tokens, 64, dtype=dtype, device=device)
    return Row(three, lambda: qa.Mask(documents=ids.clone()), ids[:, None] == ids)


def missing(tokens: int, dtype: torch.dtype, device: str) -> Row:
    """Half of the keys are padding, anywhere."""
    there = torch.rand(1, tokens, device=device) < 0.5
    three = drawn(1, 4, tokens, 64, dtype=dtype, device=device)
    return Row(three, lambda: qa.Mask(key_padding=there.clone()), there[:, None, None])


def windows(entries: int, dtype: torch.dtype, device: str) -> Row:
    """Windows of 49 without a mask."""
    return Row(drawn(entries, 4, 49, 32, dtype=dtype, device=device))


def rows(share: float) -> dict[str, Callable[[torch.dtype, str], Row]]:
    """The rows by name; ``share`` times the entries."""

    def times(entries: int) -> int:
        return max(1, round(entries * share))

    return {
        "permuted": lambda *how: permuted(times(16_000), *how),
        "narrow": lambda *how: narrow(times(16_384), *how),
        "bias-8": lambda *how: shared_bias(times(20_000), 2, 8, *how),
        "bias-49": lambda *how: shared_bias(times(1_024), 8, 49, *how),
        "lengths": lambda *how: lengths(times(20_000), *how),
        "padding": lambda *how: padding(times(20_000), *how),
        "shifted": lambda *how: shifted(times(8), *how),
        "scattered": lambda *how: scattered(4_096, *how),
        "missing": lambda *how: missing(4_096, *how),
        "windows": lambda *how: windows(times(20_000), *how),
    }


def runs(row: Row, *, backward: bool) -> dict[str, Callable[[], Any]]:
    """What is timed, by method."""
    grad_out = torch.randn_like(row.inputs[0])
    wanted = [*row.inputs, *row.learned]

    def call(attend: Callable[..., torch.Tensor], mask: Any) -> Any:
        if backward:
            return torch.autograd.grad(attend(*row.inputs, attn_mask=mask), wanted, grad_out)
        with torch.no_grad():
            return attend(*row.inputs, attn_mask=mask)

    return {
        "torch": lambda: call(scaled_dot_product_attention, row.dense),
        "quorum": lambda: call(qa.attention, row.mask()),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", help="by commas; all by default")
    parser.add_argument("--share", type=float, default=1.0, help="of the entries")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread")
    parser.add_argument("--rounds", type=int, default=3, help="calls of each after the first")
    parser.add_argument("--pass", dest="passes", choices=["both", "forward"], default="both")


def run(options: argparse.Namespace, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each row."""
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    found: dict[str, Any] = {}
    known = rows(options.share)
    if options.cpu_time:
        torch.set_num_threads(1)
    print(f"{'row':12} {'torch':>9} {'ours':>9}  ratio  (first calls; largest difference)")
    for name in options.rows.split(",") if options.rows else known:
        torch.manual_seed(0)
        row = known[name](dtype, device)
        calls = runs(row, backward=options.passes == "both")
        seconds: dict[str, list[float]] = {method: [] for method in calls}
        results: dict[str, Any] = {}
        for number in range(1 + options.rounds):
            for method in list(calls)[:: -1 if number % 2 else 1]:
                began = time.process_time()
                took, results[method] = timed(calls[method])
                spent = time.process_time() - began
                seconds[method].append(spent if options.cpu_time else took)
                gc.collect()
        pairs = zip(results["torch"], results["quorum"], strict=True)
        off = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        middle = {
            method: statistics.median(times[1:] or times) for method, times in seconds.items()
        }
        ratio, first = middle["quorum"] / middle["torch"], [t[0] for t in seconds.values()]
        found[name] = {"seconds": seconds, "ratio": ratio, "difference": off}
        print(
            f"{name:12} {middle['torch']:9.4f} {middle['quorum']:9.4f}  {ratio:5.2f}  "
            f"({first[0]:.3f}, {first[1]:.3f}; {off:.1e})",
            flush=True,
        )
        del row, calls, results
        yield {"pass": options.passes, "share": options.share, "rows": found}
