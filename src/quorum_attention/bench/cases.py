"""The paper's experiments: what each measures, and the tables that it makes."""

from __future__ import annotations

import datetime
import platform
from argparse import Namespace
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch

import quorum_attention
from quorum_attention.bench.child import FAILED, METHODS, OUT_OF_MEMORY, Measurement, Spec
from quorum_attention.units import counted

Measure = Callable[[str, Spec], Measurement]


# Title, text, columns and rows of a table of the report.
Section = tuple[str, str, list[str], list[list[str]]]


def spec(options: Namespace, method: str, tokens: int, **others: Any) -> Spec:
    """A measurement of ``method``, with the sizes that the command's options have."""
    fields: dict[str, Any] = {
        "heads": options.heads, "kv_heads": options.kv_heads, "head_dim": options.head_dim,
        "dtype": options.dtype, "device": options.device, **others,
    }  # fmt: skip
    return Spec(method, tokens, **fields)


def accuracy(options: Namespace, measure: Measure) -> Section:
    """Forward and backward errors of every method in both 16-bit dtypes (fp32 on a CPU too)."""
    dtypes = ["float16", "bfloat16", *(["float32"] if options.device == "cpu" else [])]
    dtypes, draws = ([options.dtype], 2) if options.quick else (dtypes, 10)
    rows = []
    for method in options.methods:
        for dtype in dtypes:
            answer = measure("accuracy", spec(
                options, method, options.tokens, dtype=dtype, backward=True, draws=draws
            ))  # fmt: skip
            cells = [f"{mean(found):.2e}" for found in answer.errors.values()]
            rows.append([method, dtype, *(cells if answer.ok else [label(answer)] * 4)])
    text = (
        f"{counted(options.tokens, 'token')}, relative error (norm of the difference over the "
        f"norm) against float64, mean of {counted(draws, 'draw')}."
    )
    return ("Accuracy against float64", text, ["method", "dtype", "out", "dQ", "dK", "dV"], rows)


def cost(options: Namespace, measure: Measure) -> Section:
    """Time and memory over sequence length, forward and forward+backward."""
    first, last = options.lengths
    # A method ends at its first length that fails, or if its next one is expected to take longer.
    most, repeats = (20.0, 1) if options.quick else (300.0, 3)
    rows, against = [], dict[tuple[int, bool], float]()
    for backward in (True,) if options.quick else (False, True):
        for method in options.methods:
            spent, tokens = 0.0, first
            # Work grows with the square of the length.
            while tokens <= last and 4 * (repeats + 1) * spent <= most:
                asked = spec(options, method, tokens, backward=backward, repeats=repeats)
                answer = measure("cost", asked)
                row = [method, f"{tokens:,}", "both" if backward else "forward"]
                if not answer.ok:
                    rows.append([*row, label(answer), "", ""])
                    break
                both = zip(answer.forward_seconds, answer.backward_seconds or [0.0] * repeats)  # noqa: B905
                spent = median(map(sum, both))
                other = against.setdefault((tokens, backward), spent)
                rows.append([*row, f"{spent:.4g}", f"{spent / other:.3g}", answer.memory])
                tokens *= 2
    text = (
        f"Seconds (median of {repeats}), ratio to the first method that ran, and peak memory "
        "beyond the inputs. Both: forward and backward. oom: out of memory."
    )
    columns = ["method", "tokens", "passes", "seconds", "ratio", "memory"]
    return ("Cost", text, columns, rows)


# Those worth comparing on a device. Ratios are against the first: on GPUs FlashAttention-2, as in
# the paper.
USUAL = {
    "cpu": ["sdpa", "quorum", "quorum-depth-1", "quorum-depth-2"],
    "cuda": [name for name in METHODS if name != "sdpa"],
}
EXPERIMENTS = {"accuracy": accuracy, "cost": cost}


def label(answer: Measurement) -> str:
    """A table's cell for an answer without numbers."""
    return {OUT_OF_MEMORY: "oom", FAILED: "failed"}.get(answer.status, "-")


def about(device: str) -> dict[str, str]:
    """What is measured on: device, versions and date, nothing that names a particular machine."""
    found = {"device": f"CPU, {platform.machine()}, {counted(torch.get_num_threads(), 'thread')}"}
    if device != "cpu":
        found = {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda),
                 "cudnn": str(torch.backends.cudnn.version())}  # fmt: skip
    return found | {
        "quorum-attention": quorum_attention.__version__, "torch": torch.__version__,
        "python": platform.python_version(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
