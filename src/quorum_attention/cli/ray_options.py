"""``run --ray``: the parts of a call from files are computed on a Ray cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from quorum_attention.call.arguments import Arguments
from quorum_attention.call.options import Written
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import say
from quorum_attention.devices.report import PoolPass
from quorum_attention.files.call import GRADIENTS, Part, written_as
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

    def compute(work: Work, parts: Sequence[Part]) -> Iterator[Part]:
        call = work.call
        results = dict(written_as(call, work.results))
        if call.backward:
            results = {f"grad_{role}": results[name] for role, name in _GRADIENTS.items()}
        said = Arguments(
            call.mask, is_causal=call.is_causal, scale=call.scale, enable_gqa=True,
            written=Written(depth=options.depth, kernel=options.kernel),
        )  # fmt: skip
        report = PoolPass()
        with (
            Farm(
                options.ray, workers=options.ray_workers, num_cpus=options.ray_cpus,
                num_gpus=options.ray_gpus, budget=options.budget,
            ) as farm,
            progress_bar() as bar,
        ):  # fmt: skip
            left = {part: _heads(part) for part in parts}
            heads = [head for group in left.values() for head in group]
            for head in farm.by_heads(
                call.tensors, results, heads, said, chunks=options.chunks, report=report
            ):
                (part,) = (part for part, group in left.items() if head in group)
                left[part].remove(head)
                if left[part]:
                    continue
                del left[part]
                yield part
                if bar is not None:
                    bar(len(parts) - len(left), len(parts), "parts on Ray")
        if not options.json:
            say(str(report))

    return compute


def _heads(part: Part) -> set[tuple[int, int]]:
    return {(entry, head) for entry in range(*part.entries) for head in range(*part.key_heads)}


_GRADIENTS = dict(zip(("query", "key", "value"), GRADIENTS, strict=True))

__all__ = ["ASIDE", "add_to", "check", "computing"]
