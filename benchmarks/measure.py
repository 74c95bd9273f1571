"""What the cases measure with: seconds, medians in turn, peaks of memory, ranks, and
two versions of the package side by side.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

PACKAGE = "quorum_attention"
ROOT = Path(__file__).resolve().parents[1]


def wait() -> None:
    """Wait until the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, the device idle before and after; and its result."""
    wait()
    start = time.perf_counter()
    result = run()
    wait()
    return time.perf_counter() - start, result


def timed_passes(
    forward: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grad_out: torch.Tensor,
) -> tuple[float, float]:
    """Seconds of a forward and of its backward by autograd."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    forward_seconds, out = timed(lambda: forward(*leaves))
    backward_seconds, _ = timed(lambda: out.backward(grad_out))
    return forward_seconds, backward_seconds


def medians(pairs: Sequence[Sequence[float]]) -> list[float]:
    """The median of forwards and the median of backwards."""
    return [statistics.median(part) for part in zip(*pairs, strict=True)]


def locked_calls(calls: Sequence[Any]) -> Sequence[Any]:
    """The calls on a pool whose memory was page-locked before, of all calls in order.

    The first call maps memory and prepares kernels. The second still page-locks results
    that the first has freed. With fewer than four calls it counts none the less.
    """
    n_first = 2 if len(calls) >= 4 else 1
    return calls[n_first:]


def in_turn(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """The results of each run, one a round, in alternating order: a device's clock
    drifts."""
    results: dict[str, list[Any]] = {name: [] for name in runs}
    names = list(runs)
    for _ in range(rounds):
        for name in names:
            results[name].append(runs[name]())
            gc.collect()
        names.reverse()
    return results


def on_ranks(work: Callable[[Any], Any], options: Any) -> Any:
    """The result of ``work(options)`` on rank 0 of ``options.ranks`` processes. Rank 0
    alone prints.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result")
        torch.multiprocessing.spawn(
            _rank, (work, options, str(path)), nprocs=options.ranks
        )
        return json.loads(path.read_text(encoding="utf-8"))


def _rank(rank: int, work: Callable[[Any], Any], options: Any, path: str) -> None:
    _join_group(rank, options.ranks)
    with redirect_stdout(sys.stdout if rank == 0 else io.StringIO()):
        result = work(options)
    if rank == 0:
        Path(path).write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def _join_group(rank: int, n_ranks: int) -> None:
    group: dict[str, Any] = {
        "rank": rank,
        "world_size": n_ranks,
        "init_method": "tcp://127.0.0.1:29533",
    }
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **group)
        return
    torch.cuda.set_device(rank)
    # So that messages begin while kernels still fill the device.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", **group, device_id=device, pg_options=options)


class Version:
    """The package as it stands under a folder; of several in one process one is
    importable."""

    def __init__(self, source: Path) -> None:
        self.source = str(source)
        self.modules: dict[str, ModuleType] = {}
        self.package: Any = None
        with self.active():
            self.package = importlib.import_module(PACKAGE)
            importlib.import_module(f"{PACKAGE}.operator")
            _unregister_operators()
        file = Path(self.package.__file__).resolve()
        assert file.is_relative_to(source.resolve()), f"{file} is not under {source}"

    @contextmanager
    def active(self) -> Iterator[Any]:
        """Let imports, inside functions too, import this version; return its
        package."""
        outside = _take_modules()
        sys.modules.update(self.modules)
        sys.path.insert(0, self.source)
        try:
            yield self.package
        finally:
            sys.path.remove(self.source)
            self.modules = _take_modules()
            sys.modules.update(outside)


def _unregister_operators() -> None:
    """Let another version register operators of the same names: measured calls need
    none."""
    for name, module in sys.modules.items():
        operators = getattr(module, "_library", None)
        is_ours = isinstance(operators, torch.library.Library)
        if name.startswith(f"{PACKAGE}.operator") and is_ours:
            operators._destroy()


def _take_modules() -> dict[str, ModuleType]:
    """The package's modules, no longer importable."""
    names = [name for name in sys.modules if name.split(".")[0] == PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


def forget_host_peak() -> None:
    """Let ``host_peak_bytes`` count from here on."""
    # Linux: 5 resets the peak of resident memory.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def host_peak_bytes() -> int:
    """The most memory that this process held in RAM, page-locked memory included."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    kibibytes = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert kibibytes is not None, "Linux says the peak of resident memory"
    return int(kibibytes[1]) << 10


class Meter:
    """Seconds of a block, and the most memory that torch's allocator gave out at one
    time.

    On a CPU only what is allocated within the block is counted.

    Args:
        device: "cuda" or "cpu".
        allocated: bytes that were allocated before, to be added on a CPU.

    Attributes:
        seconds, peak: valid after the block.
        host_peak: the most host memory that the process held in the block, in bytes.
    """

    def __init__(self, device: str, allocated: int = 0) -> None:
        self._device = device
        self._allocated = allocated
        self._profile = torch.autograd.profiler.profile(profile_memory=True)
        self._start = 0.0
        self.seconds = 0.0
        self.peak = 0
        self.host_peak = 0

    def __enter__(self) -> Meter:
        forget_host_peak()
        if self._device == "cuda":
            gc.collect()
            wait()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._profile.__enter__()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        wait()
        self.seconds = time.perf_counter() - self._start
        self.host_peak = host_peak_bytes()
        if self._device == "cuda":
            self.peak = torch.cuda.max_memory_allocated()
            return
        self._profile.__exit__(*error)
        self.peak = self._allocated + _profiled_peak(self._profile.kineto_results)


def _profiled_peak(results: Any) -> int:
    """The most bytes that were allocated at a time."""
    events = [event for event in results.events() if event.name() == "[memory]"]
    live = 0
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
