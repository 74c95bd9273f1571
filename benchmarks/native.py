"""The native kernel beside the vendors' on one GPU: speed, accuracy, what a task and a mask cost.

    python benchmarks/native.py [--only kernels,masks,tasks,accuracy,streaming,first] [--json FILE]

Everything causal, fp16, on device-resident inputs, medians; ``streaming`` is a whole call of
1,048,576 tokens from and to page-locked host memory within 1 GiB. Needs a CUDA device. The aims and
what was measured: docs/native.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition, Task
from quorum_attention.execution.call import no_bias
from quorum_attention.kernels import Gradients, Statistics, TaskTensors, kernels
from quorum_attention.kernels.protocol import Call, Saved
from quorum_attention.writing import write_text

_TOKENS = 131_072


def median(run: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds by events, after one run that is not timed."""
    run()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Normally distributed, on the device."""
    return torch.randn(shape, dtype=dtype, device="cuda")


def measure_kernels() -> dict[str, Any]:
    """Monolithic calls, forward and backward apart."""
    found: dict[str, Any] = {}
    for head_dim in (64, 128):
        query, key, value, grad = (random(1, 8, _TOKENS, head_dim) for _ in range(4))
        scale = head_dim**-0.5
        for name in ("flash", "cudnn", "native"):
            kernel: Any = kernels()[name]
            call = Call(query, key, value, True, scale)
            saved = Saved(grad, *kernel.rectangle_forward(call))
            found[f"{name}, {head_dim}"] = [
                median(lambda k=kernel, c=call: k.rectangle_forward(c)),
                median(lambda k=kernel, c=call, s=saved: k.rectangle_backward(c, s)),
            ]
    return found


def measure_masks() -> dict[str, Any]:
    """What carrying group bits that mask nothing costs: with over without."""
    found: dict[str, Any] = {}
    nothing = torch.zeros(_TOKENS, dtype=torch.int64, device="cuda")
    bits = {"query_bits": nothing, "key_bits": nothing}
    for head_dim in (64, 128):
        leaves = [random(1, 8, _TOKENS, head_dim).requires_grad_() for _ in range(3)]
        grad = random(1, 8, _TOKENS, head_dim)

        def both(tensors: list[torch.Tensor], upstream: torch.Tensor, given: Any) -> None:
            qa.native_attention(*tensors, is_causal=True, **given)[0].backward(upstream)
            for leaf in tensors:
                leaf.grad = None

        plain = [t.detach() for t in leaves]
        # In turn, because the device's clock drifts.
        rounds = []
        for _ in range(3):
            times = [
                median(lambda g=given, t=plain: qa.native_attention(*t, is_causal=True, **g))
                for given in ({}, bits)
            ]
            times += [median(lambda g=given, t=leaves, u=grad: both(t, u, g))
                      for given in ({}, bits)]  # fmt: skip
            rounds.append((times[1] / times[0], times[3] / times[2]))
        found[str(head_dim)] = [statistics.median(r[i] for r in rounds) for i in (0, 1)]
    return found


def measure_tasks() -> dict[str, Any]:
    """Seconds of a pair in a task of depth 1 over those in a whole call of as many pairs."""
    kernel: Any = kernels()["native"]

    def pair_seconds(task: Task, tokens: int) -> tuple[float, float]:
        rectangles = task.rectangles(True)
        query, key, value, grad = (random(1, 1, tokens, 64) for _ in range(4))
        tensors = TaskTensors(
            task, rectangles, query, key, value, 0.125, True, no_bias, tokens, tokens
        )
        out = torch.zeros(1, 1, tokens, 64, device="cuda")
        state = Statistics(out, torch.full((1, 1, tokens), -torch.inf, device="cuda"))
        forward = median(lambda: kernel.forward(tensors, state), 5)
        sums = (torch.zeros_like(out) for _ in range(3))
        grads = Gradients(grad, state.out.half(), state.lse, *sums)
        backward = median(lambda: kernel.backward(tensors, grads), 5)
        pairs = sum(r.pairs for r in rectangles)
        return forward / pairs, backward / pairs

    found = {}
    for chunks in (13, 21):
        task = list(Decomposition(1 << 20, (chunks,)).tasks())[5]
        pairs = sum(r.pairs for r in task.rectangles(True))
        tokens = int((2 * pairs) ** 0.5) // 128 * 128
        cut = pair_seconds(task, task.n_tokens)
        whole = pair_seconds(Decomposition(tokens, ()).task(()), tokens)
        found[f"{chunks} chunks"] = [a / b for a, b in zip(cut, whole, strict=True)]
    return found


def measure_accuracy(draws: int = 10) -> dict[str, Any]:
    """Relative errors at 8,192 tokens against float64, fp32 results, means over draws."""
    tokens, heads = 8192, 8
    later = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").triu(1)
    found: dict[str, Any] = {}
    for dtype in (torch.float16, torch.bfloat16):
        errors: dict[str, list[float]] = {}
        for draw in range(draws):
            torch.manual_seed(draw)
            tensors = [random(1, heads, tokens, 64, dtype=dtype) for _ in range(4)]
            right: list[list[torch.Tensor]] = [[], [], [], []]
            for head in range(heads):
                query, key, value, grad = (t[0, head].double() for t in tensors)
                p = torch.softmax((query @ key.mT / 8).masked_fill_(later, -torch.inf), -1)
                out = p @ value
                ds = p * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))
                parts = (out, ds @ key / 8, ds.mT @ query / 8, p.mT @ grad)
                for kept, part in zip(right, parts, strict=True):
                    kept.append(part)
            expected = [torch.stack(parts)[None] for parts in right]
            for depth in (0, 1):
                options: dict[str, Any] = {"is_causal": True, "kernel": "native", "depth": depth}
                out, lse = qa.attention_with_lse(*tensors[:3], out_dtype=torch.float32, **options)
                grads = tuple(torch.empty_like(out) for _ in range(3))
                qa.attention_backward(tensors[3], *tensors[:3], out, lse, grads=grads, **options)
                joined = torch.cat([g.flatten() for g in grads])
                wanted = torch.cat([e.flatten() for e in expected[1:]])
                pairs = [("out", out, expected[0]), ("gradients", joined, wanted)]
                names = ("dQ", "dK", "dV")
                pairs += list(zip(names, grads, expected[1:], strict=True))
                for name, mine, exact in pairs:
                    error = float((mine.double() - exact).norm() / exact.norm())
                    errors.setdefault(f"{name}, depth {depth}", []).append(error)
        name = str(dtype).removeprefix("torch.")
        found[name] = {key: statistics.mean(values) for key, values in errors.items()}
    return found


def _flash_seconds(tensors: list[torch.Tensor]) -> list[float]:
    kernel: Any = kernels()["flash"]
    query, key, value, grad = tensors
    call = Call(query, key, value, True, 0.125)
    saved = Saved(grad, *kernel.rectangle_forward(call))
    return [
        median(lambda: kernel.rectangle_forward(call), 1),
        median(lambda: kernel.rectangle_backward(call, saved), 1),
    ]


def measure_streaming() -> dict[str, Any]:
    """Seconds (forward, backward) of FlashAttention-2 on the device and of ours within 1 GiB."""
    tensors = [random(1, 8, 1 << 20, 64) for _ in range(4)]
    theirs = _flash_seconds(tensors)
    host = [t.cpu().pin_memory() for t in tensors]
    del tensors
    torch.cuda.empty_cache()
    results = [torch.empty_like(t).pin_memory() for t in host]
    options: dict[str, Any] = {"is_causal": True, "budget": "1GiB", "kernel": "native"}
    ours, report = [0.0, 0.0], qa.Report()
    for _ in range(2):
        began = time.perf_counter()
        _, lse = qa.attention_with_lse(*host[:3], out=results[0], report=report, **options)
        torch.cuda.synchronize()
        half = time.perf_counter()
        qa.attention_backward(
            host[3], *host[:3], results[0], lse, grads=tuple(results[1:]), report=report, **options
        )
        torch.cuda.synchronize()
        ours = [half - began, time.perf_counter() - half]
    return {"flash": theirs, "native": ours, "report": report.to_dict()}


def measure_first() -> dict[str, Any]:
    """Seconds of a first forward, and of the backward after it, in a new process: with no Triton
    cache, and with one. A part of the first forward, given apart as well, is Triton's own start:
    its import, and the hash of its library that every compilation's key begins with."""
    code = """
import json, time
import torch
import quorum_attention as qa

shape = (1, 8, 4096, 64)
x = torch.randn(shape, device="cuda", dtype=torch.float16, requires_grad=True)
torch.cuda.synchronize()
times = [time.time()]
import triton
from triton.runtime.cache import triton_key
triton_key()
times.append(time.time())
out, _ = qa.native_attention(x, x, x, is_causal=True)
torch.cuda.synchronize()
times.append(time.time())
out.sum().backward()
torch.cuda.synchronize()
times.append(time.time())
start, imported, first, last = times
print(json.dumps({
    "Triton itself": imported - start, "forward": first - start, "backward": last - first,
}))
"""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        found = {}
        for name in ("cold", "warm", "warm again"):
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, check=True, capture_output=True,
                text=True,
            )  # fmt: skip
            found[name] = json.loads(done.stdout)
        return found


MEASURES: dict[str, Callable[[], dict[str, Any]]] = {
    "kernels": measure_kernels,
    "masks": measure_masks,
    "tasks": measure_tasks,
    "accuracy": measure_accuracy,
    "streaming": measure_streaming,
    "first": measure_first,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(MEASURES))
    parser.add_argument("--json")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.date.today().isoformat(),
    }
    console = Console(width=140)
    for name in args.only.split(","):
        result[name] = MEASURES[name]()
        console.print({name: {k: v for k, v in result[name].items() if k != "report"}})
        if args.json:
            write_text(args.json, json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
