"""Compiled kernels kept on disk, and launched without Triton.

Triton keeps what it compiles too. But to find it there a new process imports Triton (0.4 s), reads
and hashes all of Triton's own files (0.3 s; its library has 400 MB) and loads a launcher that a C
compiler made. What is kept here is found by a name that is quick to make: a hash over the kernel's
source, what it is compiled for, the kind of device, and what tells one installation of Triton from
another. A file that is not complete, or not of exactly that, is not used; nor is one whose kernel
does not take the parameters that it will be given.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import struct
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quorum_attention.kernels.cuda_driver import Driver
from quorum_attention.kernels.launches import Launch
from quorum_attention.kernels.stages import PLACES
from quorum_attention.writing import cache_folder, replacing

# Changes when the format of a file, or what a name is made of, changes.
_FORMAT = 1
_FOLDER = "binaries"
# Most files of the folder: the oldest go first.
_MOST = 256
SOURCES = {
    "merge": "merge_triton.py", "add": "merge_triton.py", "norm": "scaling_triton.py",
    "divide": "scaling_triton.py",
}  # fmt: skip
"""The file that each kernel is written in."""
# Launched without asking for more.
_MOST_SHARED_BYTES = 48 << 10
_CODES = {"pointer": "Q", "i32": "i", "fp32": "f"}


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel.

    Attributes:
        name: of the function in it.
        parameters: "pointer", "i32" or "fp32" each, in order.
        multiples: those of them that it takes for multiples of 16.
        warps: of each program.
        shared: bytes of shared memory of each program.
        cubin: the code.
    """

    name: str
    parameters: tuple[str, ...]
    multiples: tuple[int, ...]
    warps: int
    shared: int
    cubin: bytes


# --- From Triton ------------------------------------------------------------------------------


def binary_of(compiled: Any, launch: Launch) -> Binary | None:
    """What Triton compiled for ``launch``; None where it is not as simple as it is expected to be.

    Args:
        compiled: Triton's ``CompiledKernel``, or what ``stages.compiled`` returns.
    """
    try:
        return _read_compiled(compiled, len(launch.arguments), len(launch.constants))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return None  # another Triton


def _read_compiled(compiled: Any, n_arguments: int, n_constants: int) -> Binary | None:
    about, source = compiled.metadata, compiled.src
    kinds = list(source.signature.values())
    if len(kinds) != n_arguments + n_constants:
        return None
    compiled_in = {at for (at,) in source.constants}
    if compiled_in != set(range(n_arguments, len(kinds))):
        return None  # a number was 1, and is a constant now
    multiples = []
    for (at,), properties in source.attrs.items():
        if properties not in ([], [["tt.divisibility", 16]]):
            return None
        if properties:
            multiples.append(at)
    parameters = tuple("pointer" if kind[0] == "*" else kind for kind in kinds[:n_arguments])
    plain = (
        all(kind in _CODES for kind in parameters)
        and about.num_ctas == 1
        and about.shared <= _MOST_SHARED_BYTES
        and not about.global_scratch_size
        and not getattr(about, "profile_scratch_size", 0)
        and not getattr(about, "launch_cooperative_grid", False)
        and not getattr(about, "launch_pdl", False)
        and tuple(getattr(about, "cluster_dims", None) or (1, 1, 1)) == (1, 1, 1)
        and about.target.backend == "cuda"
    )
    if not plain:
        return None
    cubin = compiled.asm["cubin"]
    return Binary(
        about.name, parameters, tuple(sorted(multiples)), about.num_warps, about.shared, cubin
    )


# --- On disk ----------------------------------------------------------------------------------


def keep(launch: Launch, device: torch.device, binary: Binary) -> None:
    """Keep it for other processes. What cannot be written is not kept."""
    named = _named(launch, device)
    if named is None:
        return
    about = asdict(binary) | {"of": named}
    del about["cubin"]
    content = json.dumps(about).encode() + b"\n" + binary.cubin
    with suppress(OSError):
        path = _path(named)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False) as file:
            file.write(_digest(content) + b"\n" + content)
        _remove_oldest(path.parent)


