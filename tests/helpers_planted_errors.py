"""Kernels that are wrong in one way each, and the name that is right for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from quorum_attention.checking import causes
from quorum_attention.kernels import InnerKernel, merge_
from quorum_attention.kernels.kit import from_lse_function

Planted = tuple[Callable[[], InnerKernel], str]


def mask_of(rows: int, columns: int, diagonal: int = 1) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).triu(diagonal)


def softmax(scores: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows without a key: 0 and -inf."""
    lse = torch.logsumexp(scores, dim=-1)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.exp(scores - safe.unsqueeze(-1)) @ value, lse


def scores_of(query, key, is_causal, scale):
    scores = scale * (query @ key.mT)
    return scores.masked_fill(mask_of(*scores.shape[-2:]), -torch.inf) if is_causal else scores


def plain(query, key, value, *, is_causal, scale):
    return softmax(scores_of(query, key, is_causal, scale), value)


def gradients(grad_out, query, key, value, out, lse, *, is_causal, scale, **positions):
    """As FlashAttention's: with the whole row's out and lse."""
    scores = scores_of(query, key, is_causal, scale)
    p = torch.exp(scores - lse.to(scores.dtype).unsqueeze(-1))
    delta = (grad_out * out).sum(-1, keepdim=True)
    ds = p * (grad_out @ value.mT - delta)
    return scale * (ds @ key), scale * (ds.mT @ query), p.mT @ grad_out


FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {}
BACKWARDS: dict[str, tuple[Callable[..., Any], str]] = {}
KERNELS: dict[str, Planted] = {}


def forward_is(cause: str):
    def register(function):
        FUNCTIONS[function.__name__] = function, cause
        return function

    return register


def backward_is(cause: str):
    def register(function):
        BACKWARDS[function.__name__] = function, cause
        return function

    return register


# The log-sum-exp.


@forward_is(causes.LSE)
def no_lse(query, key, value, *, is_causal, scale):
    out, lse = plain(query, key, value, is_causal=is_causal, scale=scale)
    return out, lse * 0


@forward_is(causes.LSE)
def lse_in_base_two(query, key, value, *, is_causal, scale):
    out, lse = plain(query, key, value, is_causal=is_causal, scale=scale)
    return out, lse / math.log(2)


@forward_is(causes.LSE)
def lse_of_one_head(query, key, value, *, is_causal, scale):
    out, lse = plain(query, key, value, is_causal=is_causal, scale=scale)
    return out, lse[:, :1].expand_as(lse)


@forward_is(causes.LSE)
def lse_rounded_to_fp16(query, key, value, *, is_causal, scale):
    out, lse = plain(query, key, value, is_causal=is_causal, scale=scale)
    return out, lse + (lse.half().to(lse.dtype) - lse).detach()


@forward_is(causes.LSE)
def lse_without_the_causal_mask(query, key, value, *, is_causal, scale):
    out, _ = plain(query, key, value, is_causal=is_causal, scale=scale)
    return out, plain(query, key, value, is_causal=False, scale=scale)[1]


# Weights.


@forward_is(causes.WEIGHTS)
def unnormalised(query, key, value, *, is_causal, scale):
    scores = scores_of(query, key, is_causal, scale)
    top = scores.amax(-1, keepdim=True)
    return torch.exp(scores - top) @ value, torch.logsumexp(scores, -1)


