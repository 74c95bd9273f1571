"""``distributed.attention`` on the GPUs of this machine, beside one device and beside others.

    python benchmarks/sharded.py --json F

One process a GPU, NCCL; inputs on the devices, sharded by sequence. Seconds of a forward, and of a
forward and backward through autograd: medians, of the slowest rank. All ranks begin at one moment
of the clock that they share. With ``--calls 1,8`` also of eight calls that are enqueued one after
the other before anybody waits, as a model's layers are: seconds of one of them. Ratios are to cuDNN
on one device with the whole sequence ("one device"), and to that time divided by the ranks
("linear"). A method that raises an error is left out, and the error said; one that hangs takes its
process with it, so give doubtful ones a process of their own (``--methods``; results of both go to
one file).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quorum_attention import distributed as sharded

# torch's context parallel replaces the function by its own.
_SDPA = functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Case:
    """A causal call of batch 1.

    Attributes:
        shards: rows of each rank; None: equal ones.
        warm: one device is called once untimed, as all others are.
        calls: that are enqueued before anybody waits.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    shards: tuple[int, ...] | None = None
    rounds: int = 5
    warm: bool = True
    calls: int = 1
    methods: tuple[str, ...] = (
        "one device", "ours", "plain exchange", "torch ring flash", "torch ring cudnn",
        "ringmaster",
    )  # fmt: skip


def cases(ranks: int) -> dict[str, Case]:
    """By name; the first needs minutes on one device."""
    odd = 1_000_003
    third = odd // (ranks + 1)
    uneven = (odd - third * (ranks - 1), *[third] * (ranks - 1))
    even = tuple(odd // ranks + (rank < odd % ranks) for rank in range(ranks))
    return {
        "8192-a-gpu": Case(8192 * ranks, 64, 8, 128, torch.bfloat16, rounds=15),
        "131072": Case(131072, 32, 8, 128, torch.bfloat16),
        "1048576": Case(
            1 << 20,
            8,
            8,
            64,
            torch.float16,
            rounds=1,
            warm=False,
            methods=("ours", "one device", "plain exchange"),
        ),
        "5-over-1-uneven": Case(odd, 5, 1, 64, torch.float16, uneven, rounds=1, methods=("ours",)),
        "5-over-1-even": Case(odd, 5, 1, 64, torch.float16, even, rounds=1, methods=("ours",)),
    }


def main() -> None:
    """Start a process for each GPU, and let the first print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="names, with commas; all")
    parser.add_argument("--methods", default="", help="names, with commas; those of the case")
    parser.add_argument("--rounds", type=int, help="those of the case")
    parser.add_argument("--calls", default="1", help="how many in a row; numbers, with commas")
    parser.add_argument("--json", help="file to write; what it has of other methods stays")
    given = parser.parse_args()
    ranks = torch.cuda.device_count()
    names = given.cases.split(",") if given.cases else list(cases(ranks))
    methods = given.methods.split(",") if given.methods else None
    rows = [int(number) for number in given.calls.split(",")]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    torch.multiprocessing.spawn(
        rank_main, (ranks, names, methods, given.rounds, rows, given.json), nprocs=ranks
    )


def rank_main(
    rank: int,
    ranks: int,
    names: list[str],
    chosen: list[str] | None,
    rounds: int | None,
    rows: list[int],
    target: str | None,
) -> None:
    """All cases on one rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    # So that messages begin while kernels still fill the device.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group(
        "nccl", rank=rank, world_size=ranks, device_id=device, pg_options=options
    )
    document: dict[str, Any] = {
        "machine": f"{ranks} x {torch.cuda.get_device_name()}", "torch": torch.__version__,
        "date": datetime.date.today().isoformat(), "cases": {},
    }  # fmt: skip
    if target and Path(target).exists():
        document["cases"] = json.loads(Path(target).read_text(encoding="utf-8"))["cases"]
    for name, calls in product(names, rows):
        case = replace(cases(ranks)[name], calls=calls)
        case = case if rounds is None else replace(case, rounds=rounds)
        found = measure(case, rank, ranks, device, chosen or list(case.methods))
        name = name if calls == 1 else f"{name}, {calls} in a row"
        case_of = document["cases"].setdefault(name, {})
        one = found.get("one device", case_of.get("one device"))
        case_of.update({m: _compared(*row, one, ranks) for m, row in found.items()})
        if rank == 0:
            for method in found:
                forward, both, said = case_of[method]
                print(
                    f"{name:18} {method:20} {forward * 1e3:10.3f} {both * 1e3:10.3f} ms  {said}",
                    flush=True,
                )
            if target:
                Path(target).write_text(json.dumps(document, indent=1), encoding="utf-8")
    dist.destroy_process_group()


