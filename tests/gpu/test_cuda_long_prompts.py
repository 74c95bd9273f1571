"""Attention over a cache on the device, in page-locked host memory and in files, on a
GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quorum_attention.long_prompts.attend import attend_segments, compile_kernels
from quorum_attention.long_prompts.host_sharing import HostSharing
from quorum_attention.long_prompts.places import CachePlaces, Place
from quorum_attention.long_prompts.segmented_cache import SegmentedCache
from quorum_attention.long_prompts.segments import concatenate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
HEADS, KEY_HEADS, DIM = 8, 2, 64


def filled_cache(places: CachePlaces, n_tokens: int, batch: int = 1) -> SegmentedCache:
    cache = SegmentedCache(places)
    shape = (batch, KEY_HEADS, n_tokens, DIM)
    key, value = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    cache.append(key, value)
    return cache


def expected_of(query: torch.Tensor, cache: SegmentedCache) -> torch.Tensor:
    """The equations, in float64."""
    key, value = (
        t.double() for t in concatenate(cache.segments(), torch.device("cpu"))
    )
    key = key.repeat_interleave(HEADS // KEY_HEADS, dim=1)
    value = value.repeat_interleave(HEADS // KEY_HEADS, dim=1)
    n_queries, n_keys = query.shape[2], key.shape[2]
    scores = query.cpu().double() @ key.mT * DIM**-0.5
    positions = torch.arange(n_keys - n_queries, n_keys)[:, None]
    scores = scores.masked_fill(torch.arange(n_keys) > positions, -torch.inf)
    return scores.softmax(dim=-1) @ value


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    error = (out.cpu().double() - expected).abs().max().item()
    assert error <= 1e-2 * expected.abs().max().item()


@pytest.mark.parametrize("n_queries", [1, 5, 40, 300])
@pytest.mark.parametrize("device_memory", [0, "6MiB", None])
def test_each_place_is_attended_to(
    device_memory: int | str | None, n_queries: int, tmp_path: Path
) -> None:
    """The bus and the cores share what is in host memory; copies run ahead, layer after
    layer."""
    places = CachePlaces(
        "cuda", device_memory=device_memory, host_memory="20MiB", folder=tmp_path
    )
    caches = [filled_cache(places, 30_000 + 777 * layer) for layer in range(3)]
    sharing = HostSharing(torch.empty(4 << 20, dtype=torch.uint8, device="cuda"))
    for step in range(3):
        for layer, cache in enumerate(caches):
            query = torch.randn(
                1, HEADS, n_queries, DIM, device="cuda", dtype=torch.bfloat16
            )
            following = caches[(layer + 1) % len(caches)].segments()
            out = attend_segments(
                query, cache.segments(), sharing=sharing, next_segments=following
            )
            assert_close(out, expected_of(query, cache))
            if step == 1:
                # What was copied ahead is stale.
                cache.crop(cache.n_tokens - 500)
                sharing.forget()
            new = torch.randn(1, KEY_HEADS, 7, DIM, device="cuda", dtype=torch.bfloat16)
            cache.append(new, new)


def test_host_memory_is_page_locked_and_given_back() -> None:
    """Copies from it run beside compute."""
    places = CachePlaces("cuda", device_memory=0)
    cache = filled_cache(places, 5000)
    assert [segment.place for segment in cache.segments()] == [Place.HOST]
    assert cache.segments()[0].key.is_pinned()
    del cache
    assert places.used(Place.HOST) == 0


@pytest.mark.parametrize("n_moved", [0, 700, 20_000, 30_000])
def test_a_layer_may_lie_in_two_places(n_moved: int) -> None:
    """Its last tokens move to the device, and later ones are appended there."""
    places = CachePlaces("cuda", device_memory=0)
    cache = filled_cache(places, 30_000)
    assert (
        cache.promote(n_moved * cache.token_bytes, 256) == n_moved * cache.token_bytes
    )
    sharing = HostSharing(torch.empty(4 << 20, dtype=torch.uint8, device="cuda"))
    for n_queries in (1, 1, 40, 1):
        new = torch.randn(
            1, KEY_HEADS, n_queries, DIM, device="cuda", dtype=torch.bfloat16
        )
        cache.append(new, new)
        assert cache.segments()[-1].place is Place.DEVICE
        query = torch.randn(
            1, HEADS, n_queries, DIM, device="cuda", dtype=torch.bfloat16
        )
        out = attend_segments(
            query, cache.segments(), sharing=sharing, next_segments=cache.segments()
        )
        assert_close(out, expected_of(query, cache))


def test_questions_share_one_reading() -> None:
    """Rows of several batch entries over one row of keys."""
    cache = filled_cache(CachePlaces("cuda"), 9000)
    cache.repeat_interleave(4)
    suffix = torch.randn(4, KEY_HEADS, 33, DIM, device="cuda", dtype=torch.bfloat16)
    cache.append(suffix, suffix)
    query = torch.randn(4, HEADS, 33, DIM, device="cuda", dtype=torch.bfloat16)
    assert_close(attend_segments(query, cache.segments()), expected_of(query, cache))


@pytest.mark.parametrize("n_queries", [1, 64])
def test_what_was_compiled_ahead_serves_the_first_token(
    n_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled while a prompt is computed, for all numbers of keys."""
    from triton import knobs

    from quorum_attention.long_prompts import decode_triton

    for kernel in (
        decode_triton.attend_splits_kernel,
        decode_triton.merge_splits_kernel,
    ):
        kernel.device_caches.clear()
    caches = [
        filled_cache(CachePlaces("cuda", device_memory=0), n) for n in (30_000, 9_111)
    ]
    query = torch.randn(1, HEADS, n_queries, DIM, device="cuda", dtype=torch.bfloat16)
    compile_kernels(query, caches[0].segments()[0].key.cuda())
    compiled: list[str] = []
    hook = lambda **named: compiled.append(str(named["repr"]))  # noqa: E731
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    sharing = HostSharing(torch.empty(4 << 20, dtype=torch.uint8, device="cuda"))
    for cache in caches:
        out = attend_segments(query, cache.segments(), sharing=sharing)
        assert_close(out, expected_of(query, cache))
    assert compiled == []
