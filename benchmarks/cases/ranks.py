"""``distributed.attention`` on the GPUs of this machine, beside one device and beside others.

One process a GPU, NCCL; inputs on the devices, sharded by sequence. Seconds of a forward, and of a
forward and backward through autograd: medians, of the slowest rank; all ranks begin at one moment.
"...-x8": eight calls are enqueued one after the other before anybody waits, as a model's layers
are. "fa4" and "cudnn" are one device with the whole sequence. A method that raises is left out, and
its error said; one that hangs takes its process with it: give it a run of its own (--methods; one
JSON file keeps both). Without a GPU: Gloo, --ranks 2 --divide 64.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from cases import plain
from cases.plain import fa4
from measure import on_ranks, wait
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quorum_attention import distributed as sharded

# torch's context parallel replaces the function by its own.
_SDPA = functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Case(plain.Case):
    """``tokens`` of each rank where ``each``; ``calls`` in a row."""

    rounds: int = 5
    each: bool = False


_SHORT = (8192, 64, 8, 128, torch.bfloat16)
CASES = {
    "131072": Case(131072, 32, 8, 128, torch.bfloat16),
    "1048576": Case(1 << 20, 8, 8, 64, torch.float16, rounds=2),
    "8192-a-gpu": Case(*_SHORT, rounds=15, each=True),
    "8192-a-gpu-x8": Case(*_SHORT, rounds=9, calls=8, each=True),
}


@dataclass
class Setting:
    """A case on one rank; ``whole`` and ``mine``: query, key, value and upstream gradient."""

    case: Case
    ranks: int
    sizes: tuple[int, ...]
    whole: list[torch.Tensor]
    mine: list[torch.Tensor]


@dataclass
class Method:
    """A way to make a call; ``around`` is entered before the clock starts."""

    call: Callable[..., torch.Tensor]
    tensors: list[torch.Tensor]
    together: bool = True
    around: Callable[[], Any] = contextlib.nullcontext


def setting_of(case: Case, divide: int) -> Setting:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    tokens = case.tokens // divide * (ranks if case.each else 1)
    sizes = tuple(tokens // ranks + (n < tokens % ranks) for n in range(ranks))
    start, stop = [0, *accumulate(sizes)][rank : rank + 2]
    dtype = case.dtype if device.type == "cuda" else torch.float32
    whole = plain.drawn(replace(case, tokens=tokens, dtype=dtype), device)
    return Setting(case, ranks, sizes, whole, [t[:, :, start:stop].contiguous() for t in whole])


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH):
        return _SDPA(q, k, v, is_causal=True, enable_gqa=True)


def ours(setting: Setting) -> Method:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options = {"is_causal": True, "enable_gqa": True, "lengths": setting.sizes}
        return sharded.attention(q, k, v, **options)

    return Method(call, setting.mine)


class _Swap(torch.autograd.Function):
    """Heads for rows, of equal shards: (1, h, n, d) to (1, h / ranks, n * ranks, d); or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int, back: bool) -> torch.Tensor:
        ctx.ranks, ctx.back = ranks, back
        _, h, n, d = x.shape
        if back:
            parts = x.reshape(h, ranks, n // ranks, d).transpose(0, 1).contiguous()
        else:
            parts = x.reshape(ranks, h // ranks, n, d).contiguous()
        got = torch.empty_like(parts)
        dist.all_to_all_single(got, parts)
        if back:
            return got.view(1, ranks * h, n // ranks, d)
        return got.transpose(0, 1).reshape(1, h // ranks, ranks * n, d)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Swap.apply(grad.contiguous(), ctx.ranks, not ctx.back), None, None


def exchange(setting: Setting) -> Method:
    """A plain exchange of heads around FlashAttention-4."""
    ranks = setting.ranks

    def call(*three: torch.Tensor) -> torch.Tensor:
        swapped = (_Swap.apply(t, ranks, False).transpose(1, 2) for t in three)
        return _Swap.apply(fa4(*swapped).transpose(1, 2), ranks, True)

    return Method(call, setting.mine)


def torch_ring(setting: Setting) -> Method:
    """Torch's own context parallel; its shards are a head and a tail of the sequence, so the same
    tensors are other tokens to it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    device, share = setting.mine[0].device, setting.case.heads // setting.case.kv_heads
    mesh = init_device_mesh(device.type, (setting.ranks,))

    def around() -> Any:
        # It shards what is named here, in place, and takes device and length from the first (an
        # empty list is an IndexError); the shards of query, key and value are made already.
        buffer = torch.zeros(sum(setting.sizes), device=device)
        return context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0])

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (t.repeat_interleave(share, 1) for t in (k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(q, keys, values, is_causal=True)

    return Method(call, setting.mine, around=around)


METHODS: dict[str, Callable[[Setting], Method]] = {
    "fa4": lambda s: Method(fa4, [t.transpose(1, 2).contiguous() for t in s.whole], False),
    "cudnn": lambda s: Method(cudnn, s.whole, False),
    "ours": ours,
    "fa4 exchange": exchange,
    "cudnn ring": torch_ring,
}


def times(method: Method, calls: int) -> list[float]:
    """Seconds of a forward without gradients, and of a forward and backward."""
    runs = dist.get_rank() == 0 or method.together
    q, k, v = leaves = [t.detach().requires_grad_() for t in method.tensors[:3]]

    def forward() -> None:
        with torch.no_grad():
            method.call(q, k, v)

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        method.call(q, k, v).backward(method.tensors[3])

    seconds = []
    for work in (forward, both):
        with method.around():
            begun = start_together()
            for _ in range(calls if runs else 0):
                work()
            wait()
            seconds.append((time.perf_counter() - begun) / calls)
    return seconds


def start_together() -> float:
    """Wait for a moment that all ranks agree on, when no device has anything to do."""
    wait()
    dist.barrier()
    wait()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    told = torch.tensor(time.perf_counter() + 2e-3, dtype=torch.float64, device=device)
    dist.broadcast(told, 0)
    while time.perf_counter() < told.item():
        pass
    return told.item()


def measure(setting: Setting, name: str, rounds: int) -> Any:
    """Seconds of a method (forward; both), or why there are none."""
    said = ""
    try:
        method = METHODS[name](setting)
        times(method, 1)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:300]
    every: list[Any] = [None] * setting.ranks
    dist.all_gather_object(every, said)
    if any(every):
        return next(words for words in every if words)
    found = zip(*(times(method, setting.case.calls) for _ in range(rounds)), strict=True)
    slowest = torch.tensor(list(map(statistics.median, found)), device=setting.mine[0].device)
    if method.together:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def on_this_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of all cases, by method."""
    found: dict[str, Any] = {}
    for name in options.cases.split(","):
        case = CASES[name]
        setting = setting_of(case, options.divide)
        for method in options.methods.split(","):
            seconds = measure(setting, method, options.rounds or case.rounds)
            found.setdefault(name, {})[method] = seconds
            print(f"{name:14} {method:14} {seconds}", flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, help="those of the case")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--divide", type=int, default=1, help="tokens of all cases, for a trial")


def run(options: argparse.Namespace, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Starts a process for each GPU; ``found`` has what other numbers of ranks took."""
    measured = on_ranks(on_this_rank, options)
    of_ranks = found.setdefault("ranks", {}).setdefault(str(options.ranks), {})
    for name, methods in measured.items():
        of_ranks.setdefault(name, {}).update(methods)
    yield found
