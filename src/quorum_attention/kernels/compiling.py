"""Which Triton kernels a call that is cut is going to launch beside its attention kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from quorum_attention.kernels import ahead
from quorum_attention.kernels.merge import triton_available

_begun: set[tuple[object, ...]] = set()
_driver_lock = threading.Lock()


def compile_ahead(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, scaled: bool | None
) -> None:
    """Begin to compile what merges and adds on ``device``, once in a process (ahead.py).

    Args:
        dtype: of the inputs.
        head_dim, value_dim: of query and key, and of value.
        scaled: whether the backward that is to follow is scaled; None: there is none.
    """
    asked = (device, dtype, head_dim, value_dim, scaled)
    here = device.type == "cuda" and torch.cuda.is_available()
    if asked in _begun or not here or not triton_available():
        return
    _begun.add(asked)

    def begin(name: str, compiled: Callable[[], Any]) -> None:
        ahead.begin(name, device, lambda: _load(compiled))

    begin("merge", lambda: _merging().compile_merge(dtype, value_dim))
    if scaled is not None:
        widths = (head_dim, head_dim, value_dim)
        begin("add", lambda: _merging().compile_add(dtype, widths, scaled))
    if scaled:
        begin("norm", lambda: _scaling().compile_norm(dtype, value_dim))
        begin("divide", lambda: _scaling().compile_divide(dtype, value_dim))


def _load(compiled: Callable[[], Any]) -> None:
    """Compile a kernel, once what all of them need is there, and load it."""
    with _driver_lock:
        _prepare_driver()
    # At this Triton loads the kernel, and compiles what launches it.
    _ = compiled().run


def _prepare_driver() -> None:
    """Have Triton compile its own tools, and read its own files: they name what it caches."""
    import triton

    triton.runtime.driver.active.get_current_target()
    with suppress(ImportError, AttributeError):
        from triton.runtime.cache import triton_key

        triton_key()


# Imported by the threads: to import Triton takes 0.4 s.
def _merging() -> Any:
    from quorum_attention.kernels import merge_triton

    return merge_triton


def _scaling() -> Any:
    from quorum_attention.kernels import scaling_triton

    return scaling_triton
