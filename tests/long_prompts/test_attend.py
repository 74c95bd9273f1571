"""Attention over segments against float64: every mask, shape and dtype, wherever
segments lie."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from quorum_attention.long_prompts import attend, cores
from quorum_attention.long_prompts.attend import attend_segments
from quorum_attention.long_prompts.places import CachePlaces, Place
from quorum_attention.long_prompts.segmented_cache import SegmentedCache
from quorum_attention.long_prompts.segments import Segment, concatenate

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


def draw(seed: int, folder: Path, device: str = "cpu") -> Drawn:
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    dtype = drawn.choice(list(TOLERANCES))
    batch = drawn.choice([1, 1, 2, 3])
    key_heads = drawn.choice([1, 2, 3])
    group = drawn.choice([1, 1, 2, 4])
    dim = drawn.choice([1, 8, 16, 40, 64, 72, 128])
    value_dim = drawn.choice([dim, dim, 16, 24])
    device_memory = drawn.choice([None, None, 0, 60_000])
    places = CachePlaces(device, device_memory=device_memory, folder=folder)
    cache = SegmentedCache(places)
    for _ in range(drawn.randint(1, 4)):
        n = drawn.choice([1, 2, 3, 17, 64, 100, 300, 700])
        shape = (cache.batch or batch, key_heads, n)
        # Models hand over views of token-major tensors.
        key = torch.randn(shape[0], n, key_heads, dim).transpose(1, 2)
        value = torch.randn(*shape, value_dim).to(dtype)
        cache.append(key.to(device, dtype), value.to(device))
        if drawn.random() < 0.2:
            cache.repeat_interleave(2)
        elif drawn.random() < 0.2:
            cache.select([drawn.randrange(cache.batch) for _ in range(cache.batch)])
    batch = cache.batch
    n_queries = min(cache.n_tokens, drawn.choice([1, 1, 1, 2, 5, 33]))
    query = (
        torch.randn(batch, n_queries, key_heads * group, dim)
        .to(device, dtype)
        .transpose(1, 2)
    )
    options: dict[str, object] = {}
    if drawn.random() < 0.3:
        options["softmax_scale"] = drawn.choice([0.0, 0.1, 1.0])
    if drawn.random() < 0.3:
        options["softcap"] = drawn.choice([0.5, 30.0])
    if drawn.random() < 0.3:
        options["sinks"] = torch.randn(key_heads * group, device=device)
    if drawn.random() < 0.3:
        options["window"] = drawn.choice([1, 2, 50, 400, 10_000])
    if drawn.random() < 0.4:
        padding = torch.ones(batch, cache.n_tokens, dtype=torch.bool)
        for row in padding:
            row[: drawn.choice([0, 3, 90, cache.n_tokens])] = False
        options["key_padding"] = padding.to(device)
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
    query = drawn.query.double().cpu()
    sinks = None if sinks is None else sinks.cpu()
    key_padding = None if key_padding is None else key_padding.cpu()
    key, value = (
        t.double() for t in concatenate(drawn.cache.segments(), torch.device("cpu"))
    )
    group = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    n_queries = query.shape[2]
    n_keys = key.shape[2]
    scores = (
        query
        @ key.mT
        * (query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    )
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


def check(seed: int, folder: Path, device: str = "cpu") -> None:
    drawn = draw(seed, folder, device)
    out = attend_segments(drawn.query, drawn.cache.segments(), **drawn.options)  # type: ignore[arg-type]
    expected = expected_of(drawn, **drawn.options)  # type: ignore[arg-type]
    assert out.dtype == drawn.query.dtype
    assert out.shape == expected.shape
    tolerance = TOLERANCES[out.dtype]
    error = (out.double().cpu() - expected).abs().max().item() if out.numel() else 0.0
    assert error <= tolerance * max(1.0, expected.abs().max().item()), (seed, error)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_random_calls_are_the_equations(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments are merged exactly, whatever is masked and however tensors lie."""
    # As with many threads: keys are cut into blocks, and some are left.
    monkeypatch.setattr(
        cores, "_n_blocks", lambda n_heads, n_keys: max(1, min(5, n_keys // 16))
    )
    monkeypatch.setattr(attend, "_MANY_QUERIES", 20)
    for seed in range(first, first + 100):
        check(seed, tmp_path)


@pytest.fixture
def threads() -> Iterator[None]:
    """Run with two threads, for which the keys of a head are cut into blocks."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("value_dim", [32, 16])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("n_infinite", [300, 1300, 1500])
def test_keys_with_scores_of_minus_infinity_have_no_weight(
    n_infinite: int, is_padded: bool, value_dim: int
) -> None:
    """torch's operator gives a block of such keys a log-sum-exp of 0; merged with other
    blocks, results had been wrong. The equations had returned NaN."""
    torch.manual_seed(0)
    query = torch.rand(1, 1, 1, 32)
    key = torch.randn(1, 1, 1500, 32)
    key[:, :, :n_infinite] = -torch.inf
    value = torch.randn(1, 1, 1500, value_dim)
    segment = Segment(key, value, Place.HOST)
    padding = torch.ones(1, 1500, dtype=torch.bool) if is_padded else None
    if padding is not None:
        padding[:, :10] = False
    out = attend_segments(query, [segment], key_padding=padding)
    behind = slice(n_infinite, None)
    scores = query.double() @ key[:, :, behind].double().mT / 32**0.5
    expected = scores.softmax(-1) @ value[:, :, behind].double()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("n_keys", [1, 3, 2000])
def test_a_score_of_nan_or_infinity_is_seen_in_the_output(
    n_keys: int, number: float
) -> None:
    """torch's operator returns 0 for it where keys are few."""
    query = torch.ones(1, 1, 1, 32)
    key = torch.zeros(1, 1, n_keys, 32)
    key[:, :, -1] = number
    out = attend_segments(query, [Segment(key, key.clone().zero_(), Place.HOST)])
    assert out.isnan().all()


def test_what_does_not_fit_is_refused_by_name() -> None:
    """An error that names the argument, before any work."""
    cache = SegmentedCache(CachePlaces())
    key = torch.randn(2, 2, 9, 8)
    cache.append(key, key)
    segments = cache.segments()
    query = torch.randn(2, 4, 3, 8)
    with pytest.raises(ValueError, match="query must be"):
        attend_segments(query[0], segments)
    with pytest.raises(ValueError, match="at least one segment"):
        attend_segments(query, [])
    with pytest.raises(ValueError, match="does not fit keys"):
        attend_segments(query[:1], segments)
    with pytest.raises(TypeError, match="the cache holds"):
        attend_segments(query.double(), segments)
    with pytest.raises(ValueError, match="at most as many tokens"):
        attend_segments(query.expand(2, 4, 3, 8).repeat(1, 1, 4, 1), segments)
    with pytest.raises(ValueError, match="key_padding must be"):
        attend_segments(query, segments, key_padding=torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="sinks must be"):
        attend_segments(query, segments, sinks=torch.zeros(2))
