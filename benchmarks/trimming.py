"""Trimmed tasks beside whole ones: the same calls, with and without a kernel telling what it keeps.

    python benchmarks/trimming.py [--tokens 65536] [--heads 1] [--repeats 3] [--json FILE]

Causal, batch 1, fp16 on a CUDA device (inputs in page-locked memory) and fp32 on the CPU. For every
mask and cut: tasks, how many tasks a token is in, the share of the tokens that the largest task
has, bytes into and out of slots, and median seconds after a first call, forward; forward+backward.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import quorum_attention as qa
from quorum_attention.decomposition import Pairs
from quorum_attention.kernels.kit import document, from_score_mod, sliding_window
from quorum_attention.sizes import format_bytes
from quorum_attention.writing import write_text

LEVELS = ((7,), (31,), (7, 7))


def kernels(tokens: int) -> dict[str, Callable[[], Any]]:
    """What is cut, by name: a window of 1/64 of the tokens, as long documents, dilated segments."""
    part = tokens // 64
    settings = [(part // 4, 1), (part // 2, 2), (part, 4)]
    return {
        "window": lambda: from_score_mod(None, sliding_window(part)),
        "documents": lambda: from_score_mod(None, document(torch.arange(tokens) // part)),
        "LongNet": lambda: qa.LongNetKernel(settings),
    }


def tells_nothing(kernel: Any) -> Any:
    """The kernel, keeping to itself which pairs it leaves out."""
    kernel.kept_pairs = Pairs
    return kernel


def measure(
    kernel: Any, levels: tuple[int, ...], tokens: int, heads: int, repeats: int
) -> dict[str, Any]:
    """Both passes of one call."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, width = (torch.float16, 64) if device == "cuda" else (torch.float32, 16)
    tensors = [torch.randn(1, heads, tokens, width, dtype=dtype) for _ in range(4)]
    if device == "cuda":
        tensors = [t.pin_memory() for t in tensors]
    *three, grad = tensors
    plans = [
        qa.plan(tokens, heads=heads, head_dim=width, dtype=dtype, levels=levels, is_causal=True,
                kernel=kernel, backward=backward, device=device)
        for backward in (False, True)
    ]  # fmt: skip
    seconds: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        report = qa.Report()
        call = {"is_causal": True, "kernel": kernel, "devices": device, "report": report}
        began = time.perf_counter()
        out, lse = qa.attention_with_lse(*three, plan=plans[0], **call)
        half = time.perf_counter()
        qa.attention_backward(grad, *three, out, lse, plan=plans[1], **call)
        seconds.append((half - began, time.perf_counter() - began))
    assert report.forward is not None
    assert report.backward is not None
    shape, less = plans[0].decomposition, plans[0].schedule.trimmed
    visits = sum(task.n_tokens for task in shape.tasks()) / tokens
    found = {
        "tasks": plans[0].n_tasks,
        "visits": visits * (1 - report.forward.left_out),
        "largest": plans[0].schedule.task_tokens / tokens,
        "trimmed": less is not None,
    }
    for index, part in enumerate((report.forward, report.backward)):
        found["backward" if index else "forward"] = {
            "moved": part.loaded_bytes + part.stored_bytes,
            "seconds": statistics.median(s[index] for s in seconds[1:]),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1 << 16)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    table = Table(title=f"{args.tokens} tokens, {args.heads} head(s): whole -> trimmed")
    for name in ("mask", "levels", "tasks", "visits", "largest", "moved, fwd", "moved, bwd",
                 "s, fwd", "s, fwd+bwd"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("mask", "levels") else "right")
    rows = []
    for name, make in kernels(args.tokens).items():
        for levels in LEVELS:
            pair = [
                measure(kernel, levels, args.tokens, args.heads, args.repeats)
                for kernel in (tells_nothing(make()), make())
            ]
            assert [found["trimmed"] for found in pair] == [False, True]
            rows.append({"mask": name, "levels": levels, "whole": pair[0], "trimmed": pair[1]})

            def both(show: Callable[[dict[str, Any]], str], pair=pair) -> str:  # type: ignore[no-untyped-def]
                return " -> ".join(show(found) for found in pair)

            table.add_row(
                name, " x ".join(map(str, levels)), both(lambda f: str(f["tasks"])),
                both(lambda f: f"{f['visits']:.2f}"), both(lambda f: f"{f['largest']:.1%}"),
                both(lambda f: format_bytes(f["forward"]["moved"])),
                both(lambda f: format_bytes(f["backward"]["moved"])),
                both(lambda f: f"{f['forward']['seconds']:.3g}"),
                both(lambda f: f"{f['backward']['seconds']:.3g}"),
            )  # fmt: skip
    console = Console(width=170)
    console.print(table)
    if args.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        result = {
            "date": datetime.date.today().isoformat(), "device": device,
            "torch": torch.__version__, "tokens": args.tokens, "heads": args.heads,
            "threads": torch.get_num_threads(), "rows": rows,
        }  # fmt: skip
        write_text(args.json, json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
