"""Saved caches: whole or not at all, and nothing that is not ours is opened."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes import warm_forks
from safetensors.torch import save_file

from quorum_attention.long_prompts import save
from quorum_attention.long_prompts.places import CachePlaces, Place
from quorum_attention.long_prompts.save import SavedLayer, load_layers, save_layers
from quorum_attention.long_prompts.segmented_cache import SegmentedCache
from quorum_attention.long_prompts.segments import concatenate

HOST = torch.device("cpu")


def filled_cache(n_tokens: int, places: CachePlaces | None = None) -> SegmentedCache:
    cache = SegmentedCache(places or CachePlaces())
    cache.append(torch.randn(2, 3, n_tokens, 4), torch.randn(2, 3, n_tokens, 6))
    return cache


def layers_of(*caches: SegmentedCache) -> list[SavedLayer]:
    return [
        SavedLayer("full", cache.segments(), {"n": cache.n_tokens}) for cache in caches
    ]


def assert_same(layer: SavedLayer, cache: SegmentedCache) -> None:
    key, value = concatenate(layer.segments, HOST)
    expected_key, expected_value = concatenate(cache.segments(), HOST)
    assert torch.equal(key, expected_key)
    assert torch.equal(value, expected_value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64]
)
def test_what_is_loaded_is_what_was_saved(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of several pieces, rows that entries share, layers without tokens,
    numbers."""
    monkeypatch.setattr(save, "_PIECE_BYTES", 1000)
    cache = SegmentedCache(CachePlaces())
    cache.append(torch.randn(1, 3, 50, 4).to(dtype), torch.randn(1, 3, 50, 6).to(dtype))
    cache.repeat_interleave(2)
    cache.append(torch.randn(2, 3, 9, 4).to(dtype), torch.randn(2, 3, 9, 6).to(dtype))
    save_layers(tmp_path / "book", [*layers_of(cache), SavedLayer("none")], model="a")
    full, none = load_layers(tmp_path / "book", model="a")
    assert len(full.segments) > 2
    assert {segment.place for segment in full.segments} == {Place.FILE}
    assert full.numbers == {"n": 59}
    assert (none.kind, list(none.segments)) == ("none", [])
    assert_same(full, cache)
    adopted = SegmentedCache(CachePlaces())
    for segment in full.segments:
        adopted.adopt(segment)
    assert_same(SavedLayer("full", adopted.segments()), cache)


def test_files_that_are_mapped_are_never_written_to(tmp_path: Path) -> None:
    """A cache goes on from a saved one, is cropped and reordered; the files stay."""
    cache = filled_cache(40)
    save_layers(tmp_path, layers_of(cache), model="a")
    for _ in range(2):
        (layer,) = load_layers(tmp_path, model="a")
        again = SegmentedCache(CachePlaces())
        for segment in layer.segments:
            again.adopt(segment)
        again.crop(33)
        again.select([1, 0])
        again.append(torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 5, 6))
        again.select([1, 1])
        assert_same(layer, cache)
    (layer,) = load_layers(tmp_path, model="a")
    assert_same(layer, cache)


def test_a_cache_saves_over_the_files_that_it_maps(tmp_path: Path) -> None:
    """The second day's save replaces the first day's."""
    cache = filled_cache(40)
    save_layers(tmp_path, layers_of(cache), model="a")
    (layer,) = load_layers(tmp_path, model="a")
    save_layers(tmp_path, [layer], model="a")
    assert_same(load_layers(tmp_path, model="a")[0], cache)
    assert len(list(tmp_path.glob("data-*"))) == 1


