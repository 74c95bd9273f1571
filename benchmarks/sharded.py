"""``distributed.attention`` on the GPUs of this machine, beside one device and beside others.

    python benchmarks/sharded.py [--cases 1048576,131072,8192-a-gpu-x8] [--seconds 240] [--json F]
        [--methods fa4,cudnn,ours,...] [--rounds N] [--ranks N]

One process a GPU, NCCL; inputs on the devices, sharded by sequence. Seconds of a forward, and of a
forward and backward through autograd: medians, of the slowest rank; all ranks begin at one moment.
"...-x8": eight calls are enqueued one after the other before anybody waits, as a model's layers
are. "fa4" and "cudnn" are one device with the whole sequence; ratios are to each of them ("times"),
and divided by the number of ranks ("of linear"). Masks ("window", "documents", "sinks") are
compared with our own call on one device, and the pairs that the busiest rank computes with an equal
share. A method that raises is left out, and its error said; one that hangs takes its process with
it: give it a process of its own (``--methods``; one JSON file keeps both). Nothing begins after
``--seconds``. Without a GPU: Gloo, ``--ranks 2 --divide 64``.
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
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention import distributed as sharded

# torch's context parallel replaces the function by its own.
_SDPA = functional.scaled_dot_product_attention
_HALF, _BFLOAT = torch.float16, torch.bfloat16
_EXCHANGES = ("fa4 exchange", "cudnn exchange")
_ALL = ("fa4", "cudnn", "ours", *_EXCHANGES, "flash ring", "cudnn ring")
_BASES = ("fa4", "cudnn", "one")


@dataclass(frozen=True)
class Case:
    """A causal call of batch 1; ``tokens`` of each rank where ``each``; ``calls`` in a row."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    rounds: int = 5
    calls: int = 1
    each: bool = False
    mask: str = ""
    methods: tuple[str, ...] = _ALL


_GQA, _ODD, _MASKED = (32, 8, 128, _BFLOAT), (5, 1, 64, _HALF), ("one", "ours")
CASES = {
    "131072": Case(131072, *_GQA),
    "1048576": Case(1 << 20, 8, 8, 64, _HALF, 2, methods=("fa4", "ours", "cudnn", *_EXCHANGES)),
    "8192-a-gpu": Case(8192, 64, 8, 128, _BFLOAT, 15, each=True),
    "8192-a-gpu-x8": Case(8192, 64, 8, 128, _BFLOAT, 9, 8, each=True),
    "window": Case(131072, *_GQA, mask="window", methods=_MASKED),
    "documents": Case(131072, *_GQA, mask="documents", methods=_MASKED),
    "sinks": Case(131072, *_GQA, mask="sinks", methods=_MASKED),
    "window-5": Case(131072, *_ODD, mask="window", methods=_MASKED),
    "documents-5": Case(131072, *_ODD, mask="documents", methods=_MASKED),
    "sinks-5": Case(131072, *_ODD, mask="sinks", methods=_MASKED),
    "5-over-1": Case(1_000_003, *_ODD, 1, methods=("ours",)),
}


class Setting:
    """A case on one rank; ``whole`` and ``mine``: query, key, value and upstream gradient."""

    def __init__(self, case: Case, device: torch.device, divide: int) -> None:
        self.rank, self.ranks, self.device = dist.get_rank(), dist.get_world_size(), device
        self.tokens = case.tokens // divide * (self.ranks if case.each else 1)
        self.sizes = tuple(
            self.tokens // self.ranks + (n < self.tokens % self.ranks) for n in range(self.ranks)
        )
        start, stop = [0, *accumulate(self.sizes)][self.rank : self.rank + 2]
        torch.manual_seed(0)
        self.case, self.share = case, case.heads // case.kv_heads
        heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
        dtype = case.dtype if device.type == "cuda" else torch.float32
        self.whole = [
            torch.randn((1, h, self.tokens, case.head_dim), device=device, dtype=dtype)
            for h in heads
        ]
        self.mine = [t[:, :, start:stop].contiguous() for t in self.whole]
        self.mask, self.row_pairs = self._masked()

    def _masked(self) -> tuple[Mask | None, torch.Tensor]:
        """The mask, and how many keys each token sees."""
        rows = torch.arange(1, self.tokens + 1)
        name, width = self.case.mask, self.tokens // 32
        if name == "window":
            return Mask(causal=True, window=(width - 1, 0)), rows.clamp_max(width)
        if name == "sinks":
            return Mask(causal=True, sinks=torch.randn(self.case.heads, device=self.device)), rows
        if name == "documents":  # of falling lengths: half, a quarter, ...
            ids = (self.tokens / (self.tokens - rows + 1)).log2().long()
            first = torch.searchsorted(ids, ids)
            return Mask(causal=True, documents=ids.to(self.device)), rows - first
        return None, rows


