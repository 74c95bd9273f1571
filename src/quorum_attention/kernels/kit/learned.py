"""Gradients of the tensors that a score modification reads: learned tables.

For each pair, given the global log-sum-exp,

    dS = P (dP - delta),   P = exp(S' - lse),   S' = score_mod(S, ...),

the gradient of a table is the sum of dS times the derivative of S' by the table. Scores
are computed again, tile by tile, in the backward; autograd takes each tile's S' back to
the tables. So a table of any shape has its gradient without a tensor of queries x keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from quorum_attention.kernels.kit.score_mod import ScoreModKernel, modified_scores
from quorum_attention.kernels.masked.captured_tensors import tensors
from quorum_attention.kernels.masked.pair_functions import MaskMod, ScoreMod
from quorum_attention.kernels.masked.partwise import PartwiseKernel
from quorum_attention.kernels.masked.read_values import (
    record_values,
    warn_of_changed_values,
)
from quorum_attention.kernels.operator_call import (
    Call,
    OutLse,
    Saved,
    Three,
    whole_task,
)
from quorum_attention.kernels.reference import TiledKernel
from quorum_attention.kernels.score_tiles import (
    BackwardRows,
    query_blocks,
)
from quorum_attention.kernels.task_tensors import Gradients, Indices, TaskTensors
from quorum_attention.kernels.torch_private import (
    no_grad_no_autocast,
    restores_grad_and_autocast,
    uncompiled,
)

_Edge = tuple[Any, int]
"""A node of autograd's graph, and the number of one of its outputs."""


def learned_tables(score_mod: Any) -> list[torch.Tensor]:
    """Return the tensors that a score modification reads and that require a gradient,
    as far as they are found (``captured_tensors``)."""
    return [tensor for tensor in tensors([score_mod]) if tensor.requires_grad]


