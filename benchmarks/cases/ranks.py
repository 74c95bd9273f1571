"""``distributed.attention`` on the GPUs of this machine, beside one device and beside
others.

One process a GPU, NCCL; inputs on the devices, sharded by sequence. Seconds of a
forward, and of a forward and backward through autograd: medians, of the slowest rank;
all ranks begin at one moment. "...-x8": eight calls are enqueued one after the other
before anybody waits, as a model's layers are. "fa4" and "cudnn" are one device with the
whole sequence. A method that raises is left out, and its error said; one that hangs
takes its process with it: give it a run of its own (--methods). Without a GPU: Gloo,
--ranks 2 --divide 64.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from cases import plain
from cases.plain import flash_attention_4
from measure import medians, on_ranks, wait
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quorum_attention import distributed as sharded

# torch's context parallel replaces the function by its own.
_SDPA = functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Case(plain.Case):
    """A call of a sharded sequence.

    Attributes:
        rounds: how often its calls are timed.
        is_per_rank: whether ``tokens`` are those of a rank, or else of the whole
            sequence.
    """

    rounds: int = 5
    is_per_rank: bool = False


_SHORT = (8192, 64, 8, 128, torch.bfloat16)
CASES = {
    "131072": Case(131072, 32, 8, 128, torch.bfloat16),
    "1048576": Case(1 << 20, 8, 8, 64, torch.float16, rounds=2),
    "2048-a-gpu-x8": Case(
        2048, 64, 8, 128, torch.bfloat16, rounds=9, calls=8, is_per_rank=True
    ),
    "8192-a-gpu": Case(*_SHORT, rounds=15, is_per_rank=True),
    "8192-a-gpu-x8": Case(*_SHORT, rounds=9, calls=8, is_per_rank=True),
}


@dataclass
class Setting:
    """A case on one rank.

    Attributes:
        sizes: tokens of each rank.
        sequence: query, key, value and upstream gradient of all tokens.
        shard: the same, of this rank's tokens.
    """

    case: Case
    n_ranks: int
    sizes: tuple[int, ...]
    sequence: list[torch.Tensor]
    shard: list[torch.Tensor]


@dataclass
class Method:
    """A way to make a call.

    Attributes:
        is_sharded: whether all ranks make the call, or else rank 0 alone.
        context: makes the context of the calls, which is entered before the clock
            starts.
    """

    call: Callable[..., torch.Tensor]
    tensors: list[torch.Tensor]
    is_sharded: bool = True
    context: Callable[[], Any] = contextlib.nullcontext


def make_setting(case: Case, divide: int) -> Setting:
    rank = dist.get_rank()
    n_ranks = dist.get_world_size()
    device = torch.device("cpu")
    dtype = torch.float32
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        dtype = case.dtype
    n_tokens = case.tokens // divide
    if case.is_per_rank:
        n_tokens *= n_ranks
    sizes = shard_sizes(n_tokens, n_ranks)
    start = sum(sizes[:rank])
    stop = start + sizes[rank]
    sequence = plain.draw_tensors(replace(case, tokens=n_tokens, dtype=dtype), device)
    shard = [tensor[:, :, start:stop].contiguous() for tensor in sequence]
    return Setting(case, n_ranks, sizes, sequence, shard)


def shard_sizes(n_tokens: int, n_ranks: int) -> tuple[int, ...]:
    """Tokens of each rank, as equal as can be."""
    share, remainder = divmod(n_tokens, n_ranks)
    return tuple(share + 1 if rank < remainder else share for rank in range(n_ranks))


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH):
        return _SDPA(q, k, v, is_causal=True, enable_gqa=True)


def ours(setting: Setting) -> Method:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options = {"is_causal": True, "enable_gqa": True, "lengths": setting.sizes}
        return sharded.attention(q, k, v, **options)

    return Method(call, setting.shard)


class _Swap(torch.autograd.Function):
    """Heads for rows, of equal shards: (1, h, n, d) to (1, h / ranks, n * ranks, d); or
    back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int, back: bool) -> torch.Tensor:
        ctx.ranks = ranks
        ctx.back = back
        _, h, n, d = x.shape
        if back:
            parts = x.reshape(h, ranks, n // ranks, d).transpose(0, 1).contiguous()
        else:
            parts = x.reshape(ranks, h // ranks, n, d).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        if back:
            return received.view(1, ranks * h, n // ranks, d)
        return received.transpose(0, 1).reshape(1, h // ranks, ranks * n, d)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Swap.apply(grad.contiguous(), ctx.ranks, not ctx.back), None, None


def exchange(setting: Setting) -> Method:
    """A plain exchange of heads around FlashAttention-4."""
    n_ranks = setting.n_ranks

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        swapped = (
            _Swap.apply(tensor, n_ranks, False).transpose(1, 2) for tensor in inputs
        )
        out = flash_attention_4(*swapped).transpose(1, 2)
        return _Swap.apply(out, n_ranks, True)

    return Method(call, setting.shard)


def torch_ring(setting: Setting) -> Method:
    """Torch's own context parallel; its shards are a head and a tail of the sequence,
    so the same tensors are other tokens to it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    device = setting.shard[0].device
    group = setting.case.heads // setting.case.kv_heads
    mesh = init_device_mesh(device.type, (setting.n_ranks,))

    def sharding() -> Any:
        # Torch shards the buffers in place, and takes device and length from the first
        # (an empty list is an IndexError). The shards of query, key and value are made
        # already.
        buffer = torch.zeros(sum(setting.sizes), device=device)
        return context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0])

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(
                q, keys, values, is_causal=True
            )

    return Method(call, setting.shard, context=sharding)


def fa4_on_one_device(setting: Setting) -> Method:
    tensors = [tensor.transpose(1, 2).contiguous() for tensor in setting.sequence]
    return Method(flash_attention_4, tensors, is_sharded=False)


def cudnn_on_one_device(setting: Setting) -> Method:
    return Method(cudnn, setting.sequence, is_sharded=False)


METHODS: dict[str, Callable[[Setting], Method]] = {
    "fa4": fa4_on_one_device,
    "cudnn": cudnn_on_one_device,
    "ours": ours,
    "fa4 exchange": exchange,
    "cudnn ring": torch_ring,
}


def measure_calls(method: Method, calls: int) -> list[float]:
    """Seconds of a forward without gradients, and of a forward and backward."""
    leaves = [tensor.detach().requires_grad_() for tensor in method.tensors[:3]]
    grad_out = method.tensors[3]

    def forward() -> None:
        with torch.no_grad():
            method.call(*leaves)

    def forward_and_backward() -> None:
        for leaf in leaves:
            leaf.grad = None
        method.call(*leaves).backward(grad_out)

    if dist.get_rank() != 0 and not method.is_sharded:
        calls = 0
    return [
        seconds_together(work, method, calls)
        for work in (forward, forward_and_backward)
    ]


def seconds_together(work: Callable[[], None], method: Method, calls: int) -> float:
    """Seconds of one of so many calls in a row; all ranks begin at one moment."""
    with method.context():
        start = start_together()
        for _ in range(calls):
            work()
        wait()
        return (time.perf_counter() - start) / max(1, calls)


def start_together() -> float:
    """Wait for a moment that all ranks agree on, when no device has anything to do."""
    wait()
    dist.barrier()
    wait()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    moment = torch.tensor(
        time.perf_counter() + 2e-3, dtype=torch.float64, device=device
    )
    dist.broadcast(moment, 0)
    while time.perf_counter() < moment.item():
        pass
    return moment.item()


def measure(setting: Setting, name: str, rounds: int) -> Any:
    """Seconds of a method (forward; both), or why there are none."""
    error_text = ""
    try:
        method = METHODS[name](setting)
        measure_calls(method, 1)
    except Exception as error:
        error_text = f"{type(error).__name__}: {error}"[:300]
    error_texts: list[Any] = [None] * setting.n_ranks
    dist.all_gather_object(error_texts, error_text)
    if any(error_texts):
        return next(filter(None, error_texts))
    pairs = [measure_calls(method, setting.case.calls) for _ in range(rounds)]
    slowest = torch.tensor(medians(pairs), device=setting.shard[0].device)
    if method.is_sharded:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def on_this_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of all cases, by method."""
    rows: dict[str, Any] = {}
    for name in options.cases.split(","):
        case = CASES[name]
        setting = make_setting(case, options.divide)
        row = rows.setdefault(f"{setting.n_ranks} ranks, {name}", {})
        for method in options.methods.split(","):
            row[method] = measure(setting, method, options.rounds or case.rounds)
            print(f"{name:14} {method:14} {row[method]}", flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, help="those of the case")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument(
        "--divide", type=int, default=1, help="tokens of all cases, for a trial"
    )


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start a process for each GPU."""
    yield on_ranks(on_this_rank, options)
