"""``Farm``: attention calls from files to files by the tasks of a Ray cluster, each a unit of the
call, and begun again if its worker dies."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

import torch

from quorum_attention.call.options import CallOptions
from quorum_attention.call.overlap import Mappings
from quorum_attention.call.validation import as_tensor, check_apart, check_tensor
from quorum_attention.counts import real_number, whole_number
from quorum_attention.devices.buffers import InFile, in_file
from quorum_attention.devices.call import check_options
from quorum_attention.devices.report import PoolPass, PoolReport, Ran
from quorum_attention.files.call import GRADIENTS, FileCall, file_call, written_as
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.mask import Mask, map_tensors
from quorum_attention.ray.compute import Job, compute
from quorum_attention.ray.units import Head, Unit, cut_of
from quorum_attention.sizes import parse_bytes

_Value = TypeVar("_Value")

# Times that a unit is begun again because its worker or its machine was lost.
_RETRIES = 3
_CONNECT_SECONDS, _CANCEL_SECONDS = 10.0, 30.0
_REPORTS = "RAY_USAGE_STATS_ENABLED"
_SEE_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def ray_here() -> Any:
    """Ray.

    Raises:
        ModuleNotFoundError: it is not installed; says how to.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a farm needs Ray, which is not installed: pip install 'quorum-attention[ray]'"
        ) from error
    return ray


