"""One call on several devices of a machine, against one of them with the same kernel.

Causal calls from host memory, forward and backward, under budgets of each device; the first of
--rounds is not counted. On CPUs: --devices cpu,cpu --tokens 3000.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from typing import Any

import torch
from measure import medians, timed

import quorum_attention as qa
from quorum_attention.devices import Pool
from quorum_attention.devices.shared_files import alloc_shared


def passes(tensors: list[torch.Tensor], rounds: int, **options: Any) -> tuple[Any, Any]:
    """Seconds of forward and backward, by round; and a sample of the rows of every result."""
    *inputs, grad = tensors
    rows = slice(0, None, max(1, grad.shape[2] // 4096))

    def once() -> tuple[Any, Any]:
        # Results are freed before the next round, as a training loop frees them.
        first, (out, lse) = timed(lambda: qa.attention_with_lse(*inputs, **options))
        second, grads = timed(lambda: qa.attention_backward(grad, *inputs, out, lse, **options))
        return (first, second), [t[:, :, rows].double() for t in (out, *grads)]

    seconds, samples = zip(*(once() for _ in range(rounds)), strict=True)
    return seconds, samples[-1]


def killed(pool: Pool, tensors: list[torch.Tensor], wanted: float, **how: Any) -> float:
    """Seconds of a forward whose last worker is killed in the middle, over what is ideal: then the
    others do all that was left. ``wanted``: seconds of an undisturbed one."""
    timer = threading.Timer(wanted / 2, pool.workers[-1].process.kill)
    timer.start()
    took, _ = timed(lambda: qa.attention(*tensors[:3], devices=pool, **how))
    count = len(pool.workers)
    pool.restart_lost()
    return took / (wanted / 2 * (1 + count / (count - 1)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budgets", default="1GiB,128MiB", help="of each device, by commas")
    parser.add_argument("--devices", default="all", help="by commas")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4, help="calls of each, the first included")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--kill", action="store_true", help="a worker, in the middle of a forward")


def run(options: argparse.Namespace, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each budget; ``found`` has what other numbers of devices took."""
    names = "all" if options.devices == "all" else options.devices.split(",")
    with Pool(names, threads=None if torch.cuda.is_available() else 1) as pool:
        alone = pool.devices[0]
        dtype = torch.float32 if alone == "cpu" else torch.float16
        tensors = [alloc_shared((1, options.heads, options.tokens, 64), dtype) for _ in range(4)]
        for head in (head for tensor in tensors for head in tensor[0]):
            head.copy_(torch.randn(head.shape, device=alone))
        every = found.setdefault("devices", {}).setdefault(str(len(pool.devices)), {})
        for budget in options.budgets.split(","):
            how = {"is_causal": True, "kernel": options.kernel, "budget": budget}
            # One after the other: idle workers unlock their memory after ten seconds. For one
            # device inputs are page-locked, as they are for workers.
            pinned = [t.pin_memory() if torch.cuda.is_available() else t for t in tensors]
            one, right = passes(pinned, options.rounds, devices=alone, **how)
            del pinned
            many, mine = passes(tensors, options.rounds, devices=pool, **how)
            off = max(
                float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, right, strict=True)
            )
            assert off < 1e-2, "a result is wrong"
            every[budget] = {"one": one, "all": many}
            if options.kill:
                ratio = killed(pool, tensors, medians(many[1:])[0], **how)
                every[budget]["killed"] = ratio
                print(f"{budget}: a worker killed in the middle: {ratio:.3f} of ideal", flush=True)
            first, second = (
                a / b for a, b in zip(medians(one[1:]), medians(many[1:]), strict=True)
            )
            print(
                f"{budget}: {first:.3f}; {second:.3f} times one, difference {off:.1e}", flush=True
            )
            yield found