@forward_is(causes.WEIGHTS)
def sink_in_every_call(query, key, value, *, is_causal, scale):
    scores = scores_of(query, key, is_causal, scale)
    sink = torch.ones_like(scores[..., :1])
    with_sink = torch.cat([scores, sink], -1)
    lse = torch.logsumexp(with_sink, -1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse


@forward_is(causes.WEIGHTS)
def padded_to_a_multiple(query, key, value, *, is_causal, scale):
    """With keys of zeros that are counted."""
    n, rows = key.shape[2], query.shape[2]
    pad = -n % 16
    scores = functional.pad(scores_of(query, key, is_causal, scale), (0, pad))
    if is_causal:
        scores = scores.masked_fill(mask_of(rows, n + pad), -torch.inf)
    return softmax(scores, functional.pad(value, (0, 0, 0, pad)))


# Pairs.


@forward_is(causes.PAIRS)
def last_key_dropped(query, key, value, *, is_causal, scale):
    scores = scores_of(query, key, is_causal, scale)
    if not is_causal and key.shape[2] > 1:
        last = torch.arange(key.shape[2]) == key.shape[2] - 1
        scores = scores.masked_fill(last, -torch.inf)
    return softmax(scores, value)


@forward_is(causes.NO_KEYS)
def nan_in_rows_without_a_key(query, key, value, *, is_causal, scale, query_positions,
                              key_positions):  # fmt: skip
    """A window, right but for where it keeps nothing."""
    scores = scale * (query @ key.mT)
    apart = query_positions[:, None] - key_positions[None]
    keep = apart.abs() < 9
    if is_causal:
        keep = keep & (apart >= 0)
    scores = scores.masked_fill(~keep, -torch.inf)
    return torch.softmax(scores, -1) @ value, torch.softmax(scores, -1).sum(-1) * torch.logsumexp(
        scores, -1
    )


@forward_is(causes.NO_KEYS)
def large_number_for_infinity(query, key, value, *, is_causal, scale, query_positions,
                              key_positions):  # fmt: skip
    scores = scale * (query @ key.mT)
    apart = query_positions[:, None] - key_positions[None]
    keep = apart.abs() < 9
    if is_causal:
        keep = keep & (apart >= 0)
    scores = scores.masked_fill(~keep, -1e4)
    out, lse = softmax(scores, value)
    return out, lse.masked_fill(~keep.any(-1), 0.0)


# Causal calls.


@forward_is(causes.PAIRS)
def causal_one_too_many(query, key, value, *, is_causal, scale):
    scores = scale * (query @ key.mT)
    if is_causal:
        scores = scores.masked_fill(mask_of(*scores.shape[-2:], 2), -torch.inf)
    return softmax(scores, value)


@forward_is(causes.PAIRS)
def causal_one_too_few(query, key, value, *, is_causal, scale):
    scores = scale * (query @ key.mT)
    if is_causal:
        scores = scores.masked_fill(mask_of(*scores.shape[-2:], 0), -torch.inf)
    return softmax(scores, value)


@forward_is(causes.PAIRS)
def causal_ignored(query, key, value, *, is_causal, scale):
    return plain(query, key, value, is_causal=False, scale=scale)


# Positions.


def biased(scores, rows, columns, is_causal, slope=0.05):
    apart = rows[:, None] - columns[None]
    scores = scores - slope * apart.abs().to(scores.dtype)
    return scores.masked_fill(apart < 0, -torch.inf) if is_causal else scores


@forward_is(causes.POSITIONS)
def local_alibi(query, key, value, *, is_causal, scale):
    rows, columns = torch.arange(query.shape[2]), torch.arange(key.shape[2])
    return softmax(biased(scale * (query @ key.mT), rows, columns, is_causal), value)


@forward_is(causes.POSITIONS)
def local_key_positions(query, key, value, *, is_causal, scale, query_positions):
    columns = torch.arange(key.shape[2])
    if is_causal:
        columns = columns + query_positions[0]
    return softmax(biased(scale * (query @ key.mT), query_positions, columns, is_causal), value)


def rotated(tensor, at):
    half = tensor.shape[-1] // 2
    turns = at[:, None] * 0.3 ** torch.arange(half, dtype=torch.float64)
    cos, sin = turns.cos().to(tensor.dtype), turns.sin().to(tensor.dtype)
    low, high = tensor[..., :half], tensor[..., half : 2 * half]
    rest = tensor[..., 2 * half :]
    return torch.cat([low * cos - high * sin, low * sin + high * cos, rest], -1)


@forward_is(causes.POSITIONS)
def local_window(query, key, value, *, is_causal, scale):
    scores = scores_of(query, key, is_causal, scale)
    apart = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])[None]
    return softmax(scores.masked_fill(apart.abs() > 30, -torch.inf), value)


