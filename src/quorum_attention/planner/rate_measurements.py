"""Measures the rates of a device: kernels, copies, merging and the host's time for a
call."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.kernels.operator_call import Call, Saved
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.select import select_kernel
from quorum_attention.kernels.torch_private import no_torch_modes

HEAD_DIMS = (64, 128)
# Head dimension of the measurements that do not depend on it.
_HEAD_DIM = HEAD_DIMS[0]
# Tokens of a call that takes no time but the host's, and how many calls are timed
# together.
_SHORT_TOKENS = 128
_N_CALLS = 20


class RateMeasurements:
    """The measurements on one device in one dtype.

    Attributes:
        causal_rows: rows of the causal square that is measured.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.backend = backend_of(device)
        self.sizes = self.backend.trial_sizes(device)
        self.causal_rows = self.sizes.rows // 2
        # Not torch's own generator: its numbers are the caller's.
        self._generator = torch.Generator(device).manual_seed(0)

    @no_torch_modes()
    def round(self) -> dict[str, float]:
        """Measure everything once: FLOP/s, bytes per second, and seconds
        (``..._seconds``)."""
        figures = {}
        for head_dim in HEAD_DIMS:
            forward, backward = self.rectangle_flops(head_dim)
            figures[f"head_dim {head_dim} forward"] = forward
            figures[f"head_dim {head_dim} backward"] = backward
        figures["causal"] = self.causal_flops()
        figures["merge_bytes_per_second"] = self.merge_rate()
        copy_rate = self.copy_rate()
        figures["up_bytes_per_second"] = copy_rate
        figures["down_bytes_per_second"] = copy_rate
        figures["call_seconds"], figures["backward_call_seconds"] = self.host_seconds()
        return figures

    def kernel(self, head_dim: int) -> InnerKernel:
        """Return the kernel that is measured.

        Raises:
            NotImplementedError: it does not work on rectangles.
        """
        shape = CallShape(
            self.device.type,
            self.dtype,
            heads=1,
            kv_heads=1,
            head_dim=head_dim,
            value_dim=head_dim,
            is_causal=True,
            needs_grad=True,
        )
        kernel = select_kernel("auto", shape, self.device)
        if not kernel.operator:
            raise NotImplementedError(
                "only kernels that work on rectangles can be calibrated, not "
                f"{kernel.name!r}"
            )
        return kernel

    def rectangle_flops(self, head_dim: int) -> tuple[float, float]:
        """Measure the FLOP/s of a large plain rectangle, forward and backward."""
        kernel = self.kernel(head_dim)
        scale = head_dim**-0.5
        n_long = self.sizes.rows
        n_short = self.sizes.other_rows
        flops = 4.0 * head_dim * n_long * n_short
        long = self._random(n_long, head_dim)
        long_grad = self._random(n_long, head_dim)
        short_key = self._random(n_short, head_dim)
        short_value = self._random(n_short, head_dim)
        # A forward is parallel over queries, so the queries are the long side.
        forward = Call(long, short_key, short_value, False, scale)
        forward_seconds = self.seconds(
            lambda: kernel.whole_forward(forward),
            0.3,
            self.sizes.warm_seconds,
        )
        # A backward is parallel over keys, so here the keys are the long side.
        call = Call(short_key, long, long_grad, False, scale)
        saved = Saved(short_value, *kernel.whole_forward(call))
        backward_seconds = self.seconds(
            lambda: kernel.whole_backward(call, saved),
            0.3,
            self.sizes.warm_seconds,
        )
        return flops / forward_seconds, 2.5 * flops / backward_seconds

    def causal_flops(self) -> float:
        """Measure the FLOP/s of a causal square."""
        kernel = self.kernel(_HEAD_DIM)
        call = self._square_call(self.causal_rows, causal=True)
        seconds = self.seconds(lambda: kernel.whole_forward(call), 0.2)
        return 2.0 * _HEAD_DIM * self.causal_rows * self.causal_rows / seconds

    def _square_call(self, rows: int, *, causal: bool) -> Call:
        """Draw a call with as many queries as keys."""
        query = self._random(rows, _HEAD_DIM)
        key = self._random(rows, _HEAD_DIM)
        value = self._random(rows, _HEAD_DIM)
        return Call(query, key, value, causal, _HEAD_DIM**-0.5)

    def merge_rate(self) -> float:
        """Measure the bytes per second of a merge in device memory."""
        rows = self.sizes.copy_bytes // 256
        out = self._zeros(1, 1, rows, _HEAD_DIM)
        lse = self._zeros(1, 1, rows)
        part = torch.ones_like(out, dtype=self.dtype)

        def merge_part() -> None:
            merge_(out, lse, part, lse + 1)

        seconds = self.seconds(merge_part, 0.1)
        # The output is read and written, the part is read.
        bytes_of_element = 2 * out.element_size() + part.element_size()
        merged_bytes = part.numel() * bytes_of_element
        return merged_bytes / seconds

    def copy_rate(self) -> float:
        """Measure the bytes per second of copies to the device and back, both at
        once."""
        n_bytes = self.sizes.copy_bytes
        copy = self.backend.both_ways(self.device, n_bytes)
        return n_bytes / self.seconds(copy, 0.2)

    def host_seconds(self) -> tuple[float, float]:
        """Measure the seconds of the host for one call with its merge, forward and
        backward."""
        kernel = self.kernel(_HEAD_DIM)
        call = self._square_call(_SHORT_TOKENS, causal=False)
        grad_out = self._random(_SHORT_TOKENS, _HEAD_DIM)
        state = self._zeros(1, 1, _SHORT_TOKENS, _HEAD_DIM)
        lse_state = self._zeros(1, 1, _SHORT_TOKENS)
        saved = Saved(grad_out, *kernel.whole_forward(call))

        def run_forwards() -> None:
            for _ in range(_N_CALLS):
                out, lse = kernel.whole_forward(call)
                merge_(state, lse_state, out, lse)

        def run_backwards() -> None:
            for _ in range(_N_CALLS):
                for grad in kernel.whole_backward(call, saved):
                    add_(state, grad)

        forwards_seconds = self.seconds(run_forwards, 0.1)
        backwards_seconds = self.seconds(run_backwards, 0.1)
        # The factors are for slicing, scaling and streams around a call.
        forward = 2 * forwards_seconds / _N_CALLS
        backward = 2.5 * backwards_seconds / _N_CALLS
        return forward, backward

    def seconds(
        self, run: Callable[[], object], at_least: float, warm: float = 0.0
    ) -> float:
        """Return the median seconds of ``run``, over runs that take ``at_least``
        seconds together.

        Before them the device is warmed up for as long, or for ``warm`` seconds if that
        is more.
        """
        self._times(run, max(warm, at_least))
        import statistics  # see calibration.py

        return statistics.median(self._times(run, at_least))

    def _times(self, run: Callable[[], object], at_least: float) -> list[float]:
        times: list[float] = []
        while sum(times) < at_least or len(times) < 3:
            self.backend.synchronize(self.device)
            started = time.perf_counter()
            run()
            self.backend.synchronize(self.device)
            times.append(time.perf_counter() - started)
        return times

    def _random(self, rows: int, head_dim: int) -> torch.Tensor:
        drawn = torch.randn(
            (1, 1, rows, head_dim),
            generator=self._generator,
            dtype=torch.float32,
            device=self.device,
        )
        return drawn.to(self.dtype)

    def _zeros(self, *sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=torch.float32, device=self.device)
