"""Kept kernels are launched without Triton; what cannot be kept, by Triton."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quorum_attention.kernels import ahead, binaries, launching
from quorum_attention.kernels.binaries import Binary
from quorum_attention.kernels.launches import Launch, merging

GPU = torch.device("cuda", 0)
BINARY = Binary("kernel", ("pointer",) * 4 + ("i32",) * 15, (0, 2), 4, 0, b"code")


class Kernel:
    """In the place of a Triton kernel."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def warmup(self, *arguments: Any, grid: tuple[int], **constants: Any) -> Any:
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        assert all(t.device.type == "cpu" and t.data_ptr() % 16 == 0 for t in tensors)
        assert constants == {"UNIT": 16, "WIDTH": 64, "BLOCK_ROWS": 64, "BLOCK_WIDTH": 64}
        self.done.append("compiled")
        return SimpleNamespace(run=None)

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *arguments, **constants: self.done.append("by Triton")


def other_triton(*of: object) -> Any:
    raise TypeError("make_ir() takes 5 positional arguments")


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As if there were a GPU: what happens on it."""
    found: list[str] = []

    class Loaded:
        def __init__(self, driver: object, device: int, binary: Binary) -> None:
            assert (device, binary) == (0, BINARY)
            found.append("loaded")

        def launch(self, programs: int, arguments: list[Any]) -> bool:
            fits = not any(type(a) is int and a >= 1 << 31 for a in arguments)
            found.extend(["launched"] * fits)
            return fits

    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    monkeypatch.setattr(launching, "_key", lambda what, device: (0, what.kernel, what.kinds, ()))
    monkeypatch.setattr(launching, "_loaded", {})
    monkeypatch.setattr(launching, "Loaded", Loaded)
    monkeypatch.setattr(launching, "driver", lambda: "a driver")
    monkeypatch.setattr(launching, "binary_of", lambda compiled, what: BINARY)
    monkeypatch.setattr(launching, "compiled", other_triton)
    monkeypatch.setattr(launching, "_prepare_triton", lambda: found.append("Triton"))
    monkeypatch.setattr(launching, "_in_triton", lambda kernel: Kernel(found))
    monkeypatch.setattr(binaries, "_triton", lambda: ("here",))
    yield found
    assert not ahead.RUNNING


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True
    device = GPU  # type: ignore[assignment]


def on_gpu(what: Launch) -> Launch:
    return what._replace(arguments=[what.arguments[0].as_subclass(OnGpu), *what.arguments[1:]])


WHAT = on_gpu(merging(torch.float16, 64))


def in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_loaded", {})


def test_compiled_once_then_kept(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    launching.launch(WHAT)
    launching.launch(WHAT)
    assert done == ["Triton", "compiled", "loaded", "launched", "launched"]
    done.clear()
    in_a_new_process(monkeypatch)
    launching.launch(WHAT)
    launching.launch(WHAT)
    assert done == ["loaded", "launched", "launched"]


def test_what_is_prepared_is_not_prepared_again(done: list[str]) -> None:
    launching.prepare(WHAT, GPU)
    launching.prepare(WHAT, GPU)
    assert done == ["Triton", "compiled", "loaded"]
    launching.launch(WHAT)
    assert done[3:] == ["launched"]


def test_by_stages_triton_is_not_asked_to_prepare_anything(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_stages(kernel: Kernel, what: Launch, capability: tuple[int, int]) -> str:
        assert isinstance(kernel, Kernel)
        assert (what, capability) == (WHAT, (9, 0))
        done.append("by stages")
        return "compiled"

    monkeypatch.setattr(launching, "compiled", by_stages)
    launching.launch(WHAT)
    assert done == ["by stages", "loaded", "launched"]
    in_a_new_process(monkeypatch)
    launching.launch(WHAT)
    assert done[3:] == ["loaded", "launched"]


@pytest.mark.parametrize("missing", ["driver", "binary"])
def test_without_a_driver_or_with_another_result_triton_does_it(
    missing: str, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "compiled", lambda *of: done.append("by stages"))
    if missing == "driver":
        monkeypatch.setattr(launching, "driver", lambda: None)
    else:
        monkeypatch.setattr(launching, "binary_of", lambda compiled, what: None)
    launching.launch(WHAT)
    assert done == ["by stages"] * (missing != "driver") + ["Triton", "compiled", "by Triton"]


def test_nothing_to_do_launches_nothing(done: list[str]) -> None:
    launching.launch(WHAT._replace(programs=0))
    assert done == []


@pytest.mark.parametrize("missing", ["driver", "parameters", "binary"])
def test_where_it_cannot_be_kept_triton_launches(
    missing: str, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*of: object) -> Any:
        raise ValueError("it takes something else")

    if missing == "driver":
        monkeypatch.setattr(launching, "driver", lambda: None)
    elif missing == "parameters":
        monkeypatch.setattr(launching, "Loaded", refused)
    else:
        monkeypatch.setattr(launching, "binary_of", lambda compiled, what: None)
    launching.launch(WHAT)
    launching.launch(WHAT)
    assert done == ["Triton", "compiled", "by Triton", "by Triton"]


def test_a_file_that_cannot_be_loaded_is_compiled_again(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launching.launch(WHAT)
    in_a_new_process(monkeypatch)
    done.clear()
    loaded, tries = vars(launching)["Loaded"], []

    def at_first_not(*of: Any) -> Any:
        tries.append(of)
        if len(tries) == 1:
            raise RuntimeError("CUDA error in cuModuleLoadData: device kernel image is invalid")
        return loaded(*of)

    monkeypatch.setattr(launching, "Loaded", at_first_not)
    launching.launch(WHAT)
    assert done == ["Triton", "compiled", "loaded", "launched"]


def test_what_fails_is_left_to_the_launch(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(launching, "_prepare_triton", fails)
    launching.prepare(WHAT, GPU)
    assert done == []
    launching.launch(WHAT)
    assert done == ["by Triton"]


def test_numbers_too_large_are_launched_by_triton(done: list[str]) -> None:
    launching.launch(WHAT)
    done.clear()
    large = [*WHAT.arguments]
    large[5] = 1 << 31
    launching.launch(WHAT._replace(arguments=large))
    assert done == ["by Triton"]


def test_a_launch_waits_for_the_thread_that_prepares_it(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(name: str) -> None:
        assert name == "merge"
        launching.prepare(WHAT, GPU)
        done.append("waited")

    monkeypatch.setattr(ahead, "RUNNING", {"merge": None})
    monkeypatch.setattr(ahead, "wait", wait)
    launching.launch(WHAT)
    assert done == ["Triton", "compiled", "loaded", "waited", "launched"]
    # Once it is there nobody asks.
    launching.launch(WHAT)
    assert done[5:] == ["launched"]
    monkeypatch.setattr(ahead, "RUNNING", {})


def test_a_kept_kernel_takes_no_triton(monkeypatch: pytest.MonkeyPatch, done: list[str]) -> None:
    launching.launch(WHAT)
    in_a_new_process(monkeypatch)
    done.clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "quorum_attention.kernels.merge_triton", None)
    launching.launch(WHAT)
    assert done == ["loaded", "launched"]