@pytest.mark.parametrize("at", range(4))
def test_an_interrupted_save_leaves_the_old_one(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file it was at."""
    first, second = filled_cache(10), filled_cache(20)
    save_layers(tmp_path, layers_of(first, first), model="a")
    calls = iter(range(100))

    def fail(*_: object, **__: object) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt

    def save_or_fail(*args: object, **named: object) -> None:
        fail()
        save_file(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(save, "save_file", save_or_fail)
    monkeypatch.setattr(save, "sync_directory", fail)
    monkeypatch.setattr(save, "write_text", fail)
    with pytest.raises(KeyboardInterrupt):
        save_layers(tmp_path, layers_of(second, second), model="a")
    monkeypatch.undo()
    for layer in load_layers(tmp_path, model="a"):
        assert_same(layer, first)
    assert len(list(tmp_path.glob("data-*"))) == 1


def test_an_interrupt_behind_the_manifest_leaves_the_new_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files were removed while the manifest named them, and the old ones were named
    no more: both saves were lost."""
    first, second = filled_cache(10), filled_cache(20)
    save_layers(tmp_path, layers_of(first), model="a")
    write_text = save.write_text

    def write_and_fail(*args: Any) -> None:
        write_text(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(save, "write_text", write_and_fail)
    with pytest.raises(KeyboardInterrupt):
        save_layers(tmp_path, layers_of(second), model="a")
    monkeypatch.undo()
    assert_same(load_layers(tmp_path, model="a")[0], second)
    save_layers(tmp_path, layers_of(first), model="a")
    assert_same(load_layers(tmp_path, model="a")[0], first)
    assert len(list(tmp_path.glob("data-*"))) == 1


def _save_again_and_again(folder: str, saved: Connection) -> None:
    """Save caches of a number each, which is sent when its save is done."""
    for number in range(1000):
        cache = SegmentedCache(CachePlaces())
        tensor = torch.full((1, 2, 500, 16), float(number))
        cache.append(tensor, tensor)
        layers = [SavedLayer("full", cache.segments())] * 4
        save_layers(folder, layers, model="a")
        saved.send(number)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("seed", range(12))
def test_a_killed_save_leaves_the_old_one(seed: int, tmp_path: Path) -> None:
    """A process that is killed at any moment; the next save removes what it left."""
    drawn = random.Random(seed)
    folder = tmp_path / "cache"
    context = warm_forks()
    receiver, sender = context.Pipe(duplex=False)
    arguments = (str(folder), sender)
    process = context.Process(target=_save_again_and_again, args=arguments)
    process.start()
    sender.close()
    n_saved = receiver.recv()
    time.sleep(drawn.random() * 0.3)
    process.kill()
    process.join()
    with suppress(EOFError):
        while True:
            n_saved = receiver.recv()
    receiver.close()
    layers = load_layers(folder, model="a")
    numbers = {
        float(segment.key.min()) for layer in layers for segment in layer.segments
    }
    assert len(layers) == 4
    assert numbers <= {float(n_saved), float(n_saved + 1)}
    assert len(numbers) == 1
    cache = filled_cache(3)
    save_layers(folder, layers_of(cache), model="a")
    assert_same(load_layers(folder, model="a")[0], cache)
    assert len(list(folder.glob("data-*"))) == 1


def test_a_save_while_a_cache_is_loaded_gives_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process saved behind the manifest's reading, and removed the files that it
    names: they were "missing or torn", or there was "No such file"."""
    first, second = filled_cache(10), filled_cache(20)
    save_layers(tmp_path, layers_of(first), model="a")
    read_manifest = save._read_manifest

    def read_and_save(path: Path) -> Any:
        manifest = read_manifest(path)
        monkeypatch.undo()
        save_layers(tmp_path, layers_of(second), model="a")
        return manifest

    monkeypatch.setattr(save, "_read_manifest", read_and_save)
    assert_same(load_layers(tmp_path, model="a")[0], second)


def test_what_is_torn_or_foreign_is_refused_by_name(tmp_path: Path) -> None:
    """Before anything is computed with it."""
    with pytest.raises(FileNotFoundError, match="no saved cache"):
        load_layers(tmp_path / "nothing", model="a")
    save_layers(tmp_path, layers_of(filled_cache(10)), model="a")
    with pytest.raises(ValueError, match="another model"):
        load_layers(tmp_path, model="b")
    (file,) = tmp_path.glob("data-*/*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=file.name):
        load_layers(tmp_path, model="a")
    file.write_bytes(b"\xff" * len(content))
    with pytest.raises(ValueError, match=file.name):
        load_layers(tmp_path, model="a")
    save_file({"key": torch.zeros(1), "value": torch.zeros(1)}, file)
    manifest = tmp_path / "manifest.json"
    entries = json.loads(manifest.read_text())
    entries["layers"][0]["pieces"][0]["bytes"] = file.stat().st_size
    manifest.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="another save"):
        load_layers(tmp_path, model="a")
    entries["layers"][0]["pieces"][0]["file"] = "../../secret.safetensors"
    manifest.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="another kind"):
        load_layers(tmp_path, model="a")
    for text in ("", "{}", "[]", "[" * 100_000, '{"format": 3}'):
        manifest.write_text(text)
        with pytest.raises(ValueError, match="manifest"):
            load_layers(tmp_path, model="a")


def test_a_folder_of_other_files_is_not_written_to(tmp_path: Path) -> None:
    """Somebody's photographs."""
    (tmp_path / "photo.png").touch()
    with pytest.raises(FileExistsError, match=r"photo\.png"):
        save_layers(tmp_path, layers_of(filled_cache(3)), model="a")
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]


def test_another_programs_manifest_is_not_written_to(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"name": "an extension"}')
    with pytest.raises(FileExistsError, match=r"manifest\.json is not the manifest"):
        save_layers(tmp_path, layers_of(filled_cache(3)), model="a")
    assert manifest.read_text() == '{"name": "an extension"}'


def test_what_a_kill_left_of_a_manifest_is_no_obstacle(tmp_path: Path) -> None:
    unfinished = tmp_path / "manifest.json.e24b443c.unfinished"
    unfinished.touch()
    save_layers(tmp_path, layers_of(filled_cache(3)), model="a")
    assert not unfinished.exists()
    assert load_layers(tmp_path, model="a")
