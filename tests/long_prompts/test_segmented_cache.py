"""A cache in segments is the plain cache: whatever is done to it, and wherever its
tokens lie."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quorum_attention.errors import OutOfMemoryError
from quorum_attention.long_prompts import segmented_cache as segmented_cache_module
from quorum_attention.long_prompts.places import CachePlaces, Place
from quorum_attention.long_prompts.save import SavedLayer, load_layers, save_layers
from quorum_attention.long_prompts.segmented_cache import SegmentedCache
from quorum_attention.long_prompts.segments import concatenate
from quorum_attention.long_prompts.token_blocks import TokenBlock

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5


def tokens(batch: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (batch, HEADS, n)
    return torch.randn(*shape, KEY_DIM), torch.randn(*shape, VALUE_DIM)


class PlainCache:
    """The referee: one tensor, copied for every operation."""

    def __init__(self) -> None:
        self.key = torch.empty(0)
        self.value = torch.empty(0)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        is_empty = self.key.numel() == 0
        self.key = key.clone() if is_empty else torch.cat((self.key, key), dim=2)
        self.value = (
            value.clone() if is_empty else torch.cat((self.value, value), dim=2)
        )

    @property
    def n_tokens(self) -> int:
        return self.key.shape[2] if self.key.numel() else 0

    def crop(self, n: int) -> None:
        if self.n_tokens:
            self.key = self.key[:, :, :n].clone()
            self.value = self.value[:, :, :n].clone()

    def select(self, indices: list[int]) -> None:
        self.key = self.key[indices]
        self.value = self.value[indices]

    def fork(self) -> PlainCache:
        copy = PlainCache()
        copy.key = self.key.clone()
        copy.value = self.value.clone()
        return copy


def assert_same(cache: SegmentedCache, plain: PlainCache) -> None:
    assert cache.n_tokens == plain.n_tokens
    segments = cache.segments()
    assert sum(segment.n_tokens for segment in segments) == plain.n_tokens
    if plain.n_tokens:
        key, value = concatenate(segments, torch.device("cpu"))
        assert torch.equal(key, plain.key)
        assert torch.equal(value, plain.value)


def save_and_load(cache: SegmentedCache, folder: Path) -> None:
    """Replace a cache's tokens by saved ones."""
    save_layers(folder, [SavedLayer("full", cache.segments())], model="a")
    (layer,) = load_layers(folder, model="a")
    cache.reset()
    for segment in layer.segments:
        cache.adopt(segment)


def change(
    drawn: random.Random,
    cache: SegmentedCache,
    plain: PlainCache,
    batch: int,
    folder: Path,
) -> int:
    """Make one random change to both; returns the batch after it."""
    n = plain.n_tokens
    kinds = ["append"] * 6 + ["crop", "reorder", "repeat", "select", "reset", "save"]
    kinds += ["promote"] * 2
    kind = drawn.choice(kinds)
    if kind == "append" or n == 0:
        key, value = tokens(batch, drawn.choice([1, 1, 1, 2, 7, 300]))
        cache.append(key, value)
        plain.append(key, value)
    elif kind == "crop":
        left = drawn.choice([0, n, n - 1, drawn.randint(0, n)])
        cache.crop(left)
        plain.crop(left)
    elif kind == "reorder":
        indices = [drawn.randrange(batch) for _ in range(batch)]
        cache.select(torch.tensor(indices))
        plain.select(indices)
    elif kind == "repeat" and batch <= 3:
        cache.repeat_interleave(2)
        plain.select([entry for entry in range(batch) for _ in range(2)])
        return 2 * batch
    elif kind == "select":
        indices = drawn.sample(range(batch), drawn.randint(1, batch))
        cache.select(torch.tensor(indices))
        plain.select(indices)
        return len(indices)
    elif kind == "promote":
        n_bytes = drawn.choice([0, 300, drawn.randrange(20_000)])
        cache.promote(n_bytes, drawn.choice([0, 1, 9]))
    elif kind == "save":
        save_and_load(cache, folder / "saved")
    elif kind == "reset":
        cache.reset()
        plain.__init__()  # type: ignore[misc]
    return batch


def run_history(seed: int, folder: Path) -> None:
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    device_memory = drawn.choice([0, 20_000, None])
    places = CachePlaces(device_memory=device_memory, folder=folder / "segments")
    places._limits[Place.HOST] = drawn.choice([0, 0, None])
    caches = [(SegmentedCache(places), PlainCache(), drawn.randint(1, 3))]
    for _ in range(drawn.randint(5, 40)):
        at = drawn.randrange(len(caches))
        cache, plain, batch = caches[at]
        if drawn.random() < 0.15 and len(caches) < 4:
            caches.append((cache.fork(), plain.fork(), batch))
        else:
            caches[at] = (cache, plain, change(drawn, cache, plain, batch, folder))
        for cache, plain, _ in caches:
            assert_same(cache, plain)
    del caches, cache, plain
    assert all(places.used(place) == 0 for place in Place)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("first", range(0, 600, 50))
