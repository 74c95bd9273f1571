"""Attention of a few queries over the segments of a cache, each computed where it lies.

Segments on the device are computed there. Of page-locked host memory the device reads a
share across the bus, while the cores attend over the rest; files are left to the cores.
Many queries have it copied. The segments are disjoint sets of keys, so their results
are merged by log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from quorum_attention.api import attention_with_lse
from quorum_attention.execution.device.lookup import HOST, on_host
from quorum_attention.execution.device.memory_advice import read_ahead
from quorum_attention.kernels.call_shape import state_dtype
from quorum_attention.kernels.operator_call import OutLse
from quorum_attention.kernels.sinks import join_sinks_
from quorum_attention.long_prompts.compiled_rows import begin_to_compile
from quorum_attention.long_prompts.cores import attend_on_cores
from quorum_attention.long_prompts.flash_decode import KeysAt, can_decode, decode
from quorum_attention.long_prompts.host_reader import PIECE_BYTES, Piece, copy_segment
from quorum_attention.long_prompts.host_sharing import HostSharing
from quorum_attention.long_prompts.key_mask import KeyMask
from quorum_attention.long_prompts.places import Place
from quorum_attention.long_prompts.row_groups import RowGroup, RowLayout, row_groups
from quorum_attention.long_prompts.running_statistics import RunningStatistics
from quorum_attention.long_prompts.scores import ScoreScaling, attend_by_equations
from quorum_attention.long_prompts.segments import Segment
from quorum_attention.mask import Mask
from quorum_attention.units import counted

# From so many queries on, kernels for many queries are faster than those for few.
_MANY_QUERIES = 256
# Tokens of a question: kernels compute blocks of at most 64 rows.
_QUESTION_TOKENS = 64
# With more rows of queries for each key head the cores compute longer than keys cross
# the bus.
_MAX_CORE_ROWS = 64


def attend_segments(
    query: torch.Tensor,
    segments: Sequence[Segment],
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    key_padding: torch.Tensor | None = None,
    is_causal: bool = True,
    sharing: HostSharing | None = None,
    next_segments: Sequence[Segment] = (),
) -> torch.Tensor:
    """Compute the attention of the last tokens over all tokens of a cache.

    The last query stands at the last key, the query before at the key before, and so
    on. A row without a kept key has output 0.

    Args:
        query: (b, h_q, n_q, d); h_q is a multiple of h_kv.
        segments: all n_k tokens in order of position, on the query's device, in host
            memory or in files.
        softmax_scale: scores are multiplied by this; None: 1 / sqrt(d).
        softcap: scores become ``softcap * tanh(score / softcap)``; None: they do not.
        sinks: (h_q,) logits that take part in the softmax without a value.
        window: keep keys less than this many tokens before the query; None: no limit.
        key_padding: (b, n_k) bool: keep keys where it is True.
        is_causal: keep keys at or before the query alone.
        sharing: how keys in host memory are shared between a GPU and the cores; None:
            the cores attend over all of them.
        next_segments: what the next call will attend over (the next layer's): files are
            read ahead, and host memory is copied ahead.

    Returns:
        (b, h_q, n_q, d_v), in the query's dtype and on its device.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit each other.
    """
    _check(query, segments, key_padding, sinks)
    query = query.detach()
    scale = 1 / math.sqrt(query.shape[3]) if softmax_scale is None else softmax_scale
    n_keys = sum(segment.n_tokens for segment in segments)
    mask = KeyMask(query.shape[2], n_keys, is_causal, window, _contiguous(key_padding))
    call = _SegmentedCall(query, mask, ScoreScaling(scale, softcap))
    state = RunningStatistics(query, segments[0].value.shape[3])
    visible = list(_visible(segments, mask))
    _read_files_ahead(next_segments)
    if on_host(query.device):
        _attend_in_host_memory(call, visible, state)
    else:
        _attend_with_device(call, visible, state, sharing, next_segments)
    out, lse = state.results()
    if sinks is not None:
        join_sinks_(out, lse, sinks.to(lse))
    return out.to(query.dtype)


@torch.no_grad()
def compile_kernels(query: torch.Tensor, key: torch.Tensor) -> None:
    """Compile what attends over host memory, by attention over a few tokens: to do it
    when the first token waits for it takes seconds.

    Args:
        query: (b, h_q, n, d) on a GPU, at least one token.
        key: (b, h_kv, n, d), as the cache will hold.
    """
    begin_to_compile(key.dtype)
    n_keys = _MANY_QUERIES
    shape = (*key.shape[:2], n_keys, key.shape[3])
    keys = key.new_zeros(shape)
    segment = Segment(keys, keys, Place.DEVICE)
    pieces = [Piece(0, segment), Piece(n_keys, segment)]
    # The rows of one token, and those of a question.
    for n_queries in (1, _QUESTION_TOKENS):
        queries = query.new_zeros((*query.shape[:2], n_queries, query.shape[3]))
        mask = KeyMask(n_queries, 2 * n_keys)
        call = _SegmentedCall(queries, mask, ScoreScaling(1.0))
        state = RunningStatistics(queries, key.shape[3])
        # Pieces of one call are merged by one kernel, and two calls by another.
        for _ in range(2):
            _attend_on_device(call, pieces, state)


@dataclass(frozen=True, slots=True)
class _SegmentedCall:
    """A call, as every segment gets it.

    Attributes:
        query: (b, h_q, n_q, d).
        mask: which keys are kept.
        scaling: of the scores.
    """

    query: torch.Tensor
    mask: KeyMask
    scaling: ScoreScaling

    def to_host(self) -> _SegmentedCall:
        """Begin to copy queries and padding to host memory, on the current stream."""
        padding = self.mask.key_padding
        padding = None if padding is None else padding.to(HOST, non_blocking=True)
        query = self.query.to(HOST, non_blocking=True)
        return _SegmentedCall(
            query, replace(self.mask, key_padding=padding), self.scaling
        )

    def for_group(self, group: RowGroup) -> _SegmentedCall:
        """Return the call of some batch entries."""
        query = group.take(self.query)
        return _SegmentedCall(query, group.take_mask(self.mask), self.scaling)


def _check(
    query: torch.Tensor,
    segments: Sequence[Segment],
    key_padding: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    if query.dim() != 4:
        raise ValueError(
            f"query must be (b, h_q, n_q, d), got shape {tuple(query.shape)}"
        )
    if not segments:
        raise ValueError("segments must hold at least one segment")
    for segment in segments:
        _check_segment(query, segment)
    batch, heads, n_queries, _ = query.shape
    n_keys = sum(segment.n_tokens for segment in segments)
    if n_queries > n_keys:
        raise ValueError(
            "query must have at most as many tokens as there are keys, got "
            f"{counted(n_queries, 'query', 'queries')} for {counted(n_keys, 'key')}"
        )
    _check_shape("key_padding", key_padding, (batch, n_keys))
    _check_shape("sinks", sinks, (heads,))


def _check_segment(query: torch.Tensor, segment: Segment) -> None:
    batch, heads, _, dim = query.shape
    _, key_heads, _, key_dim = segment.key.shape
    if segment.batch != batch or dim != key_dim or heads % key_heads != 0:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit keys {tuple(segment.key.shape)} "
            f"of {segment.batch} batch entries"
        )
    if segment.key.dtype != query.dtype:
        raise TypeError(
            f"query is {query.dtype} and the cache holds {segment.key.dtype}"
        )


def _check_shape(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]
) -> None:
    if tensor is not None and tensor.shape != shape:
        raise ValueError(f"{name} must be {shape}, got shape {tuple(tensor.shape)}")


def _contiguous(padding: torch.Tensor | None) -> torch.Tensor | None:
    return None if padding is None else padding.contiguous()


def _visible(segments: Sequence[Segment], mask: KeyMask) -> Iterator[Piece]:
    """Yield the segments that the window reaches, with the positions of their first
    tokens."""
    start = 0
    for segment in segments:
        stop = start + segment.n_tokens
        if stop > mask.first_visible:
            yield Piece(start, segment)
        start = stop


def _read_files_ahead(segments: Iterable[Segment]) -> None:
    """Let the system read segments in files while something else is computed."""
    for segment in segments:
        if segment.place is Place.FILE:
            read_ahead(segment.key)
            read_ahead(segment.value)


def _attend_in_host_memory(
    call: _SegmentedCall, pieces: Sequence[Piece], state: RunningStatistics
) -> None:
    """Merge attention over pieces in host memory and files, by the cores."""
    for piece in pieces:
        if call.query.shape[2] >= _MANY_QUERIES:
            state.merge(*_attend_many(call, piece))
        else:
            state.merge(
                *attend_on_cores(
                    call.query, piece.segment, piece.start, call.mask, call.scaling
                )
            )


def _attend_with_device(
    call: _SegmentedCall,
    pieces: Sequence[Piece],
    state: RunningStatistics,
    sharing: HostSharing | None,
    next_segments: Sequence[Segment],
) -> None:
    """Merge attention over pieces anywhere. The device is given its work; then the
    cores do theirs."""
    device = call.query.device
    on_device = [
        _moved(piece, device)
        for piece in pieces
        if not on_host(piece.segment.key.device)
    ]
    elsewhere = [piece for piece in pieces if on_host(piece.segment.key.device)]
    if not elsewhere:
        _attend_on_device(call, on_device, state)
        return
    if _rows_per_head(call, elsewhere[0]) > _MAX_CORE_ROWS:
        _attend_on_device(call, on_device, state)
        for piece in _copied(elsewhere, device):
            _attend_on_device(call, [piece], state)
        return
    claim = nullcontext() if sharing is None else sharing.of_one_call()
    with claim as claimed:
        _attend_with_cores(call, on_device, elsewhere, state, claimed, next_segments)


def _attend_with_cores(
    call: _SegmentedCall,
    on_device: list[Piece],
    elsewhere: list[Piece],
    state: RunningStatistics,
    sharing: HostSharing | None,
    next_segments: Sequence[Segment],
) -> None:
    """Merge attention over pieces on the device, and over others: the bus reads a share
    of those, and the cores attend over the rest."""
    by_bus: list[Piece] = []
    by_cores = elsewhere
    if sharing is not None and _can_read_host_memory(call, elsewhere[0]):
        by_bus, by_cores = sharing.split(elsewhere)
    if by_cores:
        # Before the stream waits for copies made ahead: the cores need no copy.
        host_call = call.to_host()
        stream = torch.cuda.current_stream(call.query.device)
        is_query_there = stream.record_event()
    if sharing is not None:
        on_device = [*on_device, *sharing.arrived(by_bus)]
    _attend_on_device(call, on_device, state)
    if sharing is not None:
        sharing.copy_ahead(next_segments)
    statistics = None
    if by_cores:
        # The device has computed and copied the queries, and written the last tokens.
        is_query_there.synchronize()
        statistics = _attend_on_cores(host_call, by_cores)
    if sharing is not None:
        sharing.adjust(elsewhere)
    if statistics is not None:
        state.merge(*statistics)


def _can_read_host_memory(call: _SegmentedCall, piece: Piece) -> bool:
    """Whether the device's kernels compute such a call: they read page-locked memory
    too."""
    value_dim = piece.segment.value.shape[3]
    return can_decode(call.query, value_dim, _rows_per_head(call, piece))


def _moved(piece: Piece, device: torch.device) -> Piece:
    """The piece on ``device``: another GPU may hold it, where layers lie on several."""
    segment = piece.segment
    if segment.key.device == device:
        return piece
    key = segment.key.to(device)
    value = segment.value.to(device)
    return Piece(piece.start, replace(segment, key=key, value=value))


def _rows_per_head(call: _SegmentedCall, piece: Piece) -> int:
    """Rows of queries for each row and head of keys."""
    batch, heads, n_queries, _ = call.query.shape
    rows, key_heads = piece.segment.key.shape[:2]
    return batch * heads * n_queries // max(1, rows * key_heads)


def _attend_on_cores(host_call: _SegmentedCall, pieces: Sequence[Piece]) -> OutLse:
    """Attention of queries in host memory over pieces there, as statistics of their
    own."""
    state = RunningStatistics(host_call.query, pieces[0].segment.value.shape[3])
    _attend_in_host_memory(host_call, pieces, state)
    return state.results()


def _copied(pieces: Sequence[Piece], device: torch.device) -> Iterator[Piece]:
    """Yield pieces on the device, none larger than a buffer of copies."""
    for piece in pieces:
        start = piece.start
        for part in piece.segment.cut(PIECE_BYTES):
            memory = torch.empty(part.nbytes, dtype=torch.uint8, device=device)
            yield Piece(start, copy_segment(memory, part))
            start += part.n_tokens


def _attend_on_device(
    call: _SegmentedCall, pieces: Sequence[Piece], state: RunningStatistics
) -> None:
    """Merge attention over pieces on the query's device."""
    if call.query.shape[2] >= _MANY_QUERIES:
        for piece in pieces:
            state.merge(*_attend_many(call, piece))
        return
    for neighbours in _with_equal_entries(pieces):
        if neighbours[0].segment.entries is None:
            keys = [_keys_at(piece.start, piece.segment) for piece in neighbours]
            state.merge(*_attend_rows(call, keys))
        else:
            state.merge(*_attend_shared_rows(call, neighbours))


def _keys_at(start: int, holder: Segment | RowGroup) -> KeysAt:
    return KeysAt(start, holder.key, holder.value)


def _attend_shared_rows(call: _SegmentedCall, pieces: Sequence[Piece]) -> OutLse:
    """Attention over pieces whose batch entries read the same rows, row by row."""
    value_dim = pieces[0].segment.value.shape[3]
    all_out, all_lse = RunningStatistics(call.query, value_dim).empty_results()
    starts = [piece.start for piece in pieces]
    groups_of_pieces = [row_groups(piece.segment) for piece in pieces]
    for groups in zip(*groups_of_pieces, strict=True):
        group = groups[0]
        keys = list(map(_keys_at, starts, groups))
        out, lse = _attend_rows(call.for_group(group), keys)
        group.put(all_out, out)
        group.put(all_lse, lse)
    return all_out, all_lse


def _with_equal_entries(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield runs of pieces whose batch entries read the same rows."""
    run: list[Piece] = []
    for piece in pieces:
        if run and piece.segment.entries != run[-1].segment.entries:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _attend_rows(call: _SegmentedCall, keys: Sequence[KeysAt]) -> OutLse:
    """Attention over keys on the device, whose rows neighbouring batch entries
    share."""
    value_dim = keys[0].value.shape[3]
    layout = RowLayout.from_tensors(call.query, keys[0].key)
    if can_decode(call.query, value_dim, layout.rows_per_head):
        return decode(call.query, keys, call.mask, call.scaling)
    rows = layout.to_rows(call.query)
    state = RunningStatistics(rows, value_dim)
    for part in keys:
        stop = part.start + part.key.shape[2]
        pairs = call.mask.kept_pairs(part.start, stop, rows.device)
        is_kept = layout.mask_of_rows(pairs)
        out, lse = attend_by_equations(
            rows, part.key, part.value, call.scaling, is_kept
        )
        state.merge(out, lse)
    out, lse = state.results()
    return layout.from_rows(out), layout.from_rows(lse)


def _attend_many(call: _SegmentedCall, piece: Piece) -> OutLse:
    """Attention of many queries over one piece, by the package's own planned calls."""
    key, value = piece.segment.expanded()
    mask = call.mask
    stop = piece.start + piece.segment.n_tokens
    offset = mask.first_position - piece.start
    padding = mask.key_padding
    sees_all = stop <= mask.first_position + 1 and mask.window is None
    window = None if mask.window is None else (mask.window - 1, -1)
    pairs = Mask(
        causal=mask.is_causal and not sees_all,
        offset=offset,
        window=window,
        key_padding=None if padding is None else padding[:, piece.start : stop],
        softcap=call.scaling.softcap,
    )
    is_plain = (
        padding is None
        and window is None
        and not pairs.causal
        and pairs.softcap is None
    )
    return attention_with_lse(
        call.query,
        key,
        value,
        None if is_plain else pairs,
        scale=call.scaling.softmax_scale,
        enable_gqa=True,
        out_dtype=state_dtype(call.query.dtype),
    )
