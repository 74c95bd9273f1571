"""A few rows of a forward computed again: whether a backward is of the same attention.

A backward calls users' functions again, and may be run by another process, days later, from files.
Where it computes another attention than the forward did, its gradients are wrong without a word. So
a few rows of every head, drawn anew each time, are computed from all of their keys, in O(N D) a
row: the sum of exp(S - lse) has to be 1, with the forward's lse, and the output the forward's. A
change that touches only rows that were not drawn is not seen, nor is one within the tolerances.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import NamedTuple

import torch

from quorum_attention.counts import shown
from quorum_attention.execution.call import Call
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.mask_gradient import Tile, tile_bytes
from quorum_attention.execution.memory import is_out_of_memory
from quorum_attention.kernels.merge import empty_, merge_
from quorum_attention.kernels.protocol import Indices
from quorum_attention.kernels.torch_private import capturing

_ROWS = 8
# Without a budget: keys at a time that a CPU's cache holds, and on a GPU few launches.
_HOST_BYTES, _DEVICE_BYTES = 8 << 20, 1 << 30
# With less than this, running out of memory is an error.
_LEAST_BYTES = 1 << 20
_FEWEST_KEYS = 128
_RUN = 2048
_unchecked: ContextVar[bool] = ContextVar("_unchecked", default=False)


@contextmanager
def without_check_of_rows() -> Iterator[None]:
    """For those who look for a kernel's errors themselves, or compute parts of a row's keys."""
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)


def check_functions_are_the_same(
    call: Call, out: torch.Tensor, lse: torch.Tensor, left: int | None, *, whole: bool = True
) -> None:
    """Before a backward: check some rows, if the call's kernel calls functions of the user's.

    Args:
        out, lse: as the forward returned them, (*batch, heads, n_queries, value_dim) without it.
        left: most device bytes to take at a time; None: what is usual.
        whole: whether the rows have no other keys than the call's.

    Raises:
        RuntimeError: a function has changed since the forward.
    """
    if _unchecked.get() or not (functions := call.kernel.called_back()):
        return
    if rows_differ(call, out, lse, left, whole=whole):
        names = ", ".join(shown(function) for function in functions)
        raise RuntimeError(
            f"a function of kernel {call.kernel.name!r} ({names}), or what it reads, has changed "
            "between the forward and its backward, which calls it again: gradients would be of "
            "another attention. Give every function values of its own: as a default "
            "(lambda b, h, q, k, n=n: ...), or by a function that returns it. (If nothing has "
            "changed, its rows depend on what it is called with beside them: qa.check_kernel "
            "says how)"
        )


def rows_differ(
    call: Call, out: torch.Tensor, lse: torch.Tensor, left: int | None, *, whole: bool = True
) -> bool:
    """Whether some rows that are computed again are not those of a forward; arguments as above."""
    if call.work.n_keys == 0 or capturing(call.device):  # a capture cannot wait for the answer
        return False
    rows, causal = _drawn(call.work.n_queries), call.work.is_causal
    groups = [rows]
    if causal and call.kernel.row_statistics:
        groups = [[row] for row in rows]  # it masks no key for being later
    stops = [min(at[-1] + 1, call.work.n_keys) if causal else call.work.n_keys for at in groups]
    usual = _DEVICE_BYTES if backend_of(call.device).own_memory else _HOST_BYTES
    room = usual if left is None else min(usual, left)
    while True:
        try:
            made = (_Rows(call, at, stop, room) for at, stop in zip(groups, stops, strict=True))
            return bool(torch.stack([_differ(one, out, lse, whole) for one in made]).any())
        except Exception as error:
            if not is_out_of_memory(error) or room < _LEAST_BYTES:
                raise
            room //= 4
        backend_of(call.device).give_back_cached()


def _drawn(n: int) -> list[int]:
    """One row of each of some equal parts of the sequence."""
    draw = random.SystemRandom()  # nobody's own generator moves on
    parts = min(n, _ROWS)
    return [draw.randrange(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


class _Statistics(NamedTuple):
    """Of some rows of all heads, (b, h, rows, dv) and (b, h, rows).

    Attributes:
        reach: bound of the scores by the norms of query and keys.
        spread: what the output would be off by if all probabilities were rounded at random by 1.
    """

    out: torch.Tensor
    lse: torch.Tensor
    reach: torch.Tensor
    spread: torch.Tensor


class _Rows:
    """Some rows of all heads, computed over their first keys.

    Args:
        at: the rows, ascending.
        stop: how many keys; none of those that follow is kept.
        room: most device bytes to take.
    """

    def __init__(self, call: Call, at: list[int], stop: int, room: int) -> None:
        self.call, self.at, self.stop, self._room = call, at, stop, room
        self.query = self.of(call.query)
        work, kernel = call.work, call.kernel
        self.numbers = tuple(range(work.batch))
        self._alone = kernel if kernel.row_statistics else None
        self._known = kernel if kernel.pairwise and self._alone is None else None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows of (*batch, heads, n, ...), on the computing device, with one batch
        dimension."""
        dims = len(self.call.work.batch_shape)
        index = torch.tensor(self.at, device=tensor.device)
        found = tensor.index_select(dims + 1, index)
        return found.reshape(self.call.work.batch, *found.shape[dims:]).to(self.call.device)

    def statistics(self) -> _Statistics:
        """The rows' output and log-sum-exp over all of their keys, and what bounds rounding."""
        call, state = self.call, self.call.work.state_dtype
        size = self.query.shape[:3]
        out = torch.empty((*size, call.work.value_dim), dtype=state, device=call.device)
        lse = torch.empty(size, dtype=state, device=call.device)
        empty_(out, lse)
        if call.sinks is not None:
            lse.copy_(call.sinks.to(state)[:, None].expand(size))
        norms = torch.zeros(2, dtype=state, device=call.device)
        squares = torch.zeros_like(lse)
        step = self._step()
        for start in range(0, self.stop, step):
            keys = slice(start, min(start + step, self.stop))
            both = self._keys(call.key, keys), self._keys(call.value, keys)
            part, part_lse, part_squares = self._part(*both, keys)
            part = part.masked_fill((part_lse == -torch.inf).unsqueeze(-1), 0.0)
            part_lse, before = part_lse.to(state), lse.clone()
            merge_(out, lse, part.to(state), part_lse)
            squares = _share(before, lse).square() * squares
            squares += _share(part_lse, lse).square() * part_squares
            most = [torch.linalg.vector_norm(t, dim=-1, dtype=state).max() for t in both]
            norms = torch.maximum(norms, torch.stack(most))
        reach = abs(call.scale) * norms[0] * self.query.to(state).norm(dim=-1)
        return _Statistics(out, lse, reach, squares.sqrt() * norms[1])

    def _keys(self, tensor: torch.Tensor, keys: slice) -> torch.Tensor:
        part = tensor[..., keys, :]
        return part.reshape(self.call.work.batch, *part.shape[-3:]).to(self.call.device)

    def _part(
        self, key: torch.Tensor, value: torch.Tensor, keys: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
        """Output and log-sum-exp of the rows over some keys, and the sum of p * p."""
        call, device = self.call, self.call.device
        queries = torch.tensor(self.at, device=device)
        positions = torch.arange(keys.start, keys.stop, device=device)
        if self._alone is not None:
            entries = torch.tensor(self.numbers, device=device)
            heads = torch.arange(call.work.heads, device=device)
            at = Indices(entries, heads, queries, positions)
            return *self._alone.rows(self.query, key, value, call.scale, at), 1.0
        state = call.work.state_dtype
        grouped = self.query.to(state).unflatten(1, (call.work.kv_heads, -1))
        scores = (grouped @ key.to(state).mT.unsqueeze(2)).flatten(1, 2).mul_(call.scale)
        masked = None
        if self._known is not None:
            self._known.change_(scores)
            heads_of = slice(0, call.work.heads)
            masked = self._known.masked_pairs(self.numbers, heads_of, queries, positions)
        if call.mask is not None:
            scores += self._bias(keys)
        if masked is not None:
            scores.masked_fill_(masked, -torch.inf)
        if call.work.is_causal:
            scores.masked_fill_(positions > queries.unsqueeze(1), -torch.inf)
        lse = scores.logsumexp(dim=-1)
        p = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
        squares = p.square().sum(dim=-1)
        found = _product(p.unflatten(1, (call.work.kv_heads, -1)), value.to(state).unsqueeze(2))
        return found.flatten(1, 2), lse, squares

    def _bias(self, keys: slice) -> torch.Tensor:
        """The mask of these rows, additive, as kernels get it."""
        assert self.call.mask is not None
        work, mask = self.call.work, self.call.mask.mask
        if mask.shape[-2] > 1:
            mask = mask.index_select(-2, torch.tensor(self.at, device=mask.device))
        mask = mask[..., keys] if mask.shape[-1] > 1 else mask
        mask = mask.expand(*work.batch_shape, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
        mask = mask.to(self.call.device)
        if mask.dtype != torch.bool:
            return mask.to(work.dtype)
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)

    def _step(self) -> int:
        """The most keys at a time."""
        step = self.stop
        while step > _FEWEST_KEYS and self._bytes(step) > self._room:
            step = -(-step // 2)
        return step

    def _bytes(self, keys: int) -> int:
        work = self.call.work
        rows = Tile(work.batch, work.kv_heads, len(self.at), keys)
        # Copies of keys and values on the device; what a user's function takes is much like a tile.
        copies = work.batch * work.kv_heads * keys * (work.head_dim + work.value_dim)
        return copies * work.element_bytes + tile_bytes(replace(work, dropout=False), rows, 8)


def _product(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``p`` (..., rows, keys) times ``value`` (..., keys, dv), by runs of keys: a GPU's product of
    few rows and columns over many keys goes through these one after the other."""
    whole = p.shape[-1] // _RUN * _RUN
    found = p[..., whole:] @ value[..., whole:, :]
    if whole:
        runs = p[..., :whole].unflatten(-1, (-1, _RUN)).movedim(-2, -3)
        found += (runs @ value[..., :whole, :].unflatten(-2, (-1, _RUN))).sum(dim=-3)
    return found


def _share(part: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The weight of a part in its rows; 0 where it has no key."""
    return (part - lse).masked_fill(part == -torch.inf, -torch.inf).exp()


def _differ(rows: _Rows, out: torch.Tensor, lse: torch.Tensor, whole: bool) -> torch.Tensor:
    """Whether any of these rows is not that of the forward."""
    call, found = rows.call, rows.statistics()
    then_out, then_lse = rows.of(out).to(found.out.dtype), rows.of(lse).to(found.lse.dtype)
    # Where a number has overflowed, in either, rounding decides.
    known = _is_number(then_lse) & _is_number(found.lse)
    # A function of whole rectangles may compute in any dtype; scores and masks are modified here.
    own = call.kernel.row_statistics and not call.kernel.sparse
    unit, products = _rounding(call)
    allowed = (2e-2 if own else 1e-3 if unit > 1e-10 else 1e-9) + found.reach * products
    if own:
        allowed = allowed + found.lse.abs().masked_fill(~found.lse.isfinite(), 0.0) * 2.0**-8
    # A row without a key, then and now, has the same infinite lse.
    more = torch.expm1(found.lse - then_lse).masked_fill(found.lse == then_lse, 0.0)
    differ = more > allowed
    if whole:
        differ |= more < -allowed
        if call.dropout is None:
            apart = (found.out - then_out).norm(dim=-1)
            # What is less than 16 bits hold is 0.
            least = torch.finfo(call.work.dtype).tiny * call.work.value_dim
            rounded = (0.1 + allowed) * found.out.norm(dim=-1) + unit * found.spread + least
            differ |= apart.isfinite() & (apart > rounded)
    return (differ & known).any()


def _is_number(lse: torch.Tensor) -> torch.Tensor:
    return lse.isfinite() | (lse == -torch.inf)


def _rounding(call: Call) -> tuple[float, float]:
    """How far a probability may be rounded, and a product of norms; both relative."""
    dtype = call.work.dtype
    if dtype == torch.float64:
        return 2.0**-40, 2.0**-46
    if dtype == torch.float32 and backend_of(call.device).own_memory:
        return 2.0**-7, 2.0**-9  # it may be TF32
    return (2.0**-18 if dtype == torch.float32 else 2.0**-6), 2.0**-19
