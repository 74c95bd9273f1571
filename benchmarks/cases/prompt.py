"""A long prompt in little device memory: seconds of the prefill and of each token after
it.

The model has a published shape in bf16 and random weights; on a CPU a small shape runs
in a minute. It answers by ``generate``. A short prompt comes first, so that kernels are
compiled. Each row runs in a process of its own, whose device memory is limited to
--memory, and which has --timeout seconds. A row that runs out of memory says so.

Ways, --ways chooses some:

sdpa: SDPA, the cache of Transformers on the device.
offloaded: SDPA, the cache of Transformers in host memory, a layer on the device at a
time.
chunks: the same, the prompt in chunks of 4,096 tokens, as ``prefill_chunk_size`` has
it.
heads: HeadInfer's scheme: keys and values in host memory, one key/value head on the
device at a time; the prompt in chunks.
long_context: ``long_context(model)`` with the offloaded cache.
ours: ``long_prompt(model)``; with --weights host the layers' weights are in host
memory. Beside each figure stands what ``quorum-attention estimate`` says. With
--questions, so many questions of 64 tokens about the prompt follow, one after the other
and as a batch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quorum_attention.units import format_bytes, parse_bytes, parse_count

WAYS = ("sdpa", "offloaded", "chunks", "heads", "long_context", "ours")
ROW = Path(__file__).resolve().parents[1] / "prompt_row.py"
MAX_REASON = 300


def add_options(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", default="Qwen3-4B" if on_gpu else "small")
    parser.add_argument("--layers", type=int, help="of the model; default: all")
    parser.add_argument("--tokens", default="128K,256K" if on_gpu else "1K,2K")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("24GiB"))
    parser.add_argument("--weights", choices=("device", "host"), default="device")
    parser.add_argument("--host-memory", type=parse_bytes, help="for the cache")
    parser.add_argument("--folder", help="for the part of the cache that lies in files")
    parser.add_argument(
        "--generate", type=int, default=8, help="tokens after the prompt's first"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="answers; medians are shown"
    )
    parser.add_argument("--questions", type=int, default=0, help="about the prompt")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of a row")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure row by row."""
    ways = options.ways.split(",")
    for count in options.tokens.split(","):
        tokens = parse_count(count)
        for way in ways:
            row = measure_row(options, way, tokens)
            print(f"{tokens:>9,} {way:13} {describe(row)}", flush=True)
            yield {row_name(options, way, tokens): row}


def row_name(options: argparse.Namespace, way: str, tokens: int) -> str:
    """The name of a row: shape, tokens, memory and way."""
    words = [f"{options.shape} {tokens} {format_bytes(options.memory)} {way}"]
    if options.layers is not None:
        words.append(f"{options.layers} layers")
    if options.weights == "host":
        words.append("weights in host memory")
    return ", ".join(words)


def measure_row(options: argparse.Namespace, way: str, tokens: int) -> dict[str, Any]:
    """Run a row in a process of its own."""
    row = {
        "way": way,
        "tokens": tokens,
        "shape": options.shape,
        "layers": options.layers,
        "memory": options.memory,
        "weights": options.weights,
        "host_memory": options.host_memory,
        "folder": options.folder,
        "generate": options.generate,
        "repeats": options.repeats,
        "questions": options.questions if way == "ours" else 0,
        "timeout": options.timeout,
    }
    command = [sys.executable, str(ROW), json.dumps(row)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = process.stdout.splitlines() or ["{}"]
    result: dict[str, Any] = json.loads(lines[-1])
    if process.returncode != 0:
        print(process.stderr, file=sys.stderr, flush=True)
        last_lines = process.stderr.strip().splitlines()[-1:] or ["no word"]
        result["failed"] = last_lines[0][:MAX_REASON]
    return result


def describe(row: dict[str, Any]) -> str:
    """Some lines about a row."""
    words = [str(row["failed"])] if "failed" in row else []
    if "prefill_seconds" in row:
        peak = format_bytes(row["peak_bytes"])
        weights = format_bytes(row["weights_bytes"])
        words.append(
            f"prefill {row['prefill_seconds']:.2f} s, {row['token_seconds']:.4f} s a "
            f"token, peak {peak}, of which weights {weights}"
        )
    if "estimated" in row:
        estimated = row["estimated"]
        peak = format_bytes(estimated["device_bytes"])
        words.append(
            f"estimated {estimated['prefill_seconds']:.2f} s, "
            f"{estimated['token_seconds']:.4f} s a token, peak {peak}"
        )
    if "question_seconds" in row:
        seconds = ", ".join(f"{seconds:.2f}" for seconds in row["question_seconds"])
        words.append(
            f"questions {seconds} s; as a batch {row['batch_seconds']:.2f} s, "
            f"{row['batch_token_seconds']:.4f} s a token"
        )
    return "\n          ".join(words)
