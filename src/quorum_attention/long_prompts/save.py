"""Keys and values in a folder: a manifest in JSON, and safetensors files of pieces of
layers.

A save writes its files into a new subfolder and replaces the manifest at the end. So a
save that is interrupted leaves the one before, or nothing; or, if it was at its end, is
there. Loading maps the files: it reads headers alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quorum_attention.long_prompts.places import Place
from quorum_attention.long_prompts.segments import Segment
from quorum_attention.plain_types import JsonObject
from quorum_attention.writing import (
    UNFINISHED,
    open_regular,
    sync_directory,
    write_text,
)

_MANIFEST = "manifest.json"
_FORMAT = "quorum-attention cache 1"
# A manifest is bounded before it is parsed.
_MAX_MANIFEST_BYTES = 64 << 20
# The bytes of a file: they are copied once in host memory before they are written.
_PIECE_BYTES = 256 << 20
_DATA_FOLDER = re.compile(r"data-[0-9a-f]{16}")
_UNFINISHED = re.compile(re.escape(_MANIFEST) + r"\.\w+" + re.escape(UNFINISHED))
_DATA_FILE = re.compile(r"layer-\d{5}-piece-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class SavedLayer:
    """The tokens of a layer, as they are saved.

    Attributes:
        kind: a word that says what the layer is.
        segments: in order of position; none: no tokens.
        numbers: further numbers of the layer, by name.
    """

    kind: str
    segments: Sequence[Segment] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)


def save_layers(
    folder: str | os.PathLike[str], layers: Sequence[SavedLayer], *, model: str
) -> None:
    """Save the layers of a cache. What was saved in the folder before is replaced at
    the end.

    Args:
        folder: which is made if it does not exist.
        layers: of a model.
        model: a text that only caches of the same model and dtype share.

    Raises:
        FileExistsError: the folder holds files, but no cache.
        OSError: the files cannot be written. What was saved before is still there.
    """
    target = Path(folder)
    _check_layers(layers)
    _check_target_folder(target)
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(target):
        _save_into(target, layers, model)


def _check_layers(layers: Sequence[SavedLayer]) -> None:
    """Refuse layers of which some have more tokens than others.

    Raises:
        ValueError: they are of a prompt that was not finished.
    """
    counts = set()
    for layer in layers:
        # Layers that read another layer's tokens have none.
        if layer.kind == "full" and layer.segments:
            counts.add(sum(segment.n_tokens for segment in layer.segments))
    if len(counts) > 1:
        raise ValueError(
            f"layers must have the same number of tokens, got {min(counts)} to "
            f"{max(counts)}: a prompt was not finished; reset() the cache"
        )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process at a time save into a folder."""
    descriptor = os.open(target, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _save_into(target: Path, layers: Sequence[SavedLayer], model: str) -> None:
    save_id = secrets.token_hex(8)
    data = target / f"data-{save_id}"
    data.mkdir(mode=0o700)
    try:
        entries = [
            _save_layer(data, at, layer, save_id) for at, layer in enumerate(layers)
        ]
        sync_directory(data)
        manifest = {
            "format": _FORMAT,
            "model": model,
            "save_id": save_id,
            "layers": entries,
        }
        write_text(target / _MANIFEST, json.dumps(manifest, indent=1))
    except BaseException:
        # An interrupt may come when the manifest has its name already.
        if not _is_saved(target, save_id):
            shutil.rmtree(data, ignore_errors=True)
        raise
    _remove_other_data(target, data)


def _is_saved(target: Path, save_id: str) -> bool:
    """Whether a folder's manifest is that of a save."""
    try:
        return bool(_read_manifest(target / _MANIFEST)["save_id"] == save_id)
    except (OSError, ValueError):
        return False


def _check_target_folder(target: Path) -> None:
    """Refuse a folder of other files.

    Raises:
        FileExistsError: it holds files, but no cache.
    """
    if not target.exists():
        return
    manifest = target / _MANIFEST
    if manifest.exists():
        try:
            _read_manifest(manifest)
        except ValueError:
            raise FileExistsError(
                f"{manifest} is not the manifest of a saved cache: name another folder"
            ) from None
        return
    names = [path.name for path in target.iterdir()]
    foreign = [name for name in names if not _is_ours(name)]
    if foreign:
        raise FileExistsError(
            f"{target} holds other files, such as {min(foreign)}: name another"
        )


def _is_ours(name: str) -> bool:
    """Whether a name is one of data, or of a manifest whose writing was interrupted."""
    return bool(_DATA_FOLDER.fullmatch(name) or _UNFINISHED.fullmatch(name))


def _remove_other_data(target: Path, data: Path) -> None:
    """Remove what earlier saves left, finished or not."""
    for path in target.iterdir():
        if path == data or path.is_symlink():
            continue
        if _DATA_FOLDER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _save_layer(data: Path, at: int, layer: SavedLayer, save_id: str) -> JsonObject:
    """Write the files of a layer; return its entry in the manifest."""
    pieces = []
    cut = (segment.cut(_PIECE_BYTES) for segment in layer.segments)
    for number, piece in enumerate(chain.from_iterable(cut)):
        name = f"layer-{at:05d}-piece-{number:05d}.safetensors"
        path = data / name
        tensors = {
            "key": piece.key.contiguous().cpu(),
            "value": piece.value.contiguous().cpu(),
        }
        try:
            save_file(tensors, path, metadata={"save_id": save_id})
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        _sync_file(path)
        entries = None if piece.entries is None else list(piece.entries)
        pieces.append({"file": name, "bytes": path.stat().st_size, "entries": entries})
    return {"kind": layer.kind, "numbers": dict(layer.numbers), "pieces": pieces}


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def load_layers(folder: str | os.PathLike[str], *, model: str) -> list[SavedLayer]:
    """Open saved layers. Their tensors are mapped files, which nobody may write to.

    Args:
        folder: that ``save_layers`` was given.
        model: as it was given there.

    Returns:
        The layers. Their segments lie in ``Place.FILE``.

    Raises:
        FileNotFoundError: there is no saved cache.
        ValueError: the cache is of another model or dtype; or a file is torn, or not of
            this save; by name.
    """
    source = Path(folder)
    if not (source / _MANIFEST).exists():
        raise FileNotFoundError(f"{source} holds no saved cache")
    while True:
        manifest = _read_manifest(source / _MANIFEST)
        if manifest["model"] != model:
            raise ValueError(
                f"{source} holds a cache of another model, configuration or dtype than "
                "this one"
            )
        save_id = manifest["save_id"]
        data = source / f"data-{save_id}"
        try:
            return [_load_layer(data, entry, save_id) for entry in manifest["layers"]]
        except (OSError, ValueError, RuntimeError):
            # Another process may have saved meanwhile, which removes the files before.
            if _is_saved(source, save_id):
                raise


def _read_manifest(path: Path) -> JsonObject:
    with open_regular(path) as file:
        text = file.read(_MAX_MANIFEST_BYTES + 1)
    try:
        if len(text) > _MAX_MANIFEST_BYTES:
            raise ValueError
        manifest = json.loads(text)
        is_ours = manifest["format"] == _FORMAT
        names_ours = _DATA_FOLDER.fullmatch(f"data-{manifest['save_id']}")
        if not is_ours or not names_ours or not isinstance(manifest["layers"], list):
            raise ValueError
        return {**manifest, "model": str(manifest["model"])}
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(
            f"{path} is not the manifest of a saved cache, or torn"
        ) from None


def _load_layer(data: Path, entry: Any, save_id: str) -> SavedLayer:
    try:
        kind = str(entry["kind"])
        numbers = {str(name): int(number) for name, number in entry["numbers"].items()}
        pieces = [
            (str(p["file"]), int(p["bytes"]), p["entries"]) for p in entry["pieces"]
        ]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"the manifest beside {data} is torn") from None
    segments = [
        _load_piece(data, name, n_bytes, entries, save_id)
        for name, n_bytes, entries in pieces
    ]
    return SavedLayer(kind, segments, numbers)


def _load_piece(
    data: Path, name: str, n_bytes: int, entries: Any, save_id: str
) -> Segment:
    if not _DATA_FILE.fullmatch(name):
        raise ValueError(
            f"the manifest beside {data} names a file of another kind: {name!r}"
        )
    path = data / name
    if not path.is_file() or path.stat().st_size != n_bytes:
        raise ValueError(f"{path} is missing or torn: it should have {n_bytes} bytes")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            key = file.get_tensor("key")
            value = file.get_tensor("value")
    except SafetensorError as error:
        raise ValueError(f"{path} is torn: {error}") from None
    if metadata.get("save_id") != save_id:
        raise ValueError(f"{path} is of another save")
    if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
        raise ValueError(f"{path} does not hold keys and values")
    return Segment(
        key, value, Place.FILE, _checked_entries(entries, key.shape[0], path)
    )


def _checked_entries(entries: Any, rows: int, path: Path) -> tuple[int, ...] | None:
    if entries is None:
        return None
    is_list = isinstance(entries, list) and all(type(row) is int for row in entries)
    if not is_list or not all(0 <= row < rows for row in entries):
        raise ValueError(f"the manifest names rows that {path} does not have")
    return tuple(entries)