def test_random_histories_are_those_of_a_plain_cache(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is shared must not be written to, and each cache sees its own
    tokens."""
    monkeypatch.setattr(segmented_cache_module, "_MIN_BLOCK_TOKENS", 4)
    monkeypatch.setattr(segmented_cache_module, "_TOKEN_STEP", 4)
    monkeypatch.setattr(segmented_cache_module, "_MAX_REORDERED_TOKENS", 16)
    for seed in range(first, first + 50):
        run_history(seed, tmp_path)
    assert not list((tmp_path / "segments").iterdir())


def test_single_tokens_do_not_make_a_segment_each() -> None:
    """Attention over a thousand segments of one token would be a thousand calls."""
    cache = SegmentedCache(CachePlaces())
    for _ in range(1000):
        cache.append(*tokens(1, 1))
    assert len(cache.segments()) <= 4


def test_appending_and_forking_copy_nothing_that_is_there() -> None:
    """A prefix of gigabytes is shared by many questions."""
    cache = SegmentedCache(CachePlaces())
    cache.append(*tokens(1, 300))
    address = cache.segments()[0].key.data_ptr()
    forked = cache.fork()
    forked.append(*tokens(1, 300))
    cache.append(*tokens(1, 300))
    cache.repeat_interleave(3)
    assert cache.segments()[0].key.data_ptr() == address
    assert forked.segments()[0].key.data_ptr() == address
    assert cache.segments()[0].key.shape[0] == 1


@pytest.mark.parametrize("n_tokens", [1, 2000])
def test_a_fork_appends_while_another_one_does(
    n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another thread: both found room behind the same tokens, and wrote there."""
    cache = SegmentedCache(CachePlaces("cpu"))
    prompt = tokens(1, 1000)
    cache.append(*prompt)
    forks = [cache.fork(), cache.fork()]
    questions = [tokens(1, n_tokens), tokens(1, n_tokens)]
    write = TokenBlock.write
    waiting = [1]

    def write_second(self: TokenBlock, *args: Any) -> None:
        if waiting:
            forks[1].append(*questions[waiting.pop()])
        write(self, *args)

    monkeypatch.setattr(TokenBlock, "write", write_second)
    forks[0].append(*questions[0])
    for fork, question in zip(forks, questions, strict=True):
        key, value = concatenate(fork.segments(), torch.device("cpu"))
        assert torch.equal(key, torch.cat([prompt[0], question[0]], dim=2))
        assert torch.equal(value, torch.cat([prompt[1], question[1]], dim=2))


def test_a_reserved_prompt_is_one_segment() -> None:
    """Prefill hands keys over in tiles, and attention over one piece of memory is
    fastest."""
    cache = SegmentedCache(CachePlaces())
    cache.reserve(1000)
    for _ in range(10):
        cache.append(*tokens(1, 100))
    assert len(cache.segments()) == 1


def test_tokens_go_from_place_to_place(tmp_path: Path) -> None:
    """What does not fit in memory goes to files; what fits nowhere is refused."""
    cache = SegmentedCache(CachePlaces(device_memory=64 << 10, folder=tmp_path))
    cache.append(*tokens(2, 2000))
    places = [segment.place for segment in cache.segments()]
    assert places == [Place.DEVICE, Place.FILE]
    small = SegmentedCache(CachePlaces(device_memory=64 << 10))
    small.append(*tokens(2, 100))
    with pytest.raises(OutOfMemoryError, match="folder="):
        small.append(*tokens(2, 2000))
    assert small.n_tokens == 100


def test_what_does_not_fit_is_refused_by_name() -> None:
    """A wrong shape is an error before anything is written."""
    cache = SegmentedCache(CachePlaces())
    key, value = tokens(2, 4)
    cache.append(key, value)
    with pytest.raises(ValueError, match="key and value must be"):
        cache.append(key, value[:, :, :3])
    with pytest.raises(TypeError, match="one floating-point dtype"):
        cache.append(key, value.double())
    with pytest.raises(ValueError, match="the cache holds tokens of"):
        cache.append(key[:1], value[:1])
    with pytest.raises(ValueError, match="2 batch entries"):
        cache.select([0, 2])
