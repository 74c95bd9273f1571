"""Calls of many small entries, and of masks that keep pairs here and there, beside
torch's own.

Each row is a forward with its backward by autograd, in seconds: torch's call with the
same pairs as a tensor (built beforehand), and ours, whose mask is new to it in every
call. The methods take turns; medians. --share 0.1 takes a tenth of the entries, --share
7 more than 100,000 of them; --pass forward leaves the backward out; --cpu-time counts
what one thread computes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from measure import in_turn, timed
from torch.nn.functional import scaled_dot_product_attention

import quorum_attention as qa

WORDS = {
    "permuted": "16,000 entries of tables, by columns, whose memory lies by rows",
    "narrow": "16,384 entries of 16 heads of 16 tokens, bf16",
    "bias-8": "20,000 windows of 8 tokens, with a shared bias's gradient",
    "bias-49": "1,024 windows of 49 tokens, 8 heads, with a shared bias's gradient",
    "lengths": "20,000 sets of at most 12 tokens, by `key_lengths`",
    "padding": "20,000 sets of 12 tokens, some of them missing, by `key_padding`",
    "shifted": "512 images in shifted windows of 49 tokens, by `documents`",
    "scattered": "4,096 tokens of 400 documents in any order, by `documents`",
    "missing": "4,096 tokens, half of the keys missing, by `key_padding`",
    "windows": "20,000 windows of 49 tokens",
}


@dataclass
class Row:
    """A call.

    Attributes:
        inputs: query, key and value, (*batch, heads, n, d), on the device that
            computes.
        make_mask: makes ``attn_mask`` of our call.
        dense: ``attn_mask`` of torch's call: bool, or additive.
        learned: the bias whose gradient is asked for as well.
    """

    inputs: list[torch.Tensor]
    make_mask: Callable[[], Any] = lambda: None
    dense: torch.Tensor | None = None
    learned: list[torch.Tensor] = field(default_factory=list)


class Draw:
    """Draws inputs in a dtype on a device."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.device = device

    def tensor(self, *shape: int) -> torch.Tensor:
        """A leaf that gets a gradient."""
        tensor = torch.randn(shape, device=self.device)
        return tensor.to(self.dtype).requires_grad_()

    def inputs(self, *shape: int) -> list[torch.Tensor]:
        """Query, key and value of one shape."""
        return [self.tensor(*shape) for _ in range(3)]

    def keep(self, entries: int, keys: int, share: float) -> torch.Tensor:
        """Booleans of which about ``share`` are true."""
        return torch.rand(entries, keys, device=self.device) < share


