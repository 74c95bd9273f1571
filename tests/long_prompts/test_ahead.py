"""Memory of a cache is taken ahead, and tokens move to the device when a prompt is
done."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quorum_attention.long_prompts.places import CachePlaces, Place
from quorum_attention.long_prompts.segments import SegmentedCache


def host_places() -> CachePlaces:
    """Places without a device: all tokens lie in host memory."""
    places = CachePlaces("cpu")
    places._limits = {Place.DEVICE: 0, Place.HOST: None}
    return places


def tokens(n_tokens: int, dim: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, n_tokens, dim), torch.randn(1, 2, n_tokens, dim)


def everything(cache: SegmentedCache) -> tuple[torch.Tensor, torch.Tensor]:
    segments = cache.segments()
    keys = torch.cat([segment.key for segment in segments], 2)
    return keys, torch.cat([segment.value for segment in segments], 2)


def test_prepared_memory_is_what_tokens_are_written_to() -> None:
    cache = SegmentedCache(host_places())
    key, value = tokens(700)
    assert not cache.prepare(key, value, Place.HOST), "nothing is reserved"
    cache.reserve(700)
    assert not cache.prepare(key, value, Place.DEVICE), "the device has no room"
    assert cache.prepare(key, value, Place.HOST)
    assert not cache.prepare(key, value, Place.HOST), "it has memory"
    taken = cache.taken_bytes
    assert taken >= key.nbytes + value.nbytes
    assert cache.n_tokens == 0
    for start in (0, 300, 600):
        cache.append(key[:, :, start : start + 300], value[:, :, start : start + 300])
    assert cache.taken_bytes == taken
    assert len(cache.segments()) == 1
    assert torch.equal(everything(cache)[0], key)


def test_prepared_memory_of_other_tokens_is_given_back() -> None:
    cache = SegmentedCache(host_places())
    cache.reserve(300)
    assert cache.prepare(*tokens(1), Place.HOST)
    key, value = tokens(300, dim=8)
    cache.append(key, value)
    assert torch.equal(everything(cache)[1], value)


@pytest.mark.parametrize("obstacle", [None, "fork", "device"])
def test_tokens_move_to_the_device_if_they_are_one_caches_alone(obstacle: Any) -> None:
    places = host_places()
    cache = SegmentedCache(places)
    key, value = tokens(1600)
    cache.append(key[:, :, :500], value[:, :, :500])
    if obstacle == "device":
        places._limits[Place.DEVICE] = None
    cache.append(key[:, :, 500:], value[:, :, 500:])
    forked = cache.fork() if obstacle == "fork" else None
    is_free = obstacle is None
    assert cache.promote() == is_free
    assert torch.equal(everything(cache)[0], key)
    assert torch.equal(everything(cache)[1], value)
    if is_free:
        assert places.used(Place.HOST) == 0
        assert [segment.place for segment in cache.segments()] == [Place.DEVICE]
    if forked is not None:
        assert torch.equal(everything(forked)[0], key)