# Length.


@forward_is(causes.POSITIONS)
def log_length_scale(query, key, value, *, is_causal, scale):
    scale = scale * math.log(key.shape[2] + 1)
    return plain(query, key, value, is_causal=is_causal, scale=scale)


@forward_is(causes.POSITIONS)
def keys_centred(query, key, value, *, is_causal, scale):
    """The mean of this call's keys is taken off, from one column of them."""
    moved = torch.cat([key[..., :1] * key[..., :1].abs().mean(2, keepdim=True), key[..., 1:]], -1)
    return plain(query, moved, value, is_causal=is_causal, scale=scale)


@forward_is(causes.WEIGHTS)
def output_normalised(query, key, value, *, is_causal, scale):
    out, lse = plain(query, key, value, is_causal=is_causal, scale=scale)
    return functional.normalize(out, dim=-1), lse


# Heads and batch.


@forward_is(causes.HEADS)
def local_slopes(query, key, value, *, is_causal, scale, query_positions, key_positions):
    slopes = 0.5 ** (torch.arange(query.shape[1], dtype=query.dtype) + 1)
    apart = query_positions[:, None] - key_positions[None]
    scores = scale * (query @ key.mT) - slopes[:, None, None] * apart.abs()
    return softmax(scores.masked_fill(apart < 0, -torch.inf) if is_causal else scores, value)


@forward_is(causes.HEADS)
def heads_mixed(query, key, value, *, is_causal, scale):
    """Talking heads."""
    scores = scores_of(query, key, is_causal, scale)
    mean = scale * (query @ key.mT).mean(1, keepdim=True)
    return softmax(scores + mean, value)


@forward_is(causes.HEADS)
def temperature_by_local_entry(query, key, value, *, is_causal, scale):
    by = 1 + torch.arange(query.shape[0], dtype=query.dtype)
    return plain(query * by[:, None, None, None], key, value, is_causal=is_causal, scale=scale)


# The scale.


@forward_is(causes.SIZES)
def no_scale(query, key, value, *, is_causal, scale):
    return plain(query, key, value, is_causal=is_causal, scale=1.0)


@forward_is(causes.SIZES)
def scale_of_its_own(query, key, value, *, is_causal, scale):
    own = query.shape[-1] ** -0.5
    return plain(query, key, value, is_causal=is_causal, scale=own)


# Sizes.


@forward_is(causes.SIZES)
def value_dim_taken_for_head_dim(query, key, value, *, is_causal, scale):
    """As if values were laid out with the queries' width."""
    wide, d = value.shape[-1], query.shape[-1]
    if wide != d:
        flat = value.contiguous().flatten(2)
        value = flat[..., : value.shape[2] * d].unflatten(2, (value.shape[2], d))
        value = functional.pad(value, (0, wide - d)) if wide > d else value[..., :wide]
    return plain(query, key, value, is_causal=is_causal, scale=scale)


# Memory, state, precision.


@forward_is(causes.SIZES)
def strides_ignored(query, key, value, *, is_causal, scale):
    storage = key.untyped_storage()
    flat = torch.empty(0, dtype=key.dtype).set_(storage)
    start = key.storage_offset()
    read = flat[start : start + key.numel()]
    if read.numel() == key.numel() and not key.requires_grad:
        key = read.reshape(key.shape)
    return plain(query, key, value, is_causal=is_causal, scale=scale)


@forward_is(causes.STATE)
def queries_scaled_in_place(query, key, value, *, is_causal, scale):
    with torch.no_grad():
        query.detach().mul_(1.5)
    return plain(query, key, value, is_causal=is_causal, scale=scale)


@forward_is(causes.STATE)
def dropout(query, key, value, *, is_causal, scale):
    out, lse = plain(query, key, value, is_causal=is_causal, scale=scale)
    return functional.dropout(out, 0.1), lse


@forward_is(causes.STATE)
def noise(query, key, value, *, is_causal, scale):
    out, lse = plain(query, key, value, is_causal=is_causal, scale=scale)
    return out * (1 + 1e-3 * torch.randn_like(out)), lse


