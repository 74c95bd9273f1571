"""Quorum attention inside models of Hugging Face Transformers, on one GPU, with random weights.

    python benchmarks/inside.py [--only error,overhead,graphs] [--tokens N] [--json FILE]

``error``: attention of gpt-oss's shape (64 heads over 8, 64 wide, sinks; all keys, and a window of
128) in bf16, ours and Transformers' FlexAttention, against float64: the norm of the output's error
by the norm of the output. Sinks as fresh ones are (near 0) and as large as the rows' own
log-sum-exp, where half of a row's weight goes to its sink, as much of it does in trained models.
``overhead``: a training step of a model of Qwen3's shape (4 layers as wide as the 8B model's), of
8,192 tokens, ours beside SDPA, in turn, medians; SDPA as torch chooses, and held to each of its
kernels.
``graphs``: of compiled models, graph breaks, and recompilations over five lengths. ``--device cpu``
runs small sizes to see that it works (the errors are the formula's in float32 there).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

import quorum_attention as qa
from quorum_attention.integrations.transformers import register
from quorum_attention.sizes import parse_count
from quorum_attention.writing import write_text

_ROUNDS = 9
_SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4096},
    "cpu": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256},
}  # fmt: skip


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp without sinks, in float64, head by head."""
    n, shared = q.shape[2], q.shape[1] // k.shape[1]
    at = torch.arange(n, device=q.device)
    apart = at[:, None] - at
    masked = apart < 0
    if window is not None:
        masked |= apart >= window
    outs, lses = [], []
    for head in range(q.shape[1]):
        scores = q[0, head].double() @ k[0, head // shared].double().T / math.sqrt(q.shape[-1])
        scores.masked_fill_(masked, -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        total = torch.logaddexp(lse, sinks[head].double())
        outs.append((scores - total).exp_() @ v[0, head // shared].double())
        lses.append(lse[:, 0])
    return torch.stack(outs)[None], torch.stack(lses)[None]


def error(tokens: int, device: str, out: Console) -> list[dict[str, Any]]:
    from transformers.integrations.flex_attention import flex_attention_forward

    heads, kv_heads, width = (64, 8, 64) if device == "cuda" else (4, 2, 16)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(1, h, tokens, width, device=device).to(dtype)
        for h in (heads, kv_heads, kv_heads)
    )
    rows = []
    for window in (None, 128):
        fresh = (torch.randn(heads, device=device) * 0.02).to(dtype)
        typical = exact(q, k, v, window, fresh)[1].mean((0, 2)).to(dtype)
        for kind, sinks in (("fresh", fresh), ("as large as lse", typical)):
            wanted = exact(q, k, v, window, sinks)[0]

            def off(found: torch.Tensor, wanted: torch.Tensor = wanted) -> float:
                return ((found - wanted).norm() / wanted.norm()).item()

            mask = qa.Mask(
                causal=True, window=None if window is None else (window - 1, -1), sinks=sinks
            )
            row: dict[str, Any] = {"window": window, "sinks": kind, "tokens": tokens}
            row["quorum"] = off(qa.attention(q, k, v, attn_mask=mask, enable_gqa=True))
            # No way of bf16 has less: the exact output, rounded once.
            row["rounded"] = off(wanted.to(dtype))
            if device == "cuda":
                row["flex"] = off(flexed(flex_attention_forward, q, k, v, window, sinks))
                row["of_flex"] = row["quorum"] / row["flex"]
            rows.append(row)
            out.print(row)
    return rows


def flexed(
    forward: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """FlexAttention as Transformers calls it."""
    from torch.nn.attention.flex_attention import create_block_mask

    def keeps(b: Any, h: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        del b, h
        return (j <= i) if window is None else (j <= i) & (i - j < window)

    module = torch.nn.Module().eval()
    blocks = create_block_mask(keeps, None, None, q.shape[2], k.shape[2], device=q.device)
    with torch.no_grad():
        found: torch.Tensor = forward(module, q, k, v, blocks, s_aux=sinks)[0]
    return found.transpose(1, 2)


def overhead(tokens: int, device: str, out: Console) -> dict[str, Any]:
    config = transformers.Qwen3Config(
        **_SHAPES[device], num_hidden_layers=4, use_cache=False, max_position_embeddings=1 << 20
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.train()
    ids = torch.randint(config.vocab_size, (1, tokens), device=device)
    ways: dict[str, tuple[str, list[SDPBackend] | None]] = {
        "quorum": (register(), None), "sdpa": ("sdpa", None)
    }  # fmt: skip
    if device == "cuda":
        ways["sdpa, cudnn"] = ("sdpa", [SDPBackend.CUDNN_ATTENTION])
        ways["sdpa, flash"] = ("sdpa", [SDPBackend.FLASH_ATTENTION])
    times: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(_ROUNDS + 1):
        for way, (name, backends) in ways.items():
            model.set_attn_implementation(name)
            held = sdpa_kernel(backends) if backends else contextlib.nullcontext()
            wait(device)
            began = time.perf_counter()
            with held:
                model(input_ids=ids, labels=ids).loss.backward()
            wait(device)
            if round_:
                times[way].append(time.perf_counter() - began)
            model.zero_grad(set_to_none=True)
    row: dict[str, Any] = {"tokens": tokens, "layers": 4}
    row["seconds"] = {way: statistics.median(found) for way, found in times.items()}
    row["of_sdpa"] = row["seconds"]["quorum"] / row["seconds"]["sdpa"]
    row["of_the_best_sdpa"] = row["seconds"]["quorum"] / min(
        seconds for way, seconds in row["seconds"].items() if way != "quorum"
    )
    out.print(row)
    return row


def graphs(device: str, out: Console) -> list[dict[str, Any]]:
    from torch._dynamo.utils import counters

    rows = []
    for kind, more in (
        ("llama", {}),
        ("mistral", {"sliding_window": 64}),
        ("gemma3_text", {"sliding_window": 64,
                         "layer_types": ["sliding_attention", "full_attention"]}),
    ):  # fmt: skip
        config = transformers.CONFIG_MAPPING[kind](
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, use_cache=False, **more,
        )  # fmt: skip
        ways = [(name, padded) for name in (register(min_tokens=0), "sdpa") for padded in (1, 0)]
        for name, padded in ways:
            torch.compiler.reset()
            counters.clear()
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
            compiled = torch.compile(model, backend="aot_eager")
            for tokens in (300, 250, 200, 350, 400):
                ids = torch.randint(96, (1, tokens), device=device)
                given = {"attention_mask": torch.ones_like(ids)} if padded else {}
                compiled(input_ids=ids, **given).logits.sum().backward()
            row = {
                "model": kind,
                "attention": name,
                "attention_mask": bool(padded),
                "graph_breaks": sum(counters["graph_break"].values()),
                "reasons": list(counters["graph_break"]),
                "frames_compiled": counters["frames"]["ok"],
                "graphs": counters["stats"]["unique_graphs"],
            }
            rows.append(row)
            out.print(row)
    return rows


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="error,overhead,graphs")
    parser.add_argument("--tokens", type=parse_count, help="8,192 of overhead, 4,096 of error")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    out = Console(width=120)
    chosen = options.only.split(",")
    found: dict[str, Any] = {
        "torch": torch.__version__, "transformers": transformers.__version__,
        "version": qa.__version__,
    }  # fmt: skip
    if options.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    if "error" in chosen:
        found["error"] = error(options.tokens or 4096, options.device, out)
    if "overhead" in chosen:
        found["overhead"] = overhead(options.tokens or 8192, options.device, out)
    if "graphs" in chosen:
        found["graphs"] = graphs(options.device, out)
    if options.json:
        write_text(options.json, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
