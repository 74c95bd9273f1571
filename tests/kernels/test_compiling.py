"""What is compiled ahead is what is launched: the same compile-time constants and dtypes."""

from __future__ import annotations

import importlib.util
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quorum_attention.kernels import ahead, compiling

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
GPU = torch.device("cuda", 0)


class Warmup:
    """In the place of a Triton kernel: remembers what it was to be compiled, or launched, for."""

    def __init__(self, kernel: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        # Where another test has asked for Triton's interpreter, options are kept aside.
        options = getattr(kernel, "kwargs", {})
        unspecialised = options.get("do_not_specialize", ())
        self.names = kernel.arg_names
        self.unspecialised = set(getattr(kernel, "do_not_specialize", unspecialised))

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **constants: Any) -> str:
        self.calls.append(self._key(arguments, constants))
        return "compiled"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: self.calls.append(self._key(arguments, constants))

    def _key(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
        """What Triton compiles for, where integers are not specialised."""
        given = dict(zip(self.names, arguments, strict=False)) | constants
        return tuple(self._of(name, value) for name, value in given.items())

    def _of(self, name: str, value: Any) -> object:
        if isinstance(value, torch.Tensor):
            aligned = name not in self.unspecialised and value.data_ptr() % 16 == 0
            return value.dtype, aligned
        return (name, value) if name.isupper() or name[:-2].isupper() else type(value)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Warmup]:
    from quorum_attention.kernels import merge_triton, scaling_triton

    found = {}
    for module, names in ((merge_triton, ("merge", "add")), (scaling_triton, ("norm", "divide"))):
        for name in names:
            found[name] = Warmup(getattr(module, f"_{name}_kernel"))
            monkeypatch.setattr(module, f"_{name}_kernel", found[name])
    return found


def slot(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A field of a slot, and in it the rows of one call: they begin at a whole tile."""
    batch, heads, rows, width = shape
    return torch.empty(batch, heads, rows + 384, width, dtype=dtype)[:, :, 128 : 128 + rows]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (96, 64), (80, 80)])
def test_the_kernels_compiled_are_those_launched(
    dtype: torch.dtype, widths: tuple[int, int], kernels: dict[str, Warmup]
) -> None:
    from quorum_attention.kernels import merge_triton, scaling_triton

    head_dim, value_dim = widths
    scaled = dtype == torch.float16
    merge_triton.compile_merge(dtype, value_dim)
    merge_triton.compile_add(dtype, (head_dim, head_dim, value_dim), scaled)
    scaling_triton.compile_norm(dtype, value_dim)
    scaling_triton.compile_divide(dtype, value_dim)
    for _ in range(5):
        heads, queries, keys = random.choice((1, 2, 4)), *(128 * random.randint(1, 9) for _ in "qk")
        out = slot(1, heads, queries, value_dim)
        lse = slot(1, heads, queries, 1)[..., 0]
        part = torch.empty(1, heads, queries, value_dim, dtype=dtype)
        merge_triton.merge_triton_(out, lse, part, torch.empty(1, heads, queries))
        states = (
            slot(1, heads, queries, head_dim),
            slot(1, heads, keys, head_dim),
            slot(1, heads, keys, value_dim),
        )
        parts = tuple(torch.empty(t.shape, dtype=dtype) for t in states)
        flags = torch.zeros(1, heads, dtype=torch.int32) if scaled else None
        factors = torch.ones(1, heads) if scaled else None
        merge_triton.add_triton_(states, parts, 0.5, factors, flags)
        scaling_triton.divide_gradient_triton_(
            part.contiguous(), torch.empty(1, heads, keys, value_dim, dtype=dtype),
            torch.ones(1, heads), 0,
        )  # fmt: skip
    for name, kernel in kernels.items():
        assert len(set(kernel.calls)) == 1, name
        assert len(kernel.calls) >= 6, name


def test_asked_for_once_and_only_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(ahead, "begin", lambda name, device, work: begun.append(name))
    monkeypatch.setattr(compiling, "_begun", set())
    asked = (GPU, torch.float16, 64, 64, True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compiling.compile_ahead(*asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    compiling.compile_ahead(torch.device("cpu"), *asked[1:])
    assert begun == []
    compiling.compile_ahead(*asked)
    compiling.compile_ahead(*asked)
    assert begun == ["merge", "add", "norm", "divide"]
    compiling.compile_ahead(GPU, torch.bfloat16, 64, 64, False)
    assert begun[4:] == ["merge", "add"]
    compiling.compile_ahead(GPU, torch.float16, 64, 128, None)
    assert begun[6:] == ["merge"]


def test_triton_is_set_up_first_and_every_kernel_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread: compiled, then asked for what launches it, which loads it."""
    done: list[str] = []

    class Compiled:
        def __init__(self, name: str) -> None:
            self.name = name

        @property
        def run(self) -> None:
            done.append(f"{self.name} loaded")

    module = SimpleNamespace(
        compile_merge=lambda *of: Compiled("merge"), compile_add=lambda *of: Compiled("add"),
        compile_norm=lambda *of: Compiled("norm"), compile_divide=lambda *of: Compiled("divide"),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(compiling, "_begun", set())
    monkeypatch.setattr(compiling, "_merging", lambda: module)
    monkeypatch.setattr(compiling, "_scaling", lambda: module)
    monkeypatch.setattr(compiling, "_prepare_driver", lambda: done.append("driver"))
    compiling.compile_ahead(GPU, torch.float16, 64, 64, True)
    for name in ("merge", "add", "norm", "divide"):
        ahead.wait(name)
    assert sorted(done) == [
        "add loaded", "divide loaded", "driver", "driver", "driver", "driver", "merge loaded",
        "norm loaded",
    ]  # fmt: skip
    assert done[0] == "driver"
    assert not ahead.RUNNING