def _compared(
    forward: float, both: float, said: str, one: tuple[float, float, str] | None, ranks: int
) -> tuple[float, float, str]:
    """A row with its ratios to one device, where that was measured."""
    if not one or not forward or one[0] == forward:
        return forward, both, said
    speed = one[0] / forward, one[1] / both
    words = (
        f"{speed[0]:.2f}; {speed[1]:.2f} times one device, "
        f"{speed[0] / ranks:.3f}; {speed[1] / ranks:.3f} of linear. {said}"
    )
    return forward, both, words.rstrip(". ")


@dataclass
class Setting:
    """What a method is made from.

    Attributes:
        whole, mine: query, key, value and upstream gradient of the sequence, and of this rank.
        sizes: rows of every rank.
    """

    rank: int
    ranks: int
    device: torch.device
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


def measure(
    case: Case, rank: int, ranks: int, device: torch.device, names: list[str]
) -> dict[str, Any]:
    """Seconds of each method on one case, and what there is to say."""
    sizes = case.shards or (case.tokens // ranks,) * ranks
    start, stop = [0, *accumulate(sizes)][rank : rank + 2]
    torch.manual_seed(0)
    shapes = [
        (1, h, case.tokens, case.head_dim) for h in (case.heads, *[case.kv_heads] * 2, case.heads)
    ]
    whole = [torch.randn(s, device=device, dtype=case.dtype) for s in shapes]
    mine = [t[:, :, start:stop].contiguous() for t in whole]
    setting = Setting(rank, ranks, device, sizes, whole, mine)
    methods, found = _prepared(setting, names, case)
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for _ in range(case.rounds):
        for name, method in methods.items():
            timed[name].append(_times(method, rank == 0 or method.together, case.calls))
    for name, pairs in timed.items():
        median = [statistics.median(times) for times in zip(*pairs, strict=True)]
        slowest = torch.tensor(median, device=device)
        if methods[name].together:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found[name] = (*slowest.tolist(), "")
    if "ours" in methods and case.calls == 1:
        said = _said(case, setting, methods["ours"])
        found["ours"] = (*found["ours"][:2], said)
    del whole, mine, setting, methods
    torch.cuda.empty_cache()
    return found


def _prepared(
    setting: Setting, names: list[str], case: Case
) -> tuple[dict[str, Method], dict[str, Any]]:
    """The methods that work here, called once (one device if it is to be); why others do not."""
    methods: dict[str, Method] = {}
    broken: dict[str, Any] = {}
    for name in names:
        said = ""
        try:
            method = METHODS[name](setting)
            if case.warm or method.together:
                _times(method, setting.rank == 0 or method.together, 1)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:300]
        every: list[Any] = [None] * setting.ranks
        dist.all_gather_object(every, said)
        if any(every):
            broken[name] = (0.0, 0.0, next(words for words in every if words))
        else:
            methods[name] = method
        torch.cuda.empty_cache()
    return methods, broken


def _said(case: Case, setting: Setting, ours: Method) -> str:
    """The report of a call of ours, and how far its gradients are from one device's."""
    report = sharded.ShardedReport()
    long = case.tokens > 1 << 17
    q, k, v = (t.detach().requires_grad_() for t in setting.mine[:3])
    with torch.set_grad_enabled(not long):
        out = sharded.attention(
            q, k, v, is_causal=True, enable_gqa=True, lengths=setting.sizes, report=report
        )
    if long:
        return str(report)
    out.backward(setting.mine[3])
    del out, q, k, v
    start = sum(setting.sizes[: setting.rank])
    rows = slice(start, start + setting.sizes[setting.rank])
    return str(report) + _difference(setting, ours.call, rows)


