"""One FlexAttention call for a task: its views of the tensors, positions and block mask."""

from __future__ import annotations

import copy
import types
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from math import e, log2
from typing import Any, Literal

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from quorum_attention.kernels.kit.block_table import BLOCK, BlockLists
from quorum_attention.kernels.kit.masks import BlockMask, MaskMod
from quorum_attention.kernels.kit.over_pairs import ScoreMod
from quorum_attention.kernels.protocol import TaskTensors, Three
from quorum_attention.kernels.tensors import positions
from quorum_attention.kernels.torch_private import outside

# Tensors as compiled FlexAttention reads them fastest: in words of 16 bytes.
#
# It does so only if torch.compile can tell that every row begins at a whole word. It cannot tell
# that for a tensor that begins inside its storage (a field of a slot, a part of the rows), nor for
# a stride that does not follow from the sizes; either makes both passes 1.7 times as long (kit.md).
# So tensors are handed over with a storage that begins where they begin. A free stride is handed
# over together with a sixteenth of it: the compiler can use ``stride == 16 * sixteenth``
# (``assume_stride_multiple``).

Layout = Literal["rows", "tokens", "apart"]
"""Memory order of (b, h, n, d): contiguous; that of (b, n, h, d); or gaps between heads."""

_BYTES = 16
_ELEMENTS = 16


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` (b, h, n, d), detached, in a ``Layout``; copied where it is in none."""
    found = tensor.detach()
    if layout(found) is None:
        found = found.clone(memory_format=torch.contiguous_format)
    return from_dlpack(to_dlpack(found)) if found.storage_offset() else found


def layout(tensor: torch.Tensor) -> Layout | None:
    """The layout of a tensor; None if it has none of them or does not begin at a whole word."""
    if tensor.data_ptr() % _BYTES:
        return None
    if tensor.is_contiguous():
        return "rows"
    if tensor.transpose(1, 2).is_contiguous():
        return "tokens"
    batch, heads, _, width = tensor.shape
    entry, head, row, element = tensor.stride()
    rows = element == 1 and row == width and heads > 1 and head % _ELEMENTS == 0
    return "apart" if rows and (batch == 1 or entry == heads * head) else None


def sixteenth(tensor: torch.Tensor) -> int | None:
    """A sixteenth of the head stride if there are gaps between heads; None for other layouts."""
    return tensor.stride(1) // _ELEMENTS if layout(tensor) == "apart" else None


def assume_stride_multiple(tensor: torch.Tensor, sixteenth: int | None) -> None:
    """In compiled code: tell the compiler that the head stride is 16 times ``sixteenth``."""
    if sixteenth is not None:
        torch._check(tensor.stride(1) == _ELEMENTS * sixteenth)


def always_in_words(*widths: int) -> bool:
    """Whether every range of rows of a slot's field has a ``Layout``, for columns of ``widths``.

    (It may not have one if the field holds one head of several entries.)
    """
    return all(width % _ELEMENTS == 0 for width in widths)


def has_diagonal(task: TaskTensors) -> bool:
    """Whether keys after the query are masked."""
    return task.is_causal or any(r.causal for r in task.rectangles)


@dataclass(frozen=True, slots=True)
class Indexed:
    """By local index, the numbers that the modifications get; int32, on the launch's device.

    Attributes:
        queries, keys: global positions.
        heads, entries: numbers of the query heads and batch entries in the whole call.
        pieces: (piece of every query, piece of every key, table), which say whether a pair belongs
            to a rectangle; None if rectangles end only between blocks.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    heads: torch.Tensor
    entries: torch.Tensor
    pieces: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    def mask(self, is_causal: bool, mask_mod: MaskMod | None) -> MaskMod:
        """The mask of partial blocks, by local indices; there are few kinds: each is compiled."""
        entries, heads, queries, keys = self.entries, self.heads, self.queries, self.keys
        tests: list[MaskMod] = []
        if self.pieces is not None:
            rows, columns, table = self.pieces
            tests.append(lambda b, h, q, k: table[rows[q], columns[k]] != 0)
        if is_causal:
            tests.append(lambda b, h, q, k: queries[q] >= keys[k])
        if mask_mod is not None:
            tests.append(lambda b, h, q, k: mask_mod(entries[b], heads[h], queries[q], keys[k]))
        keeps = tests[0] if tests else _everything
        for test in tests[1:]:
            keeps = _also(keeps, test)
        return keeps

    def score(self, score_mod: ScoreMod | None) -> ScoreMod | None:
        """The score modification, by local indices."""
        if score_mod is None:
            return None
        entries, heads, queries, keys = self.entries, self.heads, self.queries, self.keys
        return lambda score, b, h, q, k: score_mod(score, entries[b], heads[h], queries[q], keys[k])


def _everything(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= 0


def _also(one: MaskMod, other: MaskMod) -> MaskMod:
    return lambda b, h, q, k: one(b, h, q, k) & other(b, h, q, k)


@dataclass(frozen=True, slots=True)
class Launch:
    """One call: the part of a task between the first and the last listed block.

    All its tensors are detached: torch.compile also looks at the base of a view, and would compile
    again for every kind of view.
    """

    lists: BlockLists
    inputs: Three
    indexed: Indexed
    sent: list[torch.Tensor]
    is_causal: bool
    mask_mod: MaskMod | None
    scale: float

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The queries' part of (b, h, nq, ...), a view."""
        return tensor[:, :, self.lists.rows]

    def of_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """The keys' part of (b, hk, nk, ...), a view."""
        return tensor[:, :, self.lists.columns]

    @property
    def in_blocks(self) -> bool:
        """Whether queries and keys are whole blocks, so that no row has to be tested."""
        return all(t.shape[2] % BLOCK == 0 for t in self.inputs)

    def kind(self, needs_grad: bool) -> Hashable:
        """All that needs code of its own, so that calls of one kind are compiled once."""
        query, key, value = self.inputs
        return (
            query.device, query.dtype, query.shape[0] == 1, query.shape[1], key.shape[1],
            query.shape[3], value.shape[3], self.is_causal, self.lists.in_pieces, self.in_blocks,
            tuple(layout(t) for t in self.inputs),
            tuple(size == 1 for t in (self.sent[0], self.sent[4]) for size in t.shape), needs_grad,
        )  # fmt: skip

    def block_mask(self) -> Any:
        """The call as a ``BlockMask`` of torch."""
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        keeps = self.indexed.mask(self.is_causal, self.mask_mod)
        sizes = (self.inputs[0].shape[2], self.inputs[1].shape[2])
        # Not BlockMask.from_kv_blocks, which makes the lists by key from a matrix of all blocks.
        make: Any = FlexBlockMask
        return make(sizes, *self.sent[:8], BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=keeps)


def launch(task: TaskTensors, lists: BlockLists, mask_mod: MaskMod | None) -> Launch:
    """The call for ``task`` with its block lists."""
    device, rows, columns = task.query.device, lists.rows, lists.columns
    if isinstance(mask_mod, BlockMask):
        mask_mod = mask_mod.on(device)
    sent = lists.on(device)
    indexed = Indexed(
        positions(task.task, rows.start, rows.stop, device, torch.int32),
        positions(task.task, columns.start, columns.stop, device, torch.int32),
        _numbers(tuple(range(task.first_head, task.first_head + task.query.shape[1])), device),
        _numbers(task.entries, device),
        (sent[8], sent[9], sent[10]) if lists.in_pieces else None,
    )
    query = laid_out(task.query[:, :, rows])
    key, value = (laid_out(t[:, :, columns]) for t in (task.key, task.value))
    causal = has_diagonal(task)
    return Launch(lists, (query, key, value), indexed, sent, causal, mask_mod, task.scale)


@lru_cache(maxsize=64)
def _numbers(which: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """``which`` on the device; cached, because every task of a head group needs it."""
    # A backward may use it, so it must not be a tensor of inference mode.
    with outside():
        return torch.tensor(which, dtype=torch.int32, device="cpu").to(device)


# FlexAttention compiled for one kind of call, at any length.

_NUMBERS = count()


def compiled_flex(*, in_blocks: bool) -> Callable[..., Any]:
    """``flex(query, key, value, block_mask, score_mod=, scale=) -> (out, lse)``, compiled anew.

    Args:
        in_blocks: queries and keys are whole blocks. For dynamic sizes FlexAttention cannot know
            that, and would test every row.

    torch.compile caches by code object, up to a limit for each. Beyond the limit FlexAttention
    would silently fall back to computing every score. So each compiled call has a code object of
    its own; beyond the limit it raises an error here, and is then given another code object.
    """
    from torch.fx.experimental import _config
    from torch.nn.attention.flex_attention import flex_attention

    fx_config: Any = _config
    # Forced, because torch's kernel for few queries has other limits.
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True, "IS_DIVISIBLE": in_blocks}

    def flex(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block_mask: Any,
        score_mod: ScoreMod | None,
        scale: float,
        sixteenths: tuple[int | None, ...],
    ) -> Any:
        assume_stride_multiple(query, sixteenths[0])
        assume_stride_multiple(key, sixteenths[1])
        assume_stride_multiple(value, sixteenths[2])
        return flex_attention(
            query, key, value, score_mod=score_mod, block_mask=block_mask, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1], return_lse=True,
            kernel_options=options,
        )  # fmt: skip

    def anew() -> Callable[..., Any]:
        code = flex.__code__.replace(co_name=f"flex_{next(_NUMBERS)}")
        own = types.FunctionType(code, flex.__globals__, code.co_name, None, flex.__closure__)
        compiled: Callable[..., Any] = torch.compile(own, fullgraph=True, dynamic=True)
        return compiled

    current = anew()
    too_many = _beyond_the_limit()

    def call(*args: Any, **named: Any) -> Any:
        nonlocal current
        named["sixteenths"] = tuple(map(sixteenth, args[:3]))
        # Without this, torch assumes that sizes that are equal once always are (also a size and the
        # number of heads), and compiles again for tasks where they differ. It is set by hand,
        # because torch's context manager for it takes as long as all guards.
        before, fx_config.use_duck_shape = fx_config.use_duck_shape, False
        try:
            return current(*args, **named)
        except too_many:
            # Functions with one code may close over values for which torch compiles again (strings,
            # lists of other lengths).
            current = anew()
            return current(*args, **named)
        finally:
            fx_config.use_duck_shape = before

    return call


def _beyond_the_limit() -> type[Exception]:
    """The error that torch raises if one code object is compiled too often.

    If this torch has no such error: one that is never raised.
    """
    from torch._dynamo import exc

    found: type[Exception] = getattr(exc, "FailOnRecompileLimitHit", UnknownToTorchError)
    return found


class UnknownToTorchError(Exception):
    """In place of an error that this torch does not have; never raised."""


# FlexAttention's backward with the whole row's output and log-sum-exp, without its forward.
#
# FlexAttention's compiled backward computes a task's gradients from the out and lse that its
# forward saved, but torch has no function that calls it alone. So the forward is run with a block
# mask that lists no block, which costs next to nothing. When the backward reads the saved tensors,
# they are exchanged: the empty block counts for the real ones, and the forward's out and lse for
# those of the whole row (lse in base 2, as FlexAttention saves it).
#
# It depends on what torch saves. So the exchanged tensors are counted, and for each kind of call
# the first gradients are compared with those of another forward (``agree``).

_LOG2_E = log2(e)
# Accepted difference, a share of the norm: far above rounding, far below that of a wrong exchange.
_APART = 0.03


class UnfitError(Exception):
    """FlexAttention did not save the tensors that are to be exchanged."""


def exchanged_gradients(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: Three,
    block_mask: Any,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Three:
    """Gradients of query, key and value.

    Args:
        attend: ``attend(query, key, value, block_mask) -> (out, lse)``, compiled.
        grad_out, out, lse: of the whole rows: (b, h, nq, dv) in the input dtype, (b, h, nq) in
            fp32, -inf in rows without any key.

    Raises:
        UnfitError: a tensor to exchange was not saved, or saved more than once.
    """
    real = (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks)
    nothing = [torch.zeros_like(t) for t in real]
    empty = copy.copy(block_mask)
    empty.kv_num_blocks, empty.full_kv_num_blocks = nothing
    leaves = [t.detach().requires_grad_() for t in inputs]
    exchange = _Exchange(real, nothing, out, lse)
    # The caller's hooks see none of its tensors. Without its graph: a saved output would hold the
    # graph that has it, for good.
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, exchange.taken_up)
    with torch.enable_grad(), hooks:
        own_out, _ = attend(*leaves, empty)
    exchange.own_out = own_out.detach()
    query, key, value = torch.autograd.grad(own_out, leaves, grad_out)
    exchange.check()
    return query, key, value


def agree(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool | None:
    """Whether gradients are the same but for rounding; None where 0 says nothing."""
    sizes = [float(torch.linalg.vector_norm(t, dtype=torch.float32)) for t in wanted]
    if not all(sizes):
        return None
    return all(
        float(torch.linalg.vector_norm(mine - theirs, dtype=torch.float32)) <= _APART * size
        for mine, theirs, size in zip(found, wanted, sizes, strict=True)
    )


@dataclass(slots=True)
class _Exchange:
    real: tuple[torch.Tensor, torch.Tensor]
    nothing: list[torch.Tensor]
    out: torch.Tensor
    lse: torch.Tensor
    own_out: torch.Tensor | None = None
    seen: Counter[str] = field(default_factory=Counter)

    def taken_up(self, saved: torch.Tensor) -> torch.Tensor:
        for number, (ours, real) in enumerate(zip(self.nothing, self.real, strict=True)):
            if saved.data_ptr() == ours.data_ptr():
                self.seen[f"counts {number}"] += 1
                return real.view(saved.shape)
        if self.own_out is not None and saved.data_ptr() == self.own_out.data_ptr():
            self.seen["out"] += 1
            return _laid_out_as(saved, self.out)
        if saved.dtype == torch.float32 and saved.shape == self.lse.shape:
            self.seen["lse"] += 1
            # A new tensor, because compiled code may overwrite it. Rows without any key get 0 in
            # place of -inf, which would give NaN; they have no unmasked score.
            lse = torch.mul(self.lse, _LOG2_E)
            return lse.masked_fill_(lse == -torch.inf, 0.0)
        return saved

    def check(self) -> None:
        counted = all(self.seen[f"counts {n}"] for n in range(2))
        if not (counted and self.seen["out"] == self.seen["lse"] == 1):
            raise UnfitError(f"exchanged {dict(self.seen)}")


def _laid_out_as(pattern: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with the strides and dtype of ``pattern``, which compiled code relies on."""
    if tensor.stride() == pattern.stride() and tensor.dtype == pattern.dtype:
        return tensor
    return torch.empty_strided(
        pattern.shape, pattern.stride(), dtype=pattern.dtype, device=pattern.device
    ).copy_(tensor)
