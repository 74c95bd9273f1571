"""``Farm``: attention calls from files to files by the tasks of a Ray cluster, each a unit of the
call, and begun again if its worker dies."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from quorum_attention.argument_checks import whole_number
from quorum_attention.call.block import CallBlock
from quorum_attention.call.options import CallOptions
from quorum_attention.call.overlap import Mappings
from quorum_attention.call.validation import as_tensor, check_no_overlap, check_tensor
from quorum_attention.devices.handles import TensorHandle, handle_in_mapped_file
from quorum_attention.devices.report import PartTiming, PoolPass, PoolReport
from quorum_attention.devices.request import check_options
from quorum_attention.extras import install_hint
from quorum_attention.files.file_call import GRADIENTS, FileCall, file_call
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.keywords import check_names, helps_with_names
from quorum_attention.mask import map_tensors
from quorum_attention.ray.compute import FarmPass, FarmUnit, Head, chunks_of, compute, quorum, tasks
from quorum_attention.units import counted, parse_bytes

# Times that a unit is begun again because its worker or its machine was lost.
_RETRIES = 3
_REPORTS = "RAY_USAGE_STATS_ENABLED"
_CONNECT_SECONDS, _CANCEL_SECONDS = 10.0, 30.0
_SEE_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
# Options of a farm's call beside its tensors and results.
_OPTIONS = (
    "attn_mask", "is_causal", "scale", "enable_gqa", "dropout_p", "dropout_seed", "depth", "kernel",
    "chunks", "report",
)  # fmt: skip


def ray_here() -> Any:
    """Ray.

    Raises:
        ModuleNotFoundError: it is not installed; says how to.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"a farm needs Ray, which is not installed: {install_hint('ray')}"
        ) from error
    return ray