def find(launch: Launch, device: torch.device) -> Binary | None:
    """What is kept for ``launch`` on ``device`` (CUDA); None: nothing, or nothing sound."""
    named = _named(launch, device)
    if named is None:
        return None
    try:
        digest, content = _path(named).read_bytes().split(b"\n", 1)
        if digest != _digest(content):
            return None
        head, cubin = content.split(b"\n", 1)
        about = json.loads(head)
        if about.pop("of") != named:
            return None
        about |= {name: tuple(about[name]) for name in ("parameters", "multiples")}
        return Binary(**about, cubin=cubin)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _path(named: str) -> Path:
    return cache_folder() / _FOLDER / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.bin"


def _remove_oldest(folder: Path) -> None:
    files = [entry for entry in os.scandir(folder) if entry.name.endswith(".bin")]
    if len(files) > _MOST:
        by_age = sorted(files, key=lambda entry: entry.stat().st_mtime)
        for entry in by_age[: len(files) - _MOST]:
            with suppress(OSError):
                os.unlink(entry.path)


def _named(launch: Launch, device: torch.device) -> str | None:
    """All that the code depends on, as text; None where nothing is kept."""
    installed = _triton()
    if installed is None or os.environ.get("TRITON_INTERPRET", "0") != "0":
        return None
    settings = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith("TRITON_") and name not in PLACES
    )
    kinds = [str(kind) for kind in launch.kinds]
    what = (launch.kernel, kinds, launch.constants, torch.cuda.get_device_capability(device))
    return repr((_FORMAT, *what, _source(SOURCES[launch.kernel]), installed, settings))


@functools.cache
def _source(name: str) -> str:
    return hashlib.sha256((Path(__file__).parent / name).read_bytes()).hexdigest()


@functools.cache
def _triton() -> tuple[object, ...] | None:
    """What tells this installation of Triton from others, without importing it."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    own = Path(found.origin)
    try:
        files = [own, *sorted((own.parent / "_C").glob("libtriton*"))]
        return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    except OSError:
        return None


# --- Launched ---------------------------------------------------------------------------------


class Loaded:
    """A kept kernel on a device, ready to be launched.

    Args:
        device: number of the device; it is current.

    Raises:
        RuntimeError: the driver cannot load it.
        ValueError: it does not take the parameters that it is described with.
    """

    def __init__(self, driver: Driver, device: int, binary: Binary) -> None:
        self._driver, self._device = driver, device
        self._shared, self._threads = binary.shared, 32 * binary.warps
        self._multiples = binary.multiples
        self._tensors = [i for i, kind in enumerate(binary.parameters) if kind == "pointer"]
        self._function = driver.load(device, binary.cubin, binary.name)
        taken = driver.parameters(self._function)
        # Triton adds pointers to memory for itself. This kernel needs none, and does not read them.
        added = len(taken) - len(binary.parameters)
        codes = [_CODES[kind] for kind in binary.parameters] + ["Q"] * added
        given = [
            # "0Q" aligns as Q does, and takes no bytes.
            (struct.calcsize("".join(codes[:i]) + f"0{code}"), struct.calcsize(code))
            for i, code in enumerate(codes)
        ]
        if not 0 <= added <= 2 or taken != given:
            raise ValueError(f"{binary.name} takes {taken}, not {given}")
        self._layout = struct.Struct("".join(codes))
        self._offsets = [offset for offset, _ in taken]
        self._zeros = (0,) * added
        self._spare: deque[tuple[Any, Any]] = deque()

    def launch(self, programs: int, arguments: list[Any]) -> bool:
        """Launch it on the current stream. False: it was not compiled for such numbers.

        Args:
            arguments: as of ``Launch``; not changed.
        """
        values = [*arguments, *self._zeros]
        for i in self._tensors:
            values[i] = values[i].data_ptr()
        for i in self._multiples:
            if values[i] % 16:
                return False
        try:
            frame = self._spare.pop()
        except IndexError:
            frame = self._frame()
        buffer, pointers = frame
        try:
            self._layout.pack_into(buffer, 0, *values)
        except (struct.error, OverflowError):
            return False  # a number of more than 32 bits
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._driver.launch(self._function, programs, self._threads, self._shared, stream, pointers)
        # The driver has copied it.
        self._spare.append(frame)
        return True

    def _frame(self) -> tuple[Any, Any]:
        """Memory for the parameters of a launch, and pointers to each."""
        buffer = ctypes.create_string_buffer(self._layout.size)
        start = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(self._offsets))(*(start + at for at in self._offsets))
        return buffer, pointers
