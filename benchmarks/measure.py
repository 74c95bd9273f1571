"""What the cases measure with: seconds, medians in turn, peaks of memory, two versions side by
side, and where it was measured."""

from __future__ import annotations

import datetime
import gc
import importlib
import io
import json
import platform
import shutil
import statistics
import subprocess
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


def about() -> dict[str, Any]:
    """Machine, versions, date and commit."""
    on_gpu = torch.cuda.is_available()
    commit = ""
    if shutil.which("git"):
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    found = {"device": where, "torch": torch.__version__, "python": platform.python_version()}
    if on_gpu:
        found["cudnn"] = torch.backends.cudnn.version()
    return found | {"date": datetime.date.today().isoformat(), "commit": commit or "unknown"}


def wait() -> None:
    """Until the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], Any], calls: int = 1) -> tuple[float, Any]:
    """Seconds of one of so many calls, the device idle before and after; what the last returned."""
    wait()
    started = time.perf_counter()
    for _ in range(calls):
        result = run()
    wait()
    return (time.perf_counter() - started) / calls, result


def both(
    forward: Callable[..., torch.Tensor], three: Sequence[torch.Tensor], grad: torch.Tensor
) -> tuple[float, float]:
    """Seconds of a forward and of its backward by autograd."""
    leaves = [t.detach().requires_grad_() for t in three]
    seconds, out = timed(lambda: forward(*leaves))
    after, _ = timed(lambda: out.backward(grad))
    return seconds, after


def medians(pairs: Sequence[Sequence[float]]) -> list[float]:
    """Of forwards and of backwards."""
    return [statistics.median(part) for part in zip(*pairs, strict=True)]


def in_turn(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """What each returns, once a round, in alternating order: a device's clock drifts."""
    found: dict[str, list[Any]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            found[name].append(runs[name]())
            gc.collect()
    return found


def on_ranks(work: Callable[[Any], Any], options: Any) -> Any:
    """What ``work(options)`` returns on rank 0 of ``options.ranks`` processes; it alone prints."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found")
        torch.multiprocessing.spawn(_rank, (work, options, str(path)), nprocs=options.ranks)
        return json.loads(path.read_text(encoding="utf-8"))


def _rank(rank: int, work: Callable[[Any], Any], options: Any, path: str) -> None:
    where: dict[str, Any] = {"rank": rank, "world_size": options.ranks,
                             "init_method": "tcp://127.0.0.1:29533"}  # fmt: skip
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        # So that messages begin while kernels still fill the device.
        how = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        device = torch.device("cuda", rank)
        dist.init_process_group("nccl", **where, device_id=device, pg_options=how)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **where)
    with redirect_stdout(sys.stdout if rank == 0 else io.StringIO()):
        found = work(options)
    if rank == 0:
        Path(path).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


class Version:
    """The package as it stands under a folder; of several in one process one is importable."""

    def __init__(self, source: Path) -> None:
        self.source = str(source)
        self.modules: dict[str, ModuleType] = {}
        with self.active():
            self.qa = importlib.import_module(PACKAGE)
        found = Path(str(self.qa.__file__)).resolve()
        assert found.is_relative_to(source.resolve()), f"{found} is not under {source}"

    @contextmanager
    def active(self) -> Iterator[Any]:
        """What is imported meanwhile, inside functions too, is of this version."""
        outside = _taken()
        sys.modules.update(self.modules)
        sys.path.insert(0, self.source)
        try:
            yield getattr(self, "qa", None)
        finally:
            sys.path.remove(self.source)
            self.modules = _taken()
            sys.modules.update(outside)


def _taken() -> dict[str, ModuleType]:
    """The package's modules, no longer importable."""
    names = [name for name in sys.modules if name.split(".")[0] == PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


class Watched:
    """Seconds of a block, and the most memory that torch's allocator gave out at one time: on a CPU
    beyond ``held``, which is added."""

    def __init__(self, device: str, held: int = 0) -> None:
        self._device, self._held = device, held
        self.seconds, self.peak = 0.0, 0

    def __enter__(self) -> Watched:
        if self._device == "cuda":
            gc.collect()
            wait()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            self._profile.__enter__()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *raised: Any) -> None:
        wait()
        self.seconds = time.perf_counter() - self._began
        if self._device == "cuda":
            self.peak = torch.cuda.max_memory_allocated()
            return
        self._profile.__exit__(*raised)
        live = most = 0
        results: Any = self._profile.kineto_results
        events = [event for event in results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda e: e.start_ns()):
            live += event.nbytes()
            most = max(most, live)
        self.peak = self._held + most
