"""Memory of a cache is taken ahead, and tokens move to the device when a prompt is
done."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.errors import OutOfMemoryError
from quorum_attention.long_prompts.places import CachePlaces, Place
from quorum_attention.long_prompts.segmented_cache import SegmentedCache


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


def cache_in_host_memory(places: CachePlaces) -> tuple[SegmentedCache, torch.Tensor]:
    """1,600 tokens in two blocks of host memory, and their keys."""
    cache = SegmentedCache(places)
    key, value = tokens(1600)
    cache.append(key[:, :, :500], value[:, :, :500])
    cache.append(key[:, :, 500:], value[:, :, 500:])
    return cache, key


@pytest.mark.parametrize("n_moved", [0, 1, 700, 1100, 1599, 1600])
def test_the_last_tokens_move_to_the_device_and_later_ones_follow(n_moved: int) -> None:
    """What stays in host memory is a prefix, and later tokens are not copied there."""
    places = host_places()
    cache, key = cache_in_host_memory(places)
    value = everything(cache)[1]
    n_bytes = n_moved * cache.token_bytes + cache.token_bytes - 1
    assert cache.promote(n_bytes, 64) == n_moved * cache.token_bytes
    new_key, new_value = tokens(50)
    cache.append(new_key, new_value)
    assert torch.equal(everything(cache)[0], torch.cat([key, new_key], 2))
    assert torch.equal(everything(cache)[1], torch.cat([value, new_value], 2))
    segments = cache.segments()
    n_by_place = dict.fromkeys(Place, 0)
    for segment in segments:
        n_by_place[segment.place] += segment.n_tokens
    assert n_by_place[Place.DEVICE] == n_moved + 50
    assert [segment.place for segment in segments][-1] is Place.DEVICE
    assert cache.is_on_device == (n_moved == 1600)
    if n_moved == 1600:
        assert places.used(Place.HOST) == 0


def test_tokens_behind_those_that_moved_are_removed_and_come_again() -> None:
    """Assisted generation crops: down into what stayed in host memory too."""
    cache, key = cache_in_host_memory(host_places())
    cache.promote(100 * cache.token_bytes, 64)
    for n_kept in (1550, 1500, 1499, 30):
        cache.crop(n_kept)
        new_key, new_value = tokens(3)
        cache.append(new_key, new_value)
        assert torch.equal(everything(cache)[0][:, :, :n_kept], key[:, :, :n_kept])
        assert torch.equal(everything(cache)[0][:, :, n_kept:], new_key)
        cache.crop(n_kept)


def test_tokens_of_another_cache_stay_where_they_are() -> None:
    """A fork reads the same memory. Later tokens of each go to the device."""
    cache, key = cache_in_host_memory(host_places())
    forked = cache.fork()
    for each in (cache, forked):
        assert each.promote(1 << 30, 64) == 0
        new_key, new_value = tokens(5)
        each.append(new_key, new_value)
        assert torch.equal(everything(each)[0], torch.cat([key, new_key], 2))
        assert [s.place for s in each.segments()][-1] is Place.DEVICE


def test_a_device_without_room_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    places = host_places()
    cache, key = cache_in_host_memory(places)

    def refuse(n_bytes: int) -> torch.Tensor:
        raise OutOfMemoryError("no room")

    monkeypatch.setattr(places, "_device_memory", refuse)
    assert cache.promote(1 << 30, 64) == 0
    assert torch.equal(everything(cache)[0], key)
    assert all(segment.place is Place.HOST for segment in cache.segments())