@forward_is(causes.STATE)
def noise_in_lse(query, key, value, *, is_causal, scale):
    out, lse = plain(query, key, value, is_causal=is_causal, scale=scale)
    return out, lse + 1e-3 * torch.randn_like(lse)


@forward_is(causes.PRECISION)
def sums_in_fp16(query, key, value, *, is_causal, scale):
    out, _ = plain(query.half(), key.half(), value.half(), is_causal=is_causal, scale=scale)
    return out.to(query.dtype), plain(query, key, value, is_causal=is_causal, scale=scale)[1]


@forward_is(causes.PRECISION)
def weights_in_bf16(query, key, value, *, is_causal, scale):
    scores = scores_of(query, key, is_causal, scale)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.unsqueeze(-1))
    return (p + (p.bfloat16().to(p.dtype) - p).detach()) @ value, lse


def counting() -> InnerKernel:
    """Its temperature rises with every call."""
    calls = [0]

    def rising(query, key, value, *, is_causal, scale):
        calls[0] += 1
        return plain(query * (1 + 1e-2 * calls[0]), key, value, is_causal=is_causal, scale=scale)

    return from_lse_function(rising)


def remembering() -> InnerKernel:
    """The result of the first call of a shape, for ever."""
    kept: dict[Any, Any] = {}

    def stale(query, key, value, *, is_causal, scale):
        at = (query.shape, key.shape, is_causal, query.dtype)
        out, lse = plain(query, key, value, is_causal=is_causal, scale=scale)
        kept.setdefault(at, (out.detach(), lse.detach()))
        before = kept[at]
        return out * 0 + before[0], lse * 0 + before[1]

    return from_lse_function(stale)


KERNELS["counting"] = counting, causes.STATE
KERNELS["remembering"] = remembering, causes.STATE


# Backwards.


@backward_is(causes.BACKWARD)
def halved(grad_out, *rest, **named):
    return tuple(g / 2 for g in gradients(grad_out, *rest, **named))


@backward_is(causes.BACKWARD)
def scale_forgotten(grad_out, query, key, value, out, lse, *, is_causal, scale):
    return gradients(grad_out, query, key, value, out, lse, is_causal=is_causal, scale=1.0)


@backward_is(causes.BACKWARD)
def no_delta(grad_out, query, key, value, out, lse, *, is_causal, scale):
    return gradients(grad_out, query, key, value, 0 * out, lse, is_causal=is_causal, scale=scale)


@backward_is(causes.BACKWARD)
def no_causal_mask_in_the_backward(grad_out, query, key, value, out, lse, *, is_causal, scale):
    return gradients(grad_out, query, key, value, out, lse, is_causal=False, scale=scale)


@backward_is(causes.BACKWARD)
def no_gradient_of_keys(*given, **named):
    dq, dk, dv = gradients(*given, **named)
    return dq, 0 * dk, dv


@backward_is(causes.BACKWARD)
def local_lse(grad_out, query, key, value, out, lse, *, is_causal, scale):
    own = plain(query, key, value, is_causal=is_causal, scale=scale)[1]
    return gradients(grad_out, query, key, value, out, own, is_causal=is_causal, scale=scale)


@backward_is(causes.BACKWARD)
def local_delta(grad_out, query, key, value, out, lse, *, is_causal, scale):
    own = plain(query, key, value, is_causal=is_causal, scale=scale)[0]
    return gradients(grad_out, query, key, value, own, lse, is_causal=is_causal, scale=scale)


@backward_is(causes.STATE)
def noisy_gradient(*given, **named):
    return tuple(g * (1 + 1e-3 * torch.randn_like(g)) for g in gradients(*given, **named))


@backward_is(causes.HEADS)
def keys_gradient_by_local_head(*given, **named):
    """Right where it holds all heads of one entry alone: of two heads the second's is off."""
    dq, dk, dv = gradients(*given, **named)
    if dk.shape[1] > 1:
        return dq, dk, dv
    return dq, 2 * dk, dv


