"""Answer questions about one long text on a small GPU: the text is computed once.

pip install ".[transformers]"
python examples/long_prompt.py    # a small model with random weights, on any machine
python examples/long_prompt.py --tokens 256K --memory 24GiB    # on a GPU
python examples/long_prompt.py --model FOLDER --text FILE --ask "Who did it?"

Without ``--model`` weights and text are random: what is shown is memory and time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from quorum_attention.recipes import long_prompt
from quorum_attention.units import parse_count

SHAPES: dict[str, dict[str, int]] = {
    "Qwen3-4B": {
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "small": {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def new_model(folder: str | None, device: str) -> Any:
    """The model in a folder, or one with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if folder is not None:
        return (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        )
    shape = SHAPES["Qwen3-4B" if device == "cuda" else "small"]
    config = Qwen3Config(
        **shape, max_position_embeddings=1 << 21, tie_word_embeddings=True
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def new_texts(
    options: argparse.Namespace, model: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Ids of the text and of each question, (1, tokens)."""
    if options.model is None:
        n_ids = model.config.vocab_size
        text = torch.randint(1, n_ids, (1, options.tokens), device=model.device)
        return text, [
            torch.randint(1, n_ids, (1, 16), device=model.device) for _ in range(2)
        ]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    contents = Path(options.text).read_text(encoding="utf-8")

    def ids_of(words: str) -> torch.Tensor:
        ids: torch.Tensor = tokenizer(words, return_tensors="pt").input_ids
        return ids.to(model.device)

    return ids_of(contents), [ids_of(f"\n\n{question}\n") for question in options.ask]


def main() -> None:
    """Compute the text, then each answer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="of Transformers, with its tokenizer (default: random weights)",
    )
    parser.add_argument("--text", metavar="FILE", help="that the questions are about")
    parser.add_argument(
        "--ask",
        action="append",
        default=[],
        metavar="QUESTION",
        help="may be given several times",
    )
    parser.add_argument(
        "--tokens",
        type=parse_count,
        default=2000,
        help="of a random text, if there is no model (default: 2000)",
    )
    parser.add_argument(
        "--memory", help="of the device, such as 16GiB (default: what is free)"
    )
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = new_model(options.model, device)
    text, questions = new_texts(options, model)

    cache = long_prompt(model, device_memory=options.memory)
    began = time.perf_counter()
    with torch.no_grad():
        model(text, past_key_values=cache, logits_to_keep=1)
    print(f"{text.shape[1]:,} tokens in {time.perf_counter() - began:.1f} s")
    print(cache)
    for question in questions:
        ids = torch.cat([text, question], 1)
        began = time.perf_counter()
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache.fork(),
            max_new_tokens=options.answer,
        )
        seconds = time.perf_counter() - began
        answer = result[0, ids.shape[1] :]
        print(
            f"{len(answer)} tokens of an answer in {seconds:.1f} s: "
            f"{described(options, answer)}"
        )


def described(options: argparse.Namespace, answer: torch.Tensor) -> str:
    """An answer in words, or its ids where there is no tokenizer."""
    if options.model is None:
        return str(answer.tolist())
    from transformers import AutoTokenizer

    words: str = AutoTokenizer.from_pretrained(options.model).decode(answer)
    return words


if __name__ == "__main__":
    main()
