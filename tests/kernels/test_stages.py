"""By its stages alone Triton makes the code that it makes in its usual way, and builds no tools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quorum_attention.kernels import binaries, stages
from quorum_attention.kernels.launches import Launch, merging

needs_triton = pytest.mark.skipif(binaries._triton() is None, reason="Triton is not installed")

# In a process of its own: kernels are compiled, not interpreted, for a device that is not here.
COMPARES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from quorum_attention.kernels import launches, launching, stages
from quorum_attention.kernels.binaries import binary_of

class NotHere:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

half = torch.float16
whats = [
    launches.merging(half, 64), launches.adding(half, (64, 64, 64), True),
    launches.finding_norms(half, 64), launches.dividing(torch.bfloat16, 64),
    launches.merging(torch.bfloat16, 40), launches.adding(torch.bfloat16, (40, 40, 24), False),
]
mine = []
for what in whats:
    kernel = launching._in_triton(what.kernel)
    mine.append(binary_of(stages.compiled(kernel, what, (9, 0)), what))
    assert mine[-1] is not None, what
hashed = triton.runtime.cache.triton_key.cache_info().currsize
assert not hashed, "Triton's files were hashed"
driver.set_active(NotHere())
for what, binary in zip(whats, mine):
    kernel = launching._in_triton(what.kernel)
    arguments = [torch.empty(16, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in what.arguments]
    usual = kernel.warmup(*arguments, grid=(1,), **launching._constants(what))
    assert binary_of(usual, what) == binary, what.kernel
print("the same", len(whats))
"""  # noqa: E501


@needs_triton
def test_the_same_code_as_in_the_usual_way(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", COMPARES],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "the same 6", done.stderr[-2000:]


def parameters(*free: int) -> Any:
    """A kernel of 19 parameters and 4 constants; those at ``free`` are specialised."""
    names = [SimpleNamespace(name=f"p{i}", do_not_specialize=i not in free) for i in range(23)]
    return SimpleNamespace(params=names)


def changed(at: int, value: int) -> Launch:
    what = merging(torch.float16, 64)
    arguments = list(what.arguments)
    arguments[at] = value
    return what._replace(arguments=arguments)


def test_what_is_known_of_a_launch() -> None:
    signature, constants, attributes = stages._specialised(
        parameters(0, 5, 6), changed(6, 7)._replace(programs=3)
    )
    assert list(signature.values()) == [
        "*fp32", "*fp32", "*fp16", "*fp32", *["i32"] * 15, *["constexpr"] * 4,
    ]  # fmt: skip
    assert list(constants) == [(19,), (20,), (21,), (22,)]
    # The sixth is 128, the seventh 7.
    assert attributes == {(at,): [["tt.divisibility", 16]] for at in (0, 5)}


@pytest.mark.parametrize(("value", "free"), [(1, (5,)), (1 << 31, ())])
def test_numbers_that_triton_compiles_for_are_left_to_it(value: int, free: tuple[int]) -> None:
    with pytest.raises(ValueError, match="p5"):
        stages._specialised(parameters(*free), changed(5, value))


def test_with_settings_triton_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TRITON_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_DEBUG", "1")
    with pytest.raises(ValueError, match="TRITON_DEBUG"):
        stages.compiled(None, merging(torch.float16, 64), (9, 0))
