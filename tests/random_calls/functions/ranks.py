"""The same calls over two ranks of a Gloo group: one spawn makes many."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from random_calls.functions.case import draw, exact, inputs
from random_calls.functions.run import REFUSALS, Verdict, call_of, judge, refused

RANKS = 2


def rows(first: int, count: int) -> list[dict[str, Any]]:
    """A row for every seed: wrong if it is on any rank."""
    from helpers_ranks import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, RANKS, Path(folder), first, count, folder)
        told = [json.loads(Path(folder, f"rows-{r}").read_text()) for r in range(RANKS)]
    rank_of = {"right": 0, "refused": 1, "wrong": 2}
    return [max(both, key=lambda row: rank_of[row["outcome"]]) for both in zip(*told, strict=True)]


def _work(rank: int, first: int, count: int, folder: str) -> None:
    found = [_check(rank, seed) for seed in range(first, first + count)]
    Path(folder, f"rows-{rank}").write_text(json.dumps(found))


def _check(rank: int, seed: int) -> dict[str, Any]:
    case = draw(seed, "ranks")
    verdict, given = Verdict(case), inputs(case)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _perform(rank, case, given)
    except REFUSALS as error:
        refused(verdict, error)
        found = None
    # Ranks begin the next call together, whatever became of this one.
    alike = [None] * RANKS
    dist.all_gather_object(alike, found is not None)
    if found is not None and all(alike):
        wanted = exact(case, given)
        mine = _rows(rank, case.tokens)
        shards = {"out", "grad of query", "grad of key", "grad of value"}
        for name, tensor in found.items():
            if name not in shards and tensor is not None:
                dist.all_reduce(tensor)
        wanted = {n: t[:, :, mine] if n in shards else t for n, t in wanted.items()}
        judge(verdict, found, wanted)
    elif found is not None and case.trap is None:
        verdict.wrong("the other rank refused")
    return verdict.row()


def _rows(rank: int, tokens: int) -> slice:
    half = tokens // 2
    return slice(half) if rank == 0 else slice(half, tokens)


def _perform(rank: int, case: Any, given: Any) -> dict[str, torch.Tensor | None]:
    from quorum_attention import distributed

    call = call_of(case, given)
    mine = _rows(rank, case.tokens)
    three = {
        name: getattr(given, name)[:, :, mine].clone().requires_grad_()
        for name in ("query", "key", "value")
    }
    out = distributed.attention(*three.values(), **call.options)
    result = out.detach().clone()
    call.spring()
    leaves = three | call.learned
    grads = torch.autograd.grad(
        out, list(leaves.values()), given.upstream[:, :, mine], allow_unused=True
    )
    return {"out": result, **{f"grad of {n}": g for n, g in zip(leaves, grads, strict=True)}}
