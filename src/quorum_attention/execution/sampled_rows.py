"""A few rows of a forward computed again: whether output and log-sum-exp are those of a call.

A backward from files is given the forward's results, and gradients of another attention would be
wrong without a word. So a few rows of every head, drawn anew each time, are computed from all of
their keys by the reference, in O(N D) a row. Errors in rows that were not drawn are not seen, nor
are errors within the tolerances.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from quorum_attention.execution.call import Job, MaskView, flat
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.kernels import reference
from quorum_attention.kernels.merge import empty_
from quorum_attention.kernels.protocol import Call, Extent, Statistics
from quorum_attention.kernels.reference import Block, Scores
from quorum_attention.kernels.torch_private import capturing

_ROWS = 8
# Keys at a time take at most so much: what a CPU's cache holds, and on a GPU few launches.
_HOST_BYTES, _DEVICE_BYTES = 8 << 20, 64 << 20
_FEWEST_KEYS = 128


def rows_differ(job: Job, out: torch.Tensor, lse: torch.Tensor, left: int | None) -> bool:
    """Whether some rows, computed again, are not those of a forward.

    False for kernels that compute more than the softmax of scores, which the reference cannot.

    Args:
        out, lse: the forward's, (*batch, heads, n_queries, value_dim) and without it.
        left: most device bytes to take at a time; None: what is usual.
    """
    kernel = job.kernel
    other = (kernel.own_attention or kernel.probed_as is not None) and not kernel.pairwise
    # A capture cannot wait for the answer.
    if other or job.work.n_keys == 0 or capturing(job.device):
        return False
    usual = _DEVICE_BYTES if backend_of(job.device).own_memory else _HOST_BYTES
    room = usual if left is None else min(usual, left)
    rows = _SampledRows(job, _drawn(job.work.n_queries))
    return bool(_differ(rows, out, lse, room).any())


def _drawn(n: int) -> list[int]:
    """One row of each of some equal parts of the sequence."""
    draw = random.SystemRandom()  # leaves the program's own generators alone
    parts = min(n, _ROWS)
    return [draw.randrange(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


@dataclass(frozen=True, slots=True)
class _SampledRows:
    """Some rows of all heads of a call; ``at``: which, ascending."""

    job: Job
    at: list[int]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows of (*batch, heads, n, ...), on the computing device, with one batch
        dimension."""
        work = self.job.work
        index = torch.tensor(self.at, device=tensor.device)
        rows = tensor.index_select(len(work.batch_shape) + 1, index)
        return flat(rows, work).to(self.job.device)

    def statistics(self, room: int) -> tuple[Statistics, torch.Tensor]:
        """The rows' output and log-sum-exp over all of their keys; the largest norms of a key and
        of a value. ``room``: most device bytes to take."""
        job, state = self.job, self.job.work.state_dtype
        query = self.of(job.tensors["query"])
        out = query.new_empty((*query.shape[:3], job.work.value_dim), dtype=state)
        rows = Statistics(out, query.new_empty(query.shape[:3], dtype=state))
        empty_(rows.out, rows.lse)
        if job.sinks is not None:
            rows.lse.copy_(job.sinks.to(state)[:, None].expand(rows.lse.shape))
        norms = torch.zeros(2, dtype=state, device=job.device)
        stop = job.work.n_keys
        if job.work.is_causal:
            stop = min(self.at[-1] + 1, stop)
        step = stop
        while step > _FEWEST_KEYS and self._bytes(step) > room:
            step = -(-step // 2)
        for start in range(0, stop, step):
            keys = slice(start, min(start + step, stop))
            key, value = (
                flat(tensor[..., keys, :], job.work).to(job.device) for tensor in job.three[1:]
            )
            part = Call(query, key, value, False, job.scale, self._bias(keys))
            task = reference.whole_task(part)
            reference.forward(task, rows, self._scores(start))
            largest = [torch.linalg.vector_norm(t, dim=-1, dtype=state).max() for t in (key, value)]
            norms = torch.maximum(norms, torch.stack(largest))
        return rows, norms

    def _scores(self, first: int = 0) -> Scores:
        """How the kernel changes and masks the scores with keys from ``first`` on."""
        causal = self.job.work.is_causal

        def positions(block: Block, keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
            device = block.query.device
            columns = torch.arange(first + keys.start, first + keys.stop, device=device)
            return torch.tensor(self.at[block.rows], device=device), columns

        def kept(block: Block, keys: slice) -> torch.Tensor | None:
            rows, columns = positions(block, keys)
            seen = columns <= rows[:, None] if causal else None
            mine = None if own.kept is None else own.kept(block, keys)
            return mine if seen is None else seen if mine is None else mine & seen

        own = reference.scores_of(self.job.kernel, positions)
        return replace(own, kept=kept, matrices=max(2, own.matrices))

    def _bias(self, keys: slice) -> torch.Tensor | None:
        """The mask of these rows, additive, as kernels get it."""
        if self.job.mask is None:
            return None
        work, mask = self.job.work, self.job.mask.mask
        if mask.shape[-2] > 1:
            mask = mask.index_select(-2, torch.tensor(self.at, device=mask.device))
        mask = mask[..., keys] if mask.shape[-1] > 1 else mask
        view = MaskView(mask, len(work.batch_shape))
        return view.whole(work.dtype, self.job.device, work.batch_shape)

    def _bytes(self, keys: int) -> int:
        work, rows = self.job.work, len(self.at)
        size = Extent(work.batch, work.heads, work.kv_heads, max(rows, keys), rows, keys)
        # Copies of keys and values on the device, and their squares while norms are taken.
        copies = work.batch * work.kv_heads * keys * (work.head_dim + work.value_dim)
        copies *= work.element_bytes + work.state_dtype.itemsize
        call = work.call_shape(self.job.device.type, False)
        return copies + reference.forward_bytes(call, size, self._scores())


def _differ(rows: _SampledRows, out: torch.Tensor, lse: torch.Tensor, room: int) -> torch.Tensor:
    """Which of these rows are not those of the forward."""
    job = rows.job
    now, (key_norm, value_norm) = rows.statistics(room)
    then_out, then_lse = rows.of(out).to(now.out.dtype), rows.of(lse).to(now.lse.dtype)
    # Where a number has overflowed, in either, rounding decides.
    known = _is_number(then_lse) & _is_number(now.lse)
    unit, products = _rounding(job)
    # Scores are at most as large as the products of norms.
    reach = abs(job.scale) * key_norm * rows.of(job.tensors["query"]).to(now.lse.dtype).norm(dim=-1)
    allowed = (1e-3 if unit > 1e-10 else 1e-9) + reach * products
    # A row without a key, then and now, has the same infinite lse.
    change = torch.expm1(now.lse - then_lse).masked_fill(now.lse == then_lse, 0.0)
    differ: torch.Tensor = change.abs() > allowed
    if job.dropout is None:
        apart = (now.out - then_out).norm(dim=-1)
        # What is less than 16 bits hold is 0.
        least = torch.finfo(job.work.dtype).tiny * job.work.value_dim
        rounded = 0.1 * now.out.norm(dim=-1) + (unit + allowed) * value_norm + least
        differ |= apart.isfinite() & (apart > rounded)
    return differ & known


def _is_number(lse: torch.Tensor) -> torch.Tensor:
    return lse.isfinite() | (lse == -torch.inf)


def _rounding(job: Job) -> tuple[float, float]:
    """How far a probability may be rounded, and a product of norms; both relative."""
    dtype = job.work.dtype
    if dtype == torch.float64:
        return 2.0**-40, 2.0**-46
    if dtype == torch.float32 and backend_of(job.device).own_memory:
        return 2.0**-9, 2.0**-9  # it may be TF32
    return (2.0**-18 if dtype == torch.float32 else 2.0**-8), 2.0**-19