class LearnedScoreModKernel(ScoreModKernel):
    """The kernel of a score modification that reads tensors that require a gradient.

    ``with_table_gradients`` gives these tensors their gradients.

    Attributes:
        tables: the tensors.
    """

    def __init__(
        self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, name: str
    ) -> None:
        super().__init__(score_mod, mask_mod, name)
        self.tables = learned_tables(score_mod)

    def results_of_functions(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: Indices
    ) -> list[torch.Tensor]:
        """See ``Kernel``. A result that autograd follows to nothing but ``tables`` is
        detached: its gradient is not lost."""
        results = super().results_of_functions(query, key, value, at)
        return [
            result.detach() if _follows_only(result, self.tables) else result
            for result in results
        ]

    def table_gradients(
        self, call: Call, saved: Saved, grad_lse: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Return the gradients of ``tables``; zeros for one that no score depends on.

        Args:
            call: the whole call.
            saved: its upstream gradient and its results.
            grad_lse: (b, h, n), upstream of the lse; None: none.
        """
        tiles = _TableTiles(self, grad_lse)
        nothing = saved.lse.new_empty(0)
        grads = Gradients(
            saved.grad_out, saved.out, saved.lse, nothing, nothing, nothing
        )
        partwise = PartwiseKernel(self.geometry, tiles, tiles.scores)
        partwise.backward(whole_task(call), grads)
        return [
            total.to(table.dtype)
            for total, table in zip(tiles.totals, self.tables, strict=True)
        ]


class _TableTiles(TiledKernel):
    """The tiled loop whose backward adds up the gradients of tables, and no others.

    Args:
        kernel: its tables, and its score modification.
        grad_lse: (b, h, n), upstream of the lse; None: none.

    Attributes:
        totals: the gradients so far, in fp32 or float64.
    """

    def __init__(
        self, kernel: LearnedScoreModKernel, grad_lse: torch.Tensor | None
    ) -> None:
        super().__init__(kernel.transform)
        self._kernel = kernel
        self._grad_lse = grad_lse
        self.totals: list[torch.Tensor] = []
        for table in kernel.tables:
            dtype = torch.promote_types(table.dtype, torch.float32)
            self.totals.append(torch.zeros_like(table, dtype=dtype))

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's part of the tables' gradients to ``totals``."""
        for block in query_blocks(task, grads.grad_query, self.scores):
            rows = BackwardRows(block, grads)
            if self._grad_lse is not None:
                rows.delta.sub_(block.grouped(self._grad_lse.unsqueeze(-1)))
            for keys in block.tiles():
                self._add_tile(rows, keys)

    def _add_tile(self, rows: BackwardRows, keys: slice) -> None:
        block = rows.block
        task = block.task
        key = block.of_keys(task.key, keys)  # (b, hk, keys, d)
        grad_scores = rows.score_gradients(key, keys)
        scores = block.by_head((block.query @ key.mT).mul_(task.scale))
        with torch.inference_mode(False), torch.enable_grad():
            assert self._kernel.score_mod is not None
            modified = modified_scores(self._kernel.score_mod, scores, block, keys)
            if not modified.requires_grad:
                return
            parts = torch.autograd.grad(
                modified,
                self._kernel.tables,
                grad_scores,
                allow_unused=True,
            )
        for total, part in zip(self.totals, parts, strict=True):
            if part is not None:
                total.add_(part)


def _follows_only(result: torch.Tensor, tables: Sequence[torch.Tensor]) -> bool:
    """Tell whether autograd follows ``result`` back to some of ``tables``, and to no
    other tensor that requires a gradient."""
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        return False
    ends = {_edge_of(table) for table in tables}
    waiting = [_edge_of(result)]
    seen = set[_Edge]()
    while waiting:
        edge = waiting.pop()
        if edge in ends or edge in seen:
            continue
        seen.add(edge)
        inner_edges = [inner for inner in edge[0].next_functions if inner[0]]
        if not inner_edges:
            return False  # the gradient of a tensor that is none of the tables
        waiting += inner_edges
    return True


def _edge_of(tensor: torch.Tensor) -> _Edge:
    """Return where a gradient of ``tensor`` enters autograd's graph."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def with_table_gradients(
    kernel: LearnedScoreModKernel,
    inputs: Three,
    scale: float,
    results: OutLse,
) -> OutLse:
    """Return the results of a call such that the kernel's tables get gradients.

    Args:
        inputs: query (b, h, n, d), key (b, hk, m, d), value (b, hk, m, dv), all on the
            device that the call was computed on.
        scale: factor of the scores.
        results: out and lse of the call.
    """
    # Autocast computed the call in the dtype of its output.
    dtype = results[0].dtype
    detached = [tensor.detach().to(dtype) for tensor in inputs]
    apply: Any = _TableGradients.apply
    out, lse = apply(
        kernel,
        scale,
        *results,
        *detached,
        *kernel.tables,
    )
    return out, lse


class _TableGradients(torch.autograd.Function):
    """Hands out and lse through, and computes the gradients of tables beside."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: LearnedScoreModKernel,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
        *saved: torch.Tensor,
    ) -> OutLse:
        """Return out and lse; ``saved`` are query, key, value and the tables."""
        ctx.kernel = kernel
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        recorded_values = record_values(kernel.called_back())
        ctx.save_for_backward(out, lse, *saved, recorded_values)
        return out.detach(), lse.detach()

    @staticmethod
    @uncompiled
    @restores_grad_and_autocast
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        """Return the gradients of out and lse as they came, and those of tables."""
        grad_out, grad_lse = upstream
        out, lse, query, key, value, *_, recorded_values = ctx.saved_tensors
        warn_of_changed_values(ctx.kernel.called_back(), recorded_values)
        saved = Saved(
            torch.zeros_like(out) if grad_out is None else grad_out,
            out,
            lse,
        )
        call = Call(query, key, value, scale=ctx.scale)
        with no_grad_no_autocast():
            gradients = ctx.kernel.table_gradients(call, saved, grad_lse)
        return None, None, grad_out, grad_lse, None, None, None, *gradients
