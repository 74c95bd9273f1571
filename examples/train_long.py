"""Train a model on one long text: attention inside a budget, and all else that makes it
fit.

pip install ".[transformers]"
python examples/train_long.py    # a small model with random weights, on a CPU
python examples/train_long.py --tokens 256K    # on a GPU: Qwen3-8B's shape
python examples/train_long.py --model FOLDER --text FILE    # your weights and text

Adapters (LoRA) are trained, PEFT's where it is installed. With ``--model``, or with
``--out``, they are saved: PEFT's as an adapter, others added to the weights as a model.
Without ``--text`` the text is Python's standard library, by bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quorum_attention.recipes import long_context
from quorum_attention.units import format_bytes, parse_count

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "small": {
        "vocab_size": 8192,
        "hidden_size": 128,
        "intermediate_size": 384,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank one beside it: x W + (x A) B."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.b = nn.Parameter(base.weight.new_empty(base.out_features, rank))
        nn.init.normal_(self.a, std=base.in_features**-0.5)
        nn.init.normal_(self.b, std=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out)."""
        return self.base(x) + x @ self.a.T @ self.b.T  # type: ignore[no-any-return]


def new_model(
    shape: str, rank: int, device: str, folder: str | None = None, *, peft: bool = False
) -> Any:
    """A decoder of that shape with random weights, or the one in ``folder``; adapters
    learn.

    Args:
        shape: a name in ``SHAPES``.
        rank: of the adapters.
        device: "cuda" or "cpu".
        folder: with weights and a configuration.
        peft: whether the adapters are PEFT's where it is installed.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        if folder is None:
            config = Qwen3Config(
                **SHAPES[shape], rope_theta=1e6, max_position_embeddings=1 << 24
            )
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model.config.use_cache = False
        model = with_adapters(model, rank, peft)
    return model.train()


def with_adapters(model: Any, rank: int, peft: bool) -> Any:
    """The model with low-rank adapters of its linear layers; all else is frozen."""
    if peft and importlib.util.find_spec("peft") is not None:
        from peft import LoraConfig, get_peft_model

        names = sorted(
            {name.rpartition(".")[2] for name, _ in model.named_modules()}
            & set(ADAPTED)
        )
        config = LoraConfig(
            r=rank, lora_alpha=rank, target_modules=names, task_type="CAUSAL_LM",
            init_lora_weights="gaussian",
        )  # fmt: skip
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ADAPTED and isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child, rank))
    return model


def save(model: Any, folder: str, tokenizer: Any = None) -> None:
    """Write PEFT's adapter, for ``PeftModel.from_pretrained(model, folder)``; or a
    whole model with its adapters added to the weights, for
    ``AutoModelForCausalLM.from_pretrained(folder)``."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Adapted):
                with torch.no_grad():
                    child.base.weight += child.b @ child.a
                setattr(module, name, child.base)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    print(f"saved in {folder}", flush=True)


def library(tokens: int, device: str) -> torch.Tensor:
    """The first bytes of the standard library's sources, (1, tokens)."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" not in path.parts and len(found) < tokens:
            found += path.read_bytes()
    assert len(found) >= tokens, f"the standard library has {len(found):,} bytes"
    return torch.tensor(found[:tokens], device=device, dtype=torch.int64)[None]


def main() -> None:
    """Train for some steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder with weights and tokenizer")
    parser.add_argument("--text", help="a file; needs --model")
    parser.add_argument(
        "--out", help="a new folder for what was trained (default: FOLDER-trained)"
    )
    parser.add_argument(
        "--tokens", type=parse_count, default=32_768 if device == "cuda" else 2048
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budget", default="5GiB" if device == "cuda" else "16MiB")
    options = parser.parse_args()
    if options.text and not options.model:
        parser.error("--text needs --model, for the tokenizer")
    out = options.out
    if out is None and options.model:
        out = f"{Path(options.model).resolve()}-trained"
    if out is not None and Path(out).exists():
        parser.error(f"--out {out} is there already")
    tokenizer = None
    if options.text:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.model)
        text = Path(options.text).read_text(encoding="utf-8")
        ids = (
            tokenizer(text, return_tensors="pt")
            .input_ids[:, : options.tokens]
            .to(device)
        )
    else:
        ids = library(options.tokens, device)
    model = new_model(
        "Qwen3-8B" if device == "cuda" else "small",
        16,
        device,
        options.model,
        peft=True,
    )
    print(long_context(model, budget=options.budget), flush=True)
    optimizer = torch.optim.AdamW(
        (p for p in model.parameters() if p.requires_grad), lr=1e-3
    )
    for step in range(options.steps):
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took = f"loss {loss.item():.4f}, {time.perf_counter() - began:.1f} s"
        if device == "cuda":
            took += f", {format_bytes(torch.cuda.max_memory_allocated())} at most"
        print(f"step {step + 1}: {ids.shape[1]:,} tokens, {took}", flush=True)
    if out is not None:
        save(model, out, tokenizer)


if __name__ == "__main__":
    main()
