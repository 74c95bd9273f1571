"""Parts of a call, computed one after the other into the results' files."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quorum_attention.call.block import BlockResults, CallBlock
from quorum_attention.call.options import CallOptions
from quorum_attention.execution.report import Report
from quorum_attention.files.file_call import FileCall
from quorum_attention.files.formats import TensorSpecs, create_tensors
from quorum_attention.files.settings import RunSettings, lse_given
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.passes.block_call import check_forward, compute_block
from quorum_attention.progress import progress_bar


@dataclass(slots=True)
class FileRun:
    """A call with its results' files.

    Attributes:
        call: the call.
        settings: its settings.
        results: all of its results, in their files, with a dimension of heads.
        folder: for files of scratch space.
        report: filled while it runs.
    """

    call: FileCall
    settings: RunSettings
    results: NamedTensors
    folder: Path
    report: Report

    @property
    def parts(self) -> list[CallBlock]:
        """All parts of the call."""
        return self.call.parts(self.settings.heads)


Compute = Callable[[FileRun, Sequence[int]], Iterator[int]]
"""Computes parts by their numbers, anywhere and in any order.

Writes their results into ``FileRun.results``, and yields each part's number when they
are written. ``compute_here`` is one.
"""


def compute_here(run: FileRun, numbers: Sequence[int]) -> Iterator[int]:
    """Compute parts one after the other in this process."""
    parts = run.parts
    with progress_bar() as bar, torch.no_grad():
        for number in numbers:
            progress = _part_progress(bar, number, len(parts))
            options = run.call.options._replace(report=run.report, progress=progress)
            _compute_part(run, parts[number], options)
            yield number


def _part_progress(bar: Any, number: int, n_parts: int) -> Any:
    """Return a function that shows the progress of a part as progress of all parts."""
    return lambda done, total, label: bar(
        number * total + done,
        n_parts * total,
        label,
    )


def _compute_part(run: FileRun, block: CallBlock, options: CallOptions) -> None:
    """Compute a part into its results."""
    call = run.call
    inputs = call.whole_call.cut_named(call.tensors, block)
    results = call.whole_call.cut_named(run.results, block)
    targets = results | _scratch_tensors(run, results)
    if call.backward:
        grads = (targets["dq"], targets["dk"], targets["dv"])
        check_forward(
            call.whole_call,
            block,
            inputs,
            options,
            run.settings.parts,
        )
        compute_block(
            call.whole_call, block, inputs, options, BlockResults(grads=grads)
        )
    else:
        lse = targets["lse"] if lse_given(call, in_file=run.settings.in_file) else None
        block_results = BlockResults(targets["out"], lse)
        _, targets["lse"] = compute_block(
            call.whole_call, block, inputs, options, block_results
        )
    for name, result in results.items():
        target = targets[name]
        if target is not result:
            result.copy_(target)


def _scratch_tensors(run: FileRun, results: NamedTensors) -> NamedTensors:
    """Return accumulators of a part that are not its results themselves, in a file.

    The file has no name: the system writes it to the disk and reads it back, so it may
    be larger than the host's memory.
    """
    call = run.call
    in_file = run.settings.in_file
    dtype = call.shape.state_dtype
    specs: TensorSpecs = {}
    if in_file:
        for name, result in results.items():
            if result.dtype != dtype:
                specs[name] = (tuple(result.shape), dtype)
    lse_is_missing = not call.backward and "lse" not in results
    if lse_is_missing and lse_given(call, in_file=in_file):
        rows_shape = tuple(results["out"].shape[:-1])
        specs["lse"] = (rows_shape, dtype)
    if not specs:
        return {}
    path = run.folder / f"{secrets.token_hex(4)}-accumulators"
    tensors = create_tensors(path, specs)
    path.unlink()
    return tensors
