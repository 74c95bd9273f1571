"""One call on several devices of a machine, against one of them with the same kernel.

Causal calls from host memory, forward and backward, under budgets of each device; the
first two of --rounds are not counted (of two or three, the first). On CPUs: --devices
cpu,cpu --tokens 3000.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from measure import locked_calls, medians, timed

import quorum_attention as qa
from quorum_attention.devices import Pool
from quorum_attention.devices.shared_files import alloc_shared

HEAD_DIM = 64
# Rows of a result that are compared, about.
SAMPLED_ROWS = 4096
MAX_DIFFERENCE = 1e-2
# When a worker is killed, as shares of the time of an undisturbed forward. At a half of
# it the second of four heads ends: just before the kill, or just after it.
MOMENTS = (0.2, 0.4, 0.6, 0.8)
# Calls after which the memory of a worker that has just started is page-locked.
LOCKING_CALLS = 2


class Passes(NamedTuple):
    """Rounds of a call.

    Attributes:
        seconds: of forward and backward, by round.
        samples: rows of every result of the last round, float64.
    """

    seconds: list[tuple[float, float]]
    samples: list[torch.Tensor]


def measure_passes(tensors: list[torch.Tensor], rounds: int, **options: Any) -> Passes:
    seconds = []
    samples: list[torch.Tensor] = []
    for _ in range(rounds):
        round_seconds, samples = measure_round(tensors, **options)
        seconds.append(round_seconds)
    return Passes(seconds, samples)


def measure_round(
    tensors: list[torch.Tensor], **options: Any
) -> tuple[tuple[float, float], list[torch.Tensor]]:
    """Seconds of forward and backward, and rows of the results.

    Results are freed before the next round, as a training loop frees them.
    """
    *inputs, grad_out = tensors

    def run_backward() -> Any:
        return qa.attention_backward(grad_out, *inputs, out, lse, **options)

    forward_seconds, (out, lse) = timed(
        lambda: qa.attention_with_lse(*inputs, **options)
    )
    backward_seconds, grads = timed(run_backward)
    samples = [sample_rows(result) for result in (out, *grads)]
    return (forward_seconds, backward_seconds), samples


def sample_rows(result: torch.Tensor) -> torch.Tensor:
    step = max(1, result.shape[2] // SAMPLED_ROWS)
    return result[:, :, ::step].double()


def killed_over_ideal(
    pool: Pool,
    tensors: list[torch.Tensor],
    expected: torch.Tensor,
    undisturbed: float,
    moment: float,
    **options: Any,
) -> float:
    """Seconds of a forward whose last worker is killed, over what is ideal: then the
    other workers do all that was left. A new worker takes the place of the lost one.

    Args:
        expected: sampled rows of the output.
        undisturbed: seconds of a forward in which no worker is killed.
        moment: when the worker is killed, as a share of ``undisturbed``.
    """
    inputs = tensors[:3]
    for _ in range(LOCKING_CALLS):
        # The next call gets the memory of this output: other numbers than its own are
        # there.
        qa.attention(*inputs, scale=1.0, devices=pool, **options)
    seconds_before = moment * undisturbed
    last_process = pool.workers[-1].process
    threading.Timer(seconds_before, last_process.kill).start()
    seconds, out = timed(lambda: qa.attention(*inputs, devices=pool, **options))
    difference = largest_difference([sample_rows(out)], [expected])
    assert difference < MAX_DIFFERENCE, "a result is wrong after a worker was lost"
    n_workers = len(pool.workers)
    pool.restart_lost()
    seconds_left = undisturbed - seconds_before
    ideal_seconds = seconds_before + seconds_left * n_workers / (n_workers - 1)
    return seconds / ideal_seconds


def largest_difference(
    results: list[torch.Tensor], expected: list[torch.Tensor]
) -> float:
    """The largest difference of a result, as a share of its largest value."""
    return max(
        float((a - b).abs().max() / b.abs().max())
        for a, b in zip(results, expected, strict=True)
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budgets", default="1GiB,128MiB", help="of each device, by commas"
    )
    parser.add_argument("--devices", default="all", help="by commas")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument(
        "--rounds", type=int, default=4, help="calls of each, the first ones included"
    )
    parser.add_argument("--kernel", default="auto")
    parser.add_argument(
        "--kill",
        action="store_true",
        help="a worker, at several moments of a forward, each in a call of its own",
    )


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each budget."""
    names = "all" if options.devices == "all" else options.devices.split(",")
    n_threads = None if torch.cuda.is_available() else 1
    with Pool(names, threads=n_threads) as pool:
        tensors = draw_tensors(options, str(pool.devices[0]))
        for budget in options.budgets.split(","):
            yield measure_budget(pool, tensors, budget, options)


def draw_tensors(options: argparse.Namespace, device: str) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, in memory that workers can
    map."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    shape = (1, options.heads, options.tokens, HEAD_DIM)
    tensors = [alloc_shared(shape, dtype) for _ in range(4)]
    for tensor in tensors:
        for head in tensor[0]:
            head.copy_(torch.randn(head.shape, device=device))
    return tensors


def measure_budget(
    pool: Pool, tensors: list[torch.Tensor], budget: str, options: argparse.Namespace
) -> dict[str, Any]:
    call = {"is_causal": True, "kernel": options.kernel, "budget": budget}
    one_device = pool.devices[0]
    # One after the other: idle workers unlock their memory after ten seconds. For one
    # device inputs are page-locked, as they are for workers.
    on_gpu = torch.cuda.is_available()
    pinned = [tensor.pin_memory() if on_gpu else tensor for tensor in tensors]
    single = measure_passes(pinned, options.rounds, devices=one_device, **call)
    del pinned
    several = measure_passes(tensors, options.rounds, devices=pool, **call)
    difference = largest_difference(several.samples, single.samples)
    assert difference < MAX_DIFFERENCE, "a result is wrong"
    row = f"{len(pool.devices)} device{'s'[: len(pool.devices) - 1]}, {budget}"
    rows: dict[str, Any] = {row: {"one": single.seconds, "all": several.seconds}}
    several_medians = medians(locked_calls(several.seconds))
    if options.kill:
        ratios = []
        for moment in MOMENTS:
            ratio = killed_over_ideal(
                pool, tensors, several.samples[0], several_medians[0], moment, **call
            )
            ratios.append(ratio)
        rows[f"{row}, a worker killed"] = {"over_ideal": ratios, "moments": MOMENTS}
        words = "; ".join(f"{ratio:.3f}" for ratio in ratios)
        middle = statistics.median(ratios)
        print(f"{row}: a worker killed: {words}, median {middle:.3f}", flush=True)
    single_medians = medians(locked_calls(single.seconds))
    forward, backward = (
        a / b for a, b in zip(single_medians, several_medians, strict=True)
    )
    print(
        f"{row}: {forward:.3f}; {backward:.3f} times one, difference {difference:.1e}",
        flush=True,
    )
    return rows