def permuted(entries: int, draw: Draw) -> Row:
    """TabPFN's tables: rows by columns in memory, and a call by columns and rows."""
    inputs = draw.inputs(entries // 8, 8, 16, 4, 16)
    return Row([tensor.permute(1, 0, 3, 2, 4) for tensor in inputs])


def narrow(entries: int, draw: Draw) -> Row:
    """Entries of 16 heads, 16 tokens of 16 numbers, in 16 bits."""
    return Row(Draw(torch.bfloat16, draw.device).inputs(entries, 16, 16, 16))


def shared_bias(heads: int, tokens: int, entries: int, draw: Draw) -> Row:
    """Windows that share a learned bias."""
    bias = draw.tensor(heads, tokens, tokens)
    return Row(draw.inputs(entries, heads, tokens, 16), lambda: bias, bias, [bias])


def lengths(entries: int, draw: Draw) -> Row:
    """Sets of at most 12, each of its own length."""
    counts = torch.randint(1, 13, (entries,), device=draw.device)
    positions = torch.arange(12, device=draw.device)
    dense = (positions < counts[:, None])[:, None, None]
    inputs = draw.inputs(entries, 4, 12, 16)
    return Row(
        inputs,
        lambda: qa.Mask(key_lengths=counts.clone()),
        dense,
    )


def padding(entries: int, draw: Draw) -> Row:
    """Sets of 12 of which any may be missing, but for the first."""
    is_kept = draw.keep(entries, 12, 0.7)
    is_kept[:, 0] = True
    inputs = draw.inputs(entries, 4, 12, 16)
    return Row(
        inputs, lambda: qa.Mask(key_padding=is_kept.clone()), is_kept[:, None, None]
    )


def shifted(images: int, draw: Draw) -> Row:
    """Swin's shifted windows: 64 of an image, by their regions; those at its edges hold
    several."""
    regions = torch.zeros(8, 8, 7, 7, dtype=torch.int64)
    regions[-1, :, 4:] += 1
    regions[:, -1, :, 4:] += 2
    ids = regions.view(64, 49)
    ids = ids.repeat(images, 1)
    ids = ids.to(draw.device)
    is_same = ids[:, :, None] == ids[:, None]
    dense = is_same[:, None]
    n_windows = 64 * images
    inputs = draw.inputs(n_windows, 4, 49, 32)
    return Row(inputs, lambda: qa.Mask(documents=ids.clone()), dense)


def scattered(tokens: int, draw: Draw) -> Row:
    """400 documents whose tokens lie in any order."""
    ids = torch.randint(0, 400, (tokens,), device=draw.device)
    inputs = draw.inputs(1, 4, tokens, 64)
    return Row(inputs, lambda: qa.Mask(documents=ids.clone()), ids[:, None] == ids)


def missing(tokens: int, draw: Draw) -> Row:
    """Half of the keys are padding, anywhere."""
    is_kept = draw.keep(1, tokens, 0.5)
    inputs = draw.inputs(1, 4, tokens, 64)
    return Row(
        inputs, lambda: qa.Mask(key_padding=is_kept.clone()), is_kept[:, None, None]
    )


def windows(entries: int, draw: Draw) -> Row:
    """Windows of 49 without a mask."""
    return Row(draw.inputs(entries, 4, 49, 32))


# The entries of a row, and what makes so many of them.
ROWS: dict[str, tuple[int, Callable[[int, Draw], Row]]] = {
    "permuted": (16_000, permuted),
    "narrow": (16_384, narrow),
    "bias-8": (20_000, partial(shared_bias, 2, 8)),
    "bias-49": (1_024, partial(shared_bias, 8, 49)),
    "lengths": (20_000, lengths),
    "padding": (20_000, padding),
    "shifted": (8, shifted),
    "scattered": (4_096, scattered),
    "missing": (4_096, missing),
    "windows": (20_000, windows),
}
# Rows of one entry, which --share leaves as they are.
OF_ONE_ENTRY = ("scattered", "missing")


def make_row(name: str, share: float, draw: Draw) -> Row:
    """A row with ``share`` times its entries."""
    entries, make = ROWS[name]
    if name not in OF_ONE_ENTRY:
        entries = max(1, round(entries * share))
    return make(entries, draw)


def calls_of(row: Row, *, backward: bool) -> dict[str, Callable[[], Any]]:
    """The calls that are timed, by method."""
    grad_out = torch.randn_like(row.inputs[0])
    leaves = [*row.inputs, *row.learned]

    def call(attend: Callable[..., torch.Tensor], mask: Any) -> Any:
        if backward:
            return torch.autograd.grad(
                attend(*row.inputs, attn_mask=mask), leaves, grad_out
            )
        with torch.no_grad():
            return attend(*row.inputs, attn_mask=mask)

    return {
        "torch": lambda: call(scaled_dot_product_attention, row.dense),
        "quorum": lambda: call(qa.attention, row.make_mask()),
    }


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of both methods' calls, the ratio of the later ones, and the largest
    difference."""
    calls = calls_of(row, backward=options.passes == "both")
    results: dict[str, Any] = {}

    def seconds_of(method: str) -> float:
        cpu_start = time.process_time()
        seconds, results[method] = timed(calls[method])
        cpu_seconds = time.process_time() - cpu_start
        return cpu_seconds if options.cpu_time else seconds

    runs = {method: partial(seconds_of, method) for method in calls}
    seconds = in_turn(runs, 1 + options.rounds)
    our_median = later_median(seconds["quorum"])
    torch_median = later_median(seconds["torch"])
    difference = largest_difference(results["quorum"], results["torch"])
    return {
        "seconds": seconds,
        "ratio": our_median / torch_median,
        "difference": difference,
    }


def largest_difference(results: Any, expected: Any) -> float:
    """The largest difference of a result, as a share of its largest value."""
    shares = []
    for result, reference in zip(results, expected, strict=True):
        difference = (reference - result).abs().max()
        size = reference.abs().max()
        shares.append(float(difference / size))
    return max(shares)


def later_median(seconds: list[float]) -> float:
    """The median of the calls after the first."""
    return median(seconds[1:] or seconds)


def describe(result: dict[str, Any]) -> str:
    torch_seconds = result["seconds"]["torch"]
    our_seconds = result["seconds"]["quorum"]
    return (
        f"{later_median(torch_seconds):9.4f} {later_median(our_seconds):9.4f}  "
        f"{result['ratio']:5.2f}  ({torch_seconds[0]:.3f}, {our_seconds[0]:.3f}; "
        f"{result['difference']:.1e})"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", help="by commas; all by default")
    parser.add_argument("--share", type=float, default=1.0, help="of the entries")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread")
    parser.add_argument(
        "--rounds", type=int, default=3, help="calls of each after the first"
    )
    parser.add_argument(
        "--pass", dest="passes", choices=["both", "forward"], default="both"
    )


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each row."""
    draw = Draw(torch.float32, "cpu")
    if torch.cuda.is_available():
        draw = Draw(torch.bfloat16, "cuda")
    if options.cpu_time:
        torch.set_num_threads(1)
    print(
        f"{'row':12} {'torch':>9} {'ours':>9}  ratio  (first calls; largest difference)"
    )
    for name in options.rows.split(",") if options.rows else ROWS:
        torch.manual_seed(0)
        result = measure(make_row(name, options.share, draw), options)
        print(f"{name:12} {describe(result)}", flush=True)
        yield {name: result}
