"""Launches the Triton kernels that merge, add and divide: kept ones without Triton, if it can be.

A kernel that was kept on disk (``binaries.py``) is loaded and launched by the driver. One that was
not is compiled by Triton's stages (``stages.py``), kept, and launched in the same way from then on.
Where that does not work (a driver too old, another Triton, addresses or numbers that it was not
compiled for) Triton compiles and launches.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch

from quorum_attention.kernels import ahead
from quorum_attention.kernels.binaries import Binary, Loaded, binary_of, find, keep
from quorum_attention.kernels.cuda_driver import driver
from quorum_attention.kernels.launches import CONSTANTS, Launch
from quorum_attention.kernels.outside import outside
from quorum_attention.kernels.stages import compiled

_Key = tuple[int, str, tuple[object, ...], tuple[object, ...]]
_loaded: dict[_Key, Loaded | None] = {}
"""By device and all that they are compiled for; None: Triton launches it."""
_setup_lock = threading.Lock()


def launch(what: Launch) -> None:
    """Launch it on the current stream of its tensors' device."""
    if not what.programs:
        return
    first: torch.Tensor = what.arguments[0]
    if not first.is_cuda:  # Triton's interpreter
        _launch_by_triton(what)
        return
    with torch.cuda.device_of(first):
        key = _key(what, first.device)
        if key not in _loaded:
            if ahead.RUNNING:
                ahead.wait(what.kernel)
            prepare(what, first.device)
        kept = _loaded[key]
        if kept is None or not kept.launch(what.programs, what.arguments):
            _launch_by_triton(what)


def prepare(what: Launch, device: torch.device) -> None:
    """Have a kernel ready on ``device`` (CUDA, with its number; it is current), once in a process.

    What fails is left to the launch, which fails in the same way.
    """
    key = _key(what, device)
    if key in _loaded:
        return
    found: Loaded | None = None
    with suppress(Exception), outside():
        found = _load(find(what, device), device)
        if found is None:
            found = _load(_compile(what, device), device)
    _loaded[key] = found


def _key(what: Launch, device: torch.device) -> _Key:
    return device.index, what.kernel, what.constants, what.kinds


def _load(binary: Binary | None, device: torch.device) -> Loaded | None:
    functions = driver()
    if binary is None or functions is None:
        return None
    with suppress(RuntimeError, ValueError):
        return Loaded(functions, device.index, binary)
    return None


def _compile(what: Launch, device: torch.device) -> Binary | None:
    """Have Triton compile it; what it compiled, kept, or None, and then Triton has loaded it."""
    binary = _by_stages(what, device) if driver() is not None else None
    if binary is not None:
        keep(what, device, binary)
        return binary
    with _setup_lock:
        _prepare_triton()
    # Tensors that lie at multiples of 16, as those of a call nearly always do.
    arguments = [
        torch.empty(16, dtype=a.dtype, device="cpu") if isinstance(a, torch.Tensor) else a
        for a in what.arguments
    ]
    kernel = _in_triton(what.kernel).warmup(*arguments, grid=(1,), **_constants(what))
    binary = binary_of(kernel, what)
    if binary is None or driver() is None:
        # At this Triton loads the kernel, and compiles what launches it.
        _ = kernel.run
    else:
        keep(what, device, binary)
    return binary


def _by_stages(what: Launch, device: torch.device) -> Binary | None:
    """It compiled without Triton's own tools; None where Triton has to do it in its own way."""
    with suppress(Exception):
        capability = torch.cuda.get_device_capability(device)
        return binary_of(compiled(_in_triton(what.kernel), what, capability), what)
    return None


def _prepare_triton() -> None:
    """Have Triton compile its own tools, and read its own files: they name what it caches."""
    import triton

    # Of its files it makes a hash, while a C compiler is at work.
    reading = threading.Thread(target=_read_triton)
    reading.start()
    try:
        triton.runtime.driver.active.get_current_target()
    finally:
        reading.join()


def _read_triton() -> None:
    with suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def _launch_by_triton(what: Launch) -> None:
    _in_triton(what.kernel)[(what.programs,)](*what.arguments, **_constants(what))


def _constants(what: Launch) -> dict[str, object]:
    return dict(zip(CONSTANTS[what.kernel], what.constants, strict=True))


def _in_triton(kernel: str) -> Any:
    # To import Triton takes 0.4 s.
    if kernel in ("merge", "add"):
        from quorum_attention.kernels import merge_triton

        return merge_triton._merge_kernel if kernel == "merge" else merge_triton._add_kernel
    from quorum_attention.kernels import scaling_triton

    return scaling_triton._norm_kernel if kernel == "norm" else scaling_triton._divide_kernel
