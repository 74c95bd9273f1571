"""``distributed.attention`` on the GPUs of this machine, beside one device and beside others.

    python benchmarks/sharded.py --json F

One process a GPU, NCCL; inputs on the devices, sharded by sequence. Seconds of a forward, and of a
forward and backward through autograd: medians, of the slowest rank. Ratios are to cuDNN on one
device with the whole sequence ("one device"), and to that time divided by the ranks ("linear").
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quorum_attention import distributed as sharded


@dataclass(frozen=True)
class Case:
    """A causal call of batch 1; ``shards`` None: equal ones."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    shards: tuple[int, ...] | None = None
    rounds: int = 7
    others: bool = True


def cases(ranks: int) -> dict[str, Case]:
    """By name; the first needs minutes on one device."""
    odd = 1_000_003
    third = odd // (ranks + 1)
    uneven = (odd - third * (ranks - 1), *[third] * (ranks - 1))
    even = tuple(odd // ranks + (rank < odd % ranks) for rank in range(ranks))
    return {
        "8192-a-gpu": Case(8192 * ranks, 64, 8, 128, torch.bfloat16, rounds=15),
        "131072": Case(131072, 32, 8, 128, torch.bfloat16),
        "1048576": Case(1 << 20, 8, 8, 64, torch.float16, rounds=3),
        "5-over-1-uneven": Case(odd, 5, 1, 64, torch.float16, uneven, rounds=3, others=False),
        "5-over-1-even": Case(odd, 5, 1, 64, torch.float16, even, rounds=3, others=False),
    }


def main() -> None:
    """Start a process for each GPU, and let the first print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="")
    parser.add_argument("--json")
    given = parser.parse_args()
    ranks = torch.cuda.device_count()
    names = given.cases.split(",") if given.cases else list(cases(ranks))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    torch.multiprocessing.spawn(rank_main, (ranks, names, given.json), nprocs=ranks)


def rank_main(rank: int, ranks: int, names: list[str], target: str | None) -> None:
    """All cases on one rank."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)
    document: dict[str, Any] = {
        "machine": f"{ranks} x {torch.cuda.get_device_name()}", "torch": torch.__version__,
        "date": datetime.date.today().isoformat(), "cases": {},
    }  # fmt: skip
    for name in names:
        case = cases(ranks)[name]
        found = measure(case, rank, ranks, device)
        document["cases"][name] = found
        if rank == 0:
            for method, (forward, both, said) in found.items():
                print(
                    f"{name:18} {method:14} {forward * 1e3:10.3f} {both * 1e3:10.3f} ms  {said}",
                    flush=True,
                )
            if target:
                Path(target).write_text(json.dumps(document, indent=1), encoding="utf-8")
    dist.destroy_process_group()


def measure(case: Case, rank: int, ranks: int, device: torch.device) -> dict[str, Any]:
    """Seconds of each method on one case."""
    sizes = case.shards or (case.tokens // ranks,) * ranks
    start, stop = [0, *accumulate(sizes)][rank : rank + 2]
    torch.manual_seed(0)
    shapes = [
        (1, h, case.tokens, case.head_dim) for h in (case.heads, *[case.kv_heads] * 2, case.heads)
    ]
    whole = [torch.randn(s, device=device, dtype=case.dtype) for s in shapes]
    mine = [t[:, :, start:stop].contiguous() for t in whole]
    report = sharded.ShardedReport()

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sharded.attention(
            q, k, v, is_causal=True, enable_gqa=True, lengths=sizes, report=report
        )

    methods: dict[str, tuple[Callable[..., Any], list[torch.Tensor], bool]] = {
        "one device": (_one_device, whole, False), "ours": (ours, mine, True),
    }  # fmt: skip
    if case.others and case.heads % ranks == 0 and case.kv_heads % ranks == 0:
        methods["heads, plain"] = (_plain_exchange(ranks), mine, True)
        methods["torch's ring"] = (_torch_ring(device, ranks, mine), mine, True)
    found: dict[str, Any] = {}
    timed = {name: ([], []) for name in methods}  # type: ignore[var-annotated]
    broken = {}
    for number in range(case.rounds + 1):
        for name, (call, tensors, together) in methods.items():
            if name in broken:
                continue
            try:
                pair = _times(call, tensors, rank == 0 or together, together)
            except Exception as error:
                broken[name] = f"{type(error).__name__}: {error}"[:200]
                continue
            if number:
                timed[name][0].append(pair[0])
                timed[name][1].append(pair[1])
    for name, (forwards, boths) in timed.items():
        if name in broken:
            found[name] = (0.0, 0.0, broken[name])
            continue
        pair_ = torch.tensor([statistics.median(forwards), statistics.median(boths)], device=device)
        if name != "one device":
            dist.all_reduce(pair_, op=dist.ReduceOp.MAX)
        found[name] = (*pair_.tolist(), str(report) if name == "ours" else "")
    base = found["one device"]
    for name in list(found):
        if name not in ("one device", *broken):
            forward, both, said = found[name]
            speed = base[0] / forward, base[1] / both
            share = speed[0] / ranks, speed[1] / ranks
            words = (
                f"{speed[0]:.2f}; {speed[1]:.2f} times one device, "
                f"{share[0]:.3f}; {share[1]:.3f} of linear"
            )
            found[name] = (forward, both, f"{words}. {said}")
    if rank == 0 and case.tokens <= 1 << 17:
        found["ours"] = (
            *found["ours"][:2],
            found["ours"][2] + _difference(whole, mine, ours, start, stop),
        )
    elif case.tokens <= 1 << 17:
        _difference(whole, mine, ours, start, stop)
    del whole, mine
    torch.cuda.empty_cache()
    return found


def _difference(
    whole: list[torch.Tensor], mine: list[torch.Tensor], ours: Any, start: int, stop: int
) -> str:
    """The largest difference to one device's result, forward and gradients."""
    results = []
    for call, tensors in ((_one_device, whole), (ours, mine)):
        q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
        call(q, k, v).backward(tensors[3])
        results.append([t.grad for t in (q, k, v)])
    worst = [
        float((a[:, :, start:stop].float() - b.float()).abs().max() / a.float().abs().max())
        for a, b in zip(*results, strict=True)
    ]
    return "; gradients differ from one device's by " + ", ".join(f"{w:.1e}" for w in worst)


def _times(
    call: Callable[..., Any], tensors: list[torch.Tensor], runs: bool, together: bool
) -> tuple[float, float]:
    """Seconds of a forward without gradients, and of a forward and backward."""
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    with torch.no_grad():
        forward = _timed(lambda: call(q, k, v), runs, together)

    def both() -> None:
        q.grad = k.grad = v.grad = None
        call(q, k, v).backward(tensors[3])

    return forward, _timed(both, runs, together)


def _timed(work: Callable[[], Any], runs: bool, together: bool) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    if runs:
        work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def _one_device(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class _Swap(torch.autograd.Function):
    """Heads for rows, of equal shards: (1, h, n, d) to (1, h / ranks, n * ranks, d); or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int, back: bool) -> torch.Tensor:
        ctx.ranks, ctx.back = ranks, back
        _, h, n, d = x.shape
        if back:
            parts = x.view(h, ranks, n // ranks, d).transpose(0, 1).contiguous()
        else:
            parts = x.view(ranks, h // ranks, n, d).contiguous()
        got = torch.empty_like(parts)
        dist.all_to_all_single(got, parts)
        if back:
            return got.view(1, ranks * h, n // ranks, d)
        return got.transpose(0, 1).reshape(1, h // ranks, ranks * n, d)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Swap.apply(grad.contiguous(), ctx.ranks, not ctx.back), None, None


def _plain_exchange(ranks: int) -> Callable[..., Any]:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        inner = [_Swap.apply(t, ranks, False) for t in (q, k, v)]
        return _Swap.apply(_one_device(*inner), ranks, True)

    return call


def _torch_ring(device: torch.device, ranks: int, mine: list[torch.Tensor]) -> Callable[..., Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (ranks,))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Its buffers are whole sequences that it shards in place; here the shards are made already.
        share = q.shape[1] // k.shape[1]
        with context_parallel(mesh):
            keys, values = (t.repeat_interleave(share, 1) if share > 1 else t for t in (k, v))
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return functional.scaled_dot_product_attention(q, keys, values, is_causal=True)

    return call


if __name__ == "__main__":
    main()
