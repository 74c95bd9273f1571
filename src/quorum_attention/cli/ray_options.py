"""``run --ray``: the parts of a call from files are computed on a Ray cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from quorum_attention.call.block import Block, WholeCall
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import say
from quorum_attention.devices.report import PoolPass
from quorum_attention.files.call import written_as
from quorum_attention.files.compute import Compute, Work
from quorum_attention.progress import progress_bar

# Options that change no number of a result.
ASIDE = ("ray", "ray_workers", "ray_gpus", "ray_cpus")
_amount = shared.number_of("a number of at least 0", lambda number: 0 <= number < 1e6)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    found = parser.add_argument_group("on a Ray cluster")
    found.add_argument(
        "--ray", metavar="ADDRESS",
        help="compute on its workers; local (a new one in this machine), HOST:PORT, or auto (the "
        "one that runs here, whoever began it); its machines must have the files under the same "
        "names (default: none)",
    )  # fmt: skip
    found.add_argument(
        "--ray-workers", type=shared.count_of, metavar="N",
        help="units that are computed at once (default: as many as the cluster holds)",
    )  # fmt: skip
    found.add_argument(
        "--ray-gpus", type=_amount, metavar="X",
        help="GPUs of each, 0.5 for two on one (default: 1 if the cluster has any)",
    )  # fmt: skip
    found.add_argument("--ray-cpus", type=_amount, metavar="X", default=1.0, help="CPUs of each")
    found.add_argument(
        "--chunks", type=shared.count_of, metavar="C",
        help="tasks of each key/value head: 7, 13, 21, 31, ...; 1: heads stay whole (default: as "
        "many as keep all workers busy)",
    )  # fmt: skip


def check(options: argparse.Namespace) -> None:
    """Refuse options that go with ``--ray`` only, or not with it.

    Raises:
        ValueError: says which.
    """
    if options.ray is None:
        for name, usual in (("ray_workers", None), ("ray_gpus", None), ("ray_cpus", 1.0),
                            ("chunks", None)):  # fmt: skip
            if getattr(options, name) != usual:
                raise ValueError(f"--{name.replace('_', '-')} goes with --ray only")
    elif options.device is not None:
        raise ValueError("--device does not go with --ray: workers have the devices Ray gives them")
    elif options.draw is not None:
        raise ValueError("--draw does not go with --ray")


def computing(options: argparse.Namespace) -> Compute:
    """What computes parts on the cluster that the options name."""
    from quorum_attention.ray import Farm

    def compute(work: Work, numbers: Sequence[int]) -> Iterator[int]:
        call, parts, report = work.call, work.parts, PoolPass()
        left = {number: _heads(call.whole, parts[number]) for number in numbers}
        heads = {head: number for number, group in left.items() for head in group}
        farm = Farm(
            options.ray, workers=options.ray_workers, num_cpus=options.ray_cpus,
            num_gpus=options.ray_gpus, budget=options.budget,
        )  # fmt: skip
        with farm, progress_bar() as bar:
            results = written_as(call, work.results)
            for head in farm.by_heads(call, results, heads, chunks=options.chunks, report=report):
                number = heads[head]
                left[number].remove(head)
                if left[number]:
                    continue
                del left[number]
                yield number
                if bar is not None:
                    bar(len(numbers) - len(left), len(numbers), "parts on Ray")
        if not options.json:
            say(str(report))

    return compute


def _heads(whole: WholeCall, part: Block) -> set[tuple[int, int]]:
    keys = whole.key_heads(part)
    return {(entry, head) for entry in range(*part.entries) for head in range(*keys)}


__all__ = ["ASIDE", "add_to", "check", "computing"]
