"""``Pool``: several devices, a worker process each, that compute one call together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quorum_attention.autograd import attend
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.devices.report import PoolReport
from quorum_attention.devices.request import request_on_devices
from quorum_attention.devices.worker_pool import WorkerPool
from quorum_attention.execution.report import Report
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.keywords import check_names, helps_with_names
from quorum_attention.mask import Mask

# Options of a pool's call that `Pool.attention` does not name.
_OPTIONS = (
    "budget",
    "depth",
    "kernel",
    "accumulator",
    "progress",
    "plan",
    "exact_delta",
)


class Pool(WorkerPool):
    """Worker processes, one for each device, that share the work of an attention call.

    A call is cut into independent parts: by key/value heads, and by rows if the heads
    do not divide among the devices. Faster devices get more parts, and take over parts
    of slower devices at the end. A part is an ordinary call, with its own budget and
    recovery. If a worker is killed, or runs out of memory at every depth, the others
    finish its parts.

    Inputs in shared memory (``tensor.share_memory_()``), or mapped from files, are not
    copied. Other inputs are copied into shared memory, and the report counts the bytes.

    Give the pool to calls as ``devices=``, or use its own ``attention``. Use the pool
    as a context manager, or ``close`` it; it also ends with the program. Calls from
    several threads run one after the other.

    Args:
        devices: as torch writes them, "cuda:0" or "cpu"; or "all", which is all CUDA
            devices of this machine.
        threads: threads of each worker, for CPU devices; None: torch's default.

    Raises:
        ValueError, TypeError: ``devices`` is empty, or names a device that this machine
            lacks.
        RuntimeError: a worker did not start.
    """

    @helps_with_names
    def __init__(
        self,
        devices: str | Sequence[str | torch.device] = "all",
        *,
        threads: int | None = None,
    ) -> None:
        super().__init__(devices, threads=threads)

    def __enter__(self) -> Pool:
        return self

    @uncompiled
    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | Mask | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
        out: torch.Tensor | None = None,
        report: PoolReport | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """``quorum_attention.attention`` on all devices of the pool, with gradients.

        Args:
            query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p,
                dropout_seed, out: as in ``quorum_attention.attention``; tensors in host
                memory or on a CUDA device.
            report: filled with what happened.
            options: budget, depth, kernel, accumulator, progress and exact_delta, as in
                ``quorum_attention.attention``. Each device has the whole budget; a list
                gives each its own. progress counts parts.

        Returns:
            (..., heads, n_queries, value_dim), in shared memory if the inputs are in
            host memory.

        Raises:
            RuntimeError: no worker is left; the message says what was done until then.
            ValueError, TypeError, BudgetError: as in ``quorum_attention.attention``.
        """
        check_names("Pool.attention", options, _OPTIONS)
        call_report = None if report is None else Report(pool=report)
        call_options = CallOptions(**options, devices=self, report=call_report)
        arguments = Arguments(
            attn_mask,
            dropout_p,
            dropout_seed,
            is_causal,
            scale,
            enable_gqa,
            out,
            options=call_options,
        )
        tensors, request = request_on_devices("attention", query, key, value, arguments)
        return attend(tensors, request, out)[0]