def _difference(setting: Setting, ours: Callable[..., torch.Tensor], rows: slice) -> str:
    """The largest difference to one device's gradients."""
    results = []
    for call, tensors in ((_one_device, setting.whole), (ours, setting.mine)):
        q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
        call(q, k, v).backward(tensors[3])
        results.append([t.grad for t in (q, k, v)])
    worst = [
        float((a[:, :, rows].float() - b.float()).abs().max() / a.float().abs().max())
        for a, b in zip(*results, strict=True)
    ]
    return "; gradients differ from one device's by " + ", ".join(f"{w:.1e}" for w in worst)


def _times(method: Method, runs: bool, calls: int) -> tuple[float, float]:
    """Seconds of a forward without gradients, and of a forward and backward."""
    q, k, v = leaves = [t.detach().requires_grad_() for t in method.tensors[:3]]

    def forward() -> None:
        with torch.no_grad():
            method.call(q, k, v)

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        method.call(q, k, v).backward(method.tensors[3])

    with method.around():
        alone = _timed(forward, runs, calls)
    with method.around():
        return alone, _timed(both, runs, calls)


def _timed(work: Callable[[], Any], runs: bool, calls: int) -> float:
    begun = _together()
    for _ in range(calls if runs else 0):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / calls


def _together() -> float:
    """Wait for a moment that all ranks agree on, when no device has anything to do."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    moment = torch.tensor(time.perf_counter() + 2e-3, dtype=torch.float64, device="cuda")
    dist.broadcast(moment, 0)
    start = moment.item()
    while time.perf_counter() < start:
        pass
    return start


def _one_device(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _SDPA(q, k, v, is_causal=True, enable_gqa=True)


def _ours(setting: Setting) -> Method:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sharded.attention(q, k, v, is_causal=True, enable_gqa=True, lengths=setting.sizes)

    return Method(call, setting.mine)


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


def _plain_exchange(setting: Setting) -> Method:
    ranks = setting.ranks

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        inner = [_Swap.apply(t, ranks, False) for t in (q, k, v)]
        return _Swap.apply(_one_device(*inner), ranks, True)

    return Method(call, setting.mine)


def _torch_ring(setting: Setting, backend: SDPBackend) -> Method:
    """Torch's own context parallel; its shards are a head and a tail of the sequence, so the same
    tensors are other tokens to it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (setting.ranks,))
    tokens, share = sum(setting.sizes), setting.mine[0].shape[1] // setting.mine[1].shape[1]

    def around() -> Any:
        # It shards what is named here, in place, and takes device and length from the first (an
        # empty list is an IndexError); the shards of query, key and value are made already.
        buffer = torch.zeros(tokens, device=setting.device)
        return context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0])

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (t.repeat_interleave(share, 1) if share > 1 else t for t in (k, v))
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, keys, values, is_causal=True)

    return Method(call, setting.mine, around=around)


def _ringmaster(setting: Setting) -> Method:
    """What axolotl-ringmaster takes by itself where key/value heads divide: an exchange of heads
    around a model's kernel, here SDPA over cuDNN. (Its balanced rings need flash-attn.)"""
    from ringmaster import CPRuntime, RingmasterConfig, set_runtime
    from ringmaster.strategies.ulysses import make_ulysses_attention

    group = dist.group.WORLD
    config = RingmasterConfig(size=setting.ranks)
    set_runtime(CPRuntime(config, ulysses_group=group, cp_group=group))
    exchanged = make_ulysses_attention("sdpa")
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    module.num_key_value_groups = (  # type: ignore[assignment]
        setting.mine[0].shape[1] // setting.mine[1].shape[1]
    )

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out: torch.Tensor = exchanged(module, q, k, v, None, is_causal=True)[0]
        return out.transpose(1, 2)

    return Method(call, setting.mine)


METHODS: dict[str, Callable[[Setting], Method]] = {
    "one device": lambda setting: Method(_one_device, setting.whole, together=False),
    "ours": _ours,
    "plain exchange": _plain_exchange,
    "torch ring flash": lambda setting: _torch_ring(setting, SDPBackend.FLASH_ATTENTION),
    "torch ring cudnn": lambda setting: _torch_ring(setting, SDPBackend.CUDNN_ATTENTION),
    "ringmaster": _ringmaster,
}


if __name__ == "__main__":
    main()