@dataclass
class Method:
    """A way to make a call; ``around`` is entered before the clock starts."""

    call: Callable[..., torch.Tensor]
    tensors: list[torch.Tensor]
    together: bool = True
    around: Callable[[], Any] = contextlib.nullcontext


def fa4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FlashAttention-4 as its users call it: token after token."""
    from flash_attn.cute import flash_attn_func

    found = flash_attn_func(q, k, v, causal=True)
    result: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return result


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    backend = SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        return _SDPA(q, k, v, is_causal=True, enable_gqa=True)


def fa4_by_heads(*three: torch.Tensor) -> torch.Tensor:
    return fa4(*(t.transpose(1, 2) for t in three)).transpose(1, 2)


def ours(setting: Setting) -> Method:
    """With or without a mask."""
    more = {"is_causal": True} if setting.mask is None else {"attn_mask": setting.mask}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **told: Any) -> torch.Tensor:
        return sharded.attention(q, k, v, enable_gqa=True, lengths=setting.sizes, **more, **told)

    return Method(call, setting.mine)


def one_of_ours(setting: Setting) -> Method:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = setting.mask
        return qa.attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)

    return Method(call, setting.whole, together=False)


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


def plain_exchange(setting: Setting, inner: Callable[..., torch.Tensor]) -> Method:
    ranks = setting.ranks

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _Swap.apply(inner(*(_Swap.apply(t, ranks, False) for t in (q, k, v))), ranks, True)

    return Method(call, setting.mine)


def torch_ring(setting: Setting, backend: SDPBackend) -> Method:
    """Torch's own context parallel; its shards are a head and a tail of the sequence, so the same
    tensors are other tokens to it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(setting.device.type, (setting.ranks,))

    def around() -> Any:
        # It shards what is named here, in place, and takes device and length from the first (an
        # empty list is an IndexError); the shards of query, key and value are made already.
        buffer = torch.zeros(setting.tokens, device=setting.device)
        return context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0])

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (t.repeat_interleave(setting.share, 1) for t in (k, v))
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, keys, values, is_causal=True)

    return Method(call, setting.mine, around=around)


def alone_fa4(setting: Setting) -> Method:
    return Method(fa4, [t.transpose(1, 2).contiguous() for t in setting.whole], together=False)


METHODS: dict[str, Callable[[Setting], Method]] = {
    "fa4": alone_fa4,
    "cudnn": lambda setting: Method(cudnn, setting.whole, together=False),
    "one": one_of_ours,
    "ours": ours,
    "fa4 exchange": lambda setting: plain_exchange(setting, fa4_by_heads),
    "cudnn exchange": lambda setting: plain_exchange(setting, cudnn),
    "flash ring": lambda setting: torch_ring(setting, SDPBackend.FLASH_ATTENTION),
    "cudnn ring": lambda setting: torch_ring(setting, SDPBackend.CUDNN_ATTENTION),
}


def times(method: Method, rank: int, calls: int) -> tuple[float, float]:
    """Seconds of a forward without gradients, and of a forward and backward."""
    runs = rank == 0 or method.together
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
            synchronize()
            seconds.append((time.perf_counter() - begun) / calls)
    return seconds[0], seconds[1]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def start_together() -> float:
    """Wait for a moment that all ranks agree on, when no device has anything to do."""
    synchronize()
    dist.barrier()
    synchronize()
    start = from_first(time.perf_counter() + 2e-3)
    while time.perf_counter() < start:
        pass
    return start


