"""Kept kernels: found only for exactly what they were compiled for, and launched as compiled."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quorum_attention.kernels import binaries
from quorum_attention.kernels.binaries import Binary, Loaded
from quorum_attention.kernels.launches import Launch, adding, merging

GPU = torch.device("cuda", 0)
HALF = torch.float16
needs_triton = pytest.mark.skipif(binaries._triton() is None, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a made-up GPU and a made-up Triton."""
    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(binaries, "_triton", lambda: ("here", 1, 2))
    return tmp_path / "cache" / "binaries"


def made(what: Launch, cubin: bytes = b"\x7fELF\n\ncode\n") -> Binary:
    kinds = tuple(
        "pointer" if isinstance(a, torch.Tensor) else "fp32" if isinstance(a, float) else "i32"
        for a in what.arguments
    )
    multiples = (0, 2) if what.kernel == "merge" else (0, 1)
    return Binary("kernel", kinds, multiples, 4, 1024, cubin)


# --- On disk ----------------------------------------------------------------------------------


def test_what_was_kept_is_found() -> None:
    for what in (merging(HALF, 64), adding(HALF, (64, 64, 64), True)):
        assert binaries.find(what, GPU) is None
        binaries.keep(what, GPU, made(what))
        assert binaries.find(what, GPU) == made(what)
    assert binaries.find(merging(HALF, 128), GPU) is None
    assert binaries.find(merging(torch.bfloat16, 64), GPU) is None


