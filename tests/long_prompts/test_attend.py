"""Attention over segments against float64: every mask, shape and dtype, wherever segments lie."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from quorum_attention.long_prompts.attend import attend_segments
from quorum_attention.long_prompts.places import CachePlaces
from quorum_attention.long_prompts.segments import SegmentedCache, concatenate

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 2.5e-2,
    torch.float16: 4e-3,
}


@dataclass
class Drawn:
    """One random call."""

    cache: SegmentedCache
    query: torch.Tensor
    options: dict[str, object]


def draw(seed: int, folder: Path) -> Drawn:
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    dtype = drawn.choice(list(TOLERANCES))
    batch = drawn.choice([1, 1, 2, 3])
    key_heads = drawn.choice([1, 2, 3])
    group = drawn.choice([1, 1, 2, 4])
    dim = drawn.choice([1, 8, 16, 40, 64, 72, 128])
    value_dim = drawn.choice([dim, dim, 16, 24])
    places = CachePlaces(device_memory=drawn.choice([None, None, 0, 60_000]), folder=folder)
    cache = SegmentedCache(places)
    for _ in range(drawn.randint(1, 4)):
        n = drawn.choice([1, 2, 3, 17, 64, 100, 300, 700])
        shape = (cache.batch or batch, key_heads, n)
        # Models hand over views of token-major tensors.
        key = torch.randn(shape[0], n, key_heads, dim).transpose(1, 2)
        cache.append(key.to(dtype), torch.randn(*shape, value_dim).to(dtype))
        if drawn.random() < 0.2:
            cache.repeat_interleave(2)
        elif drawn.random() < 0.2:
            cache.reorder([drawn.randrange(cache.batch) for _ in range(cache.batch)])
    batch = cache.batch
    n_queries = min(cache.n_tokens, drawn.choice([1, 1, 1, 2, 5, 33]))
    query = torch.randn(batch, n_queries, key_heads * group, dim).to(dtype).transpose(1, 2)
    options: dict[str, object] = {}
    if drawn.random() < 0.3:
        options["softmax_scale"] = drawn.choice([0.0, 0.1, 1.0])
    if drawn.random() < 0.3:
        options["softcap"] = drawn.choice([0.5, 30.0])
    if drawn.random() < 0.3:
        options["sinks"] = torch.randn(key_heads * group)
    if drawn.random() < 0.3:
        options["window"] = drawn.choice([1, 2, 50, 400, 10_000])
    if drawn.random() < 0.4:
        padding = torch.ones(batch, cache.n_tokens, dtype=torch.bool)
        for row in padding:
            row[: drawn.choice([0, 3, 90, cache.n_tokens])] = False
        options["key_padding"] = padding
    if drawn.random() < 0.2:
        options["is_causal"] = False
    return Drawn(cache, query, options)


def expected_of(
    drawn: Drawn,
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    key_padding: torch.Tensor | None = None,
    is_causal: bool = True,
) -> torch.Tensor:
    """The equations, in float64."""
    query = drawn.query.double()
    key, value = (t.double() for t in concatenate(drawn.cache.segments(), torch.device("cpu")))
    group = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    n_queries = query.shape[2]
    n_keys = key.shape[2]
    scores = query @ key.mT * (query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(n_keys - n_queries, n_keys)[:, None]
    places = torch.arange(n_keys)[None, :]
    is_kept = torch.ones(query.shape[0], 1, n_queries, n_keys, dtype=torch.bool)
    if is_causal:
        is_kept &= places <= positions
    if window is not None:
        is_kept &= places > positions - window
    if key_padding is not None:
        is_kept &= key_padding[:, None, None]
    scores = scores.masked_fill(~is_kept, -torch.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1).nan_to_num()[..., :n_keys]
    return weights @ value


def check(seed: int, folder: Path) -> None:
    drawn = draw(seed, folder)
    out = attend_segments(drawn.query, drawn.cache.segments(), **drawn.options)  # type: ignore[arg-type]
    expected = expected_of(drawn, **drawn.options)  # type: ignore[arg-type]
    assert out.dtype == drawn.query.dtype
    assert out.shape == expected.shape
    tolerance = TOLERANCES[out.dtype]
    error = (out.double() - expected).abs().max().item() if out.numel() else 0.0
    assert error <= tolerance * max(1.0, expected.abs().max().item()), (seed, error)


@pytest.mark.parametrize("first", range(0, 3000, 150))
def test_random_calls_are_the_equations(first: int, tmp_path: Path) -> None:
    """Segments are merged exactly, whatever is masked and however tensors lie."""
    for seed in range(first, first + 150):
        check(seed, tmp_path)
