"""A run from files to files, which may be stopped and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

import quorum_attention
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.files.compute import Compute, FileRun, compute_here
from quorum_attention.files.file_call import FileCall
from quorum_attention.files.formats import TensorSpecs
from quorum_attention.files.inputs import FileStamp
from quorum_attention.files.output import Output
from quorum_attention.files.run_folder import Mode, RunFolder, run_folder
from quorum_attention.files.settings import RunSettings, choose_settings
from quorum_attention.plain_types import JsonObject
from quorum_attention.units import counted


class RunResult(NamedTuple):
    """How a call was run.

    Attributes:
        settings: what was chosen for it.
        resumed_parts: how many parts an earlier process had done; None if there was
            none.
    """

    settings: RunSettings
    resumed_parts: int | None


def fingerprint(
    call: FileCall,
    specs: TensorSpecs,
    arguments: Mapping[str, Any],
    inputs: Mapping[str, FileStamp],
) -> JsonObject:
    """Return what has to be the same when a run is resumed, by the names that messages
    give it.

    Args:
        specs: shapes and dtypes of the results.
        arguments: as JSON has them.
        inputs: the input files, by what they are for.
    """
    device = call.device
    fields: JsonObject = {
        "quorum-attention's version": quorum_attention.__version__,
        "torch's version": torch.__version__,
        "the device": str(device)
        if on_host(device)
        else backend_of(device).model(device),
    }
    for role, tensor in call.tensors.items():
        fields[f"the {role}'s shape"] = list(tensor.shape)
        fields[f"the {role}'s dtype"] = str(tensor.dtype)
    fields["the results"] = [
        [name, list(shape), str(dtype)] for name, (shape, dtype) in specs.items()
    ]
    fields |= arguments
    for role, stamp in inputs.items():
        fields |= stamp.fingerprint(role)
    return fields


def run_call(
    call: FileCall,
    output: Output,
    header: Mapping[str, Any],
    inputs: Iterable[FileStamp],
    report: Report,
    *,
    mode: Mode = "new",
    heads: int | None = None,
    compute: Compute = compute_here,
    say: Callable[[str], None] = lambda text: None,
) -> RunResult:
    """Compute a call into the files of ``output``, which are replaced when all of them
    are whole.

    Args:
        header: from ``fingerprint``.
        inputs: files that must not change meanwhile.
        report: filled with what the last part did; its total has all.
        mode: what becomes of a run that an earlier process left unfinished.
        heads: key/value heads of a part; None for as many as take some seconds.
        say: is told, in sentences, what users should know.

    Raises:
        BudgetError, NotImplementedError: the call cannot be run; nothing has been
            written.
        OSError: no room, or another process writes the same output.
        ValueError: see ``run_folder``; or an input changed meanwhile.
    """
    with run_folder(output, header, mode) as folder:
        settings = _settings(folder, call, heads)
        n_done = len(folder.progress.done)
        if folder.resumed:
            say(f"resumed: {n_done} of {counted(settings.parts, 'part')} were done")
        options = call.options._replace(budget=settings.budget_bytes)
        call = replace(call, options=options)
        results = call.with_heads(folder.open())
        run = FileRun(call, settings, results, output.run, report)
        _compute_parts(
            run,
            folder,
            set(inputs),
            compute,
            say,
        )
    return RunResult(settings, n_done if folder.resumed else None)


def _settings(folder: RunFolder, call: FileCall, heads: int | None) -> RunSettings:
    """Return the settings that an earlier process has chosen, or choose them.

    Raises:
        BudgetError, NotImplementedError: a part cannot be run.
    """
    progress = folder.progress
    if progress.settings:
        return RunSettings(**progress.settings)
    settings = choose_settings(call, heads)
    folder.progress = replace(progress, settings=asdict(settings))
    return settings


def _compute_parts(
    run: FileRun,
    folder: RunFolder,
    inputs: Iterable[FileStamp],
    compute: Compute,
    say: Callable[[str], None],
) -> None:
    """Compute the parts that are not done, and give the files their names."""
    n_parts = run.settings.parts
    remaining = [
        number for number in range(n_parts) if number not in folder.progress.done
    ]
    try:
        computed = compute(run, remaining) if remaining else ()
        for number in computed:
            for stamp in inputs:
                stamp.check()
            folder.keep(number)
        folder.finish()
    except BaseException:
        n_done = len(folder.progress.done)
        if n_done:
            say(
                f"{n_done} of {counted(n_parts, 'part')} are done and kept: --resume "
                "continues"
            )
        raise
