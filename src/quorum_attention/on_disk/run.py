"""A call from files to files: settled, begun or resumed, computed part by part, finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import torch

import quorum_attention
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.files import Wanted
from quorum_attention.on_disk import journal as journals
from quorum_attention.on_disk.call import FileCall
from quorum_attention.on_disk.compute import Settings, Work, compute_here, plan_words, settle
from quorum_attention.on_disk.fingerprint import unchanged
from quorum_attention.on_disk.journal import Header
from quorum_attention.on_disk.parts import Part
from quorum_attention.on_disk.targets import Output
from quorum_attention.on_disk.unfinished import Mode, beside, settings_of, writing

Compute = Callable[[Work, Sequence[Part]], Iterator[Part]]
"""Computes parts, anywhere and in any order: writes their results into ``Work.results`` and yields
each part when they are written. ``compute_here`` is one."""


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


def header_of(
    call: FileCall, wanted: Wanted, arguments: Mapping[str, Any], inputs: Mapping[str, Any]
) -> Header:
    """What identifies a call in a journal.

    Args:
        arguments: by the names that messages give them, as JSON has them.
        inputs: a fingerprint of each input file.
    """
    device = call.written.devices
    assert isinstance(device, torch.device)
    named = str(device) if on_host(device) else backend_of(device).model(device)
    described = {
        "quorum-attention's version": quorum_attention.__version__,
        "torch's version": torch.__version__,
        "the device": named,
        **{f"the {name}'s shape": list(t.shape) for name, t in call.tensors.items()},
        **{f"the {name}'s dtype": str(t.dtype) for name, t in call.tensors.items()},
        "the results": [[name, list(shape), str(dtype)] for name, (shape, dtype) in wanted.items()],
    }
    begun = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return Header({**described, **arguments}, inputs, {}, begun)


def run_call(
    call: FileCall,
    output: Output,
    header: Header,
    report: Report,
    *,
    mode: Mode = "new",
    heads: int | None = None,
    compute: Compute = compute_here,
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Compute a call into the files of ``output``, which are replaced when all of them are whole.

    Args:
        header: from ``header_of``.
        report: filled with what the last part did; its total has all.
        mode: what becomes of an output that an earlier process left unfinished.
        heads: key/value heads of a part; None: as many as take some seconds.
        say: is told, in sentences, what users should know.

    Raises:
        BudgetError, NotImplementedError: the call cannot be run; nothing has been written.
        OSError: no room, or another process writes the same output.
        UnfinishedError, ValueError: see ``unfinished.writing``; or an input changed meanwhile.
    """
    before = settings_of(output) if mode == "resume" else None
    settings = settle(call, heads) if before is None else Settings.of(before)
    header = replace(header, settings=settings.to_dict())
    with _telling(output, say) as begun, writing(output, header, mode) as found:
        if found.resumed:
            settings = Settings.of(found.journal.header.settings)
        parts = call.parts(settings.heads)
        done = found.journal.done
        if len(parts) != settings.parts or (done and max(done) >= len(parts)):
            raise ValueError(
                f"{found.journal.path} is damaged: it has parts that the call has not; --restart "
                f"removes it and begins anew"
            )
        begun(len(parts))
        left = [part for part in parts if part.number not in done]
        resumed = len(done) if found.resumed else None
        if resumed is not None:
            say(f"resumed: {resumed} of {len(parts)} head groups were done")
            if found.journal.torn:
                say(
                    f"the last {found.journal.torn} line(s) of {found.journal.path} are damaged: "
                    f"what they said is done again"
                )
            if left and (now := plan_words(call, settings)) != settings.plan:
                say(
                    f"the rest runs by another plan, so it may round otherwise: it was "
                    f"{settings.plan}, and is {now}"
                )
        folder = output.targets[0].path.parent
        work = Work(call, settings, found.tensors, folder, report, progress)
        if not found.journal.complete:
            for part in compute(work, left):
                _check_inputs(header.inputs)
                found.done(part.number)
    return Outcome(len(parts), resumed, settings.heads, settings.in_file)


@contextmanager
def _telling(output: Output, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Says what is kept of a run that ends with an exception, wherever it comes from: also while
    files are given their names.

    Yields:
        a function that is told how many parts the run has, when it begins.
    """
    begun: list[int] = []
    try:
        yield begun.append
    except BaseException:
        # The file knows best: a signal may have come right after it was written.
        with suppress(OSError, ValueError):
            kept = journals.read(beside(output.targets[0])[1]) if begun else None
            if kept is not None and kept.done:
                say(
                    f"{len(kept.done)} of {begun[0]} head groups are done and kept: --resume goes "
                    f"on from there"
                )
        raise


def _check_inputs(inputs: Mapping[str, Any]) -> None:
    for name, found in inputs.items():
        if not unchanged(found):
            raise ValueError(
                f"{name} ({found['path']}) was changed while it was read: what was computed since "
                f"is not kept"
            )


__all__ = ["Compute", "Outcome", "header_of", "run_call"]
