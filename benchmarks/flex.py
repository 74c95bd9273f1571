"""FlexAttention through quorum attention beside FlexAttention alone, on one GPU.

    python benchmarks/flex.py [--only causal,window,...] [--ways ...] [--tokens N] [--json FILE]

fp16, 8 heads of 64, medians, in turn. The monolithic call is torch's compiled ``flex_attention``
with the very block lists of the uncut kernel, made beforehand and not timed. Ours, inputs and
results on the device: uncut; at depth 1 (7 chunks), the tasks in place; the same through slots; and
under a budget of 1 GiB from and to page-locked host memory, transfers included. ``lengths``: the
windowed call at depth 1 from 65,536 to 1,048,576 tokens. ``budgets``: the windowed call of
1,048,576 tokens from and to page-locked host memory, as planned for several budgets, beside what
the planner predicts. Needs a CUDA device.
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
from torch.nn.attention.flex_attention import flex_attention

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.call import no_bias
from quorum_attention.kernels import TaskTensors
from quorum_attention.kernels.kit import from_score_mod, sliding_window
from quorum_attention.writing import write_text

_HEADS, _WIDTH, _WINDOW = 8, 64, 4096
_ROUNDS = 3
_ROW_SECONDS = 0.1
_RESIDENT: dict[str, Any] = {"levels": (7,), "inputs": "device"}
_WAYS: dict[str, dict[str, Any]] = {
    "uncut": {"levels": (), "inputs": "device"},
    "depth 1": _RESIDENT,
    "slots": {**_RESIDENT, "over_inputs": False},
}
_LENGTHS = (65_536, 131_072, 262_144, 524_288, 1_048_576)
Run = Callable[[], Any]


def seconds(run: Run, calls: int) -> float:
    """Of one call of ``calls`` in a row, the device idle before and after."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls


def in_turn(runs: dict[str, Run]) -> dict[str, float]:
    """Medians, each once a round, because the device's clock drifts; the first two are not timed.

    Short calls follow each other without waiting, as in a model: what the host does for one is
    beside what the device does for another.
    """
    calls = {}
    for name, run in runs.items():
        run()
        calls[name] = min(10, max(1, int(_ROW_SECONDS / seconds(run, 1))))
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            found[name].append(seconds(run, calls[name]))
    return {name: statistics.median(times) for name, times in found.items()}


