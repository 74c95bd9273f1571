"""``Pool``: several devices, a worker process each, that compute one call together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from quorum_attention.call.options import Written
from quorum_attention.call.request import request_of
from quorum_attention.counts import shown, whole_number
from quorum_attention.execution.device.lookup import every_device, on_host, present
from quorum_attention.kernels.uncompiled import uncompiled
from quorum_attention.mask import Mask
from quorum_attention.pool.call import PoolCall, attend
from quorum_attention.pool.messages import Begin
from quorum_attention.pool.parts import Part
from quorum_attention.pool.report import PoolPass, PoolReport
from quorum_attention.pool.run import Coordinator
from quorum_attention.pool.shared import Handle
from quorum_attention.pool.workers import start


class Pool:
    """Worker processes, one for each device, that share the work of an attention call.

    A call is cut into parts that do not depend on each other: key/value heads first, then, where
    they do not divide among the devices, rows of the last ones. Workers take a part as soon as they
    have none, so devices of unequal speed end together. Each computes its part as an ordinary call,
    under its own budget, with its own recovery. A worker that is killed, hangs or runs out of
    memory at every depth gives its part back and the others finish.

    Inputs in shared memory (``tensor.share_memory_()``), mapped from files, or on a CUDA device are
    handed over as they are; others are copied into shared memory, and the report says how much.

    Use it as a context manager, or ``close`` it; it also ends with the program.

    Args:
        devices: as torch writes them, "cuda:0" or "cpu"; or "all" CUDA devices of this machine.
        threads: threads of each worker, for CPU devices; None: torch's default.

    Raises:
        ValueError, TypeError: ``devices`` names none, or one that is not here.
        RuntimeError: a worker did not start.
    """

    def __init__(
        self, devices: str | Sequence[str | torch.device] = "all", *, threads: int | None = None
    ) -> None:
        names = _names(devices)
        count = None if threads is None else whole_number(threads, "threads", 1)
        self._threads = count
        self._workers = start(names, count)
        self._passes = 0

    @property
    def devices(self) -> list[str]:
        """The devices whose workers are alive."""
        return [worker.device for worker in self._workers if worker.alive]

    @property
    def names(self) -> list[str]:
        """Their own names, by which one sees whether they are alike."""
        return [worker.name for worker in self._workers if worker.alive]

    def join(self, device: str | torch.device) -> None:
        """Start a worker for one more device, or for one whose worker was lost."""
        self._workers += start(_names([device]), self._threads)

    def close(self) -> None:
        """End the workers; the pool is of no use afterwards."""
        for worker in self._workers:
            if worker.alive:
                worker.end()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @uncompiled
    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        budget: int | str | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        out: torch.Tensor | None = None,
        report: PoolReport | None = None,
    ) -> torch.Tensor:
        """``quorum_attention.attention`` on all devices of the pool, with gradients.

        Args:
            query, key, value, attn_mask, is_causal, scale, enable_gqa: as there; tensors in host
                memory or on a CUDA device. ``attn_mask`` gets no gradient here.
            budget, depth, kernel: as there, of each device.
            out: preallocated result.
            report: filled with what happened.

        Returns:
            (..., heads, n_queries, value_dim), in shared memory if the inputs are in host memory.

        Raises:
            Errors as of ``quorum_attention.attention``; RuntimeError: no worker is left, with what
            was done until then.
        """
        if isinstance(attn_mask, Mask):
            raise NotImplementedError("attn_mask must be a tensor or None in a pool, got a Mask")
        written = Written(budget=budget, depth=depth, kernel=kernel)
        tensors, request = request_of(
            "attention", query, key, value, attn_mask, 0.0, None, is_causal, scale, enable_gqa, out,
            None, written,
        )  # fmt: skip
        if request.mask_grad:
            raise NotImplementedError("attn_mask that requires a gradient is not taken by a pool")
        if not self.devices:
            raise RuntimeError("the pool has no worker: it was closed, or all of them were lost")
        return request.back(attend(PoolCall(self, tensors, request, report), tensors))

    def run(
        self,
        begin: Begin,
        parts: list[Part],
        report: PoolPass,
        sums: Callable[[Part], tuple[Handle, Handle] | None],
        done: Callable[[Part, tuple[Handle, Handle] | None], None],
    ) -> None:
        """Run a pass of parts on the workers; see ``Coordinator``."""
        report.devices = [worker.label for worker in self._workers]
        report.parts = len(parts)
        Coordinator(self._workers, begin, parts, sums, done, report).run()

    def number(self) -> int:
        """A number for a pass."""
        self._passes += 1
        return self._passes


def _names(devices: str | Sequence[str | torch.device]) -> list[str]:
    if devices == "all":
        every = every_device()
        if not every:
            raise ValueError('devices="all" needs a CUDA device, and there is none here')
        return [str(device) for device in every]
    if isinstance(devices, (str, torch.device)):
        devices = [devices]
    if not devices:
        raise ValueError("devices must name at least one device, got none")
    places = [present(device, "devices") for device in devices]
    own = [place for place in places if not on_host(place)]
    if len(set(own)) < len(own):
        raise ValueError(f"devices must name each GPU once, got {shown([str(p) for p in places])}")
    return [str(place) for place in places]


__all__ = ["Pool"]
