"""``Farm``: attention calls from files to files by the tasks of a Ray cluster, each a
unit of the call, and begun again if its worker dies."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import torch

from quorum_attention.argument_checks import whole_number
from quorum_attention.call.block import CallBlock
from quorum_attention.call.options import CallOptions
from quorum_attention.call.overlap import Mappings
from quorum_attention.call.validation import as_tensor, check_no_overlap, check_tensor
from quorum_attention.devices.handles import TensorHandle, handle_in_mapped_file
from quorum_attention.devices.report import PartTiming, PoolPass, PoolReport
from quorum_attention.devices.request import check_options
from quorum_attention.execution.report import Report
from quorum_attention.files.file_call import GRADIENTS, FileCall, file_call
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.keywords import check_names, helps_with_names
from quorum_attention.mask import map_tensors
from quorum_attention.plain_types import Keywords
from quorum_attention.ray.chunks import FarmUnit, Head, choose_n_chunks
from quorum_attention.ray.cluster import connect, count_workers, import_ray
from quorum_attention.ray.compute import compute
from quorum_attention.ray.farm_pass import FarmPass
from quorum_attention.ray.unit_queue import UnitQueue
from quorum_attention.units import check_budget, counted, parse_bytes

# Times that a unit is begun again because its worker or its machine was lost.
_RETRIES = 3
_CANCEL_SECONDS = 30.0
_SEE_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
# Options of a farm's call beside its tensors and results.
_OPTIONS = (
    "attn_mask",
    "is_causal",
    "scale",
    "enable_gqa",
    "dropout_p",
    "dropout_seed",
    "depth",
    "kernel",
    "chunks",
    "report",
)


class Farm(AbstractContextManager["Farm"]):
    """A Ray cluster that computes attention calls from files to files.

    A call is cut into independent units, each a Ray task: key/value heads, or cyclic
    quorum tasks if there are few heads. A unit maps the rows that it needs, computes
    them as ordinary calls under its own budget, and writes its results. Quorum tasks
    write partial states; a chunk is merged, exactly, when all its states exist. If a
    worker or a machine dies, Ray runs its units again.

    Inputs and results are tensors mapped from files, as by ``quorum_attention.files``,
    on a file system that all machines have under the same path.

    Use it as a context manager, or ``close`` it.

    Args:
        address: HOST:PORT of a cluster; "auto" for the one that ``RAY_ADDRESS`` names,
            or that any user started on this machine (join only clusters that you trust:
            docs/ray.md); None or "local" for a new one on this machine, which ends with
            the farm. A program that is already connected to Ray keeps its cluster.
        workers: at most this many units run at a time; None: as many as the cluster has
            room for.
        num_cpus, num_gpus: CPUs and GPUs of a unit. A unit with a GPU, or a part of
            one, computes on this GPU. A unit without computes on as many threads as it
            has CPUs. None: one GPU if the cluster has any.
        budget: device bytes of a unit, as in ``quorum_attention.attention``.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConnectionError: there is no cluster at ``address``.
        RuntimeError: no machine of the cluster has as many CPUs and GPUs as a unit
            needs.
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
        check_budget(budget)
        self._budget = None if budget is None else parse_bytes(budget)
        self._ray = import_ray()
        self._max_running = workers
        self._cpus = num_cpus
        with ExitStack() as undo:
            if not self._ray.is_initialized():
                connect(self._ray, address, undo)
            resources = self._ray.cluster_resources()
            has_gpu = resources.get("GPU", 0) >= 1
            self._gpus = float(has_gpu) if num_gpus is None else num_gpus
            if self._count_workers() <= 0:
                raise RuntimeError(
                    f"no machine of the cluster holds a worker: one takes {num_cpus:g} "
                    f"CPU and {self._gpus:g} GPU, the cluster has "
                    f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} "
                    "GPU"
                )
            self._undo = undo.pop_all()

    def close(self) -> None:
        """End the cluster if this farm began it."""
        self._undo.close()

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
            call: attn_mask, is_causal, scale and enable_gqa of
                ``quorum_attention.attention``, in this order or by name. The tensors of
                ``attn_mask`` may be in memory, and are sent to every worker then.
            out: the result, (..., heads, n_queries, value_dim) of any dtype, mapped
                from a file; partial states are kept beside that.
            lse: the log-sum-exp, (..., heads, n_queries) in fp32 (fp64 for fp64
                inputs), mapped from a file; None: it is not stored.
            options: dropout_p and dropout_seed, as in ``quorum_attention.attention``;
                with dropout heads are not cut. depth and kernel are for the calls of
                each unit. chunks is the number of tasks of each key/value head, c = l
                (l - 1) + 1; 1 leaves heads whole. If chunks is None and there are fewer
                than ten heads for each worker, heads are cut until each worker has ten
                units. report is a ``PoolReport``, filled with what happened.

        Returns:
            ``out``.

        Raises:
            ValueError: a tensor is not mapped from a file, or an argument is wrong, as
                in ``quorum_attention.attention``.
            NotImplementedError: an input requires a gradient: call
                ``attention_backward`` instead.
            RuntimeError: four workers died while they computed the same unit.
        """
        results = {"out": out}
        if lse is not None:
            results["lse"] = lse
        tensors = {"query": query, "key": key, "value": value}
        return self._compute(
            tensors,
            results,
            *call,
            **options,
        )["out"]

    def attention_with_lse(
        self, *call: Any, lse: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``quorum_attention.attention_with_lse`` from files to files. The arguments
        are those of ``attention``."""
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
        tensors = {
            "query": query,
            "key": key,
            "value": value,
            "grad_out": grad_out,
            "out": out,
            "lse": lse,
        }
        self._compute(
            tensors, dict(zip(GRADIENTS, grads, strict=True)), *call, **options
        )
        return grads

    @uncompiled
    def _compute(
        self,
        tensors: NamedTensors,
        results: Mapping[str, torch.Tensor | None],
        *call: Any,
        chunks: int | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        report: PoolReport | None = None,
        **dropout: Any,
    ) -> NamedTensors:
        """Compute all heads of a call into its results, which are checked first.

        Args:
            call, dropout: as ``file_call`` takes them.
        """
        check_names("Farm.attention", dropout, _OPTIONS)
        tensors = {name: as_tensor(tensor, name) for name, tensor in tensors.items()}
        targets = {
            name: as_tensor(result, name, for_writing=True)
            for name, result in results.items()
        }
        out_dtype = next(iter(targets.values())).dtype
        # This process computes nothing of the call.
        options = CallOptions(depth=depth, devices="cpu")
        checked_call = file_call(
            options, tensors, *call, out_dtype=out_dtype, **dropout
        )
        checked_call = replace(checked_call, options=options._replace(kernel=kernel))
        _check_targets(checked_call, targets, tensors["query"].device)
        pool_pass = PoolPass()
        if report is not None:
            setattr(
                report, "backward" if checked_call.backward else "forward", pool_pass
            )
        parts = dict(enumerate(checked_call.parts(1)))
        done = self.by_parts(
            checked_call,
            checked_call.with_heads(targets),
            parts,
            chunks=chunks,
            report=pool_pass,
        )
        for _ in done:
            pass
        return targets

    @uncompiled
    @torch.no_grad()
    def by_parts(
        self,
        call: FileCall,
        results: NamedTensors,
        parts: Mapping[int, CallBlock],
        *,
        chunks: int | None = None,
        report: PoolPass,
    ) -> Iterator[int]:
        """Compute parts of a call, for a caller that records which parts are done.

        Args:
            results: out, and lse if wanted; or dq, dk and dv; with a dimension of
                heads.
            parts: from ``call.parts``, by number.
            report: filled with what happened.

        Yields:
            The number of each part whose results are complete.
        """
        if chunks is not None:
            chunks = whole_number(chunks, "chunks", 1)
        check_options(call.options)
        mappings = Mappings.now()
        inputs = _input_handles(call, mappings)
        files = {
            name: _handle_of(name, tensor, mappings, writable=True)
            for name, tensor in results.items()
            if tensor.numel()
        }
        torch.autograd.graph.increment_version(list(results.values()))
        if not parts or not files:
            yield from parts
            return
        part_of_head = {
            (entry, head): number
            for number, block in parts.items()
            for entry, head in product(
                range(*block.entries), range(*call.whole_call.key_heads(block))
            )
        }
        result_bytes = sum(tensor.nbytes for tensor in results.values())
        n_chunks = choose_n_chunks(
            call.shape,
            n_heads=len(part_of_head),
            n_workers=self._max_running or max(1, self._count_workers()),
            head_bytes=result_bytes // (call.shape.batch * call.shape.kv_heads),
            n_chunks=chunks,
        )
        folder, name = os.path.split(next(iter(files.values())).path)
        with TemporaryDirectory(prefix=f"{name}.states-", dir=folder) as states:
            farm_pass = FarmPass(
                self._sent_call(call),
                n_chunks,
                inputs,
                files,
                states,
                self._cpus,
                self._gpus,
            )
            yield from self._run(farm_pass, part_of_head, report)

    def _sent_call(self, call: FileCall) -> FileCall:
        """Return a call as workers get it: without the tensors that are sent by
        themselves."""
        mask = call.whole_call.mask
        if mask is not None:
            mask = map_tensors(
                replace(mask, bias=None), lambda tensor, name: tensor.cpu()
            )
        whole_call = replace(call.whole_call, mask=mask)
        options = CallOptions(
            self._budget,
            depth=call.options.depth,
            kernel=call.options.kernel,
        )
        return replace(call, tensors={}, whole_call=whole_call, options=options)

    def _run(
        self, farm_pass: FarmPass, part_of_head: Mapping[Head, int], report: PoolPass
    ) -> Iterator[int]:
        """Compute a pass.

        Args:
            part_of_head: batch entries and key/value heads to compute, with the number
                of their part.

        Yields:
            The number of each part whose results are complete.

        Raises:
            RuntimeError: a unit was begun too often.
            Exception: what a unit raised.
        """
        ray = self._ray
        started = time.perf_counter()
        queue = UnitQueue(part_of_head, farm_pass.n_chunks)
        report.parts = queue.n_units
        sent_pass = ray.put(farm_pass)
        running: dict[Any, FarmUnit] = {}
        try:
            while queue.waiting or running:
                self._submit(sent_pass, queue, running)
                ready, _ = ray.wait(list(running))
                for reference in ready:
                    unit = running[reference]
                    stop = time.perf_counter() - started
                    place, seconds, unit_report = self._result_of(
                        reference, unit, report
                    )
                    del running[reference]
                    _add_timing(
                        report,
                        place,
                        stop - seconds,
                        stop,
                        unit_report,
                    )
                    part = queue.finish(unit)
                    for path in farm_pass.merged_paths(unit):
                        path.unlink(missing_ok=True)
                    if part is not None:
                        yield part
        finally:
            report.seconds = time.perf_counter() - started
            if running and ray.is_initialized():
                # They write to files that their caller may use otherwise now.
                for reference in running:
                    ray.cancel(reference, force=True)
                ray.wait(
                    list(running), num_returns=len(running), timeout=_CANCEL_SECONDS
                )

    def _submit(
        self, sent_pass: Any, queue: UnitQueue, running: dict[Any, FarmUnit]
    ) -> None:
        """Begin units while there is room for them."""
        while queue.waiting:
            # Twice as many as are computed at once: no worker waits for this process.
            most_running = self._max_running or 2 * max(1, self._count_workers())
            if len(running) >= most_running:
                return
            unit = queue.waiting.popleft()
            if unit.kind == "merge":
                function = self._remote(max(1, self._cpus), 0)
            else:
                function = self._remote(self._cpus, self._gpus)
            reference = function.remote(sent_pass, unit)
            running[reference] = unit

    def _count_workers(self) -> int:
        """Return how many workers the machines hold now."""
        return count_workers(self._ray, self._cpus, self._gpus)

    def _remote(self, cpus: float, gpus: float) -> Any:
        """Return the function that computes a unit by a Ray task."""
        # Workers stay for more tasks, so each opens its device once.
        options: Keywords = {"max_calls": 0, "max_retries": _RETRIES}
        if gpus:
            options["runtime_env"] = {"env_vars": _SEE_ALL_GPUS}
        return self._ray.remote(num_cpus=cpus, num_gpus=gpus, **options)(compute)

    def _result_of(self, reference: Any, unit: FarmUnit, report: PoolPass) -> Any:
        """Return what the task of a unit has returned, or raise its error."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            raise RuntimeError(
                f"{unit} was begun {_RETRIES + 1} times and its worker was lost each "
                f"time, after {len(report.ran)} of {counted(report.parts, 'unit')}: "
                f"{error}"
            ) from error


def _check_targets(call: FileCall, targets: NamedTensors, device: torch.device) -> None:
    """Check the tensors that results are written to.

    Raises:
        ValueError, TypeError: one does not fit, or shares memory with an input.
    """
    specs = call.results(lse="lse" in targets)
    for name, (shape, dtype) in specs.items():
        check_tensor(
            targets[name],
            shape,
            name,
            device,
            dtype,
            for_writing=True,
        )
    mask = call.whole_call.mask
    bias = None if mask is None else mask.bias
    check_no_overlap(targets, {**call.tensors, "attn_mask": bias})


def _add_timing(
    report: PoolPass, place: str, start: float, stop: float, unit_report: Report
) -> None:
    """Add a unit that is done to a report."""
    if place not in report.devices:
        report.devices.append(place)
    device = report.devices.index(place)
    report.ran.append(
        PartTiming(
            device,
            len(report.ran),
            start,
            stop,
            unit_report,
        )
    )


def _input_handles(
    call: FileCall, mappings: Mappings
) -> dict[str, torch.Tensor | TensorHandle]:
    """Return the files that a call's tensors lie in, and its bias, which may be in a
    file.

    Raises:
        ValueError: a tensor is in no file.
    """
    inputs: dict[str, torch.Tensor | TensorHandle] = {}
    for name, tensor in call.tensors.items():
        inputs[name] = tensor
        if tensor.numel():
            inputs[name] = _handle_of(name, tensor, mappings, writable=False)
    mask = call.whole_call.mask
    if mask is not None and mask.bias is not None:
        handle = handle_in_mapped_file(mask.bias, mappings, writable=False)
        inputs["bias"] = mask.bias.detach() if handle is None else handle
    return inputs


def _handle_of(
    name: str, tensor: torch.Tensor, mappings: Mappings, *, writable: bool
) -> TensorHandle:
    """Return the file that a tensor lies in.

    Raises:
        ValueError: it lies in none that other machines may have.
    """
    handle = handle_in_mapped_file(tensor, mappings, writable)
    # Torch's shared memory has a name, too.
    if handle is None or handle.path.startswith("/dev/shm/torch_"):
        raise ValueError(
            f"{name} must be mapped from a file, whole and as it is there (as by "
            f"quorum_attention.files): a farm computes from files to files"
        )
    n_row_dims = 1 if name == "lse" else 2
    first_rows = tensor[(0,) * (tensor.dim() - n_row_dims)]
    if writable and not first_rows.is_contiguous():
        raise ValueError(f"the rows of {name} must lie one after the other in its file")
    return handle