def random(n: int) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output."""
    return [torch.randn(1, _HEADS, n, _WIDTH, device="cuda", dtype=torch.float16) for _ in range(4)]


def monolithic(tensors: list[torch.Tensor], mask: Any) -> dict[str, Run]:
    """FlexAttention alone, forward, and forward and backward."""
    query, key, value, grad = tensors
    n = query.shape[2]
    task = Decomposition(n, ()).task(())
    kernel: Any = from_score_mod(None, mask, compiled=True)
    launch = kernel._launch(
        TaskTensors(task, task.rectangles(True), query, key, value, 0.125, True, no_bias)
    )

    # In positions of its own, as one would write it: nothing is looked up.
    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def windowed(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k <= _WINDOW)

    block_mask = launch.block_mask()
    block_mask.mask_mod = causal if mask is None else windowed
    # As users compile it: for this very size.
    flex = torch.compile(flex_attention)
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]

    def forward() -> None:
        with torch.no_grad():
            flex(query, key, value, block_mask=block_mask, scale=0.125, return_lse=True)

    def both() -> None:
        out = flex(*leaves, block_mask=block_mask, scale=0.125)
        torch.autograd.grad(out, leaves, grad)

    return {"flex, forward": forward, "flex, both": both}


def ours(
    name: str,
    tensors: list[torch.Tensor],
    kernel: Any,
    results: list[torch.Tensor] | None = None,
    **how: Any,
) -> dict[str, Run]:
    """A planned call, forward, and forward and backward; ``results`` are made where not given."""
    query, key, value, grad = tensors
    n = query.shape[2]
    sizes: dict[str, Any] = {"heads": _HEADS, "head_dim": _WIDTH, "is_causal": True}
    plans = [
        qa.plan(n, **sizes, kernel=kernel, backward=backward, device="cuda", **how)
        for backward in (False, True)
    ]
    options: dict[str, Any] = {"is_causal": True, "kernel": kernel, "devices": "cuda"}

    given = results or [None] * 4
    grads = None if results is None else (results[1], results[2], results[3])

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return qa.attention_with_lse(query, key, value, out=given[0], plan=plans[0], **options)

    def both() -> None:
        out, lse = forward()
        qa.attention_backward(
            grad, query, key, value, out, lse, grads=grads, plan=plans[1], **options
        )

    return {f"{name}, forward": forward, f"{name}, both": both}


def measure(n: int, mask: Any, ways: list[str]) -> dict[str, Any]:
    """Seconds, ratios, and rectangles of one forward at depth 1."""
    kernel: Any = from_score_mod(None, mask, compiled=True)
    tensors = random(n)
    runs = monolithic(tensors, mask)
    for way in ways:
        if way in _WAYS:
            runs |= ours(way, tensors, kernel, **_WAYS[way])
    if "1 GiB" in ways:
        host = [t.cpu().pin_memory() for t in tensors]
        on_host = [torch.empty_like(t).pin_memory() for t in host]
        runs |= ours("1 GiB", host, kernel, on_host, budget="1GiB", inputs="host")
    times = in_turn(runs)
    before = kernel.run, kernel.pruned
    ours("depth 1", tensors, kernel, **_RESIDENT)["depth 1, forward"]()
    return {
        "seconds": times,
        "ratios": {
            f"{way}, {what}": times[f"{way}, {what}"] / times[f"flex, {what}"]
            for way in ways
            for what in ("forward", "both")
        },
        "rectangles run": kernel.run - before[0],
        "rectangles pruned": kernel.pruned - before[1],
    }


def measure_lengths() -> dict[str, Any]:
    """Seconds of the windowed call at depth 1, and of a token's share."""
    found: dict[str, Any] = {}
    kernel = from_score_mod(None, sliding_window(_WINDOW), compiled=True)
    for n in _LENGTHS:
        tensors = random(n)
        times = in_turn(ours("depth 1", tensors, kernel, **_RESIDENT))
        found[str(n)] = {**times, **{f"{k}, ns a token": 1e9 * t / n for k, t in times.items()}}
        del tensors
        torch.cuda.empty_cache()
    return found


def measure_budgets() -> dict[str, Any]:
    """Seconds of the planned windowed call from host memory, predicted and measured."""
    found: dict[str, Any] = {}
    n = _LENGTHS[-1]
    kernel = from_score_mod(None, sliding_window(_WINDOW), compiled=True)
    host = [t.cpu().pin_memory() for t in random(n)]
    results = [torch.empty_like(t).pin_memory() for t in host]
    sizes: dict[str, Any] = {"heads": _HEADS, "head_dim": _WIDTH, "is_causal": True}
    for budget in ("1GiB", "256MiB", "64MiB"):
        plans = [
            qa.plan(n, **sizes, kernel=kernel, backward=backward, device="cuda", inputs="host",
                    budget=budget)
            for backward in (False, True)
        ]  # fmt: skip
        runs = ours(budget, host, kernel, results, inputs="host", budget=budget)
        times = in_turn(runs)
        forward, both = times[f"{budget}, forward"], times[f"{budget}, both"]
        found[budget] = {
            "levels": [p.levels for p in plans],
            "forward": forward,
            "forward, predicted": plans[0].predicted_seconds,
            "backward": both - forward,
            "backward, predicted": plans[1].predicted_seconds,
        }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="causal,window,lengths,budgets")
    parser.add_argument("--ways", default="uncut,depth 1,slots,1 GiB")
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--json")
    args = parser.parse_args()
    ways = args.ways.split(",")
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "causal": lambda: measure(args.tokens, None, ways),
        "window": lambda: measure(args.tokens, sliding_window(_WINDOW), ways),
        "lengths": measure_lengths,
        "budgets": measure_budgets,
    }
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tokens": args.tokens,
        "date": datetime.date.today().isoformat(),
    }
    console = Console(width=140)
    for name in args.only.split(","):
        result[name] = measures[name]()
        console.print({name: result[name]})
        if args.json:
            write_text(args.json, json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
