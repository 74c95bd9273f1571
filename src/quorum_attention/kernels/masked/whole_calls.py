"""A kernel that computes uncut calls under a mask by a few kernel calls, and all others
by blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from quorum_attention.decomposition import PARTIAL, Pairs, Ranges, Verdict
from quorum_attention.kernels.call_shape import (
    BiasShape,
    CallShape,
    Extent,
    state_dtype,
)
from quorum_attention.kernels.masked.cell_rows import (
    CellPlaces,
    Places,
    Results,
    RowReader,
)
from quorum_attention.kernels.masked.token_rules import TokenRules
from quorum_attention.kernels.masked.user_functions import BasedKernel
from quorum_attention.kernels.operator_call import Call, OutLse, Saved, Three, four_dims
from quorum_attention.kernels.protocol import Kernel, Launches, workspace_bytes
from quorum_attention.kernels.score_tiles import QueryBlock, ScoreTransform
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors

# The blocks of more entries are not looked at together.
_FEW_ENTRIES = 64


class WholeCallPart(NamedTuple):
    """One of the kernel calls that compute a whole call.

    Attributes:
        queries, keys: the places of its rows.
        causal: whether keys after the query are masked.
        make_bias: makes its bias: that of the whole call, and what the mask adds to it;
            or None.
    """

    queries: Places
    keys: Places
    causal: bool
    make_bias: Callable[[], torch.Tensor | None]


class WholeCallWay(ABC):
    """A way to compute whole calls under a mask by a few kernel calls."""

    @abstractmethod
    def parts(self, call: Call, shape: CallShape) -> Iterator[WholeCallPart]:
        """The kernel calls of a call without dropout, of entries from
        ``call.first_entry`` on.

        Args:
            shape: of the call.
        """

    @abstractmethod
    def count_pairs(self, shape: CallShape) -> int:
        """How many pairs of one head it takes for kept, of all batch entries."""

    @abstractmethod
    def workspace_bytes(
        self, kernel: Kernel, shape: CallShape, extent: Extent, *, backward: bool
    ) -> int:
        """Upper bound of the device bytes of a whole call whose parts ``kernel``
        computes."""


class WholeCallKernel(BasedKernel):
    """Attention under a mask of tokens.

    Args:
        way: how whole calls are computed.
        rules: the pairs that the mask keeps.
        shape: of the calls.
        base: computes the calls.
        by_blocks: makes the kernel for all that is no whole call: tasks, and calls with
            dropout.
        scores: what is done to scores beside the mask.
    """

    def __init__(
        self,
        way: WholeCallWay,
        rules: TokenRules,
        shape: CallShape,
        base: Kernel,
        by_blocks: Callable[[], Kernel],
        scores: ScoreTransform,
    ) -> None:
        super().__init__(base, scores)
        self.way = way
        self.rules = rules
        self.shape = shape
        self._by_blocks = by_blocks
        n_pairs = shape.batch * shape.n_queries * shape.n_keys
        self._share = min(1.0, way.count_pairs(shape) / n_pairs)
        is_one_launch = base.launches is Launches.ONE
        self.launches = Launches.ONE if is_one_launch else Launches.CALLS_ON_STREAMS

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """See ``Kernel``."""
        return Pairs(
            n_queries,
            n_keys,
            is_causal,
            self._verdict,
            self._share,
        )

    def _verdict(self, block: Ranges) -> Verdict:
        if self.shape.batch > _FEW_ENTRIES:
            return PARTIAL
        verdict = self._by_blocks().kept_pairs(*self.shape.lengths).verdict
        return PARTIAL if verdict is None else verdict(block)

    def kept_pairs_of_tile(self, block: QueryBlock, keys: slice) -> torch.Tensor:
        """See ``BasedKernel``."""
        pairs = block.indices(keys)
        rows = pairs.queries.unsqueeze(0)
        columns = pairs.keys.unsqueeze(0)
        is_kept = self.rules.kept_pairs(
            pairs.entries,
            rows,
            columns,
            columns.device,
        )
        return is_kept.unsqueeze(1)

    def takes_whole(self, shape: CallShape, tokens: int, all_heads: bool) -> bool:
        """Calls are told which entries they have."""
        return all_heads or not shape.dropout

    def whole_forward(self, call: Call) -> OutLse:
        """See ``Kernel``."""
        if call.dropout is not None:
            return self._by_blocks().whole_forward(call)
        readers = [RowReader(tensor) for tensor in call.inputs]
        out = Results(call.query, call.value.shape[-1])
        # Head after head, whatever the order of the query's dimensions.
        rows = call.query.new_empty(()).expand(*call.query.shape[:3], 1)
        lse = Results(rows, 1, -torch.inf)
        for part in self.way.parts(call, _shape_of(call)):
            part_call = _call_of(part, call, readers)
            part_out, part_lse = self.base.whole_forward(part_call)
            del part_call
            out.write(part.queries, part_out)
            lse.write(part.queries, part_lse.unsqueeze(-1))
            del part_out, part_lse  # before the next part's are made
        lse_columns = lse.tensor(state_dtype(call.query.dtype))
        return out.tensor(call.result_dtype), lse_columns.squeeze(-1)

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``."""
        if call.dropout is not None:
            return self._by_blocks().whole_backward(call, saved)
        readers = [RowReader(tensor) for tensor in call.inputs]
        grad_out = RowReader(saved.grad_out)
        out = RowReader(saved.out)
        lse = RowReader(saved.lse.unsqueeze(-1))
        grad_query, grad_key, grad_value = (
            Results(tensor, tensor.shape[-1]) for tensor in call.inputs
        )
        for part in self.way.parts(call, _shape_of(call)):
            rows = part.queries
            part_saved = Saved(
                grad_out=_without_copies(grad_out.at(rows), rows),
                out=out.at(rows),
                lse=lse.at(rows).squeeze(-1),
            )
            part_call = _call_of(part, call, readers)
            grads = self.base.whole_backward(part_call, part_saved)
            del part_call
            grad_query.write(rows, grads[0])
            grad_key.write(part.keys, grads[1])
            grad_value.write(part.keys, grads[2])
            del grads  # before the next part's are made
        dtype = call.result_dtype
        return (
            grad_query.tensor(dtype),
            grad_key.tensor(dtype),
            grad_value.tensor(dtype),
        )

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        self._by_blocks().forward(task, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        self._by_blocks().backward(task, grads)

    def pass_workspace_bytes(
        self, shape: CallShape, extent: Extent, *, backward: bool
    ) -> int:
        """See ``BasedKernel``."""
        if extent.direct and not shape.dropout:
            return self.way.workspace_bytes(self.base, shape, extent, backward=backward)
        return workspace_bytes(self._by_blocks(), shape, extent, backward=backward)


def _call_of(part: WholeCallPart, call: Call, readers: Sequence[RowReader]) -> Call:
    """The kernel call of a part.

    Args:
        readers: of query, key and value.
    """
    query, key, value = readers
    return replace(
        call,
        query=query.at(part.queries),
        key=key.at(part.keys),
        value=value.at(part.keys),
        causal=part.causal,
        bias=part.make_bias(),
    )


def _without_copies(rows: torch.Tensor, places: Places) -> torch.Tensor:
    """Rows with zeros for copies of a query, which have no part in the gradients of
    keys."""
    if isinstance(places, CellPlaces) and places.is_filled:
        return rows.masked_fill(places.is_copy[:, None, :, None], 0.0)
    return rows


def _shape_of(call: Call) -> CallShape:
    query, key, value = call.inputs
    bias: BiasShape | None = None
    if call.bias is not None:
        batch, heads, rows, columns = four_dims(call.bias).shape
        bias = BiasShape(
            batch > 1,
            heads > 1,
            rows > 1,
            columns > 1,
            wide=call.bias.dtype != query.dtype,
        )
    return CallShape(
        query.device.type,
        query.dtype,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        bias=bias,
        batch_shape=(len(query),),
        n_queries=query.shape[2],
        n_keys=key.shape[2],
    )