def from_first(number: float) -> float:
    """The first rank's number, on all ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    told = torch.tensor(number, dtype=torch.float64, device=device)
    dist.broadcast(told, 0)
    return told.item()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def measure(
    setting: Setting, names: list[str], rounds: int, over: Callable[[], bool]
) -> dict[str, Any]:
    """Seconds of each method on one case (forward; both), or why there are none."""
    found: dict[str, Any] = {}
    for name in names:
        if over():
            found[name] = "left out, the time is over"
            continue
        said = ""
        try:
            method = METHODS[name](setting)
            times(method, setting.rank, 1)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:300]
        every: list[Any] = [None] * setting.ranks
        dist.all_gather_object(every, said)
        if any(every):
            found[name] = next(words for words in every if words)
            continue
        pairs: list[tuple[float, float]] = []
        while len(pairs) < rounds and not (pairs and over()):
            pairs.append(times(method, setting.rank, setting.case.calls))
        median = [statistics.median(part) for part in zip(*pairs, strict=True)]
        slowest = torch.tensor(median, dtype=torch.float64, device=setting.device)
        if method.together:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found[name] = slowest.tolist()
        if name == "ours" and setting.case.calls == 1:
            found["report"] = said_of(setting, method)
        del method
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def said_of(setting: Setting, method: Method) -> str:
    """Our report; the pairs of the busiest rank under the mask; the difference to one device."""
    report = sharded.ShardedReport()
    q, k, v = (t.detach() for t in setting.mine[:3])
    out = method.call(q, k, v, report=report)
    mine = torch.tensor(float(kept_pairs(setting)), dtype=torch.float64, device=setting.device)
    every = [torch.empty_like(mine) for _ in range(setting.ranks)]
    dist.all_gather(every, mine)
    pairs = torch.stack(every)
    balance = float(pairs.max() * setting.ranks / pairs.sum())
    said = f"{report}; under the mask the busiest rank has {balance:.3f} of an equal share"
    if setting.tokens <= 1 << 17:
        wanted = qa.attention(
            *setting.whole[:3], setting.mask, is_causal=setting.mask is None, enable_gqa=True
        )
        start = sum(setting.sizes[: setting.rank])
        part = wanted[:, :, start : start + out.shape[2]].float()
        said += f"; differs from one device's by {float((out - part).abs().max()):.1e}"
    return said


def kept_pairs(setting: Setting) -> int:
    """Pairs that this rank computes under the mask."""
    from quorum_attention.distributed.partition import Sequences, choose, forward_bytes

    case, starts = setting.case, (0, *accumulate(setting.sizes))
    units: Any = "pairs" if setting.mask is None else "rows"
    # As distributed/attention.py has it: rows of windows and documents are alike.
    leans = case.mask not in ("window", "documents")
    of = Sequences(starts, case.heads, case.kv_heads, leans, units)
    sizes = forward_bytes(case.head_dim, case.head_dim, 2, 4)
    assignment = choose(of, sizes, 4.0 * case.head_dim)
    if setting.mask is None:
        return assignment.pairs(setting.rank)
    above = [0, *setting.row_pairs.cumsum(0).tolist()]
    blocks = [block for stage in assignment.shares[setting.rank] for block in stage]
    return sum(b.heads.length * (above[b.queries.stop] - above[b.queries.start]) for b in blocks)


def table(name: str, found: dict[str, Any], ranks: int) -> list[str]:
    """A line for each method, with its ratios to one device."""
    lines = []
    for method, seconds in found.items():
        if isinstance(seconds, str):
            lines.append(f"{name:14} {method:14} {seconds}")
            continue
        line = f"{name:14} {method:14} {seconds[0] * 1e3:9.2f}; {seconds[1] * 1e3:9.2f} ms"
        for base in _BASES:
            if method not in _BASES and isinstance(found.get(base), list):
                both = [a / b for a, b in zip(found[base], seconds, strict=True)]
                line += f" | {both[0]:.2f}; {both[1]:.2f} times {base}"
                line += f" ({both[0] / ranks:.3f}; {both[1] / ranks:.3f} of linear)"
        lines.append(line)
    return lines


def rank_main(rank: int, ranks: int, given: argparse.Namespace) -> None:
    """All cases on one rank."""
    begun, device = time.perf_counter(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        # So that messages begin while kernels still fill the device.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        dist.init_process_group(
            "nccl", rank=rank, world_size=ranks, device_id=device, pg_options=options
        )
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=ranks)

    def over() -> bool:
        return bool(from_first(time.perf_counter() - begun > given.seconds))

    kind = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    document: dict[str, Any] = {
        "machine": f"{ranks} x {kind}", "torch": torch.__version__,
        "date": datetime.date.today().isoformat(), "cases": {},
    }  # fmt: skip
    target = Path(given.json) if given.json else None
    if target is not None and target.exists():
        document["cases"] = json.loads(target.read_text(encoding="utf-8"))["cases"]
    for name in given.cases.split(","):
        if over():
            say(f"{name}: left out, the time is over")
            continue
        case = CASES[name]
        setting = Setting(case, device, given.divide)
        names = given.methods.split(",") if given.methods else list(case.methods)
        found = measure(setting, names, given.rounds or case.rounds, over)
        document["cases"].setdefault(name, {}).update(found)
        say("\n".join(table(name, found, ranks)))
        if target is not None and rank == 0:
            target.write_text(json.dumps(document, indent=1), encoding="utf-8")
        del setting
    say(f"\n{document['machine']}, torch {torch.__version__}, forward; forward and backward")
    for name, found in document["cases"].items():
        say("\n".join(table(name, found, ranks)))
    dist.destroy_process_group()


def main() -> None:
    """Start a process for each GPU; the first prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="names, with commas")
    parser.add_argument("--methods", default="", help="names, with commas; those of the case")
    parser.add_argument("--rounds", type=int, help="those of the case")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--divide", type=int, default=1, help="tokens of all cases, for a trial")
    parser.add_argument("--json", help="file to write; what it has of other methods stays")
    given = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    os.environ["WORLD_SIZE"] = str(given.ranks)
    torch.multiprocessing.spawn(rank_main, (given.ranks, given), nprocs=given.ranks)


if __name__ == "__main__":
    main()