@pytest.mark.parametrize("changed", ["device", "triton", "source", "settings", "interpreter"])
def test_for_anything_else_nothing_is_found(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    what = merging(HALF, 64)
    binaries.keep(what, GPU, made(what))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert binaries.find(what, GPU) is not None
    if changed == "device":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    elif changed == "triton":
        monkeypatch.setattr(binaries, "_triton", lambda: ("here", 1, 3))
    elif changed == "source":
        monkeypatch.setattr(binaries, "_source", lambda name: "another")
    elif changed == "settings":
        monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert binaries.find(what, GPU) is None


def test_no_damaged_file_is_used(folder: Path) -> None:
    """Whatever byte is changed, added or lost: a seventh of them each time."""
    what = merging(HALF, 64)
    binaries.keep(what, GPU, made(what))
    (path,) = folder.glob("*.bin")
    whole = path.read_bytes()
    for at in range(random.randrange(7), len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert binaries.find(what, GPU) is None
        path.write_bytes(whole[:at])
        assert binaries.find(what, GPU) is None
    path.write_bytes(whole + b"x")
    assert binaries.find(what, GPU) is None
    # Sound, but of something else.
    path.write_bytes(whole)
    assert binaries.find(what, GPU) is not None
    other = merging(HALF, 128)
    binaries.keep(other, GPU, made(other))
    (second,) = set(folder.glob("*.bin")) - {path}
    path.write_bytes(second.read_bytes())
    assert binaries.find(what, GPU) is None
    # It is replaced by what is compiled next.
    binaries.keep(what, GPU, made(what))
    assert binaries.find(what, GPU) == made(what)


@pytest.mark.parametrize("head", [b"[]", b"3", b'{"of": 1}', b"{", b""])
def test_nor_one_with_a_head_that_says_nothing(head: bytes, folder: Path) -> None:
    what = merging(HALF, 64)
    binaries.keep(what, GPU, made(what))
    (path,) = folder.glob("*.bin")
    content = head + b"\ncode"
    path.write_bytes(binaries._digest(content) + b"\n" + content)
    assert binaries.find(what, GPU) is None


def test_without_a_place_to_write_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = merging(HALF, 64)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(tmp_path / "file"))
    binaries.keep(what, GPU, made(what))
    assert binaries.find(what, GPU) is None


def test_a_folder_that_may_only_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in it is used; nothing is added."""
    what, other = merging(HALF, 64), merging(HALF, 128)
    binaries.keep(what, GPU, made(what))

    def refused(path: object, **how: object) -> Any:
        raise PermissionError(f"{path} may not be written")

    monkeypatch.setattr(binaries, "replacing", refused)
    binaries.keep(other, GPU, made(other))
    assert binaries.find(other, GPU) is None
    assert binaries.find(what, GPU) == made(what)


def test_several_write_and_read_at_once() -> None:
    """Each reader finds all of one of them, or nothing."""
    what = merging(HALF, 64)
    contents = [bytes([number]) * 300_000 for number in range(4)]
    found: list[bytes | None] = []

    def write(content: bytes) -> None:
        for _ in range(10):
            binaries.keep(what, GPU, made(what, content))
            back = binaries.find(what, GPU)
            found.append(None if back is None else back.cubin)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    assert set(found) <= set(contents)


def test_old_files_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_MOST", 3)
    launches = [merging(HALF, width) for width in (8, 16, 24, 32, 40)]
    for age, what in enumerate(launches):
        binaries.keep(what, GPU, made(what))
        for path in folder.glob("*.bin"):
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
        assert len(list(folder.glob("*.bin"))) == min(3, age + 1)
    assert [binaries.find(what, GPU) is not None for what in launches] == [False] * 2 + [True] * 3


# --- From Triton ------------------------------------------------------------------------------


def compiled(**changed: Any) -> Any:
    """Two pointers, the first taken for a multiple of 16, and a number; two constants."""
    about = {
        "name": "kernel", "num_warps": 4, "num_ctas": 1, "shared": 64, "global_scratch_size": 0,
        "profile_scratch_size": 0, "launch_pdl": False, "launch_cooperative_grid": False,
        "target": SimpleNamespace(backend="cuda"),
    }  # fmt: skip
    source = {
        "signature": {"a": "*fp32", "b": "*i32", "n": "i32", "W": "constexpr", "R": "constexpr"},
        "constants": {(3,): 64, (4,): 128},
        "attrs": {(0,): [["tt.divisibility", 16]], (3,): []},
    }
    about |= {name: value for name, value in changed.items() if name not in source}
    source |= {name: value for name, value in changed.items() if name in source}
    return SimpleNamespace(
        metadata=SimpleNamespace(**about), src=SimpleNamespace(**source), asm={"cubin": b"code"}
    )


SMALL = Launch("merge", 1, [torch.empty(1), torch.empty(1), 3], (64, 128), ())


def test_what_triton_compiled_is_read() -> None:
    found = binaries.binary_of(compiled(), SMALL)
    assert found == Binary("kernel", ("pointer", "pointer", "i32"), (0,), 4, 64, b"code")


@pytest.mark.parametrize(
    "changed",
    [
        {"num_ctas": 2},
        {"shared": 100_000},
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
        {"cluster_dims": (2, 1, 1)},
        {"target": SimpleNamespace(backend="hip")},
        {"signature": {"a": "*fp32", "b": "*i32", "n": "i64", "W": "constexpr", "R": "constexpr"}},
        {"signature": {"a": "*fp32", "b": "*i32", "n": "i32", "W": "constexpr"}},
        {"signature": ["*fp32"] * 5},
        {"constants": {(2,): 1, (3,): 64, (4,): 128}},
        {"constants": {"W": 64, "R": 128}},
        {"attrs": {(0,): [["tt.divisibility", 8]]}},
        {"attrs": "unknown"},
    ],
    ids=str,
)
def test_what_is_not_as_simple_as_expected_is_left_to_triton(changed: dict[str, Any]) -> None:
    assert binaries.binary_of(compiled(**changed), SMALL) is None


CROSS = """
import pathlib, re, subprocess, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Device:
    # A GPU that Triton compiles for, and nobody has.
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

driver.set_active(Device())
from quorum_attention.kernels import launching
from quorum_attention.kernels.binaries import binary_of
from quorum_attention.kernels.launches import adding, dividing, finding_norms, merging
half = torch.float16
cases = merging(half, 64), adding(half, (64,) * 3, True), finding_norms(half, 64)
for what in (*cases, dividing(torch.bfloat16, 128)):
    kernel = launching._in_triton(what.kernel)
    compiled = kernel.warmup(*what.arguments, grid=(1,), **launching._constants(what))
    found = binary_of(compiled, what)
    path = pathlib.Path(sys.argv[1]) / what.kernel
    path.write_bytes(found.cubin)
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "-elf", path], capture_output=True, text=True).stdout
    numbers = re.findall(r"Ordinal : 0x(\\w+)\\s+Offset\\s+: 0x(\\w+)\\s+Size\\s+: 0x(\\w+)", said)
    taken = [(o, n) for _, o, n in sorted(tuple(int(x, 16) for x in each) for each in numbers)]
    print((found.name, found.parameters, found.multiples, taken))
