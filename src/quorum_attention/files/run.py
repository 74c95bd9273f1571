"""A call from files to files: computed part by part, kept, resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

import quorum_attention
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.files.call import FileCall
from quorum_attention.files.compute import (
    Compute,
    Settings,
    Work,
    compute_here,
    plan_words,
    settle,
)
from quorum_attention.files.formats import Wanted
from quorum_attention.files.inputs import Seen
from quorum_attention.files.output import Output
from quorum_attention.files.run_folder import Mode, RunFolder, run_folder

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        parts: of the call.
        resumed: parts that an earlier process had done; None: there was none.
        heads: key/value heads of a part.
        in_file: whether accumulators were in a mapped file.
    """

    parts: int
    resumed: int | None
    heads: int
    in_file: bool


def described(
    call: FileCall, wanted: Wanted, arguments: Mapping[str, Any], inputs: Mapping[str, Seen]
) -> dict[str, Any]:
    """What has to be the same when a run is resumed, by the names that messages give it.

    Args:
        arguments: as JSON has them.
        inputs: the input files, by what they are for.
    """
    device = call.device
    found = {
        "quorum-attention's version": quorum_attention.__version__,
        "torch's version": torch.__version__,
        "the device": str(device) if on_host(device) else backend_of(device).model(device),
        **{f"the {name}'s shape": list(t.shape) for name, t in call.tensors.items()},
        **{f"the {name}'s dtype": str(t.dtype) for name, t in call.tensors.items()},
        "the results": [[name, list(shape), str(dtype)] for name, (shape, dtype) in wanted.items()],
        **arguments,
    }
    for role, seen in inputs.items():
        found |= seen.described(role)
    return found


def run_call(
    call: FileCall,
    output: Output,
    header: Mapping[str, Any],
    inputs: Iterable[Seen],
    report: Report,
    *,
    mode: Mode = "new",
    heads: int | None = None,
    compute: Compute = compute_here,
    progress: bool = True,
    say: Say = lambda text: None,
) -> Outcome:
    """Compute a call into the files of ``output``, which are replaced when all of them are whole.

    Args:
        header: from ``described``.
        inputs: files that must not change meanwhile.
        report: filled with what the last part did; its total has all.
        mode: what becomes of a run that an earlier process left unfinished.
        heads: key/value heads of a part; None: as many as take some seconds.
        say: is told, in sentences, what users should know.

    Raises:
        BudgetError, NotImplementedError: the call cannot be run; nothing has been written.
        OSError: no room, or another process writes the same output.
        UnfinishedError, ValueError: see ``run_folder``; or an input changed meanwhile.
    """
    inputs = list(inputs)
    _tell_of_earlier_versions(output, say)
    with run_folder(output, header, mode) as folder, ExitStack() as stack, _telling(folder, say):
        if not folder.progress["settings"]:
            folder.progress["settings"] = asdict(settle(call, heads))
        settings = Settings(**folder.progress["settings"])
        parts = call.parts(settings.heads)
        left = [part for part in parts if part.number not in folder.done]
        resumed = len(folder.done) if folder.resumed else None
        if resumed is not None:
            say(f"resumed: {resumed} of {len(parts)} head groups were done")
            if left and (now := plan_words(call, settings)) != settings.plan:
                say(
                    f"the rest runs by another plan, so it may round otherwise: it was "
                    f"{settings.plan}, and is {now}"
                )
        _check(inputs)
        folder.open(stack)
        work = Work(call, settings, folder.tensors, folder.path, report, progress)
        for part in compute(work, left) if left else ():
            _check(inputs)
            folder.keep(part.number)
        folder.finish()
    return Outcome(len(parts), resumed, settings.heads, settings.in_file)


def _check(inputs: Iterable[Seen]) -> None:
    for seen in inputs:
        seen.check()


def _tell_of_earlier_versions(output: Output, say: Say) -> None:
    earlier = f"{output.run}.journal"
    if os.path.lexists(earlier):
        say(f"{earlier} is of an earlier version's run, which cannot be resumed: it is left there")


@contextmanager
def _telling(folder: RunFolder, say: Say) -> Iterator[None]:
    """Says what is kept of a run that ends with an exception."""
    try:
        yield
    except BaseException:
        settings, done = folder.progress["settings"], folder.kept()
        if done:
            say(
                f"{len(done)} of {settings['parts']} head groups are done and kept: --resume goes "
                f"on from there"
            )
        raise


__all__ = ["Outcome", "described", "run_call"]