class Farm(AbstractContextManager["Farm"]):
    """A Ray cluster that computes attention calls from files to files.

    A call is cut into independent units, each a Ray task: key/value heads, or cyclic quorum tasks
    if there are few heads. A unit maps the rows that it needs, computes them as ordinary calls
    under its own budget, and writes its results. Quorum tasks write partial states; a chunk is
    merged, exactly, when all its states exist. If a worker or a machine dies, Ray runs its units
    again.

    Inputs and results are tensors mapped from files, as by ``quorum_attention.files``, on a file
    system that all machines have under the same path.

    Use it as a context manager, or ``close`` it.

    Args:
        address: HOST:PORT of a cluster; "auto" for the one that ``RAY_ADDRESS`` names, or that any
            user started on this machine (join only clusters that you trust: docs/ray.md); None or
            "local" for a new one on this machine, which ends with the farm. A program that is
            already connected to Ray keeps its cluster.
        workers: the most units that run at a time; None: as many as the cluster holds.
        num_cpus, num_gpus: CPUs and GPUs of a unit. With a GPU, or a part of one, it computes on
            that, otherwise on as many threads as it has CPUs. None: one GPU if the cluster has any.
        budget: device bytes of a unit, as in ``quorum_attention.attention``.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConnectionError: there is no cluster at ``address``.
        RuntimeError: no machine of the cluster has so many CPUs and GPUs.
    """

    @helps_with_names
    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        budget: int | str | None = None,
    ) -> None:
        if workers is not None:
            workers = whole_number(workers, "workers", 1)
        self._budget = None if budget is None else parse_bytes(budget)
        self._ray, self._most, self._cpus = ray_here(), workers, num_cpus
        with ExitStack() as begun:
            if not self._ray.is_initialized():
                self._begin(address, begun)
            there = self._ray.cluster_resources()
            self._gpus = float(there.get("GPU", 0) >= 1) if num_gpus is None else num_gpus
            if self._held() <= 0:
                raise RuntimeError(
                    f"no machine of the cluster holds a worker: one takes {num_cpus:g} CPU and "
                    f"{self._gpus:g} GPU, the cluster has {there.get('CPU', 0):g} CPU and "
                    f"{there.get('GPU', 0):g} GPU"
                )
            self._begun = begun.pop_all()

    def close(self) -> None:
        """End the cluster if this farm began it."""
        self._begun.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *call: Any,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """``quorum_attention.attention`` from files to files.

        Args:
            call: attn_mask, is_causal, scale and enable_gqa, in this order or by name, as there.
                The tensors of ``attn_mask`` may be in memory, and are sent to every worker then.
            out: the result, (..., heads, n_queries, value_dim) of any dtype, mapped from a file;
                partial states are kept beside that.
            lse: the log-sum-exp, (..., heads, n_queries) in fp32 (fp64 for fp64 inputs), mapped
                from a file; None: it is not wanted.
            options: dropout_p and dropout_seed, as there; with dropout heads are not cut;
                depth and kernel, of each unit's calls, as there;
                chunks: tasks of each key/value head, c = l (l - 1) + 1; 1: heads stay whole. None:
                as many as leave ten units for each worker, if there are fewer heads;
                report: a ``PoolReport``, filled with what happened.

        Returns:
            ``out``.

        Raises:
            Errors as of ``quorum_attention.attention``; ValueError: a tensor is in no file;
            NotImplementedError: a gradient is wanted, which ``attention_backward`` computes;
            RuntimeError: a unit has lost four workers.
        """
        results = {"out": out} if lse is None else {"out": out, "lse": lse}
        tensors = {"query": query, "key": key, "value": value}
        return self._compute(tensors, results, *call, **options)["out"]

    def attention_with_lse(
        self, *call: Any, lse: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``quorum_attention.attention_with_lse`` from files to files; arguments as ``attention``
        has them."""
        return self.attention(*call, lse=lse, **options), lse

    @torch.no_grad()
    def attention_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *call: Any,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``quorum_attention.attention_backward`` from files to files.

        Args:
            grads: (grad_query, grad_key, grad_value), of one dtype, mapped from files.
            call, options: as in ``attention``.
        """
        tensors = {"query": query, "key": key, "value": value,
                   "grad_out": grad_out, "out": out, "lse": lse}  # fmt: skip
        self._compute(tensors, dict(zip(GRADIENTS, grads, strict=True)), *call, **options)
        return grads

    @uncompiled
    def _compute(
        self,
        tensors: Mapping[str, torch.Tensor],
        results: Mapping[str, torch.Tensor | None],
        *call: Any,
        chunks: int | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        report: PoolReport | None = None,
        **dropout: Any,
    ) -> dict[str, torch.Tensor]:
        """Compute all heads of a call into its results, which are checked first.

        Args:
            call, dropout: as ``file_call`` takes them.
        """
        check_names("Farm.attention", dropout, _OPTIONS)
        tensors = {name: as_tensor(tensor, name) for name, tensor in tensors.items()}
        found = {n: as_tensor(result, n, for_writing=True) for n, result in results.items()}
        # This process computes nothing of it.
        here, dtype = CallOptions(depth=depth, devices="cpu"), next(iter(found.values())).dtype
        made = file_call(here, tensors, *call, out_dtype=dtype, **dropout)
        made, ran = replace(made, options=here._replace(kernel=kernel)), PoolPass()
        if report is not None:
            setattr(report, "backward" if made.backward else "forward", ran)
        for name, (shape, dtype) in made.results(lse="lse" in found).items():
            check_tensor(found[name], shape, name, tensors["query"].device, dtype, for_writing=True)
        mask = made.whole.mask
        check_no_overlap(found, {**made.tensors, "attn_mask": None if mask is None else mask.bias})
        parts = dict(enumerate(made.parts(1)))
        for _ in self.by_parts(made, made.with_heads(found), parts, chunks=chunks, report=ran):
            pass
        return found

    @uncompiled
    @torch.no_grad()
    def by_parts(
        self,
        call: FileCall,
        results: Mapping[str, torch.Tensor],
        parts: Mapping[int, CallBlock],
        *,
        chunks: int | None = None,
        report: PoolPass,
    ) -> Iterator[int]:
        """Parts of a call, for who keeps book of what is done.

        Args:
            results: out, and lse if wanted; or dq, dk and dv; with a dimension of heads.
            parts: from ``call.parts``, by number.
            report: filled with what happened.

        Yields:
            the number of each part whose results are complete.
        """
        chunks = None if chunks is None else whole_number(chunks, "chunks", 1)
        check_options(call.options)
        shape, mappings, mask = call.shape, Mappings.now(), call.whole.mask
        inputs: dict[str, torch.Tensor | TensorHandle] = {
            name: _located(name, tensor, mappings, False) if tensor.numel() else tensor
            for name, tensor in call.tensors.items()
        }
        files = {n: _located(n, t, mappings, True) for n, t in results.items() if t.numel()}
        bias = None if mask is None else mask.bias
        if bias is not None:  # sent by itself: it may be in a file
            inputs["bias"] = handle_in_mapped_file(bias, mappings, writable=False) or bias.detach()
        mask = mask and map_tensors(replace(mask, bias=None), lambda tensor, name: tensor.cpu())
        torch.autograd.graph.increment_version(list(results.values()))
        if not parts or not files:
            yield from parts
            return
        heads = {
            (entry, head): number
            for number, block in parts.items()
            for entry, head in product(range(*block.entries), range(*call.whole.key_heads(block)))
        }
        head_bytes = sum(t.nbytes for t in results.values()) // (shape.batch * shape.kv_heads)
        options = CallOptions(self._budget, depth=call.options.depth, kernel=call.options.kernel)
        call = replace(call, tensors={}, whole=replace(call.whole, mask=mask), options=options)
        workers = self._most or max(1, self._held())
        chunks = chunks_of(call.shape, len(heads), workers, head_bytes, chunks)
        folder, name = os.path.split(next(iter(files.values())).path)
        with TemporaryDirectory(prefix=f"{name}.states-", dir=folder) as states:
            job = FarmPass(call, chunks, inputs, files, states, self._cpus, self._gpus)
            yield from self._run(job, heads, report)

    def _run(self, job: FarmPass, heads: Mapping[Head, int], report: PoolPass) -> Iterator[int]:
        """Compute a pass.

        Args:
            heads: batch entries and key/value heads to compute, with the number of their part.

        Yields:
            the number of each part whose results are complete.

        Raises:
            RuntimeError: a unit was begun too often.
            Exception: what a unit raised.
        """
        chunks, begun, ray = job.chunks, time.perf_counter(), self._ray
        first: Literal["head", "task"] = "head" if chunks == 1 else "task"
        waiting = deque(FarmUnit(first, *head, n) for head in sorted(heads) for n in range(chunks))
        report.parts = len(waiting) * (1 if chunks == 1 else 2)
        # Units that give results and are not done, by part; states that exist, by their merge.
        left = Counter(number for number in heads.values() for _ in range(chunks))
        states = Counter[FarmUnit]()
        sent, running = ray.put(job), dict[Any, FarmUnit]()
        merge, other = self._remote(max(1, self._cpus), 0), self._remote(self._cpus, self._gpus)
        try:
            while waiting or running:
                # Twice as many as are computed at once: none of them waits for this process.
                while waiting and len(running) < (self._most or 2 * max(1, self._held())):
                    unit = waiting.popleft()
                    running[(merge if unit.kind == "merge" else other).remote(sent, unit)] = unit
                for ref in ray.wait(list(running))[0]:
                    unit, now = running[ref], time.perf_counter() - begun
                    where, seconds, made = self._answer(ref, unit, report)
                    del running[ref]
                    if where not in report.devices:
                        report.devices.append(where)
                    device = report.devices.index(where)
                    report.ran.append(PartTiming(device, len(report.ran), now - seconds, now, made))
                    if unit.kind == "task":
                        for chunk in quorum(unit.number, chunks):
                            states[of := unit._replace(kind="merge", number=chunk)] += 1
                            if states[of] == len(tasks(chunk, chunks)):
                                waiting.appendleft(of)
                        continue
                    for path in job.states_of(unit):
                        path.unlink(missing_ok=True)
                    left[part := heads[unit.entry, unit.head]] -= 1
                    if not left[part]:
                        yield part
        finally:
            report.seconds = time.perf_counter() - begun
            if running and ray.is_initialized():
                # They write to files that their caller may use otherwise now.
                for ref in running:
                    ray.cancel(ref, force=True)
                ray.wait(list(running), num_returns=len(running), timeout=_CANCEL_SECONDS)

    def _held(self) -> int:
        """How many workers the machines hold now."""
        asked = [(name, n) for name, n in (("CPU", self._cpus), ("GPU", self._gpus)) if n]
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"] and asked]
        return sum(min(int(one.get(name, 0) / n + 1e-6) for name, n in asked) for one in alive)

    def _remote(self, cpus: float, gpus: float) -> Any:
        # Workers stay for more tasks, so each opens its device once.
        options: dict[str, Any] = {"max_calls": 0, "max_retries": _RETRIES}
        if gpus:
            options["runtime_env"] = {"env_vars": _SEE_ALL_GPUS}
        return self._ray.remote(num_cpus=cpus, num_gpus=gpus, **options)(compute)

    def _answer(self, ref: Any, unit: FarmUnit, report: PoolPass) -> Any:
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            raise RuntimeError(
                f"{unit} was begun {_RETRIES + 1} times and its worker was lost each time, after "
                f"{len(report.ran)} of {counted(report.parts, 'unit')}: {error}"
            ) from error

    def _begin(self, address: str | None, begun: ExitStack) -> None:
        """Connect to a cluster, or begin one."""
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        # A cluster that runs may be another user's, so it is joined only where that is said.
        if address not in (None, "local", "auto"):
            _check_there(str(address))
        elif address != "auto":
            address = "local"
            # Names of sockets are short, and nothing of a farm's own cluster is left behind.
            folder = begun.enter_context(TemporaryDirectory(prefix="qa-ray-", dir="/tmp"))
            options |= {"include_dashboard": False, "_temp_dir": folder}
        # A cluster reports its use over the network only if that was allowed.
        with ExitStack() as after:
            if _REPORTS not in os.environ:
                os.environ[_REPORTS] = "0"
                after.callback(os.environ.pop, _REPORTS)
            handler = signal.getsignal(signal.SIGTERM)
            self._ray.init(address, **options)
        # Ray puts its own in the place of a program's, such as that of ``cli/process.py``.
        if callable(handler) and signal.getsignal(signal.SIGTERM) is not handler:
            signal.signal(signal.SIGTERM, handler)
        begun.callback(self._ray.shutdown)


def _check_there(address: str) -> None:
    """Refuse an address at which nobody listens: Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"address must be auto, local or HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"there is no Ray cluster at {address}: {error}") from error


def _located(name: str, tensor: torch.Tensor, mappings: Mappings, written: bool) -> TensorHandle:
    """The file that a tensor lies in.

    Raises:
        ValueError: it lies in none that other machines may have.
    """
    found = handle_in_mapped_file(tensor, mappings, written)
    # Torch's shared memory has a name, too.
    if found is None or found.path.startswith("/dev/shm/torch_"):
        raise ValueError(
            f"{name} must be mapped from a file, whole and as it is there (as by "
            f"quorum_attention.files): a farm computes from files to files"
        )
    inner = 1 if name == "lse" else 2
    if written and not tensor[(0,) * (tensor.dim() - inner)].is_contiguous():
        raise ValueError(f"the rows of {name} must lie one after the other in its file")
    return found