"""


@needs_triton
def test_what_triton_compiles_takes_what_it_will_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for a GPU by the Triton that is here; parameters read from the code itself."""
    # Not imported: in this process Triton interprets, if it is told so before its import; here it
    # is not, and later tests would find its functions to be compiled ones.
    triton = importlib.util.find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    if not (Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump").exists():
        pytest.skip("this Triton has no tool that reads code")
    done = subprocess.run(
        [sys.executable, "-c", CROSS, tmp_path],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [eval(line) for line in done.stdout.splitlines() if line.startswith("(")]
    expected = {
        "_merge_kernel": (4, 15, 0, (0, 2)),
        "_add_kernel": (8, 38, 1, (0, 1, 14, 15, 28, 29)),
        "_norm_kernel": (2, 2, 0, (0, 2)),
        "_divide_kernel": (3, 4, 0, (0, 5)),
    }
    assert [line[0] for line in lines] == list(expected)
    for name, parameters, multiples, taken in lines:
        counts = tuple(parameters.count(kind) for kind in ("pointer", "i32", "fp32"))
        assert (*counts, multiples) == expected[name]
        binary = Binary(name, parameters, multiples, 4, 0, b"")
        loaded = Loaded(FakeDriver(taken), 0, binary)  # type: ignore[arg-type]
        assert len(loaded._zeros) in (0, 1, 2)


# --- Launched ---------------------------------------------------------------------------------


class FakeDriver:
    """Reads what a launch is given as the device would: by the parameters' offsets and sizes."""

    def __init__(self, taken: list[tuple[int, int]]) -> None:
        self.taken = taken
        self.launches: list[tuple[Any, ...]] = []
        self.during = lambda: None

    def load(self, device: int, cubin: bytes, name: str) -> int:
        return 77

    def parameters(self, function: int) -> list[tuple[int, int]]:
        return self.taken

    def launch(self, function: int, *rest: Any) -> None:
        *numbers, pointers = rest
        self.during()
        values = [
            ctypes.string_at(pointer, n_bytes)
            for pointer, (_, n_bytes) in zip(pointers, self.taken, strict=True)
        ]
        self.launches.append((function, *numbers, values))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)


def offsets(kinds: tuple[str, ...], added: int) -> list[tuple[int, int]]:
    """As a compiler lays parameters out: each at a multiple of its size."""
    found, at = [], 0
    for kind in (*kinds, *["pointer"] * added):
        size = 8 if kind == "pointer" else 4
        at = -(-at // size) * size
        found.append((at, size))
        at += size
    return found


@pytest.mark.parametrize("added", [0, 1, 2])
def test_every_parameter_gets_its_value(added: int, stream: None) -> None:
    for what in (merging(HALF, 64), adding(HALF, (64, 40, 64), True)):
        binary = made(what)
        driver = FakeDriver(offsets(binary.parameters, added))
        loaded = Loaded(driver, 0, binary)  # type: ignore[arg-type]
        for programs in (7, 8):
            assert loaded.launch(programs, what.arguments)
        wanted = [
            struct.pack("Q", a.data_ptr())
            if isinstance(a, torch.Tensor)
            else struct.pack("f" if isinstance(a, float) else "i", a)
            for a in what.arguments
        ] + [bytes(8)] * added
        same = (128, 1024, 5, wanted)
        assert driver.launches == [(77, 7, *same), (77, 8, *same)]


def test_a_kernel_that_takes_something_else_is_not_loaded() -> None:
    binary = made(merging(HALF, 64))
    right = offsets(binary.parameters, 0)
    wrong = [right[:-1], [(0, 4), *right[1:]], [*right, (96, 4)], offsets(binary.parameters, 3), []]
    for taken in wrong:
        with pytest.raises(ValueError, match="takes"):
            Loaded(FakeDriver(taken), 0, binary)  # type: ignore[arg-type]


def test_numbers_it_was_not_compiled_for_are_left_to_triton(stream: None) -> None:
    what = merging(HALF, 64)
    binary = made(what)
    driver = FakeDriver(offsets(binary.parameters, 0))
    loaded = Loaded(driver, 0, binary)  # type: ignore[arg-type]
    many = [*what.arguments]
    many[5] = 1 << 31
    assert not loaded.launch(1, many)
    for at, fits in ((0, False), (1, True), (2, False), (3, True)):
        shifted = [*what.arguments]
        whole = shifted[at]
        shifted[at] = torch.empty(whole.numel() + 1, dtype=whole.dtype)[1:]
        assert shifted[at].data_ptr() % 16
        assert loaded.launch(1, shifted) is fits
    assert len(driver.launches) == 2


def test_threads_do_not_share_the_memory_of_a_launch(stream: None) -> None:
    """While one launch waits for the device, another thread makes its own."""
    what = merging(HALF, 64)
    binary = made(what)
    driver = FakeDriver(offsets(binary.parameters, 0))
    loaded = Loaded(driver, 0, binary)  # type: ignore[arg-type]
    other = [*what.arguments[:4], 9, *what.arguments[5:]]

    def meanwhile() -> None:
        driver.during = lambda: None
        thread = threading.Thread(target=loaded.launch, args=(2, other))
        thread.start()
        thread.join()

    driver.during = meanwhile
    assert loaded.launch(1, what.arguments)
    heads = {launch[1]: struct.unpack("i", launch[-1][4])[0] for launch in driver.launches}
    assert heads == {1: 1, 2: 9}