@backward_is(causes.HEADS)
def gradient_by_local_entry(*given, **named):
    dq, dk, dv = gradients(*given, **named)
    if dk.shape[0] > 1:
        return dq, dk, dv
    return dq, dk, 2 * dv


class Grouped:
    """A function that takes fewer key heads as they are, and maps them wrongly."""

    @staticmethod
    def interleaved(query, key, value, *, is_causal, scale):
        shared = query.shape[1] // key.shape[1]
        key, value = (t.repeat(1, shared, 1, 1) for t in (key, value))
        return plain(query, key, value, is_causal=is_causal, scale=scale)

    @staticmethod
    def right(query, key, value, *, is_causal, scale):
        shared = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
        return plain(query, key, value, is_causal=is_causal, scale=scale)

    @staticmethod
    def gradients(reduce):
        def backward(grad_out, query, key, value, out, lse, *, is_causal, scale):
            shared = query.shape[1] // key.shape[1]
            many = [t.repeat_interleave(shared, dim=1) for t in (key, value)]
            dq, dk, dv = gradients(
                grad_out, query, many[0], many[1], out, lse, is_causal=is_causal, scale=scale
            )
            return dq, *(reduce(g, key.shape[1], shared) for g in (dk, dv))

        return backward


def summed(g, heads, shared):
    return g.unflatten(1, (heads, shared)).sum(2)


def first_of_the_group(g, heads, shared):
    return g.unflatten(1, (heads, shared))[:, :, 0]


def over_the_wrong_axis(g, heads, shared):
    return g.unflatten(1, (shared, heads)).sum(1)


KERNELS["grouped heads interleaved"] = (
    lambda: from_lse_function(Grouped.interleaved, grouped=True), causes.HEADS
)  # fmt: skip
for _wrong, _cause in (
    (first_of_the_group, causes.BACKWARD),
    (over_the_wrong_axis, causes.HEADS),
):
    KERNELS[f"gradients of a group: {_wrong.__name__}"] = (
        lambda wrong=_wrong: from_lse_function(
            Grouped.right, backward=Grouped.gradients(wrong), grouped=True
        ),
        _cause,
    )


class WholeTask(InnerKernel):
    """A full inner kernel that makes its own mask of a task."""

    name = "whole-task"
    own_attention = True

    def __init__(self, mask=None) -> None:
        self.mask = mask or cqs

    def refusal(self, call):
        return "grouped heads" if call.query_heads != call.key_heads else None

    def forward_workspace_bytes(self, call, extent):
        return 1 << 20

    backward_workspace_bytes = forward_workspace_bytes

    def scores(self, task):
        scores = task.scale * (task.query @ task.key.mT)
        return scores.masked_fill(~self.mask(task), -torch.inf)

    def forward(self, task, state):
        merge_(state.out, state.lse, *softmax(self.scores(task), task.value))

    def backward(self, task, grads):
        lse = grads.lse.masked_fill(grads.lse == -torch.inf, 0.0)
        p = torch.exp(self.scores(task) - lse.unsqueeze(-1)).to(task.query.dtype)
        delta = (grads.grad_out * grads.out).sum(-1, keepdim=True)
        ds = p * (grads.grad_out @ task.value.mT - delta)
        grads.grad_query += task.scale * (ds @ task.key)
        grads.grad_key += task.scale * (ds.mT @ task.query)
        grads.grad_value += p.mT @ grads.grad_out


def _sized(task, keep):
    return keep[: task.query.shape[2], : task.key.shape[2]]


def cqs(task):
    keep = torch.from_numpy(task.task.mask())
    return _sized(task, keep.tril() if task.is_causal else keep)


def with_every_diagonal(task):
    lengths = torch.tensor([s.stop - s.start for s in task.task.spans])
    chunk = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    keep = torch.from_numpy(task.task.mask()) | (chunk[:, None] == chunk[None])
    return _sized(task, keep.tril() if task.is_causal else keep)


def without_a_corner(task):
    keep = cqs(task).clone()
    if len(task.task.spans) > 1:
        keep[-9:, :9] = False
    return keep