class Farm:
    """A Ray cluster that computes attention calls from files to files.

    A call's key/value heads, or where there are few of them their cyclic quorum tasks, are units
    that do not depend on each other, and each is a Ray task. It maps the rows that it needs,
    computes them as ordinary calls under its own budget, and writes its results, or partial states
    that are merged exactly when all those of a chunk exist. A worker or a machine that dies costs
    the units that it was at, which Ray begins again.

    Inputs and results are tensors that are mapped from files, as those of
    ``quorum_attention.files``, on a file system that all machines have under the same path.

    Use it as a context manager, or ``close`` it.

    Args:
        address: HOST:PORT of a cluster, or "auto" for the one that ``RAY_ADDRESS`` names or that
            runs on this machine, whoever began it: whoever can reach a cluster runs code as those
            who use it (docs/ray.md). None or "local": a new one in this machine, ended with the
            farm. A program that is connected to Ray already stays where it is.
        workers: how many units are computed at once, at most; None: as many as the cluster holds
            at any time.
        num_cpus, num_gpus: what each gets of its machine. With (part of) a GPU it computes on that,
            otherwise on as many threads as it has CPUs. None: one GPU if the cluster has any.
        budget: device bytes of each, as in ``quorum_attention.attention``.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConnectionError: there is no cluster at ``address``.
        RuntimeError: no machine of the cluster has so many CPUs and GPUs.
    """

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
        for name, number in (("num_cpus", num_cpus), ("num_gpus", num_gpus or 0)):
            if not real_number(number, name) >= 0:
                raise ValueError(f"{name} must be a number of at least 0, got {number!r}")
        if not num_cpus and not num_gpus:
            raise ValueError("num_cpus and num_gpus must not both be 0")
        self._budget = None if budget is None else parse_bytes(budget)
        self._ray, self._most, self._cpus = ray_here(), workers, num_cpus
        with ExitStack() as begun:
            if not self._ray.is_initialized():
                self._begin(address, begun)
            there = self._ray.cluster_resources()
            self._gpus = float(there.get("GPU", 0) >= 1) if num_gpus is None else num_gpus
            if not self._held():
                raise RuntimeError(
                    f"no machine of the cluster holds a worker: one takes {num_cpus:g} CPU and "
                    f"{self._gpus:g} GPU, the cluster has {there.get('CPU', 0):g} CPU and "
                    f"{there.get('GPU', 0):g} GPU"
                )
            self._begun = begun.pop_all()

    def close(self) -> None:
        """End the cluster if this farm began it."""
        self._begun.close()

    def __enter__(self) -> Farm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        lse: torch.Tensor | None = None,
        chunks: int | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        report: PoolReport | None = None,
    ) -> torch.Tensor:
        """``quorum_attention.attention`` from files to files.

        Args:
            query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p, dropout_seed: as
                there. The tensors of ``attn_mask`` may be in memory, and are sent to every worker
                then. With dropout heads are not cut.
            out: the result, (..., heads, n_queries, value_dim) of any dtype, mapped from a file;
                partial states are kept beside that.
            lse: the log-sum-exp, (..., heads, n_queries) in fp32 (fp64 for fp64 inputs), mapped
                from a file; None: it is not wanted.
            chunks: tasks of each key/value head, c = l (l - 1) + 1; 1: heads stay whole. None: as
                many as leave ten units for each worker, if there are fewer heads.
            depth, kernel: of each unit's calls, as there.
            report: filled with what happened.

        Returns:
            ``out``.

        Raises:
            Errors as of ``quorum_attention.attention``; ValueError: a tensor is in no file;
            NotImplementedError: a gradient is wanted, which ``attention_backward`` computes;
            RuntimeError: a unit has lost four workers.
        """
        results = {"out": _given(out, "out")} | ({} if lse is None else {"lse": lse})
        self._all(
            {"query": query, "key": key, "value": value}, attn_mask, results, chunks, report,
            CallOptions(depth=depth, kernel=kernel), dropout_p=dropout_p, dropout_seed=dropout_seed,
            is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        return results["out"]

    def attention_with_lse(
        self, *call: Any, lse: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``quorum_attention.attention_with_lse`` from files to files; arguments as ``attention``
        has them."""
        lse = _given(lse, "lse")
        return self.attention(*call, lse=lse, **options), lse

    @uncompiled
    @torch.no_grad()
    def attention_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        attn_mask: torch.Tensor | Mask | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        chunks: int | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        report: PoolReport | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``quorum_attention.attention_backward`` from files to files.

        Args:
            grads: (grad_query, grad_key, grad_value), of one dtype, mapped from files.
            attn_mask and so on: as in ``attention``.
        """
        results = dict(zip(GRADIENTS, _given(grads, "grads"), strict=True))
        self._all(
            {"query": query, "key": key, "value": value, "grad_out": grad_out, "out": out,
             "lse": lse}, attn_mask, results, chunks, report,
            CallOptions(depth=depth, kernel=kernel), dropout_p=dropout_p, dropout_seed=dropout_seed,
            is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        return results["dq"], results["dk"], results["dv"]

    def _all(
        self,
        tensors: Mapping[str, torch.Tensor],
        mask: torch.Tensor | Mask | None,
        results: dict[str, torch.Tensor],
        chunks: int | None,
        report: PoolReport | None,
        written: CallOptions,
        **said: Any,
    ) -> None:
        """Compute all heads of a call, whose results are checked first."""
        check_options(written)
        given = {name: as_tensor(tensor, name) for name, tensor in tensors.items()}
        # This process computes nothing of it.
        call = file_call(given, mask, CallOptions(depth=written.depth, devices="cpu"), **said)
        call, ran, work = replace(call, written=written), PoolPass(), call.work
        if report is not None:
            setattr(report, "backward" if call.backward else "forward", ran)
        results = {n: as_tensor(result, n, written=True) for n, result in results.items()}
        for name, (shape, dtype) in call.results(lse="lse" in results).items():
            home, exact = call.tensors["query"].device, dtype if name == "lse" else None
            check_tensor(results[name], shape, name, home, exact, written=True)
        bias = call.whole.mask
        bias = bias.bias if isinstance(bias, Mask) else bias
        check_apart(results, {**call.tensors, "attn_mask": bias})
        heads = list(product(range(work.batch), range(work.kv_heads)))
        for _ in self.by_heads(call, written_as(call, results), heads, chunks=chunks, report=ran):
            pass

    @uncompiled
    @torch.no_grad()
    def by_heads(
        self,
        call: FileCall,
        results: Mapping[str, torch.Tensor],
        heads: Collection[Head],
        *,
        chunks: int | None = None,
        report: PoolPass,
    ) -> Iterator[Head]:
        """A call over some heads, for who keeps book of what is done.

        Args:
            results: out, and lse if wanted; or dq, dk and dv; with a dimension of heads.
            heads: batch entries (through all batch dimensions) and key/value heads to compute.
            report: filled with what happened.

        Yields:
            each head whose results are complete.
        """
        chunks = None if chunks is None else whole_number(chunks, "chunks", 1)
        check_options(call.written)
        work, mappings = call.work, Mappings.now()
        inputs: dict[str, torch.Tensor | InFile] = {
            name: _located(name, tensor, mappings, False) if tensor.numel() else tensor
            for name, tensor in call.tensors.items()
        }
        files = {n: _located(n, t, mappings, True) for n, t in results.items() if t.numel()}
        mask = call.whole.mask if isinstance(call.whole.mask, Mask) else None
        bias = call.whole.mask if mask is None else mask.bias
        if isinstance(bias, torch.Tensor):  # sent by itself: it may be in a file
            inputs["bias"] = in_file(bias.detach(), mappings, written=False) or bias.detach()
        if mask is not None:
            mask = map_tensors(replace(mask, bias=None), lambda t, name: t.detach().cpu())
        torch.autograd.graph.increment_version(list(results.values()))
        if not heads:
            return
        if not work.n_queries * work.n_keys or not files:
            for name, tensor in results.items():
                tensor.fill_(-torch.inf if name == "lse" else 0.0)
            if "lse" in results and mask is not None and mask.sinks is not None:
                results["lse"].copy_(mask.sinks[:, None])
            yield from heads
            return
        head_bytes = sum(t.nbytes for t in results.values()) // (work.batch * work.kv_heads)
        whole = replace(call.whole, mask=mask)
        cut = cut_of(whole, len(heads), self._workers, head_bytes, chunks)
        folder, name = os.path.split(next(iter(files.values())).path)
        with TemporaryDirectory(prefix=f"{name}.states-", dir=folder) as states:
            job = Job(
                cut, inputs, files, states, work.state_dtype, next(iter(results.values())).dtype,
                CallOptions(self._budget, depth=call.written.depth, kernel=call.written.kernel),
                self._cpus, self._gpus,
            )  # fmt: skip
            yield from self._run(job, heads, report)

    @property
    def _workers(self) -> int:
        """How many units are computed at once."""
        return self._most or max(1, self._held())

    def _run(self, job: Job, heads: Collection[Head], report: PoolPass) -> Iterator[Head]:
        """Compute a pass.

        Yields:
            each head whose results are complete.

        Raises:
            RuntimeError: a unit was begun too often.
            Exception: what a unit raised.
        """
        cut, begun, ray = job.cut, time.perf_counter(), self._ray
        first: Literal["head", "task"] = "head" if cut.chunks == 1 else "task"
        every = [Unit(first, *head, n) for head in sorted(heads) for n in range(cut.chunks)]
        waiting, report.parts = deque(every), len(every) * (1 if cut.chunks == 1 else 2)
        # Units that give results and are not done, by head; states that exist, by their merge.
        left, states = dict.fromkeys(heads, cut.chunks), Counter[Unit]()
        sent, running = ray.put(job), dict[Any, Unit]()
        merge, other = self._remote(max(1, self._cpus), 0), self._remote(self._cpus, self._gpus)
        try:
            while waiting or running:
                # Twice as many as are computed at once: none of them waits for this process.
                while waiting and len(running) < (self._most or 2 * self._workers):
                    unit = waiting.popleft()
                    running[(merge if unit.kind == "merge" else other).remote(sent, unit)] = unit
                for ref in ray.wait(list(running))[0]:
                    unit, now = running[ref], time.perf_counter() - begun
                    done = self._answer(ref, unit, report)
                    del running[ref]
                    if done.where not in report.devices:
                        report.devices.append(done.where)
                    device, start = report.devices.index(done.where), now - done.seconds
                    report.ran.append(Ran(device, len(report.ran), start, now, done.report))
                    if unit.kind == "task":
                        for chunk in cut.quorum(unit.number):
                            states[of := unit._replace(kind="merge", number=chunk)] += 1
                            if states[of] == len(cut.tasks(chunk)):
                                waiting.appendleft(of)
                        continue
                    if unit.kind == "merge":
                        job.remove_states(unit)
                    head = unit.entry, unit.head
                    left[head] -= 1
                    if not left[head]:
                        yield head
        finally:
            report.seconds = time.perf_counter() - begun
            if running and ray.is_initialized():
                # They write to files that their caller may use otherwise now.
                for ref in running:
                    ray.cancel(ref, force=True)
                ray.wait(list(running), num_returns=len(running), timeout=_CANCEL_SECONDS)

    def _held(self) -> int:
        """How many workers the machines hold now."""
        asked = {"CPU": self._cpus, "GPU": self._gpus}
        return sum(
            min(int(node["Resources"].get(name, 0) / n + 1e-6) for name, n in asked.items() if n)
            for node in self._ray.nodes()
            if node["Alive"]
        )

    def _remote(self, cpus: float, gpus: float) -> Any:
        # Workers stay for more tasks, so each opens its device once.
        options: dict[str, Any] = {"max_calls": 0, "max_retries": _RETRIES}
        if gpus:
            options["runtime_env"] = {"env_vars": _SEE_ALL_GPUS}
        return self._ray.remote(num_cpus=cpus, num_gpus=gpus, **options)(compute)

    def _answer(self, ref: Any, unit: Unit, report: PoolPass) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except errors.RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, Exception) else error from error
        except errors.RayError as error:
            raise RuntimeError(
                f"{unit} was begun {_RETRIES + 1} times and its worker was lost each time, after "
                f"{len(report.ran)} of {report.parts} units: {error}"
            ) from error

    def _begin(self, address: str | None, begun: ExitStack) -> None:
        """Connect to a cluster, or begin one."""
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        # A cluster that runs may be another user's, so it is joined only where that is said.
        if address is not None and address != "local":
            _check_there(address)
        else:
            address = "local"
            # Names of sockets are short, and nothing of a farm's own cluster is left behind.
            folder = begun.enter_context(TemporaryDirectory(prefix="qa-ray-", dir="/tmp"))
            options |= {"include_dashboard": False, "_temp_dir": folder}
        # A cluster reports its use over the network only if that was allowed.
        unset = _REPORTS not in os.environ
        os.environ.setdefault(_REPORTS, "0")
        try:
            self._ray.init(address, **options)
        finally:
            if unset:
                del os.environ[_REPORTS]
        begun.callback(self._ray.shutdown)


def _check_there(address: str) -> None:
    """Refuse an address at which nobody listens: Ray would try for minutes."""
    if address == "auto":
        return
    host, _, port = str(address).removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"address must be auto, local or HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"there is no Ray cluster at {address}: {error}") from error


def _given(value: _Value | None, name: str) -> _Value:
    if value is None:
        raise ValueError(f"{name} must be given: a farm writes to files")
    return value


def _located(name: str, tensor: torch.Tensor, mappings: Mappings, written: bool) -> InFile:
    """The file that a tensor lies in.

    Raises:
        ValueError: it lies in none that other machines may have.
    """
    found = in_file(tensor, mappings, written)
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
