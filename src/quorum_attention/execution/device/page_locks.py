"""Page-locks host memory for as long as it is copied from or to."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch

from quorum_attention.decomposition.intervals import union
from quorum_attention.execution.memory import is_out_of_memory

# Registering costs about 0.1 s/GiB and saves eight times the copy time: not worth it below this.
_WORTH_LOCKING_BYTES = 16 << 20


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


class PageLocks:
    """Page-locks pageable host tensors for the length of a ``with`` block.

    What cannot be locked (a read-only file mapping, a system limit) is left pageable: copies
    from it are slower, never wrong. Everything locked here is unlocked on the way out.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # Extents that overlap are locked as one; those that touch need not be.
        self._wanted = union(
            (
                _extent(t)
                for t in tensors
                if t.device.type == "cpu"
                and t.numel() * t.element_size() >= _WORTH_LOCKING_BYTES
                and not t.is_pinned()
            ),
            gap=0,
        )
        self._locked: list[tuple[int, int]] = []

    def __enter__(self) -> PageLocks:
        runtime = torch.cuda.cudart() if self._wanted else None
        for start, stop in self._wanted:
            assert runtime is not None
            if int(runtime.cudaHostRegister(start, stop - start, 0)) == 0:
                self._locked.append((start, stop))
            else:
                _clear_last_cuda_error()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        runtime = torch.cuda.cudart() if self._locked else None
        while self._locked:
            assert runtime is not None
            start, _ = self._locked.pop()
            runtime.cudaHostUnregister(start)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` (on the host) is page-locked, by this object or by its owner."""
        start, stop = _extent(tensor)
        if any(low <= start and stop <= high for low, high in self._locked):
            return True
        return bool(tensor.is_pinned())


def _clear_last_cuda_error() -> None:
    """A refused registration leaves an error behind that the next launch would report."""
    try:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