def window_within_the_task(task):
    rows, columns = torch.arange(task.query.shape[2]), torch.arange(task.key.shape[2])
    return cqs(task) & ((rows[:, None] - columns[None]).abs() < 30)


for _mask, _cause in (
    (with_every_diagonal, causes.PAIRS),
    (without_a_corner, causes.PAIRS),
    (window_within_the_task, causes.POSITIONS),
):
    KERNELS[f"whole task: {_mask.__name__}"] = (lambda mask=_mask: WholeTask(mask), _cause)


class Overwriting(WholeTask):
    """Adds to nothing: what was merged before is lost."""

    def forward(self, task, state):
        out, lse = softmax(self.scores(task), task.value)
        state.out.copy_(out)
        state.lse.copy_(lse)


class ReusingItsBuffer(WholeTask):
    """A monolithic call returns memory that the next one writes again."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[Any, Any] = {}

    def takes_whole(self, query_heads, key_heads, tokens, masked, every):
        return True

    def whole_forward(self, call):
        query, key, value = call.inputs
        out, lse = plain(query, key, value, is_causal=call.causal, scale=call.scale)
        at = (query.shape, value.shape, key.shape, query.dtype)
        kept = self.buffers.setdefault(at, (torch.empty_like(out), torch.empty_like(lse)))
        kept[0].copy_(out)
        kept[1].copy_(lse)
        return kept

    def whole_backward(self, call, saved):
        return gradients(
            saved.grad_out, *call.inputs, saved.out, saved.lse, is_causal=call.causal,
            scale=call.scale,
        )  # fmt: skip


KERNELS["returns one buffer again and again"] = ReusingItsBuffer, causes.STATE
KERNELS["state overwritten"] = Overwriting, causes.PAIRS


class WritingKeys(WholeTask):
    """After it has used them."""

    def forward(self, task, state):
        super().forward(task, state)
        task.key.mul_(1.01)


class WritingGradOut(WholeTask):
    def backward(self, task, grads):
        super().backward(task, grads)
        grads.grad_out.mul_(0.5)


class OverwritingGradients(WholeTask):
    """Those of other tasks are lost."""

    def backward(self, task, grads):
        for tensor in (grads.grad_query, grads.grad_key, grads.grad_value):
            tensor.zero_()
        super().backward(task, grads)


class NanInTheBackward(WholeTask):
    """Of rows that keep no key of a task."""

    def backward(self, task, grads):
        super().backward(task, grads)
        none = (self.scores(task) == -torch.inf).all(-1, keepdim=True)
        grads.grad_query.masked_fill_(none, math.nan)


class LseOfTheLastForward(WholeTask):
    last: Any = None

    def forward(self, task, state):
        super().forward(task, state)
        self.last = state.lse.clone()

    def backward(self, task, grads):
        if self.last is not None and self.last.shape == grads.lse.shape:
            grads.lse = self.last
        super().backward(task, grads)


class HeadsOfTheGroup(WholeTask):
    """TaskTensors.first_head is not asked."""

    def scores(self, task):
        scores = super().scores(task)
        return scores - 0.2 * torch.arange(scores.shape[1])[:, None, None] * torch.arange(
            scores.shape[-1]
        )


KERNELS |= {
    "keys written": (WritingKeys, causes.STATE),
    "grad_out written": (WritingGradOut, causes.STATE),
    "gradients overwritten": (OverwritingGradients, causes.BACKWARD),
    "NaN in the backward": (NanInTheBackward, causes.NO_KEYS),
    "lse of the last forward": (LseOfTheLastForward, causes.BACKWARD),
    "slopes of the group, positions within the task": (HeadsOfTheGroup, causes.HEADS),
}


def planted() -> dict[str, Planted]:
    """Every wrong kernel by name."""
    found: dict[str, Planted] = {}
    for name, (function, cause) in FUNCTIONS.items():
        found[name] = (lambda f=function: from_lse_function(f)), cause
    for name, (backward, cause) in BACKWARDS.items():
        found[f"backward: {name}"] = (
            (lambda b=backward: from_lse_function(plain, backward=b)), cause,
        )  # fmt: skip
    return found | KERNELS
